"""Every converter of tools/ with a small input of its own, and processes that meet a full disk or are killed.

What is bad about an input, a disk or an end is said once, in the tests, for all converters that it can happen to.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.checkpoint import torch_dist_writer
from slime.conversion import writer
from tests.unit.megatron_fakes import make_hf_model, run_forked
from tests.unit.test_convert_gguf import write_gguf
from tests.unit.test_hf_weights import run_tool, tensors_of
from tools import (
    convert_fsdp_to_hf,
    convert_gguf_to_hf,
    convert_hf_to_fp8,
    convert_hf_to_int4,
    convert_hf_to_int4_direct,
    convert_hf_to_torch_dist,
    convert_k2_thinking_int4_to_bf16,
    convert_torch_dist_to_hf,
    fp8_cast_bf16,
)
from tools.make_tiny_model import build_tokenizer


@dataclass(frozen=True)
class Way:
    """A converter and how it is called.

    Attributes:
        tool: its module.
        reads: flag -> what it names in the directory of `make_inputs`; the weights come first.
        writes: flag of the output.
        more: further flags; small shards among them, so that a cut finds some complete.
        inside: of what the last flag names, the directory that gets its name when it is complete.
        replaces: flag with which it replaces an output that exists.
    """

    tool: Any
    reads: Mapping[str, str]
    writes: str
    more: tuple[str, ...] = ()
    inside: str = ""
    replaces: str | None = None

    def command(self, inputs: Path, output: Path | str, *more: str) -> list[str]:
        """The command line."""
        reads = [word for flag, name in self.reads.items() for word in (flag, str(inputs / name))]
        return [*reads, self.writes, str(output), *self.more, *more]


_HF, _SHARDS = {"--model-dir": "hf"}, ("--shard-bytes", "8000")
_ORIGIN = {"--origin-hf-dir": "origin"}
WAYS = {
    "hf to torch_dist": Way(convert_hf_to_torch_dist, {"--hf-checkpoint": "hf"}, "--save", inside="release"),
    "torch_dist to hf": Way(
        convert_torch_dist_to_hf,
        {"--input-dir": "dist", **_ORIGIN},
        "--output-dir",
        ("--chunk-size", "8000"),
        replaces="--force",
    ),
    "fsdp to hf": Way(
        convert_fsdp_to_hf,
        {"--input-dir": "run", **_ORIGIN},
        "--output-dir",
        ("--chunk-size", "8000"),
        replaces="--force",
    ),
    "gguf to hf": Way(convert_gguf_to_hf, {"--gguf": "model.gguf"}, "--output", _SHARDS),
    "fp8": Way(convert_hf_to_fp8, _HF, "--save-dir", _SHARDS),
    "int4": Way(convert_hf_to_int4_direct, _HF, "--save-dir", (*_SHARDS, "--group-size", "16")),
    "int4 by GPTQ": Way(
        convert_hf_to_int4,
        {"--input-dir": "hf", "--data-dir": "rows"},
        "--output-dir",
        (*_SHARDS, "--quant-group-size", "16"),
    ),
    "from fp8": Way(fp8_cast_bf16, {"--input-fp8-hf-path": "fp8"}, "--output-bf16-hf-path", _SHARDS),
    "from int4": Way(
        convert_k2_thinking_int4_to_bf16, {"--model-dir": "int4"}, "--output-dir", _SHARDS, replaces="--overwrite"
    ),
}
FROM_HF = [way for way, one in WAYS.items() if next(iter(one.reads.values())) in ("hf", "fp8", "int4")]
"""Those whose weights are an HF directory."""


def make_inputs(root: Path) -> None:
    """One small model of two layers in every form that a converter reads."""
    hf, dist = root / "hf", root / "dist"
    make_hf_model(hf, "qwen3", dtype="bfloat16", vocab=len(build_tokenizer()))
    build_tokenizer().save_pretrained(hf)
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", str(hf), "--save", str(dist), "--model-args-from-hf")
    state = {f"model.{name}": tensor for name, tensor in tensors_of(hf).items()}
    torch_checkpoint.save(state, checkpoint_id=root / "run" / "model", no_dist=True)
    for way in ("fp8", "int4"):
        assert WAYS[way].tool.main(WAYS[way].command(root, root / way, "--shard-bytes", "1000000")) == 0
        split_in_two(root / way)
    write_gguf(root / "model.gguf", "qwen3")
    (root / "rows").mkdir()
    rows = [{"text": f"{a} + {a * b} = {a + a * b}"} for a in range(5) for b in (7, 31)]
    (root / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    split_in_two(hf)
    shutil.copytree(hf, root / "origin")
    for file in (root / "origin").glob("*.safetensors*"):
        file.unlink()


def split_in_two(directory: Path) -> None:
    """The weights of an HF directory in two files with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, half = sorted(tensors), len(tensors) // 2
    weight_map = {}
    for i, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def cut_in_the_middle(path: Path) -> None:
    """What a download leaves that did not come to its end."""
    os.truncate(path, path.stat().st_size // 2)


def run_apart(way: Way, command: list[str], before: Callable[[], None] = lambda: None) -> int:
    """The status with which a tool ends in a process of its own, -9 where it was killed.

    Args:
        way: the tool.
        command: its line.
        before: is called in that process first.
    """

    def run() -> int:
        torch_dist_writer.PART_BYTES = 10_000
        before()
        return int(way.tool.main(command))

    return run_forked(run)


def killed() -> NoReturn:
    """The end that nothing is done about."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def no_room() -> NoReturn:
    """What the system says of a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class EndOfWriting:
    """From some moment on, whatever writes into this process's files ends so.

    Attributes:
        ends: is called before a write, which is done if it comes back.
        when: "the weights": after so many bytes; "the rest": when the weights are complete; "the name": when all is.
        after: those bytes; of "the name", so many directories that have got theirs.
    """

    ends: Callable[[], None]
    when: str
    after: int = 0
    written: int = field(default=0, init=False)

    def __call__(self) -> None:
        """Put it in place, in a process that does nothing else."""
        for module, name in ((os, "pwrite"), (torch_dist_writer.HashedStream, "write")):
            setattr(module, name, self._counted(getattr(module, name)))
        real_text = Path.write_text

        def write_text(path: Path, *values: Any, **more: Any) -> int:
            if self.when == "the rest" and path.name in ("config.json", "metadata.json"):
                self.ends()
            return real_text(path, *values, **more)

        Path.write_text = write_text  # type: ignore[method-assign]
        real_copy = shutil.copyfile

        def copyfile(source: Any, target: Any) -> Any:
            if self.when == "the rest":
                self.ends()
            return real_copy(source, target)

        writer.shutil.copyfile = copyfile
        real_rename = Path.rename

        def rename(path: Path, target: Path) -> Path:
            if self.when == "the name" and path.is_dir():
                self.written += 1
                if self.written == self.after + 1:  # the one that takes it back has room
                    self.ends()
            return real_rename(path, target)

        Path.rename = rename  # type: ignore[method-assign]

    def _counted(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(*values: Any, **more: Any) -> int:
            if self.when == "the weights" and self.written >= self.after:
                self.ends()
            count = real(*values, **more)
            self.written += count if self.when == "the weights" else 0
            return count

        return write


def contents(path: Path) -> dict[str, bytes]:
    """Every file in or below a directory, or the one file that it is."""
    files = [path] if path.is_file() else [one for one in sorted(path.rglob("*")) if one.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}
