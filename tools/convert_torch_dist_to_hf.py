"""Turn a Megatron torch_dist checkpoint into an HF directory, in one process, without Megatron and without a GPU.

    python tools/convert_torch_dist_to_hf.py --input-dir ckpt --output-dir out --origin-hf-dir Qwen3-0.6B

Weights come from the checkpoint alone; config and tokenizer files are copied from --origin-hf-dir. It does not know
how the checkpoint was made: a converted model and a trained one look the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--input-dir", required=True, help="checkpoint root (its newest), or one iter_* directory of it"
    )
    parser.add_argument("--output-dir", required=True, help="HF directory to write")
    parser.add_argument("--origin-hf-dir", help="copy config and tokenizer files from here; its dtype is the output's")
    parser.add_argument("--model-name", help="family (qwen3, qwen2, llama); default: the origin's model_type")
    parser.add_argument("-f", "--force", action="store_true", help="replace --output-dir if it exists")
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy tensors of the origin that the checkpoint does not have",
    )
    parser.add_argument("--chunk-size", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding without padding; default: as saved")
    return parser


def convert(args: argparse.Namespace) -> None:
    """Do what the command line says.

    Raises:
        UsageError: input or output that cannot work.
    """
    from slime.backends.megatron_utils.hf_export import HfWriter
    from slime.backends.megatron_utils.hf_to_megatron.safetensors_reader import SafetensorsReader
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer_fp8 import quantize_bucket
    from slime.backends.megatron_utils.megatron_to_hf.rules import TensorShape, family_of
    from slime.backends.megatron_utils.torch_dist_reader import TorchDistReader
    from slime.utils.fp8_format import Fp8Format

    check_paths(args)
    origin = read_origin_config(args.origin_hf_dir)
    directory = checkpoint_dir(args.input_dir)
    saved = saved_shape(directory, origin)
    if args.vocab_size:
        saved["vocab_size"] = args.vocab_size
    family = family_of(args.model_name or origin.get("model_type") or saved.get("model_type") or "")
    shape = TensorShape(
        num_layers=saved["num_layers"],
        num_attention_heads=saved["num_attention_heads"],
        num_query_groups=saved["num_query_groups"],
        kv_channels=saved["kv_channels"],
        vocab_size=saved["vocab_size"],
        padded_vocab_size=saved["vocab_size"],
    )
    dtypes, fmt = saved.get("hf_dtypes", {}), Fp8Format.of(origin)
    writer = HfWriter(args.output_dir, args.origin_hf_dir, dtypes=dtypes, shard_bytes=args.chunk_size)
    written: set[str] = set()
    for name, param in TorchDistReader(directory).parameters():
        rule, hf_names = family.find(name, shape.num_layers)
        writer.add(quantize_bucket(list(zip(hf_names, rule.layout.to_hf(param, shape), strict=True)), fmt))
        written.update(hf_names)
    if args.add_missing_from_origin_hf:
        reader = SafetensorsReader(args.origin_hf_dir)
        missing = [name for name in reader.names() if name not in written]
        for name in missing:
            writer.add(quantize_bucket([(name, reader.get(name))], fmt))
        print(f"copied from the origin: {', '.join(missing) or 'nothing'}")
    writer.finish()
    print(f"wrote {len(written)} tensors of {directory} to {args.output_dir}")


def check_paths(args: argparse.Namespace) -> None:
    """Raise UsageError for paths that cannot work, before anything is read."""
    from slime.backends.megatron_utils.hf_export import check_output
    from slime.utils.errors import UsageError

    if args.origin_hf_dir is None and (args.model_name is None or args.add_missing_from_origin_hf):
        raise UsageError("--origin-hf-dir is not given; it or --model-name says what the tensors are called.")
    if args.origin_hf_dir:
        check_output(args.output_dir, args.origin_hf_dir)
    if Path(args.output_dir).exists() and not args.force:
        raise UsageError(f"--output-dir {args.output_dir} exists; give --force to replace it.")


def read_origin_config(origin: str | None) -> dict[str, Any]:
    """Return the origin's config.json, {} without an origin."""
    from slime.utils.errors import UsageError

    if origin is None:
        return {}
    config = Path(origin) / "config.json"
    if not config.is_file():
        raise UsageError(f"--origin-hf-dir {origin} is no HF checkpoint: it has no config.json.")
    return json.loads(config.read_text())


def checkpoint_dir(path: str) -> Path:
    """Return the directory with the tensors: `path` itself, or the newest iteration of a checkpoint root."""
    from slime.utils.checkpoint_paths import resolve_checkpoint_dir

    return Path(path) if (Path(path) / ".metadata").is_file() else resolve_checkpoint_dir(path)[0]


def saved_shape(directory: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """Return the model's numbers as the checkpoint has them, or as the origin's config says where it has none."""
    from slime.backends.megatron_utils.hf_config import model_args_from_hf
    from slime.utils.checkpoint_paths import MODEL_SHAPE_FILE
    from slime.utils.errors import UsageError

    file = directory / MODEL_SHAPE_FILE
    saved = json.loads(file.read_text()) if file.is_file() else {}
    if saved:
        return saved
    if not origin:
        raise UsageError(f"{directory} has no {MODEL_SHAPE_FILE}; give --origin-hf-dir.")
    return model_args_from_hf(origin)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    try:
        convert(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
