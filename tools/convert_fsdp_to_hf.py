"""Turn a checkpoint that FSDP has written (torch.distributed.checkpoint, no common.pt) into an HF directory.

    python tools/convert_fsdp_to_hf.py --input-dir iter_0000012 --origin-hf-dir Qwen3-4B --output-dir out

Its tensors have HF's names already, with what wraps the model before them; optimizer states are left out. Config and
tokenizer files are copied from --origin-hf-dir, without a quantization_config, for the tensors are not quantised;
where it has weights, the tensors must have their names. Memory holds one tensor a thread.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import Job

EMBEDDING = re.compile(r"(?P<before>(.*\.)?)model\.(language_model\.)?embed_tokens\.weight")
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
IS_OPTIMIZER = re.compile(r"(.*\.)?optim(izer)?(_state)?\.")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    from slime.conversion.writer import usual_threads

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input-dir", required=True, help="directory with .metadata and *.distcp, or one around it")
    parser.add_argument("--origin-hf-dir", required=True, help="copy config and tokenizer files from here")
    parser.add_argument("--output-dir", required=True, help="HF directory to write")
    parser.add_argument("-f", "--force", action="store_true", help="replace --output-dir if it exists")
    parser.add_argument("--chunk-size", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    parser.add_argument("--max-workers", type=int, default=usual_threads(), help="threads")
    return parser


def convert(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of tensors.

    Raises:
        UsageError: input or output that cannot work.
    """
    from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
    from slime.conversion.reader import config_dtype, read_hf_config, without_quantization
    from slime.conversion.writer import HfTarget, check_target, write_hf
    from slime.utils.errors import UsageError
    from slime.weights.formats import quantization_config_of
    from slime.weights.names import text_config
    from tools.convert_torch_dist_to_hf import check_written

    for flag in ("chunk_size", "max_workers"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    config = read_hf_config(args.origin_hf_dir, flag="--origin-hf-dir")
    sources = {"--origin-hf-dir": args.origin_hf_dir, "--input-dir": args.input_dir}
    check_target(Path(args.output_dir), flag="--output-dir", sources=sources, replaces=args.force)
    directory = checkpoint_dir(Path(args.input_dir))
    check_target(Path(args.output_dir), flag="--output-dir", sources={"--input-dir": directory}, replaces=args.force)
    reader = TorchDistReader(directory, is_stacked=False)
    name_of = hf_names([name for name in reader.infos() if not IS_OPTIMIZER.match(name)], directory)
    jobs = tensor_jobs(reader, name_of, config_dtype(text_config(config)))
    written = {name: info for job in jobs for name, info in job.outputs.items()}
    check_written(written, args.origin_hf_dir, "is it one of another model?")
    target = HfTarget(
        path=Path(args.output_dir),
        flag="--output-dir",
        assets_from=Path(args.origin_hf_dir),
        config=without_quantization(config) if quantization_config_of(config) else None,
        shard_bytes=args.chunk_size,
        replaces=args.force,
    )
    write_hf(target, jobs, num_threads=args.max_workers)
    return len(written)


def checkpoint_dir(path: Path) -> Path:
    """The one directory with .metadata in or below `path`.

    Raises:
        UsageError: there is none, several, or one that Megatron wrote.
    """
    from slime.utils.errors import UsageError

    found = [path] if (path / ".metadata").is_file() else sorted(one.parent for one in path.glob("**/.metadata"))
    if len(found) != 1:
        there = f"several: {', '.join(map(str, found))}; name one" if found else "no .metadata file in or below it"
        raise UsageError(f"--input-dir {path} is no checkpoint of torch.distributed.checkpoint: {there}.")
    if (found[0] / "common.pt").is_file():
        raise UsageError(
            f"--input-dir {found[0]} has a common.pt, so Megatron wrote it; use tools/convert_torch_dist_to_hf.py."
        )
    return found[0]


def hf_names(names: Sequence[str], directory: Path) -> dict[str, str]:
    """Name in the checkpoint -> HF name: without wrappers, and without what is before "model.embed_tokens.weight".

    Raises:
        UsageError: there is no embedding that shows how names begin.
    """
    from slime.utils.errors import UsageError

    plain = {name: WRAPPERS.sub("", name) for name in names}
    starts = {found["before"] for one in plain.values() if (found := EMBEDDING.fullmatch(one))}
    if len(starts) != 1:
        raise UsageError(
            f"--input-dir {directory} has {'no' if not starts else 'more than one'} tensor that is called "
            f"...model.embed_tokens.weight; it has {', '.join(sorted(plain)[:3]) or 'no tensors at all'}. Is it a "
            "language model saved by FSDP?"
        )
    (start,) = starts
    return {name: one.removeprefix(start) for name, one in plain.items() if one.startswith(start)}


def tensor_jobs(reader: TorchDistReader, name_of: Mapping[str, str], dtype: torch.dtype | None) -> list[Job]:
    """One job for each tensor, in the dtype that the config says; experts that are one tensor become single ones."""
    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import Job
    from slime.weights.names import is_fused, single_names

    def job_of(name: str, info: TensorInfo) -> Job:
        stored = dtype if dtype is not None and info.dtype.is_floating_point else info.dtype
        if not is_fused(name_of[name]):
            return Job({name_of[name]: TensorInfo(stored, info.shape)}, lambda: [reader.read(name).to(stored)])
        singles = single_names(name_of[name], info.shape[0])
        parts = len(singles) // info.shape[0]
        one = TensorInfo(stored, (info.shape[1] // parts, *info.shape[2:]))

        def make() -> list[torch.Tensor]:
            return [part for expert in reader.read(name).to(stored) for part in expert.chunk(parts)]

        return Job(dict.fromkeys(singles, one), make)

    return [job_of(name, info) for name, info in reader.infos().items() if name in name_of]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import exit_status

    args = make_parser().parse_args(argv)
    return exit_status(lambda: f"wrote {convert(args)} tensors of {args.input_dir} to {args.output_dir}")


if __name__ == "__main__":
    sys.exit(main())
