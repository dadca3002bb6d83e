"""Turn an HF checkpoint into one whose linear layers are fp8, for engines that generate in 8 bit.

    python tools/convert_hf_to_fp8.py --model-dir Qwen3-4B --save-dir Qwen3-4B-FP8
    python tools/convert_hf_to_fp8.py --model-dir Qwen3-4B --save-dir Qwen3-4B-FP8 --scale-fmt ue8m0

It reads and writes one tensor after the other, so that memory holds a few. The weights are quantised by the functions
that a weight sync uses; config.json gets the quantization_config that says how. Embeddings, norms, routers and the
output layer stay as they are. See docs/fp8.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import SafetensorsReader
    from slime.conversion.writer import Job
    from slime.weights.formats import Fp8Format

SHARD_BYTES = 5 * 1024**3


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-dir", required=True, help="HF directory to read")
    parser.add_argument("--save-dir", required=True, help="HF directory to write")
    parser.add_argument(
        "--strategy", choices=("block", "channel", "tensor"), default="block", help="what shares a scale"
    )
    parser.add_argument(
        "--block-size", type=int, nargs="*", help="rows and columns of a block (default: 128 128); one number: both"
    )
    parser.add_argument("--max-workers", type=int, default=1, help="CPU threads")
    parser.add_argument("--scale-fmt", choices=("ue8m0",), help="scales that are powers of two")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="bytes of a safetensors shard")
    return parser


def format_of(args: argparse.Namespace) -> Fp8Format:
    """The format that the flags describe.

    Raises:
        UsageError: one that the engines could not serve.
    """
    from slime.utils.errors import UsageError
    from slime.weights.formats import DEFAULT_BLOCK, Fp8Format

    size = args.block_size
    if args.strategy == "channel":
        raise UsageError(
            "--strategy channel: SGLang reads one scale a channel from compressed-tensors checkpoints only, and those "
            "cannot take new weights from a trainer; use block or tensor."
        )
    for flag, value in (("--max-workers", args.max_workers), ("--shard-bytes", args.shard_bytes)):
        if value < 1:
            raise UsageError(f"{flag} {value} is not above 0.")
    if args.strategy == "tensor" and size:
        raise UsageError(
            f"--block-size {' '.join(map(str, size))} has no effect with --strategy tensor; leave it out."
        )
    if size is not None and (len(size) not in (1, 2) or min(size) < 1):
        raise UsageError(f"--block-size {' '.join(map(str, size))} is not one or two numbers above 0, as 128 128.")
    block = None if args.strategy == "tensor" else (size[0], size[-1]) if size else DEFAULT_BLOCK
    return Fp8Format(block_size=block, is_ue8m0=args.scale_fmt == "ue8m0")


def convert(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of weights that are fp8 now.

    Raises:
        UsageError: input or output that cannot work.
    """
    from dataclasses import replace

    import torch

    from slime.conversion.reader import SafetensorsReader
    from slime.conversion.writer import HfTarget, write_hf

    fmt = format_of(args)
    flags = ("--model-dir", "--save-dir")
    config = config_to_quantize(args.model_dir, args.save_dir, flags=flags, kind="fp8", in_blocks=bool(fmt.block_size))
    torch.set_num_threads(args.max_workers)
    reader = SafetensorsReader(args.model_dir, flag="--model-dir")
    if not any(fmt.quantizes(name) for name in reader.names()):
        no_linear(args.model_dir)
    fmt = replace(fmt, unquantized=tuple(unquantized_modules(reader, fmt)))
    target = HfTarget(
        path=Path(args.save_dir),
        flag="--save-dir",
        assets_from=Path(args.model_dir),
        config=config | {"quantization_config": fmt.config()},
        shard_bytes=args.shard_bytes,
    )
    write_hf(target, fp8_jobs(reader, fmt))
    return sum(fmt.quantizes(name) for name in reader.names())


def fp8_jobs(reader: SafetensorsReader, fmt: Fp8Format) -> list[Job]:
    """Every tensor by itself, but gate and up of a gated MLP together, for they may share a scale."""
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import planned, quantize_bucket
    from slime.conversion.writer import Job

    infos = reader.infos()

    def job_of(*names: str) -> Job:
        def make() -> list[torch.Tensor]:
            return [tensor for _, tensor in quantize_bucket([(name, reader.get(name)) for name in names], fmt)]

        return Job(planned({name: infos[name] for name in names}, fmt), make)

    jobs: list[Job] = []
    for name in infos:
        # MiniMax calls them w1 and w3.
        up = name.replace(".gate_proj.", ".up_proj.").replace(".w1.", ".w3.")
        gate = name.replace(".up_proj.", ".gate_proj.").replace(".w3.", ".w1.")
        if up != name and up in infos:
            jobs.append(job_of(name, up))
        elif gate == name or gate not in infos:
            jobs.append(job_of(name))
    return jobs


def no_linear(model_dir: str) -> None:
    """Raise UsageError for a checkpoint with nothing to quantise."""
    from slime.utils.errors import UsageError

    raise UsageError(
        f"--model-dir {model_dir} has no linear layers that are called as in the supported families "
        "(model.layers.N...._proj.weight); is it a checkpoint of another kind?"
    )


def unquantized_modules(reader: SafetensorsReader, fmt: Fp8Format) -> list[str]:
    """Module paths of matrices that stay as they are: transformers wants them named, embeddings excepted."""
    kept = [name.removesuffix(".weight") for name in reader.names() if name.endswith(".weight")]
    kept = [
        name for name in kept if not fmt.quantizes(name + ".weight") and "norm" not in name and "embed" not in name
    ]
    return sorted({*kept, "lm_head"})


def config_to_quantize(
    source: str,
    target: str,
    *,
    flags: tuple[str, str],
    kind: str,
    beside: Mapping[str, str] | None = None,
    in_blocks: bool = True,
) -> dict[str, Any]:
    """The config.json of a checkpoint that is to be quantised.

    Args:
        source: HF directory.
        target: directory to make.
        flags: that named them.
        kind: what it is to become, in a word.
        beside: flag -> path of what is read beside it.
        in_blocks: fp8 weights are to have a scale for each block.

    Raises:
        UsageError: it is no HF checkpoint, quantised already or of a family that is not trained so, or the output
            exists.
    """
    from slime.conversion.reader import read_hf_config
    from slime.conversion.writer import check_target
    from slime.models.hf_config import unsupported_family
    from slime.utils.errors import UsageError
    from slime.weights.formats import quantization_config_of

    config = read_hf_config(source, flag=flags[0])
    check_target(Path(target), flag=flags[1], sources={flags[0]: source, **(beside or {})})
    if quantization_config_of(config):
        raise UsageError(f"{flags[0]} {source} is quantised already; give the unquantised checkpoint.")
    if problem := unsupported_family(config.get("model_type"), kind, in_blocks=in_blocks):
        raise UsageError(f"{flags[0]} {source}: {problem}")
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import QuantizationError
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    try:
        count = convert(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except QuantizationError as error:
        print(f"error: --model-dir {args.model_dir}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.save_dir}: {count} weights in fp8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
