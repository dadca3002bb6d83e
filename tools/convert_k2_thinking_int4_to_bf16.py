"""Turn an HF checkpoint in 4-bit integers (compressed-tensors, as Kimi-K2-Thinking is published) into one in bf16.

    python tools/convert_k2_thinking_int4_to_bf16.py --model-dir Kimi-K2-Thinking --output-dir Kimi-K2-Thinking-bf16

To train from: every weight is multiplied by its scales. Other tensors keep their dtype, and config.json loses its
quantization_config. Memory holds one tensor a thread.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import RawTensors
    from slime.conversion.writer import Job
    from slime.weights.formats import Int4Format


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model-dir", required=True, help="HF directory in int4")
    parser.add_argument("--output-dir", help="HF directory to write (default: --model-dir with -bf16 behind it)")
    parser.add_argument("--files", nargs="*", help="convert the tensors of these safetensors files alone")
    parser.add_argument("--config-path", help="config.json to read (default: the one in --model-dir)")
    parser.add_argument("--overwrite", action="store_true", help="replace --output-dir if it exists")
    parser.add_argument("--max-workers", type=int, default=2, help="threads")
    parser.add_argument("--shard-bytes", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    return parser


def convert(args: argparse.Namespace) -> tuple[Path, int]:
    """Do what the command line says; returns the directory and the number of weights that were int4.

    Raises:
        UsageError: input or output that cannot work.
    """
    from slime.conversion.reader import RawTensors, read_config_file, read_hf_config, without_quantization
    from slime.conversion.writer import HfTarget, check_target, write_hf
    from slime.utils.errors import UsageError
    from slime.weights.formats import PACKED, Int4Format

    for flag in ("max_workers", "shard_bytes"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    source = Path(args.model_dir)
    target = Path(args.output_dir or f"{os.path.abspath(source)}-bf16")
    if args.config_path:
        config = read_config_file(Path(args.config_path), missing=f"--config-path {args.config_path}: no such file.")
    else:
        config = read_hf_config(source, flag="--model-dir")
    check_target(target, flag="--output-dir", sources={"--model-dir": source}, replaces=args.overwrite)
    fmt = Int4Format.of(config, where=f"--model-dir {source}")
    raw = RawTensors(source, flag="--model-dir")
    raw.check()
    if unknown := sorted(set(args.files or ()) - set(raw.file_of.values())):
        raise UsageError(
            f"--files {unknown[0]}: {source} has no such file; it has {', '.join(sorted(set(raw.file_of.values())))}."
        )
    names = [name for name, file in raw.file_of.items() if not args.files or file in args.files]
    hf_target = HfTarget(
        path=target,
        flag="--output-dir",
        assets_from=source,
        config=without_quantization(config),
        shard_bytes=args.shard_bytes,
        replaces=args.overwrite,
    )
    write_hf(hf_target, bf16_jobs(raw, names, fmt), num_threads=args.max_workers)
    return target, sum(name.endswith("." + PACKED) for name in names)


def bf16_jobs(raw: RawTensors, names: Sequence[str], fmt: Int4Format) -> list[Job]:
    """One job for each weight; scales, shapes and zero points belong to theirs.

    Raises:
        UsageError: a weight has no scales or no shape, they do not go with it, or its columns are in another order.
    """
    import torch

    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import Job
    from slime.utils.errors import UsageError
    from slime.weights.formats import PACKED, SCALE, SHAPE, ZERO
    from slime.weights.quantization import dequantize_groups, unpack

    def weight_job(module: str) -> Job:
        fmt.check_order(module, raw.file_of, where=str(raw.root))
        if lacking := [part for part in (SCALE, SHAPE) if module + part not in raw.file_of]:
            raise UsageError(
                f"{raw.root}: {module}{PACKED} has no {' and no '.join(lacking)}; is it downloaded whole?"
            )
        rows, columns = (int(size) for size in raw.read(module + SHAPE))
        packed, scales = raw.info(module + PACKED).shape, raw.info(module + SCALE).shape
        zeros = raw.info(module + ZERO).shape if module + ZERO in raw.file_of else None
        fmt.check_stored(module, packed, scales, zeros, where=str(raw.root))
        if (rows, columns) != (scales[0], scales[1] * fmt.group_size):
            raise UsageError(
                f"{raw.root}: {module}{SHAPE} says [{rows}, {columns}], and {module}{SCALE} of shape {list(scales)} "
                f"is of {fmt.group_size} columns each; is it downloaded whole?"
            )

        def make() -> list[torch.Tensor]:
            values, zeros = unpack(raw.read(module + PACKED), columns), None
            if module + ZERO in raw.file_of:
                zeros = unpack(raw.read(module + ZERO), rows, dim=0)
            return [dequantize_groups(values, raw.read(module + SCALE), fmt.group_size, zeros, torch.bfloat16)]

        return Job({module + "weight": TensorInfo(torch.bfloat16, (rows, columns))}, make)

    def plain_job(name: str) -> Job:
        return Job({name: raw.info(name)}, lambda: [raw.read(name)])

    jobs: list[Job] = []
    for name in names:
        module, _, part = name.rpartition(".")
        if part == PACKED:
            jobs.append(weight_job(module + "."))
        elif part not in (SCALE, SHAPE, ZERO) or f"{module}.{PACKED}" not in raw.file_of:
            jobs.append(plain_job(name))
    return jobs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    try:
        target, count = convert(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {target}: {count} weights were int4")
    return 0


if __name__ == "__main__":
    sys.exit(main())
