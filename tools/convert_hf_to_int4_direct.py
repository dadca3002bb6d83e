"""Turn an HF checkpoint into one in 4-bit integers (compressed-tensors) by rounding alone: no data, no GPU.

    python tools/convert_hf_to_int4_direct.py --model-dir Qwen3-30B-A3B --save-dir Qwen3-30B-A3B-int4
    python tools/convert_hf_to_int4_direct.py --model-dir ... --save-dir ... --group-size 128 --ignore-rules lm_head

It reads and writes one tensor after the other, so that memory holds one a thread. Of a model with experts only these
are quantised, as in Kimi-K2-Thinking, of any other all linear layers; --ignore-rules says otherwise. The functions are
those of a weight sync. What is stored: docs/int4.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import SafetensorsReader, TensorInfo
    from slime.conversion.writer import Job
    from slime.weights.formats import Int4Format


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-dir", required=True, help="HF directory to read")
    parser.add_argument("--save-dir", required=True, help="HF directory to write")
    parser.add_argument("--group-size", type=int, default=32, help="columns that share a scale")
    parser.add_argument(
        "--is-symmetric",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="no zero points (engines want it so)",
    )
    parser.add_argument(
        "--ignore-rules",
        nargs="*",
        help='modules to leave as they are: a path, or "re:" and a regular expression (default: lm_head; of a model '
        "with experts, everything but these)",
    )
    parser.add_argument("--max-workers", type=int, default=1, help="threads")
    parser.add_argument("--shard-bytes", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    return parser


def convert(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of weights that are int4 now.

    Raises:
        UsageError: input or output that cannot work.
    """
    from slime.conversion.reader import SafetensorsReader
    from slime.conversion.writer import HfTarget, write_hf
    from slime.utils.errors import UsageError
    from slime.weights.formats import EXPERTS_ONLY, Int4Format
    from tools.convert_hf_to_fp8 import config_to_quantize

    for flag in ("group_size", "max_workers", "shard_bytes"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    flags = ("--model-dir", "--save-dir")
    config = config_to_quantize(args.model_dir, args.save_dir, flags=flags, kind="int4")
    reader = SafetensorsReader(args.model_dir, flag="--model-dir")
    has_experts = any(".experts." in name for name in reader.names())
    rules = (EXPERTS_ONLY if has_experts else ("lm_head",)) if args.ignore_rules is None else tuple(args.ignore_rules)
    for rule in (rule for rule in rules if rule.startswith("re:")):
        try:
            re.compile(rule.removeprefix("re:"))
        except re.error as error:
            raise UsageError(f"--ignore-rules {rule} is no regular expression: {error}.") from error
    fmt = Int4Format(args.group_size, args.is_symmetric, rules)
    remedy = "give another size, or name the module in --ignore-rules"
    check_shapes(
        reader, fmt, f"--model-dir {args.model_dir}, --ignore-rules {' '.join(rules)}", "--group-size", remedy
    )
    target = HfTarget(
        path=Path(args.save_dir),
        flag="--save-dir",
        assets_from=Path(args.model_dir),
        config=config | {"quantization_config": fmt.config()},
        shard_bytes=args.shard_bytes,
    )
    write_hf(target, int4_jobs(reader, fmt), num_threads=args.max_workers)
    return sum(fmt.quantizes(name) for name in reader.names())


def check_shapes(reader: SafetensorsReader, fmt: Int4Format, source: str, flag: str, remedy: str) -> None:
    """Raise UsageError where there is nothing to quantise, or a weight does not divide into groups.

    Args:
        reader: of the checkpoint.
        fmt: which weights are quantised, and how.
        source: flag and path of the checkpoint.
        flag: of the group size.
        remedy: what to do about such a weight, as the end of a sentence.
    """
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import divides
    from slime.utils.errors import UsageError

    chosen = {name: info.shape for name, info in reader.infos().items() if fmt.quantizes(name)}
    if not chosen:
        raise UsageError(f"{source}: there is nothing to quantise (linear layers of attention, MLPs or experts).")
    for name, shape in chosen.items():
        if not divides(shape, fmt):
            also = "" if fmt.is_symmetric else " and 8 rows, for zero points are packed along them"
            raise UsageError(
                f"{name} has the shape {list(shape)}, which is not whole groups of {flag} {fmt.group_size} "
                f"columns{also}; {remedy}."
            )


def int4_jobs(reader: SafetensorsReader, fmt: Int4Format) -> list[Job]:
    """Every tensor by itself; a quantised weight becomes its packed values, scales, shape and zero points."""
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import (
        QuantizationError,
        planned,
        quantize_bucket,
    )
    from slime.conversion.writer import Job
    from slime.utils.errors import UsageError

    def packed_job(name: str, info: TensorInfo) -> Job:
        def make() -> list[torch.Tensor]:
            try:
                return [tensor for _, tensor in quantize_bucket([(name, reader.get(name))], fmt)]
            except QuantizationError as error:
                raise UsageError(
                    f"{name} has a weight that is infinite or no number, and so cannot be quantised."
                ) from error

        return Job(planned({name: info}, fmt), make)

    def plain_job(name: str, info: TensorInfo) -> Job:
        return Job({name: info}, lambda: [reader.get(name)])

    return [
        packed_job(name, info) if fmt.quantizes(name) else plain_job(name, info)
        for name, info in reader.infos().items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import exit_status

    args = make_parser().parse_args(argv)
    return exit_status(lambda: f"wrote {args.save_dir}: {convert(args)} weights in int4")


if __name__ == "__main__":
    sys.exit(main())
