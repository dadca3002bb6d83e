"""Turn an HF checkpoint into one in 4-bit integers (compressed-tensors) by rounding alone: no data, no GPU.

    python tools/convert_hf_to_int4_direct.py --model-dir Qwen3-30B-A3B --save-dir Qwen3-30B-A3B-int4
    python tools/convert_hf_to_int4_direct.py --model-dir ... --save-dir ... --group-size 128 --ignore-rules lm_head

It reads and writes one tensor after the other, so that memory holds one a thread; a conversion that was cut off goes
on when it is started again. Of a model with experts only these are quantised, as in Kimi-K2-Thinking, of any other all
linear layers; --ignore-rules says otherwise. What is stored: docs/conversion.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.backends.megatron_utils.hf_to_megatron.safetensors_reader import SafetensorsReader
    from slime.utils.conversion.hf_output import Job
    from slime.utils.int4_format import Int4Format


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
    from slime.backends.megatron_utils.hf_to_megatron.safetensors_reader import SafetensorsReader
    from slime.utils.conversion.hf_config import read_hf_config
    from slime.utils.conversion.hf_output import HfTarget, check_target, write_hf
    from slime.utils.errors import UsageError
    from slime.utils.int4_format import EXPERTS_ONLY, Int4Format

    for flag in ("group_size", "max_workers", "shard_bytes"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    config = read_hf_config(args.model_dir, flag="--model-dir")
    check_target(Path(args.save_dir), flag="--save-dir", sources={"--model-dir": args.model_dir})
    if config.get("quantization_config"):
        raise UsageError(f"--model-dir {args.model_dir} is quantised already; give the unquantised checkpoint.")
    reader = SafetensorsReader(args.model_dir, flag="--model-dir")
    has_experts = any(".experts." in name for name in reader.names())
    rules = (EXPERTS_ONLY if has_experts else ("lm_head",)) if args.ignore_rules is None else tuple(args.ignore_rules)
    fmt = Int4Format(args.group_size, args.is_symmetric, rules)
    check_shapes(reader, fmt, args.model_dir)
    target = HfTarget(
        path=Path(args.save_dir),
        flag="--save-dir",
        assets_from=Path(args.model_dir),
        config=config | {"quantization_config": fmt.config()},
        shard_bytes=args.shard_bytes,
        made_from=[str(Path(args.model_dir).resolve()), json.dumps(fmt.config())],
    )
    write_hf(target, int4_jobs(reader, fmt), num_threads=args.max_workers)
    return sum(fmt.quantizes(name) for name in reader.names())


def check_shapes(reader: SafetensorsReader, fmt: Int4Format, model_dir: str) -> None:
    """Raise UsageError where there is nothing to quantise, or a weight does not divide into groups."""
    from slime.utils.errors import UsageError

    chosen = {name: info.shape for name, info in reader.infos().items() if fmt.quantizes(name)}
    if not chosen:
        raise UsageError(f"--model-dir {model_dir}: the rules leave nothing to quantise; look at --ignore-rules.")
    rows_of = 1 if fmt.is_symmetric else 8
    for name, shape in chosen.items():
        if len(shape) != 2 or shape[1] % fmt.group_size or shape[0] % rows_of:
            also = "" if fmt.is_symmetric else " and 8 rows, for zero points are packed along them"
            raise UsageError(
                f"{name} has the shape {list(shape)}, which is not whole groups of --group-size {fmt.group_size} "
                f"columns{also}; give another size, or name the module in --ignore-rules."
            )


def int4_jobs(reader: SafetensorsReader, fmt: Int4Format) -> list[Job]:
    """Every tensor by itself; a quantised weight becomes its packed values, scales, shape and zero points."""
    import torch

    from slime.utils.conversion.hf_output import Job
    from slime.utils.conversion.raw_tensors import TensorInfo
    from slime.utils.errors import UsageError
    from slime.utils.int4 import pack, quantize_groups
    from slime.utils.int4_format import PACKED, SCALE, SHAPE, ZERO

    def packed_job(name: str, info: TensorInfo) -> Job:
        (rows, columns), module = info.shape, name.removesuffix("weight")
        groups = columns // fmt.group_size
        outputs = {
            module + PACKED: TensorInfo(torch.int32, (rows, -(-columns // 8))),
            module + SCALE: TensorInfo(info.dtype, (rows, groups)),
            module + SHAPE: TensorInfo(torch.int64, (2,)),
        }
        if not fmt.is_symmetric:
            outputs[module + ZERO] = TensorInfo(torch.int32, (rows // 8, groups))

        def make() -> list[torch.Tensor]:
            values, scales, zeros = quantize_groups(reader.get(name), fmt.group_size, symmetric=fmt.is_symmetric)
            if not bool(scales.isfinite().all()):
                raise UsageError(f"{name} has a weight that is infinite or no number, and so cannot be quantised.")
            found = [pack(values), scales, torch.tensor([rows, columns])]
            return found if zeros is None else [*found, pack(zeros, 0)]

        return Job(outputs, make)

    def plain_job(name: str, info: TensorInfo) -> Job:
        return Job({name: info}, lambda: [reader.get(name)])

    return [
        packed_job(name, info) if fmt.quantizes(name) else plain_job(name, info)
        for name, info in reader.infos().items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    try:
        count = convert(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.save_dir}: {count} weights in int4")
    return 0


if __name__ == "__main__":
    sys.exit(main())
