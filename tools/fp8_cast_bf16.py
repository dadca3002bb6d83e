"""Turn an HF checkpoint in fp8 into one in bf16, to train from: every weight is multiplied by its scales.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-V3 --output-bf16-hf-path DeepSeek-V3-bf16

Tensors that are not fp8 keep their dtype, and config.json loses its quantization_config. Memory holds one tensor a
thread. A run does not need this tool: --load and --ref-load of an fp8 checkpoint do the same as they read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input-fp8-hf-path", required=True, help="HF directory in fp8")
    parser.add_argument("--output-bf16-hf-path", required=True, help="HF directory to write")
    parser.add_argument("--max-workers", type=int, default=2, help="threads")
    parser.add_argument("--shard-bytes", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    return parser


def convert(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of weights that were fp8.

    Raises:
        UsageError: input or output that cannot work.
    """
    import torch

    from slime.conversion.reader import SafetensorsReader, TensorInfo, read_hf_config, without_quantization
    from slime.conversion.writer import HfTarget, Job, check_target, write_hf
    from slime.utils.errors import UsageError
    from slime.weights.formats import Fp8Format, quantization_config_of
    from slime.weights.quantization import E4M3

    for flag in ("max_workers", "shard_bytes"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    source, target = Path(args.input_fp8_hf_path), Path(args.output_bf16_hf_path)
    config = read_hf_config(source, flag="--input-fp8-hf-path")
    check_target(target, flag="--output-bf16-hf-path", sources={"--input-fp8-hf-path": source})
    scheme = quantization_config_of(config).get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise UsageError(
            f"--input-fp8-hf-path {source}: activation_scheme {scheme!r} has scales of activations beside the "
            "weights, which have no place in a checkpoint in bf16; use the unquantised checkpoint."
        )
    if Fp8Format.of(config) is None:
        raise UsageError(f"--input-fp8-hf-path {source} has no quantization_config; there is nothing to convert.")
    reader = SafetensorsReader(source, flag="--input-fp8-hf-path")
    stored = reader.infos()

    def job_of(name: str, info: TensorInfo) -> Job:
        dtype = torch.bfloat16 if info.dtype == E4M3 else info.dtype
        return Job({name: TensorInfo(dtype, info.shape)}, lambda: [reader.get(name).to(dtype)])

    jobs = [job_of(name, info) for name, info in stored.items()]
    out = HfTarget(
        path=target,
        flag="--output-bf16-hf-path",
        assets_from=source,
        config=without_quantization(config),
        shard_bytes=args.shard_bytes,
    )
    write_hf(out, jobs, num_threads=args.max_workers)
    return sum(info.dtype == E4M3 for info in stored.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import exit_status

    args = make_parser().parse_args(argv)
    return exit_status(lambda: f"wrote {args.output_bf16_hf_path}: {convert(args)} weights were fp8")


if __name__ == "__main__":
    sys.exit(main())
