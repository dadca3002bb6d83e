"""Checks of what flags point at: checkpoints, data files, rewards by name, hooks, output directories.

It reads small files and every data row, and opens no tensors. Each function returns sentences; none of them leaves
anything behind on disk. Which flags are hooks, and how slime calls them, comes in as a table; loading a hook to check
its call runs the user's module.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.checkpoints.paths import classify_checkpoint
from slime.config.args import Args
from slime.config.problems import Rule
from slime.utils.data import check_data_file, parse_slice, read_file
from slime.utils.errors import UsageError, sentences
from slime.utils.eval_config import DatasetSettings, PromptSource
from slime.utils.files.streams import check_first_row, is_stream
from slime.utils.misc import attempt, try_to_load
from slime.weights.transports import why_not_ours

# os.path.isfile and its like say no to what cannot be a path (a name that is too long, a null byte); Path's raise.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def read_hf_config(path: str | None) -> tuple[dict[str, Any] | None, list[str]]:
    """(the config of an HF directory or None, sentences about why it cannot be used)."""
    if path is None:
        return None, []
    root = Path(path)
    if not os.path.isdir(root):
        return None, [
            f"--hf-checkpoint {path} is no directory; download the model first (hf download NAME --local-dir DIR) and "
            "give DIR."
        ]
    if not (root / "config.json").is_file():
        is_megatron = classify_checkpoint(root) == "megatron"
        looks_like = " (it is a Megatron checkpoint: give that as --load or --ref-load)" if is_megatron else ""
        return None, [f"--hf-checkpoint {path} is no HF checkpoint: it has no config.json{looks_like}."]
    try:
        config = json.loads((root / "config.json").read_text())
    except ValueError as error:
        return None, [f"--hf-checkpoint {path}: config.json is not valid JSON ({error})."]
    if not isinstance(config, dict) or not ("model_type" in config or "architectures" in config):
        return None, [
            f"--hf-checkpoint {path}: config.json names no model_type; it is no config of a transformers model."
        ]
    return config, []


def check_hf_files(path: str, *, needs_weights: bool) -> Iterable[str]:
    """An HF directory with a config has a tokenizer, and weights where they are read."""
    root = Path(path)
    return sentences(
        (
            not any((root / name).is_file() for name in _TOKENIZER_FILES),
            f"--hf-checkpoint {path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); copy the model's "
            "tokenizer files there.",
        ),
        (
            needs_weights and not any(any(root.glob(pattern)) for pattern in _WEIGHT_PATTERNS),
            f"--hf-checkpoint {path} has no weights (no {' or '.join(_WEIGHT_PATTERNS[:2])}), which the engines start "
            "from.",
        ),
    )


def check_checkpoints(
    *, load: str | None, ref_load: str | None, save: str | None, teacher_load: str | None = None
) -> Iterable[str]:
    """--ref-load is a checkpoint, and so is the teacher's; --load is one, or where this run will save.

    Args:
        load: as given on the command line, before derivation.
    """
    for option, path in {"--ref-load": ref_load, "--opd-teacher-load": teacher_load}.items():
        if path is not None and classify_checkpoint(path) is None:
            yield f"{option} {path} {_why_no_checkpoint(path)}"
    if load is None or classify_checkpoint(load) is not None or (save is not None and Path(save) == Path(load)):
        return
    if os.path.exists(load) and (not os.path.isdir(load) or any(Path(load).iterdir())):
        yield f"--load {load} {_why_no_checkpoint(load)}"


def check_weight_update_equal(*, load: str | None, hf_checkpoint: str) -> Iterable[str]:
    """What the first sync is to restore is what the trainer starts from.

    Args:
        load: where it starts, as derived.
    """
    if load is not None and Path(load).resolve() != Path(hf_checkpoint).resolve():
        yield (
            f"--check-weight-update-equal compares with the weights of --hf-checkpoint {hf_checkpoint}, but training "
            f"starts from {load}; leave the check out, or start from the same."
        )


def check_weight_dir(path: str | None) -> Iterable[str]:
    """--update-weight-disk-dir is no other run's, and nothing in it would be overwritten."""
    if path is None or not os.path.isdir(path):
        return
    try:
        problem = why_not_ours(path)
    except OSError as error:
        problem = f"cannot be read: {error}; choose another directory."
    if problem:
        yield f"--update-weight-disk-dir {path} {problem}"


def _why_no_checkpoint(path: str) -> str:
    if not os.path.exists(path):
        return "does not exist; give a Megatron checkpoint root or an HF directory."
    return "is no checkpoint: it has neither latest_checkpointed_iteration.txt (Megatron) nor config.json (HF)."


def check_train_data(args: Args, *, reads_reward: bool) -> Iterator[str]:
    """Every prompt file can be read to its end, and names a reward where nothing else does.

    Args:
        reads_reward: rewards come from `rm_type` (see generation.uses_builtin_reward).
    """
    for source, facts, lacks_reward in _read(args, () if args.eval_only else args.prompt_sources, reads_reward):
        yield from (f"{source.where}: {message}" for message in facts.problems)
        if lacks_reward:
            where = f"{source.where}: " if source.is_named else ""
            rows = "(or metadata with an rm_type in every data row)"
            yield f"{where}no reward is given: use --rm-type or --custom-rm-path {rows}."
        if source.system_prompt and facts.first_prompt_is_text and not source.apply_chat_template:
            yield (
                f"{source.where}: system_prompt: a prompt that is a text has no place for it; set "
                "apply_chat_template, or write message lists."
            )


def num_prompts(args: Args) -> int | None:
    """Prompts of an epoch; None where they cannot be counted without a tokenizer, or not at all."""
    is_ours = args.rollout_global_dataset and args.data_source_path.startswith("slime.rollout.data_source.")
    sources = args.prompt_sources
    if any(_streams(args, one) for one in sources):
        return None
    may_drop_long_ones = any(one.max_prompt_len for one in sources) and args.prompt_truncation == "drop"
    if not sources or not is_ours or may_drop_long_ones:
        return None
    return sum(_facts_of(args, one).num_rows for one in sources) or None


SMALL_DATA_NOTE = Rule(
    lambda a: a.num_epoch and 0 < (num_prompts(a) or 0) < (a.rollout_batch_size or 0),
    lambda a: (
        f"--prompt-data {' '.join(one.path for one in a.prompt_sources)} has {num_prompts(a)} rows, fewer than "
        f"--rollout-batch-size {a.rollout_batch_size}: a rollout takes prompts several times, and each of --num-epoch "
        f"{a.num_epoch} is one rollout."
    ),
)


def check_eval_data(args: Args, *, reads_reward: bool) -> Iterator[str]:
    """Every evaluation file can be read to its end, and its answers are graded; `reads_reward` as above."""
    for dataset, facts, lacks_reward in _read(args, args.eval_datasets, reads_reward):
        yield from (f"{dataset.where}: {message}" for message in facts.problems)
        if lacks_reward:
            yield f"{dataset.where}: no reward is given: use --rm-type, --custom-rm-path, or rm_type in --eval-config."


def _read(args: Args, sources: Iterable[Any], reads_reward: bool) -> Iterator[tuple[Any, DataFacts, bool]]:
    """Each data set, what reading it found, and whether nothing grades its answers."""
    for source in sources:
        facts = _facts_of(args, source)
        names_reward = args.rm_type or source.names_reward or facts.first_row_names_reward
        scores_itself = source.custom_rm_path or source.custom_generate_function_path or not reads_reward
        yield source, facts, not (facts.problems or names_reward or scores_itself)


@dataclass(frozen=True)
class DataFacts:
    """What reading a data file found.

    Attributes:
        num_rows: rows (after the slice); 0 where there are problems.
        fields: of the first row.
        first_row_names_reward: its metadata has an rm_type.
        first_prompt_is_text: it is no message list.
        problems: why the file cannot be used.
    """

    num_rows: int = 0
    fields: tuple[str, ...] = ()
    first_row_names_reward: bool = False
    first_prompt_is_text: bool = False
    problems: tuple[str, ...] = ()


def data_facts(
    path: str,
    prompt_key: str,
    label_key: str | None,
    metadata_key: str,
    *,
    multimodal_keys: dict[str, str] | None = None,
    skip_malformed: bool,
) -> DataFacts:
    """Read a data file to its end, once for as long as it does not change."""
    kinds = tuple((multimodal_keys or {}).items())
    status, _ = attempt(lambda: parse_slice(path)[0].stat())
    stamp = (status.st_mtime_ns, status.st_size, status.st_ino) if status else object()  # of no other reading
    return _read_data(stamp, path, prompt_key, label_key, metadata_key, kinds, skip_malformed)


@functools.lru_cache(maxsize=64)
def _read_data(
    stamp: object,
    path: str,
    prompt_key: str,
    label_key: str | None,
    metadata_key: str,
    kinds: tuple[tuple[str, str], ...],
    skip_malformed: bool,
) -> DataFacts:
    fields: tuple[str, ...] = ()
    try:
        row = next(read_file(path, [] if skip_malformed else None), {})
        fields = tuple(row)
        num_rows = check_data_file(
            path,
            prompt_key=prompt_key,
            label_key=label_key,
            metadata_key=metadata_key,
            multimodal_keys=dict(kinds),
            skip_malformed=skip_malformed,
        )
    except UsageError as error:
        return DataFacts(fields=fields, problems=tuple(error.messages))
    return DataFacts(num_rows, fields, _names_reward(row.get(metadata_key)), isinstance(row.get(prompt_key), str))


def _streams(args: Args, dataset: DatasetSettings) -> bool:
    return is_stream(dataset.path) or (isinstance(dataset, PromptSource) and args.stream_prompts)


def _facts_of_stream(dataset: DatasetSettings) -> DataFacts:
    """What the first row tells: the others are looked at when they are drawn."""
    try:
        row = check_first_row(dataset.path, dataset.input_key, dataset.label_key)
    except UsageError as error:
        return DataFacts(problems=tuple(error.messages))
    names_reward = _names_reward(row.get(dataset.metadata_key))
    return DataFacts(0, tuple(row), names_reward, isinstance(row[dataset.input_key], str))


def _facts_of(args: Args, dataset: DatasetSettings) -> DataFacts:
    if _streams(args, dataset):
        return _facts_of_stream(dataset)
    return data_facts(
        dataset.path,
        dataset.input_key,
        dataset.label_key,
        dataset.metadata_key,
        multimodal_keys=dataset.multimodal_keys,
        skip_malformed=args.skip_malformed_data,
    )


def _names_reward(metadata: Any) -> bool:
    try:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    except ValueError:
        return False
    return isinstance(metadata, dict) and bool(metadata.get("rm_type"))


def fields_text(args: Args) -> str:
    """Which fields the prompt file has, for a sentence about a missing one."""
    fields = _facts_of(args, args.prompt_sources[0]).fields if args.prompt_sources else ()
    return f"the fields are {', '.join(fields)}" if fields else "the data file cannot be read"


def output_dirs(args: Args) -> dict[str, str | None]:
    """option -> directory that the run will write."""
    return {
        "--save": args.save,
        "--output-dir": args.output_dir if args.output_dir != args.save else None,
        "--save-hf": _fixed_parent(args.save_hf),
        "--update-weight-disk-dir": args.update_weight_disk_dir,
        "--save-debug-rollout-data": _fixed_parent(args.save_debug_rollout_data),
        "--save-debug-train-data": _fixed_parent(args.save_debug_train_data),
        "--ci-save-grad-norm": _fixed_parent(args.ci_save_grad_norm),
        "--memory-snapshot-dir": args.memory_snapshot_dir if args.record_memory_history else None,
        "--wandb-dir": args.wandb_dir,
        "--tb-project-name": args.tb_project_name,
        "--compile-cache-dir": args.compile_cache_dir,
    }


def _fixed_parent(template: str | None) -> str | None:
    """The directory part of a path template that is the same for every rollout."""
    return None if template is None else template.split("{", 1)[0].rpartition("/")[0] or "."


def check_output_dirs(outputs: dict[str, str | None]) -> Iterator[str]:
    """Every directory to write (option -> path) can be made and written; nothing is left behind."""
    for option, path in outputs.items():
        if path is not None and (reason := why_not_writable(Path(path))):
            yield f"{option} {path} cannot be written: {reason}; choose another directory."


def check_output_file(option: str, path: str | None) -> Iterator[str]:
    """A file to write can be made where it is named."""
    if path is None:
        return
    if os.path.isdir(path):
        yield f"{option} {path} is a directory; name a file in it."
    elif reason := why_not_writable(Path(path).parent):
        yield f"{option} {path} cannot be written: {reason}; choose another place."


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
            if os.path.isdir(part) and not any(part.iterdir()):
                part.rmdir()
    return None


SignatureProblem = Callable[[Any, type], str | None]
_MULTI_TURN = "slime.rollout.multi_turn"


def check_hooks(
    values: dict[str, Any],
    defaults: dict[str, Any],
    hooks: dict[str, type],
    signature_problem: SignatureProblem,
) -> Iterator[str]:
    """Check every hook flag that is not at its default.

    Args:
        values: attribute -> value of the flags.
        defaults: attribute -> default; slime's own functions need no check.
        hooks: attribute -> Protocol of its function.
        signature_problem: why a function does not fit a Protocol, or None.
    """
    for attribute, protocol in hooks.items():
        value = values.get(attribute)
        if value is None or value == defaults.get(attribute):
            continue
        for path in value if isinstance(value, list) else [value]:
            yield from check_hook("--" + attribute.replace("_", "-"), path, protocol, signature_problem)


def check_hook(option: str, path: str, protocol: type, signature_problem: SignatureProblem) -> Iterator[str]:
    """Check one hook path; `option` names where it was given."""
    function, problem = try_to_load(path)
    if problem:
        yield f"{option}{problem}."
    elif problem := signature_problem(function, protocol):
        yield f"{option} {path} does not fit: {problem}."


def form_notes(option: str, path: str | None, is_batch: Callable[[Any], bool]) -> Iterator[str]:
    """Show the recommended form of a generate function that is given in another one.

    Args:
        option: names where it was given.
        path: of the function; None where there is none.
        is_batch: whether a function takes a list of samples.
    """
    function = try_to_load(path)[0] if path else None
    if function is None:  # check_hook says why
        return
    name = getattr(function, "__name__", "generate")
    if str(path).endswith(".py"):
        yield f"{option} {path} is taken as its only public coroutine; write {path}:{name}."
    if is_batch(function):
        yield (
            f"{option} {path}: {name} takes a list of samples, and gets each one in a list of its own; write async "
            f"def {name}(args, sample, sampling_params, evaluation=False), which returns the sample."
        )


def check_settings(values: dict[str, Any], defaults: dict[str, Any], hooks: Iterable[str]) -> Iterator[str]:
    """Ask each function that has a `check_args(args)` of its own what is wrong with its settings.

    Args:
        values: attribute -> value, with everything that the custom config sets.
        defaults: as of `check_hooks`.
        hooks: attributes of the hook flags.
    """
    for attribute in hooks:
        path = values.get(attribute)
        if path == defaults.get(attribute):
            continue
        for each in path if isinstance(path, list) else [path] if path else []:
            if check_args := getattr(try_to_load(each)[0], "check_args", None):
                yield from check_args(Args.of(values))


def check_tool_function(
    generate_paths: Iterable[str | None],
    path: str | None,
    protocol: type,
    signature_problem: SignatureProblem,
    *,
    has_servers: bool,
) -> Iterator[str]:
    """slime.rollout.multi_turn, where a run uses it, has a tool function, or servers that have tools.

    Args:
        generate_paths: the run's custom generate functions.
        path: `tool_function_path` of the custom config.
        protocol: of the tool function.
        has_servers: the custom config has `mcp`.
    """
    if not any(generate and generate.startswith(_MULTI_TURN) for generate in generate_paths):
        return
    if path is None and not has_servers:
        yield (
            f"{_MULTI_TURN} needs a --custom-config-path file with tool_function_path: the path of "
            "fn(args, sample, name, arguments), which makes the model's tool calls; or with mcp, a list of servers."
        )
    if path is None:
        return
    yield from check_hook("tool_function_path in --custom-config-path", path, protocol, signature_problem)
