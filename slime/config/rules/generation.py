"""Rules of what is generated, evaluated and scored, and of where samples come from."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.config.derive import FULLY_ASYNC_ROLLOUT
from slime.config.problems import Check, NoEffect, Rule, WithoutEffect, each, first_of, for_each, plain_option, where
from slime.config.prompt_sources import source_problems
from slime.plugins import OWN_TRACKERS, TRACKER_PACKAGES, TRACKERS, Table, problem_of_tracker
from slime.utils.errors import did_you_mean, sentences
from slime.utils.misc import try_to_load
from slime.utils.processing_utils import PROCESSOR_FILES, has_processor
from slime.utils.types import MultimodalTypes
from slime.weights.names import expected_hf_names, is_of_other_part, read_config

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
COMPLETING_ROLLOUTS = (DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT)
BUFFER_ROLLOUT = "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
FORGE_ROLLOUT = "slime.rollout.forge_load.generate_rollout"
_NO_BUFFER = ("slime.rollout.data_source.RolloutDataSource", "slime.rollout.data_source:RolloutDataSource")
_KINDS = tuple(kind.name for kind in MultimodalTypes.all())


def _has_eval_data(args: Args) -> bool:
    return bool(args.eval_prompt_data or args.eval_config)


def _completes_prompts(args: Args) -> bool:
    return args.rollout_function_path.replace(":", ".") in COMPLETING_ROLLOUTS


def _writes_one_turn(args: Args) -> bool:
    """Whether the default generate function alone completes samples."""
    sets = (*args.prompt_sources, *args.eval_datasets)
    generates = [args.custom_generate_function_path, *(one.custom_generate_function_path for one in sets)]
    return not any(generates) and args.data_source_path.startswith("slime.")


def _enough_samples(args: Args) -> int:
    """Samples that --min-batch-collection-ratio asks for."""
    return math.ceil(args.min_batch_collection_ratio * args.rollout_batch_size) * args.n_samples_per_prompt


def uses_builtin_reward(args: Args) -> bool:
    """Whether rewards come from `rm_type`: a rollout of slime's own without hooks that score."""
    has_hook = args.custom_rm_path or args.custom_generate_function_path
    return _completes_prompts(args) and not args.debug_train_only and not has_hook


def check_rewards(args: Args, *, known: Table[Any], needs_label: Callable[[str], bool], fields: str) -> Iterator[str]:
    """Built-in rewards exist and have what they compare with, in training and in every evaluation set.

    Args:
        known: the rewards that have a name.
        needs_label: whether a built-in reward compares with a label.
        fields: says which fields the prompt file has.
    """
    builtin = uses_builtin_reward(args)
    yield from check_rm_type(args, args.rm_type, "--rm-type", known=known)
    for dataset in (*args.prompt_sources, *args.eval_datasets):
        where, is_trained, idle = dataset.where, dataset in args.prompt_sources, dataset.set_for_rollouts
        yield from check_rm_type(args, dataset.rm_type, f"{where}: rm_type", known=known)
        grader = None if dataset.custom_rm_path or not builtin else dataset.rm_type or args.rm_type
        # With a teacher the rewards may be all the same: what is learned is its log-probs.
        is_compared = dataset.label_key is None and not (is_trained and args.use_opd)
        lacks_label = grader and is_compared and needs_label(grader)
        key = "label_key" if is_trained else "--eval-label-key or label_key"
        yield from sentences(
            (
                is_trained and args.group_rm and dataset.custom_rm_path,
                f"{where}: custom_rm_path {dataset.custom_rm_path}: --group-rm has whole groups scored by "
                "--custom-rm-path; leave one of them out.",
            ),
            (
                is_trained and args.loss_type == "sft_loss" and idle,
                NoEffect(
                    f"{where}: {', '.join(idle)}",
                    "with --loss-type sft_loss, which generates and grades nothing",
                    "leave it out",
                ),
            ),
            (
                dataset.rm_type and args.custom_rm_path and not dataset.custom_rm_path,
                NoEffect(
                    f"{where}: rm_type {dataset.rm_type}",
                    f"with --custom-rm-path {args.custom_rm_path}, which goes first",
                    "give the data set a custom_rm_path",
                ),
            ),
            (
                lacks_label,
                f"--rm-type {grader} compares with a label: name its field with --label-key ({fields})."
                if is_trained and not dataset.rm_type
                else f"{where}: rm_type {grader} compares with a label: name its field with {key}.",
            ),
        )


# What a built-in reward cannot do without: attribute, and what its flag names.
REWARD_NEEDS = {
    "remote_rm": ("rm_url", "the address of the reward service"),
    "code": ("code_sandbox_url", "the address of the service that runs the code"),
    "classify": ("reward_model_path", "the reward model"),
}


def check_rm_type(args: Args, rm_type: str | None, where: str, *, known: Table[Any]) -> Iterator[str]:
    """A reward name exists, and the service that it asks has its address."""
    if rm_type is None:
        return
    name = rm_type.strip()
    if name not in known:
        yield f"{where} {rm_type} is no built-in reward: {did_you_mean(name, known)}"
    elif name in REWARD_NEEDS:
        attribute, what = REWARD_NEEDS[name]
        if not vars(args)[attribute]:
            yield f"{where} {name} needs {plain_option(attribute)}, {what}."
    else:
        yield from known.problems(name)


MULTIMODAL: tuple[Check, ...] = (  # kinds of input are known, and name fields
    for_each(
        lambda a: a.multimodal_keys or {},
        lambda a, kind: kind not in _KINDS,
        lambda a, kind: f"--multimodal-keys: there is no kind {kind!r}; the kinds are {', '.join(_KINDS)}.",
    ),
    for_each(
        lambda a: (a.multimodal_keys or {}).items(),
        lambda a, item: not item[1] or not isinstance(item[1], str),
        lambda a, item: f"--multimodal-keys: {item[0]} must name a field of the data rows, not {item[1]!r}.",
    ),
)
UNSUPPORTED: tuple[Check, ...] = (  # only images reach an engine, and nothing but text the trainer
    for_each(
        lambda a: a.multimodal_keys or {},
        lambda a, kind: kind in _KINDS and kind != "image",
        lambda a, kind: (
            f"--multimodal-keys {kind} is not supported: processor and engine would each pick the frames of a video "
            "and write their times into the prompt, and need not agree; give its frames as a list of images."
            if kind == "video"
            else f"--multimodal-keys {kind} is not supported (model families); use image."
        ),
    ),
    Rule(
        lambda a: bool(a.multimodal_keys) and a.prompt_truncation in ("left", "right", "middle"),
        "--prompt-truncation {prompt_truncation} cuts the text of a prompt, and with it the places of its images "
        "(--multimodal-keys); use drop or error.",
    ),
    Rule(
        lambda a: bool(a.multimodal_keys) and a.reward_model_path,
        "--reward-model-path {reward_model_path}: the reward model is given no images (--multimodal-keys), and would "
        "judge answers to what it does not see; score them with --custom-rm-path or --rm-type.",
    ),
    Rule(
        lambda a: a.image_min_pixels and a.image_max_pixels and a.image_min_pixels > a.image_max_pixels,
        "--image-min-pixels {image_min_pixels} is more than --image-max-pixels {image_max_pixels}.",
    ),
)


def check_generation_files(args: Args) -> Iterable[str]:
    """The checkpoint sees images where there are some, and the first file of a replay exists."""
    checkpoint = args.hf_checkpoint
    if args.multimodal_keys and checkpoint and os.path.isdir(checkpoint) and (reason := _why_blind(Path(checkpoint))):
        yield (
            f"--multimodal-keys: --hf-checkpoint {checkpoint} has {reason}, so its model sees no images; use a "
            "checkpoint that does, or leave the flag out."
        )
    if args.load_forge_rollout_data is None or args.start_rollout_id is None:
        return
    try:
        path = args.load_forge_rollout_data.format(rollout_id=args.start_rollout_id)
    except (ValueError, KeyError, IndexError, AttributeError):
        return  # a rule of debug.py says what is wrong
    if not os.path.isfile(path):
        yield (
            f"--load-forge-rollout-data {args.load_forge_rollout_data}: there is no file {path}; dump it with "
            "--save-debug-rollout-data."
        )


def _why_blind(checkpoint: Path) -> str | None:
    """What a model that sees images has and this HF directory has not; None where it has all."""
    if not has_processor(str(checkpoint)):
        return f"no processor ({' or '.join(PROCESSOR_FILES)})"
    config = read_config(checkpoint)
    if config and not config.get("vision_config"):
        return f"no vision_config in its config.json (model_type {config.get('model_type')!r})"
    names = expected_hf_names(checkpoint, with_tower=True)
    if names and not any(is_of_other_part(name) for name in names):
        return "no weights of a part that sees images, whatever its config.json says"
    return None


def tracker_problems(args: Args) -> Iterator[str]:
    """Say which trackers cannot be used: unknown, not installed, not loadable, or without a method."""
    switched = [name for name in ("wandb", "tensorboard") if vars(args)[f"use_{name}"]]
    for name in dict.fromkeys([*switched, *args.tracker]):
        if name in TRACKER_PACKAGES:
            if importlib.util.find_spec(name) is None:
                yield f"--tracker {name} needs the package {name}, which is not installed: pip install 'slime[{name}]'"
        elif name in TRACKERS:
            yield from TRACKERS.problems(name)
        elif ":" in name:
            row, problem = try_to_load(name)
            if problem or (problem := problem_of_tracker(row)):
                yield f"--tracker {name}{problem if problem[0] == ':' else f' {problem}'}."
        elif name not in OWN_TRACKERS:
            known = [*OWN_TRACKERS, *TRACKERS]
            yield f"--tracker {name} is no tracker, and no path module:Class: {did_you_mean(name, known)}"


ROLLOUT_CHECKS: tuple[Check, ...] = (
    # evaluation has data when it is asked for
    first_of(
        Rule(
            lambda a: a.eval_only and not _has_eval_data(a),
            "--eval-only (or --num-rollout 0) needs --eval-prompt-data or --eval-config.",
        ),
        WithoutEffect(
            lambda a: a.eval_interval is not None and not _has_eval_data(a),
            "--eval-interval {eval_interval}",
            "without --eval-prompt-data or --eval-config",
            instead={"eval_interval": None},
        ),
    ),
    where(
        lambda a: a.debug_train_only,
        first_of(
            Rule(
                lambda a: a.eval_only,
                "--eval-only (or --num-rollout 0) has nothing to do with --debug-train-only, which starts no engines.",
            ),
            WithoutEffect(
                lambda a: a.eval_interval is not None,
                "--eval-interval {eval_interval}",
                "with --debug-train-only, which starts no engines",
            ),
        ),
    ),
    WithoutEffect(
        lambda a: a.eval_config and a.eval_prompt_data,
        "--eval-prompt-data",
        "with --eval-config",
        "list all data sets in one of them",
    ),
    Rule(
        lambda a: len(a.eval_prompt_data or []) > 1 and len(a.eval_prompt_data or []) % 2,
        lambda a: (
            f"--eval-prompt-data takes NAME PATH pairs, not {len(a.eval_prompt_data or [])} values: "
            f"{' '.join(a.eval_prompt_data or [])}."
        ),
    ),
    WithoutEffect(
        lambda a: a.eval_only and a.skip_eval_before_train,
        "--skip-eval-before-train",
        "with --num-rollout 0 (--eval-only), which only evaluates",
        "leave one out",
    ),
    where(  # the rollouts that complete prompts have engines for that
        _completes_prompts,
        Rule(
            lambda a: a.debug_train_only and a.load_debug_rollout_data is None,
            "--debug-train-only starts no engines, which the default rollout needs; give a --rollout-function-path "
            "that uses none, such as slime.rollout.sft_rollout.generate_rollout.",
        ),
        WithoutEffect(
            lambda a: a.loss_mask_type != "qwen" and not a.custom_generate_function_path,
            "--loss-mask-type {loss_mask_type}",
            "with the default rollout, which trains on what the engine generated",
            "leave it out",
        ),
        WithoutEffect(
            lambda a: a.max_turns is not None and _writes_one_turn(a),
            "--max-turns {max_turns}",
            "without --custom-generate-function-path: the default one writes one turn",
            "slime.rollout.multi_turn.generate writes several",
        ),
        Rule(
            lambda a: a.group_rm and a.custom_generate_function_path and not a.custom_rm_path and not a.rm_type,
            "--group-rm needs --custom-rm-path or --rm-type.",
        ),
    ),
    # a buffer server is named where, and only where, the rollout function asks one, and brings a whole train step
    Rule(
        lambda a: a.rollout_buffer_url is None and a.rollout_function_path.replace(":", ".") == BUFFER_ROLLOUT,
        f"--rollout-function-path {BUFFER_ROLLOUT} needs --rollout-buffer-url, as http://host:8889.",
    ),
    where(
        lambda a: a.rollout_buffer_url is not None,
        WithoutEffect(
            lambda a: a.rollout_function_path.startswith("slime."),
            "--rollout-buffer-url",
            lambda a: f"with --rollout-function-path {a.rollout_function_path.replace(':', '.')}",
            f"{BUFFER_ROLLOUT} reads it",
        ),
        Rule(
            lambda a: not re.fullmatch(r"https?://[^/?#\s]+/?", a.rollout_buffer_url or ""),
            "--rollout-buffer-url {rollout_buffer_url} is no address of a server; write http://host:8889.",
        ),
        Rule(
            lambda a: not a.min_batch_collection_ratio > 0,
            "--min-batch-collection-ratio {min_batch_collection_ratio:g}: it must be above 0 and at most 1.",
        ),
        Rule(
            lambda a: (
                a.min_batch_collection_ratio > 0
                and a.rollout_batch_size
                and not a.drop_last_rollouts
                and _enough_samples(a) < a.global_batch_size
            ),
            lambda a: (
                f"--min-batch-collection-ratio {a.min_batch_collection_ratio:g}: {_enough_samples(a)} samples would "
                f"be enough, and one train step needs {a.global_batch_size} (--global-batch-size); raise the ratio."
            ),
        ),
    ),
    Rule(
        lambda a: (
            a.prompt_data is None
            and a.rollout_global_dataset
            and a.data_source_path.startswith("slime.rollout.data_source.")
            and not a.eval_only
            and a.load_debug_rollout_data is None
        ),
        "--prompt-data is required: a .jsonl or .parquet file with the prompts.",
    ),
    Rule(
        lambda a: a.use_tensorboard and not a.tb_project_name and not os.environ.get("TENSORBOARD_DIR"),
        "--use-tensorboard (--tracker tensorboard) needs --tb-project-name, or the environment variable "
        "TENSORBOARD_DIR.",
    ),
    WithoutEffect(
        lambda a: a.dashboard_port == -1 and a.dashboard_host != "127.0.0.1",
        "--dashboard-host {dashboard_host}",
        "with --dashboard-port -1, which starts no pages",
    ),
    Rule(
        lambda a: a.dashboard_port > 65535,
        "--dashboard-port {dashboard_port} is no port; give 0 (a free one), 1 to 65535, or -1 (no pages).",
    ),
    for_each(lambda a: tracker_problems(a), lambda a, problem: True, lambda a, problem: problem),
    *each(
        "rm_url code_sandbox_url http_proxy",
        lambda url: url is not None and not re.match(r"https?://[^/\s]", url),
        "{option} {value!r} is no address: it must begin with http:// or https:// and name a host.",
    ),
    where(  # the penalty is added by the default reward post-processing
        lambda a: a.overlong_buffer_len is not None,
        WithoutEffect(
            lambda a: a.custom_reward_post_process_path,
            "--overlong-buffer-len",
            "with --custom-reward-post-process-path, which makes the rewards",
            "add slime.algorithms.estimators.overlong_penalties there",
        ),
        WithoutEffect(
            lambda a: a.custom_convert_samples_to_train_data_path,
            "--overlong-buffer-len",
            "with --custom-convert-samples-to-train-data-path, which makes the rewards",
            "leave one of the two out",
        ),
    ),
)
GENERATION_CHECKS: tuple[Check, ...] = (
    Rule(
        lambda a: (
            not a.rollout_global_dataset
            and a.rollout_function_path == DEFAULT_ROLLOUT
            and not a.custom_generate_function_path
            and a.data_source_path.startswith("slime.rollout.data_source")
        ),
        "--disable-rollout-global-dataset gives samples without prompts, which the default generate function cannot "
        "complete; give --custom-generate-function-path, --rollout-function-path or --data-source-path.",
    ),
    Rule(
        lambda a: a.rollout_fire_temperature is not None and a.rollout_fire_temperature <= 0,
        "--rollout-fire-temperature {rollout_fire_temperature} must be > 0; leave it out for no hot token.",
    ),
    WithoutEffect(
        lambda a: a.rollout_fire_temperature is not None and a.custom_generate_function_path,
        "--rollout-fire-temperature",
        "with --custom-generate-function-path, which calls the engine itself",
        "leave one of the two out",
    ),
    Rule(
        lambda a: a.partial_rollout and a.data_source_path in _NO_BUFFER,
        "--partial-rollout gives groups back to the data source, and --data-source-path {data_source_path} takes "
        "none; use slime.rollout.data_source.RolloutDataSourceWithBuffer.",
    ),
    *MULTIMODAL,
    lambda args, *_: source_problems(args),
    Rule(
        lambda a: a.rollout_function_path == FORGE_ROLLOUT and a.load_forge_rollout_data is None,
        f"--rollout-function-path {FORGE_ROLLOUT} needs --load-forge-rollout-data, the samples that it replays.",
    ),
)
