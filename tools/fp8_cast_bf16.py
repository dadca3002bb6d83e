"""Turn an HF checkpoint in fp8 into one in bf16, to train from: every weight is multiplied by its scales.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-V3 --output-bf16-hf-path DeepSeek-V3-bf16

Tensors that are not fp8 keep their dtype, and config.json loses its quantization_config. A run does not need it:
--load and --ref-load of an fp8 checkpoint do the same as they read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input-fp8-hf-path", required=True, help="HF directory in fp8")
    parser.add_argument("--output-bf16-hf-path", required=True, help="HF directory to write")
    return parser


def convert(source: Path, target: Path) -> int:
    """Write `target`; returns the number of weights that were fp8.

    Raises:
        UsageError: input or output that cannot work.
    """
    from slime.backends.megatron_utils.hf_export import HfWriter, check_output
    from slime.backends.megatron_utils.hf_to_megatron.safetensors_reader import SafetensorsReader
    from slime.utils.errors import UsageError
    from slime.utils.fp8 import E4M3
    from slime.utils.fp8_format import fp8_format_of

    if not (source / "config.json").is_file():
        raise UsageError(f"--input-fp8-hf-path {source} is no HF checkpoint: it has no config.json.")
    check_output(target, source)
    if fp8_format_of(source) is None:
        raise UsageError(f"--input-fp8-hf-path {source} has no quantization_config; there is nothing to convert.")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    reader = SafetensorsReader(source)
    stored = reader.dtypes()
    dtypes = {
        name: "bfloat16" if dtype == E4M3 else str(dtype).removeprefix("torch.") for name, dtype in stored.items()
    }
    writer = HfWriter(target, source, dtypes=dtypes, config=config)
    for name in reader.names():
        writer.add([(name, reader.get(name))])
    writer.finish()
    return sum(dtype == E4M3 for dtype in stored.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    try:
        count = convert(Path(args.input_fp8_hf_path), Path(args.output_bf16_hf_path))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output_bf16_hf_path}: {count} weights were fp8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
