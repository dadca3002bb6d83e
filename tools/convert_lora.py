"""Merge a LoRA adapter into its base: an HF checkpoint of W + scale B A, which needs no adapter any more.

    python tools/convert_lora.py --base Qwen3-4B --adapter ckpt/iter_0000099/adapter --output Qwen3-4B-merged

The adapter is a PEFT directory: one that a run with --lora-rank has written beside a checkpoint, or PEFT itself. The
sum is made in fp32 and rounded to the base's type, one tensor after the other. The other ways need no tool:
checkpoints hold a PEFT directory, and --lora-adapter-path starts a run from one. See docs/lora.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import TensorInfo

HALVES = ("lora_A", "lora_B")
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", required=True, help="HF directory that the adapter was trained over")
    parser.add_argument("--adapter", required=True, help="PEFT directory: adapter_config.json and its safetensors")
    parser.add_argument("--output", required=True, help="HF directory to write")
    parser.add_argument("--shard-bytes", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    return parser


def read_adapter(
    directory: Path, infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, tuple[torch.Tensor, ...]], float]:
    """(name of a weight of the base -> (A [r, in], B [out, r]), what their product is multiplied by).

    Raises:
        UsageError: it cannot be read, is of another base, or is more than the two matrices.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from slime.utils.errors import UsageError
    from slime.weights.adapters import PEFT_COPY, PEFT_PREFIX, not_plain, scale_of

    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = load_file(directory / "adapter_model.safetensors")
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(PEFT_COPY)}
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"--adapter {directory} is no PEFT directory that can be read ({error}).") from error
    for sentence in not_plain(config):
        raise UsageError(f"--adapter {directory}: {sentence}")
    named = {
        name.removeprefix(PEFT_PREFIX).rsplit(f".{half}.", 1)[0] for name in tensors for half in HALVES if half in name
    }
    found = dict[str, tuple[Any, ...]]()
    for module in sorted(named):
        pair = tuple(tensors.pop(f"{PEFT_PREFIX}{module}.{half}.weight", None) for half in HALVES)
        shape = infos[f"{module}.weight"].shape if f"{module}.weight" in infos else None
        if any(half is None for half in pair) or tuple(shape or ()) != (pair[1].shape[0], pair[0].shape[1]):
            halves = [half if half is None else tuple(half.shape) for half in pair]
            raise UsageError(
                f"--adapter {directory}: {module} has A and B of the shapes {halves[0]} and {halves[1]}, but its "
                f"weight in --base has {shape}; give the base that the adapter was trained over."
            )
        found[f"{module}.weight"] = pair
    if tensors or not found:
        raise UsageError(
            f"--adapter {directory}: {next(iter(tensors), 'nothing')} in it is no A or B of a linear layer."
        )
    return found, scale_of(config)


def convert(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of weights with an adapter.

    Raises:
        UsageError: input or output that cannot work.
    """
    from slime.conversion.reader import SafetensorsReader, read_hf_config
    from slime.conversion.writer import HfTarget, Job, check_target, write_hf
    from slime.utils.errors import UsageError
    from slime.weights.formats import quantization_config_of

    if args.shard_bytes < 1:
        raise UsageError(f"--shard-bytes {args.shard_bytes} is not above 0.")
    base, output, adapter = Path(args.base), Path(args.output), Path(args.adapter)
    config = read_hf_config(base, flag="--base")
    check_target(output, flag="--output", sources={"--base": base, "--adapter": adapter})
    if quantization_config_of(config):
        raise UsageError(f"--base {base} is quantised; merge into the checkpoint that it was made of.")
    reader = SafetensorsReader(base, flag="--base")
    infos = reader.infos()
    is_tied = OUTPUT not in infos and EMBEDDING in infos
    pairs, scale = read_adapter(adapter, infos | ({OUTPUT: infos[EMBEDDING]} if is_tied else {}))
    if is_tied and OUTPUT in pairs:  # merged, it is another matrix than the embedding
        infos |= {OUTPUT: infos[EMBEDDING]}
        config |= {"tie_word_embeddings": False}

    def job_of(name: str, info: TensorInfo) -> Job:
        def make() -> list[torch.Tensor]:
            weight = reader.get(EMBEDDING if is_tied and name == OUTPUT else name)
            if name not in pairs:
                return [weight]
            a, b = (half.float() for half in pairs[name])
            return [(weight.float() + scale * (b @ a)).to(weight.dtype)]

        return Job({name: info}, make)

    jobs = [job_of(name, info) for name, info in infos.items()]
    target = HfTarget(path=output, flag="--output", assets_from=base, config=config, shard_bytes=args.shard_bytes)
    write_hf(target, jobs)
    return len(pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import exit_status

    args = make_parser().parse_args(argv)
    return exit_status(lambda: f"wrote {args.output}: {convert(args)} weights had an adapter")


if __name__ == "__main__":
    sys.exit(main())
