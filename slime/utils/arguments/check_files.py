"""Checks of what flags point at: checkpoints, data files, rewards by name, output directories.

It reads small files and every data row, and opens no tensors. Each function returns sentences; none of them leaves
anything behind on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import string
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.utils.arguments.flags import nearest
from slime.utils.checkpoint_paths import classify_checkpoint
from slime.utils.data import check_data_file, read_file
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def read_hf_config(path: str | None) -> tuple[dict[str, Any] | None, list[str]]:
    """(the config of an HF directory or None, sentences about why it cannot be used)."""
    if path is None:
        return None, []
    root = Path(path)
    if not root.is_dir():
        return None, [
            f"--hf-checkpoint {path} is no directory; download the model first (hf download NAME --local-dir DIR) and "
            "give DIR."
        ]
    if not (root / "config.json").is_file():
        return None, [f"--hf-checkpoint {path} is no HF checkpoint: it has no config.json{_looks_like(root)}."]
    try:
        config = json.loads((root / "config.json").read_text())
    except ValueError as error:
        return None, [f"--hf-checkpoint {path}: config.json is not valid JSON ({error})."]
    if not isinstance(config, dict) or not ("model_type" in config or "architectures" in config):
        return None, [
            f"--hf-checkpoint {path}: config.json names no model_type; it is no config of a transformers model."
        ]
    return config, []


def _looks_like(root: Path) -> str:
    if classify_checkpoint(root) == "megatron":
        return " (it is a Megatron checkpoint: give that as --load or --ref-load)"
    return ""


def check_hf_files(path: str, *, needs_weights: bool) -> Iterable[str]:
    """An HF directory with a config has a tokenizer, and weights where they are read."""
    root = Path(path)
    if not any((root / name).is_file() for name in _TOKENIZER_FILES):
        yield (
            f"--hf-checkpoint {path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy the model's "
            "tokenizer files there."
        )
    if needs_weights and not any(any(root.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        yield (
            f"--hf-checkpoint {path} has no weights (no {' or '.join(_WEIGHT_PATTERNS[:2])}), which the engines start "
            "from."
        )


def check_checkpoints(*, load: str | None, ref_load: str | None, save: str | None) -> Iterable[str]:
    """--ref-load is a checkpoint; --load is one, or is the still empty place where this run will save.

    Args:
        load: as given on the command line, before derivation.
    """
    if ref_load is not None and classify_checkpoint(ref_load) is None:
        yield f"--ref-load {ref_load} {_why_no_checkpoint(ref_load)}"
    if load is None or classify_checkpoint(load) is not None or (save is not None and Path(save) == Path(load)):
        return
    if Path(load).exists() and (not Path(load).is_dir() or any(Path(load).iterdir())):
        yield f"--load {load} {_why_no_checkpoint(load)}"


def _why_no_checkpoint(path: str) -> str:
    if not Path(path).exists():
        return "does not exist; give a Megatron checkpoint root or an HF directory."
    return "is no checkpoint: it has neither latest_checkpointed_iteration.txt (Megatron) nor config.json (HF)."


def uses_builtin_reward(args: argparse.Namespace, default_rollout: str) -> bool:
    """Whether rewards come from `rm_type`: the default rollout without hooks that score."""
    has_hook = args.custom_rm_path or args.custom_generate_function_path
    return args.rollout_function_path == default_rollout and not args.debug_train_only and not has_hook


def check_rm_type(rm_type: str | None, where: str, *, rm_url: str | None, known: Collection[str]) -> Iterator[str]:
    """A reward name exists, and remote_rm has its address."""
    if rm_type is None:
        return
    name = rm_type.strip()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}."
        yield f"{where} {rm_type} is no built-in reward: {hint}"
    if name.removeprefix("boxed_") == "remote_rm" and not rm_url:
        yield f"{where} {name} needs --rm-url, the address of the reward service."


def check_train_data(
    args: argparse.Namespace, *, reads_reward: bool, needs_label: Callable[[str], bool]
) -> Iterator[str]:
    """The prompt file can be read to its end and has what the reward needs.

    Args:
        reads_reward: rewards come from `rm_type` (see `uses_builtin_reward`).
        needs_label: whether a built-in reward compares with a label.
    """
    if args.prompt_data is None:
        if args.data_source_path.startswith("slime.rollout.data_source.") and args.num_rollout != 0:
            yield "--prompt-data is required: a .jsonl or .parquet file with the prompts."
        return
    if reads_reward and args.rm_type and args.label_key is None and needs_label(args.rm_type):
        yield (
            f"--rm-type {args.rm_type} compares with a label: name its field with --label-key "
            f"({_keys_of(args.prompt_data)})."
        )
    try:
        num_rows = check_data_file(
            args.prompt_data, prompt_key=args.input_key, label_key=args.label_key, metadata_key=args.metadata_key
        )
    except UsageError as error:
        yield from (f"--prompt-data: {message}" for message in error.messages)
        return
    if reads_reward and not args.rm_type and not _first_row_names_reward(args):
        yield "no reward is given: use --rm-type or --custom-rm-path (or metadata with an rm_type in every data row)."
    if args.num_rollout is None and args.num_epoch and args.rollout_batch_size and num_rows < args.rollout_batch_size:
        yield (
            f"--prompt-data {args.prompt_data} has {num_rows} rows, fewer than --rollout-batch-size "
            f"{args.rollout_batch_size}, so an epoch "
            "holds no whole rollout; lower it or give --num-rollout."
        )


def _first_row_names_reward(args: argparse.Namespace) -> bool:
    metadata = next(read_file(args.prompt_data)).get(args.metadata_key)
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        return False
    return isinstance(metadata, dict) and bool(metadata.get("rm_type"))


def _keys_of(path: str) -> str:
    try:
        return f"the fields are {', '.join(next(read_file(path)))}"
    except (UsageError, StopIteration):
        return "the data file cannot be read"


def check_eval_data(
    datasets: list[EvalDatasetConfig],
    *,
    reads_reward: bool,
    rm_type: str | None,
    custom_rm_path: str | None,
    rm_url: str | None,
    known: Collection[str],
    needs_label: Callable[[str], bool],
) -> Iterator[str]:
    """Every evaluation file can be read and has what its reward needs."""
    for dataset in datasets:
        where = f"evaluation data set {dataset.name}"
        yield from check_rm_type(dataset.rm_type, f"{where}: rm_type", rm_url=rm_url, known=known)
        if dataset.rm_type and custom_rm_path and not dataset.custom_rm_path:
            yield (
                f"{where}: rm_type {dataset.rm_type} has no effect: --custom-rm-path {custom_rm_path} goes first; "
                "give the data set a custom_rm_path."
            )
        grader = None if dataset.custom_rm_path or not reads_reward else dataset.rm_type or rm_type
        if grader and dataset.label_key is None and needs_label(grader):
            yield (
                f"{where}: rm_type {grader} compares with a label: name its field with --eval-label-key or label_key."
            )
        try:
            check_data_file(
                dataset.path,
                prompt_key=dataset.input_key,
                label_key=dataset.label_key,
                metadata_key=dataset.metadata_key,
            )
        except UsageError as error:
            yield from (f"{where}: {message}" for message in error.messages)


def check_tensorboard(
    use_tensorboard: bool, tb_project_name: str | None, environment: Mapping[str, str]
) -> Iterator[str]:
    """TensorBoard has a directory."""
    if use_tensorboard and not tb_project_name and not environment.get("TENSORBOARD_DIR"):
        yield "--use-tensorboard needs --tb-project-name, or the environment variable TENSORBOARD_DIR."


def check_template(option: str, template: str | None, *, needs_id: bool) -> Iterator[str]:
    """A path template has nothing to fill in but {rollout_id}.

    Args:
        needs_id: without it each rollout would overwrite the file of the one before.
    """
    if template is None:
        return
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        yield f"{option} {template}: {error}."
        return
    if names - {"rollout_id"}:
        yield f"{option} {template}: only {{rollout_id}} can be filled in, not {{{min(names - {'rollout_id'})}}}."
    if needs_id and "rollout_id" not in names:
        yield f"{option} {template} must contain {{rollout_id}}, as in dump/{{rollout_id}}.pt."


def check_output_dirs(outputs: dict[str, str | None]) -> Iterator[str]:
    """Every directory to write (option -> path) can be made and written; nothing is left behind."""
    for option, path in outputs.items():
        if path is not None and (reason := why_not_writable(Path(path))):
            yield f"{option} {path} cannot be written: {reason}; choose another directory."


def why_not_writable(directory: Path) -> str | None:
    """Why files cannot be made in `directory` (which need not exist), found by trying; None when they can."""
    missing = [part for part in (directory, *directory.parents) if not os.path.lexists(part)]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".write-test-"):
            pass
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or directory})"
    except ValueError as error:  # a null byte
        return str(error)
    finally:
        for part in missing:  # innermost first; only what did not exist before
            if part.is_dir() and not any(part.iterdir()):
                part.rmdir()
    return None
