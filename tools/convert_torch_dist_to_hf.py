"""Turn a Megatron torch_dist checkpoint into an HF directory, in one process, without Megatron and without a GPU.

    python tools/convert_torch_dist_to_hf.py --input-dir ckpt --output-dir out --origin-hf-dir Qwen3-0.6B

Weights come from the checkpoint alone; config and tokenizer files are copied from --origin-hf-dir. They are read,
re-laid and written one by one, by several threads: memory holds one weight a thread. A converted model and a trained
one look the same to it. Checkpoints of FSDP: tools/convert_fsdp_to_hf.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import Job

EMBEDDING = "embedding.word_embeddings.weight"
VALUE_HEAD = ".value_head."
LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    from slime.conversion.writer import usual_threads

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--input-dir", required=True, help="checkpoint root (its newest), or one iter_* directory of it"
    )
    parser.add_argument("--output-dir", required=True, help="HF directory to write")
    parser.add_argument("--origin-hf-dir", help="copy config and tokenizer files from here; its dtype is the output's")
    parser.add_argument("--model-name", help="family (docs/model_families.md) or module:NAME; default: of the origin")
    parser.add_argument("-f", "--force", action="store_true", help="replace --output-dir if it exists")
    parser.add_argument(
        "-a",
        "--add-missing-from-origin-hf",
        action="store_true",
        help="copy tensors of the origin that the checkpoint does not have",
    )
    parser.add_argument("--chunk-size", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding without padding; default: as saved")
    parser.add_argument("--load-max-workers", type=int, default=2, help="threads that read at a time")
    parser.add_argument("--save-max-workers", type=int, default=usual_threads(), help="threads in all")
    return parser


def convert(args: argparse.Namespace) -> None:
    """Do what the command line says.

    Raises:
        UsageError: input or output that cannot work.
    """
    import torch._dynamo  # noqa: F401 - tensors without memory load it; libraries are loaded before the clock starts

    from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
    from slime.conversion.writer import HfTarget, check_target, write_hf
    from slime.models.families import family_of
    from slime.weights.formats import weight_format_of
    from slime.weights.names import text_config

    start = time.perf_counter()
    check_paths(args)
    origin = read_origin_config(args.origin_hf_dir)
    directory = checkpoint_dir(args.input_dir)
    check_target(Path(args.output_dir), flag="--output-dir", sources={"--input-dir": directory}, replaces=args.force)
    saved = saved_shape(directory, origin)
    reader = TorchDistReader(directory)
    padded_rows = reader.infos()[EMBEDDING].shape[0] if EMBEDDING in reader.infos() else saved["vocab_size"]
    check_sizes(saved, origin)
    saved["vocab_size"] = vocab_size(
        args.vocab_size, saved["vocab_size"], text_config(origin).get("vocab_size"), padded_rows
    )
    family = family_of(args.model_name or origin.get("model_type") or saved.get("model_type") or "")
    fmt = weight_format_of(origin)
    jobs = weight_jobs(reader, family, saved, origin, fmt, threading.Semaphore(args.load_max_workers))
    written = {name: info for job in jobs for name, info in job.outputs.items()}
    if args.origin_hf_dir is not None:
        with_missing = args.add_missing_from_origin_hf
        remedy = "is it one of another model? --add-missing-from-origin-hf copies them"
        check_written(written, args.origin_hf_dir, None if with_missing else remedy)
        more = jobs_of_origin(args.origin_hf_dir, written.keys(), fmt, with_missing=with_missing)
        jobs += more
        if more or with_missing:
            print(f"copied from the origin: {', '.join(name for job in more for name in job.outputs) or 'nothing'}")
    target = HfTarget(
        path=Path(args.output_dir),
        flag="--output-dir",
        assets_from=Path(args.origin_hf_dir) if args.origin_hf_dir else None,
        shard_bytes=args.chunk_size,
        replaces=args.force,
    )
    write_hf(target, jobs, num_threads=args.save_max_workers)
    seconds = time.perf_counter() - start
    print(f"wrote {len(written)} tensors of {directory} to {args.output_dir} in {seconds:.2f} s")


def check_paths(args: argparse.Namespace) -> None:
    """Raise UsageError for paths and numbers that cannot work, before anything is read."""
    from slime.conversion.writer import check_target
    from slime.utils.errors import UsageError

    if args.origin_hf_dir is None and (args.model_name is None or args.add_missing_from_origin_hf):
        raise UsageError("--origin-hf-dir is not given; it or --model-name says what the tensors are called.")
    for flag in ("chunk_size", "load_max_workers", "save_max_workers"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    sources = {"--origin-hf-dir": args.origin_hf_dir, "--input-dir": args.input_dir}
    check_target(Path(args.output_dir), flag="--output-dir", sources=sources, replaces=args.force)


def read_origin_config(origin: str | None) -> dict[str, Any]:
    """Return the origin's config.json, {} without an origin."""
    from slime.conversion.reader import read_hf_config

    return {} if origin is None else read_hf_config(origin, flag="--origin-hf-dir")


def checkpoint_dir(path: str) -> Path:
    """Return the directory with the tensors: `path` itself, or the newest iteration of a checkpoint root.

    Raises:
        UsageError: there is no checkpoint, or one of another kind.
    """
    from slime.checkpoints.paths import resolve_checkpoint_dir
    from slime.utils.errors import UsageError

    directory = Path(path) if (Path(path) / ".metadata").is_file() else resolve_checkpoint_dir(path)[0]
    if not (directory / "common.pt").is_file():
        raise UsageError(
            f"--input-dir {directory} has no common.pt, so Megatron did not write it; for a checkpoint of FSDP use "
            "tools/convert_fsdp_to_hf.py."
        )
    return directory


def saved_shape(directory: Path, origin: dict[str, Any]) -> dict[str, Any]:
    """Return the model's numbers as the checkpoint has them, or as the origin's config says where it has none.

    Raises:
        UsageError: neither has them, or the checkpoint holds no model.
    """
    from slime.checkpoints.paths import MODEL_SHAPE_FILE
    from slime.conversion.reader import read_config_file
    from slime.models.hf_config import model_args_from_hf
    from slime.utils.errors import UsageError

    file = directory / MODEL_SHAPE_FILE
    saved = read_config_file(file, missing="") if file.is_file() else {}
    if "lora" in saved:
        raise UsageError(
            f"{directory} holds LoRA adapters alone (its adapter/ is a PEFT directory); --save-hf of their run writes "
            "merged models."
        )
    if saved:
        return saved
    if not origin:
        raise UsageError(f"{directory} has no {MODEL_SHAPE_FILE}; give --origin-hf-dir.")
    return model_args_from_hf(origin)


def check_sizes(saved: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
    """Compare the model of the checkpoint with the origin's config, but for the vocabulary.

    Raises:
        UsageError: they are two models; names all that differs.
    """
    from slime.config.megatron.arguments import SHAPE_KEYS
    from slime.models.hf_config import SUPPORTED_MODEL_TYPES, model_args_from_hf
    from slime.utils.errors import UsageError

    if origin.get("model_type") not in SUPPORTED_MODEL_TYPES:
        return
    theirs = model_args_from_hf(origin)
    pairs = {key: (saved.get(key), theirs.get(key)) for key in SHAPE_KEYS if key != "vocab_size"}
    found = [f"{key} {a}, not {b}" for key, (a, b) in pairs.items() if None not in (a, b) and a != b]
    if found:
        raise UsageError(
            f"the checkpoint holds another model than the config of --origin-hf-dir describes: {'; '.join(found)}."
        )


def vocab_size(given: int | None, saved: int, of_origin: int | None, padded_rows: int) -> int:
    """The rows of the embedding that are tokens.

    Args:
        given: --vocab-size.
        saved: as the checkpoint says.
        of_origin: as the origin's config says.
        padded_rows: of the embedding in the checkpoint.

    Raises:
        UsageError: they contradict each other; says which --vocab-size would do.
    """
    from slime.utils.errors import UsageError

    if given is None and of_origin is not None and of_origin != saved:
        raise UsageError(
            f"the checkpoint was saved with a vocabulary of {saved}, the config of --origin-hf-dir says {of_origin}; "
            f"give --vocab-size {min(of_origin, padded_rows)} or --vocab-size {saved}."
        )
    chosen = saved if given is None else given
    if not 0 < chosen <= padded_rows:
        raise UsageError(
            f"--vocab-size {chosen}, but the embedding of the checkpoint has {padded_rows} rows, padding included; "
            f"give --vocab-size {of_origin if of_origin and of_origin <= padded_rows else saved}."
        )
    return chosen


def weight_jobs(
    reader: Any, family: Any, saved: Mapping[str, Any], origin: Mapping[str, Any], fmt: Any, reads: threading.Semaphore
) -> list[Job]:
    """One job for each weight of the checkpoint.

    Raises:
        UsageError: weights that the family has no rules for, or of other shapes than the model has.
    """
    import torch

    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import planned, quantize_bucket
    from slime.conversion.reader import TensorInfo, config_dtype
    from slime.conversion.writer import Job
    from slime.models.family import numbered_in_model
    from slime.models.layouts import TensorShape
    from slime.utils.errors import UsageError
    from slime.weights.names import text_config

    shape = TensorShape.of_saved({**saved, "padded_vocab_size": saved["vocab_size"]})
    usual, of_tensor = config_dtype(text_config(origin)), saved.get("hf_dtypes", {})
    unknown: list[str] = []

    def job_of(name: str, info: TensorInfo) -> Job:
        rule, hf_names = family.find(numbered_in_model(name, shape.num_layers), shape.num_layers)
        try:
            parts = rule.layout.to_hf(torch.empty(info.shape, device="meta"), shape)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{name} of shape {list(info.shape)} is none of the model that the config of --origin-hf-dir "
                "describes; is it the config of another model?"
            ) from error
        dtypes = [getattr(torch, of_tensor[n]) if n in of_tensor else usual or info.dtype for n in hf_names]
        plain = {
            n: TensorInfo(dtype, tuple(part.shape)) for n, dtype, part in zip(hf_names, dtypes, parts, strict=True)
        }
        outputs = planned(plain, fmt)

        def make() -> list[torch.Tensor]:
            with reads:
                param = reader.read(name)
            found = quantize_bucket(list(zip(hf_names, rule.layout.to_hf(param, shape), strict=True)), fmt)
            return [tensor.to(outputs[n].dtype) for n, tensor in found]

        return Job(outputs, make)

    jobs: list[Job] = []
    for name, info in reader.infos().items():
        if VALUE_HEAD in f".{name}":
            continue
        try:
            jobs.append(job_of(name, info))
        except KeyError:
            unknown.append(name)
    if unknown:
        raise UsageError(
            f"the family {family.model_type} has no rules for {len(unknown)} parameter(s) of the checkpoint, such as "
            f"{unknown[0]}; is --model-name or --origin-hf-dir that of another model?"
        )
    return jobs


def check_written(written: Mapping[str, TensorInfo], origin: str, remedy: str | None) -> None:
    """Compare what is to be written with the config of the origin, and with its weights where it has any.

    Args:
        written: name -> dtype and shape.
        origin: --origin-hf-dir.
        remedy: what to do about tensors that are missing, as the end of a sentence; None: they may be.

    Raises:
        UsageError: a tensor of the origin is missing, or of another shape.
    """
    from slime.conversion.reader import SafetensorsReader
    from slime.utils.errors import UsageError
    from slime.weights.names import expected_hf_names

    check_config(written, origin)
    if not has_weights(origin):
        return
    infos = SafetensorsReader(origin, flag="--origin-hf-dir").infos()
    if remedy is not None and (missing := sorted(expected_hf_names(Path(origin)) - written.keys())):
        raise UsageError(
            f"the checkpoint lacks {len(missing)} tensor(s) of --origin-hf-dir {origin}, such as {missing[0]}; "
            f"{remedy}."
        )
    for name, info in infos.items():
        if name in written and written[name].shape != info.shape:
            raise UsageError(
                f"{name} is {list(written[name].shape)} in the checkpoint and {list(info.shape)} in --origin-hf-dir "
                f"{origin}; is it one of another model?"
            )


def has_weights(origin: str) -> bool:
    """Whether there are shapes to compare with; an index may be there without the weights."""
    return any(Path(origin).glob("*.safetensors"))


def check_config(written: Mapping[str, TensorInfo], origin: str) -> None:
    """Compare the layers and the width of what is to be written with the origin's config.

    Raises:
        UsageError: it is the config of another model.
    """
    from slime.conversion.reader import read_hf_config
    from slime.utils.errors import UsageError
    from slime.weights.names import is_of_other_part, text_config

    config = text_config(read_hf_config(origin, flag="--origin-hf-dir"))
    found = {int(match[1]) for name in written if not is_of_other_part(name) and (match := LAYER.match(name))}
    if missing := sorted(set(range(config.get("num_hidden_layers", 0))) - found):
        raise UsageError(
            f"the checkpoint has no layer {missing[0]}, and the config of --origin-hf-dir {origin} says that there "
            f"are {config['num_hidden_layers']}; is it one of another model?"
        )
    for name, info in written.items():
        if name.endswith("embed_tokens.weight") and config.get("hidden_size", info.shape[-1]) != info.shape[-1]:
            raise UsageError(
                f"{name} is {list(info.shape)} in the checkpoint, and the config of --origin-hf-dir {origin} says "
                f"hidden_size {config['hidden_size']}; is it one of another model?"
            )


def names_of_index(origin: str) -> list[str]:
    """The tensors that the index of an HF directory names; none without an index.

    Raises:
        UsageError: it cannot be read.
    """
    from slime.utils.errors import UsageError
    from slime.weights.names import INDEX_FILE

    file = Path(origin) / INDEX_FILE
    try:
        return list(json.loads(file.read_text())["weight_map"]) if file.is_file() else []
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no index of safetensors ({error}); download it again.") from error


def jobs_of_origin(origin: str, written: Collection[str], fmt: Any, *, with_missing: bool) -> list[Job]:
    """One job for each tensor of the origin that no trainer changes (the part that sees images).

    `with_missing`: for each that the checkpoint does not give.

    Raises:
        UsageError: the origin's index names tensors that have to be copied, and their files are not there.
    """
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import planned, quantize_bucket
    from slime.conversion.reader import SafetensorsReader
    from slime.conversion.writer import Job
    from slime.utils.errors import UsageError
    from slime.weights.names import is_of_other_part

    if not with_missing and not has_weights(origin):
        needed = sorted(name for name in names_of_index(origin) if is_of_other_part(name) and name not in written)
        if needed:
            raise UsageError(
                f"--origin-hf-dir {origin} has no weights, and its index names {len(needed)} tensor(s) that the "
                f"checkpoint does not hold, such as {needed[0]}; download its *.safetensors, too."
            )
        return []
    reader = SafetensorsReader(origin, flag="--origin-hf-dir")

    def job_of(name: str, info: Any) -> Job:
        outputs = planned({name: info}, fmt)
        return Job(outputs, lambda: [tensor for _, tensor in quantize_bucket([(name, reader.get(name))], fmt)])

    wanted = {name: info for name, info in reader.infos().items() if with_missing or is_of_other_part(name)}
    return [job_of(name, info) for name, info in wanted.items() if name not in written]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import QuantizationError
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    try:
        convert(args)
    except (UsageError, QuantizationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
