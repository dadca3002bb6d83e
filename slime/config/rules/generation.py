"""Rules of what is generated, evaluated and scored, and of where samples come from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from slime.config.args import Args
from slime.config.derive import FULLY_ASYNC_ROLLOUT
from slime.config.parser import nearest
from slime.config.problems import NoEffect
from slime.utils.processing_utils import PROCESSOR_FILES, has_processor
from slime.utils.types import MultimodalTypes

DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"
COMPLETING_ROLLOUTS = (DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT)
BUFFER_ROLLOUT = "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"


def check_eval(args: Args) -> Iterable[str]:
    """Evaluation has data when it is asked for (V1, V6)."""
    has_data = args.eval_prompt_data or args.eval_config
    if args.eval_only and not has_data:
        yield "--eval-only (or --num-rollout 0) needs --eval-prompt-data or --eval-config."
    elif args.eval_interval is not None and not has_data:
        yield NoEffect(
            f"--eval-interval {args.eval_interval}",
            "without --eval-prompt-data or --eval-config",
            instead={"eval_interval": None},
        )
    if args.eval_only and args.debug_train_only:
        yield "--eval-only (or --num-rollout 0) has nothing to do with --debug-train-only, which starts no engines."
    elif args.eval_interval is not None and args.debug_train_only:
        yield NoEffect(f"--eval-interval {args.eval_interval}", "with --debug-train-only, which starts no engines")
    if args.eval_config and args.eval_prompt_data:
        yield NoEffect("--eval-prompt-data", "with --eval-config", "list all data sets in one of them")
    names_and_paths = args.eval_prompt_data or []
    if len(names_and_paths) > 1 and len(names_and_paths) % 2:
        yield (
            f"--eval-prompt-data takes NAME PATH pairs, not {len(names_and_paths)} values: "
            f"{' '.join(names_and_paths)}."
        )
    if args.eval_only and args.skip_eval_before_train:
        yield NoEffect(
            "--skip-eval-before-train", "with --num-rollout 0 (--eval-only), which only evaluates", "leave one out"
        )


def check_rollout_source(args: Args) -> Iterable[str]:
    """The rollouts that complete prompts have engines for that."""
    if args.rollout_function_path.replace(":", ".") not in COMPLETING_ROLLOUTS:
        return
    if args.debug_train_only and args.load_debug_rollout_data is None:
        yield (
            "--debug-train-only starts no engines, which the default rollout needs; give a --rollout-function-path "
            "that uses none, such as slime.rollout.sft_rollout.generate_rollout."
        )
    if args.loss_mask_type != "qwen" and not args.custom_generate_function_path:
        yield NoEffect(
            f"--loss-mask-type {args.loss_mask_type}",
            "with the default rollout, which trains on what the engine generated",
            "leave it out",
        )
    generates = [args.custom_generate_function_path, *(d.custom_generate_function_path for d in args.eval_datasets)]
    if args.max_turns is not None and not any(generates) and args.data_source_path.startswith("slime."):
        yield NoEffect(
            f"--max-turns {args.max_turns}",
            "without --custom-generate-function-path: the default one writes one turn",
            "slime.rollout.multi_turn.generate writes several",
        )
    if args.group_rm and args.custom_generate_function_path and not args.custom_rm_path and not args.rm_type:
        yield "--group-rm needs --custom-rm-path or --rm-type."


def check_rollout_buffer(args: Args) -> Iterable[str]:
    """A buffer server is named where, and only where, the rollout function asks one, and brings a whole train step."""
    path, url = args.rollout_function_path.replace(":", "."), args.rollout_buffer_url
    if url is None:
        if path == BUFFER_ROLLOUT:
            yield f"--rollout-function-path {path} needs --rollout-buffer-url, as http://host:8889."
        return
    if path.startswith("slime."):
        yield NoEffect("--rollout-buffer-url", f"with --rollout-function-path {path}", f"{BUFFER_ROLLOUT} reads it")
    if not re.fullmatch(r"https?://[^/?#\s]+/?", url):
        yield f"--rollout-buffer-url {url} is no address of a server; write http://host:8889."
    yield from _check_collection_ratio(args)


def _check_collection_ratio(args: Args) -> Iterable[str]:
    ratio, batch = args.min_batch_collection_ratio, args.rollout_batch_size
    if not ratio > 0:
        yield f"--min-batch-collection-ratio {ratio:g}: it must be above 0 and at most 1."
    elif batch and args.global_batch_size and not args.drop_last_rollouts:
        enough = math.ceil(ratio * batch) * args.n_samples_per_prompt
        if enough < args.global_batch_size:
            yield (
                f"--min-batch-collection-ratio {ratio:g}: {enough} samples would be enough, and one train step needs "
                f"{args.global_batch_size} (--global-batch-size); raise the ratio."
            )


def check_prompts(args: Args) -> Iterable[str]:
    """slime's data sources are given a file to read."""
    reads_file = args.rollout_global_dataset and args.data_source_path.startswith("slime.rollout.data_source.")
    if args.prompt_data is None and reads_file and not args.eval_only and args.load_debug_rollout_data is None:
        yield "--prompt-data is required: a .jsonl or .parquet file with the prompts."


def uses_builtin_reward(args: Args) -> bool:
    """Whether rewards come from `rm_type`: a rollout of slime's own without hooks that score."""
    has_hook = args.custom_rm_path or args.custom_generate_function_path
    completes = args.rollout_function_path.replace(":", ".") in COMPLETING_ROLLOUTS
    return completes and not args.debug_train_only and not has_hook


def check_rewards(
    args: Args, *, known: Collection[str], needs_label: Callable[[str], bool], fields: str
) -> Iterator[str]:
    """Built-in rewards exist and have what they compare with, in training and in every evaluation set.

    Args:
        known: names of built-in rewards.
        needs_label: whether a built-in reward compares with a label.
        fields: says which fields the prompt file has.
    """
    builtin = uses_builtin_reward(args)
    yield from check_rm_type(args, args.rm_type, "--rm-type", known=known)
    # With a teacher the rewards may be all the same: what is learned is its log-probs.
    is_compared = builtin and args.prompt_data and not args.use_opd
    if is_compared and args.rm_type and args.label_key is None and needs_label(args.rm_type):
        yield f"--rm-type {args.rm_type} compares with a label: name its field with --label-key ({fields})."
    for dataset in args.eval_datasets:
        where = f"evaluation data set {dataset.name}"
        yield from check_rm_type(args, dataset.rm_type, f"{where}: rm_type", known=known)
        if dataset.rm_type and args.custom_rm_path and not dataset.custom_rm_path:
            yield NoEffect(
                f"{where}: rm_type {dataset.rm_type}",
                f"with --custom-rm-path {args.custom_rm_path}, which goes first",
                "give the data set a custom_rm_path",
            )
        grader = None if dataset.custom_rm_path or not builtin else dataset.rm_type or args.rm_type
        if grader and dataset.label_key is None and needs_label(grader):
            yield (
                f"{where}: rm_type {grader} compares with a label: name its field with --eval-label-key or label_key."
            )


# What a built-in reward cannot do without: attribute, and what its flag names.
REWARD_NEEDS = {
    "remote_rm": ("rm_url", "the address of the reward service"),
    "code": ("code_sandbox_url", "the address of the service that runs the code"),
    "classify": ("reward_model_path", "the reward model"),
}


def check_rm_type(args: Args, rm_type: str | None, where: str, *, known: Collection[str]) -> Iterator[str]:
    """A reward name exists, and the service that it asks has its address."""
    if rm_type is None:
        return
    name = rm_type.strip()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}."
        yield f"{where} {rm_type} is no built-in reward: {hint}"
    elif name in REWARD_NEEDS:
        attribute, what = REWARD_NEEDS[name]
        if not vars(args)[attribute]:
            yield f"{where} {name} needs --{attribute.replace('_', '-')}, {what}."


def check_reward_services(args: Args) -> Iterable[str]:
    """Addresses of reward services and of their proxy are ones that a client can use."""
    addresses = {
        "--rm-url": args.rm_url,
        "--code-sandbox-url": args.code_sandbox_url,
        "--http-proxy": args.http_proxy,
    }
    for option, value in addresses.items():
        if value is not None and not re.match(r"https?://[^/\s]", value):
            yield f"{option} {value!r} is no address: it must begin with http:// or https:// and name a host."


def check_overlong(args: Args) -> Iterable[str]:
    """The penalty for long responses is added by the default reward post-processing."""
    if args.overlong_buffer_len is not None and args.custom_reward_post_process_path:
        yield NoEffect(
            "--overlong-buffer-len",
            "with --custom-reward-post-process-path, which makes the rewards",
            "add slime.utils.overlong.overlong_penalties there",
        )
    if args.overlong_buffer_len is not None and args.custom_convert_samples_to_train_data_path:
        yield NoEffect(
            "--overlong-buffer-len",
            "with --custom-convert-samples-to-train-data-path, which makes the rewards",
            "leave one of the two out",
        )


def check_tensorboard(args: Args, environment: Mapping[str, str]) -> Iterator[str]:
    """TensorBoard has a directory."""
    if args.use_tensorboard and not args.tb_project_name and not environment.get("TENSORBOARD_DIR"):
        yield (
            "--use-tensorboard (--tracker tensorboard) needs --tb-project-name, or the environment variable "
            "TENSORBOARD_DIR."
        )


ROLLOUT_CHECKS = (
    check_eval,
    check_rollout_source,
    check_rollout_buffer,
    check_prompts,
    check_reward_services,
    check_overlong,
)


FORGE_ROLLOUT = "slime.rollout.forge_load.generate_rollout"
_NO_BUFFER = ("slime.rollout.data_source.RolloutDataSource", "slime.rollout.data_source:RolloutDataSource")
_KINDS = tuple(kind.name for kind in MultimodalTypes.all())


def _makes_no_prompts(args: Args) -> bool:
    is_ours = args.data_source_path.startswith("slime.rollout.data_source")
    return args.rollout_function_path == DEFAULT_ROLLOUT and not args.custom_generate_function_path and is_ours


def check_prompts_without_file(args: Args) -> Iterable[str]:
    """Samples without a prompt are completed by something that makes one."""
    if not args.rollout_global_dataset and _makes_no_prompts(args):
        yield (
            "--disable-rollout-global-dataset gives samples without prompts, which the default generate function "
            "cannot complete; give --custom-generate-function-path, --rollout-function-path or --data-source-path."
        )


def check_fire(args: Args) -> Iterable[str]:
    """The hot first token has a temperature, and is the default generate function's."""
    temperature = args.rollout_fire_temperature
    if temperature is None:
        return
    if temperature <= 0:
        yield f"--rollout-fire-temperature {temperature} must be above 0; leave it out for no hot token."
    if args.custom_generate_function_path:
        yield NoEffect(
            "--rollout-fire-temperature",
            "with --custom-generate-function-path, which calls the engine itself",
            "leave one of the two out",
        )


def check_partial(args: Args) -> Iterable[str]:
    """Groups that are kept have a buffer to be kept in."""
    if args.partial_rollout and args.data_source_path in _NO_BUFFER:
        yield (
            f"--partial-rollout gives groups back to the data source, and --data-source-path {args.data_source_path} "
            "takes none; use slime.rollout.data_source.RolloutDataSourceWithBuffer."
        )


def check_multimodal(args: Args) -> Iterable[str]:
    """Kinds of input are known, and name fields."""
    for kind, field in (args.multimodal_keys or {}).items():
        if kind not in _KINDS:
            yield f"--multimodal-keys: there is no kind {kind!r}; the kinds are {', '.join(_KINDS)}."
        if not isinstance(field, str) or not field:
            yield f"--multimodal-keys: {kind} must name a field of the data rows, not {field!r}."


def unsupported_multimodal(args: Args) -> Iterable[str]:
    """Only images reach an engine, and nothing but text the trainer."""
    trains = not args.debug_rollout_only and not args.eval_only
    for kind in args.multimodal_keys or {}:
        if kind in _KINDS and kind != "image":
            yield f"--multimodal-keys {kind} is not supported yet (model families); use image."
        elif kind in _KINDS and trains:
            yield (
                f"--multimodal-keys {kind} is not supported yet in training (model families): the trainer reads no "
                "images, so it would train the model on the tokens that stand for them; leave it out, or generate "
                "only (--debug-rollout-only, --eval-only)."
            )


def check_forge(args: Args) -> Iterable[str]:
    """A replay with live engines has its files named."""
    if args.rollout_function_path == FORGE_ROLLOUT and args.load_forge_rollout_data is None:
        yield f"--rollout-function-path {FORGE_ROLLOUT} needs --load-forge-rollout-data, the samples that it replays."


def check_generation_files(args: Args) -> Iterable[str]:
    """The checkpoint sees images where there are some, and the first file of a replay exists."""
    checkpoint = args.hf_checkpoint
    if args.multimodal_keys and checkpoint and os.path.isdir(checkpoint) and not has_processor(checkpoint):
        yield (
            f"--multimodal-keys: --hf-checkpoint {checkpoint} has no processor ({' or '.join(PROCESSOR_FILES)}), so "
            "its model sees no images; use a checkpoint that does, or leave the flag out."
        )
    if args.load_forge_rollout_data is None or args.start_rollout_id is None:
        return
    try:
        path = args.load_forge_rollout_data.format(rollout_id=args.start_rollout_id)
    except (ValueError, KeyError, IndexError, AttributeError):
        return  # check_template says what is wrong
    if not os.path.isfile(path):
        yield (
            f"--load-forge-rollout-data {args.load_forge_rollout_data}: there is no file {path}; dump it with "
            "--save-debug-rollout-data."
        )


GENERATION_CHECKS = (check_prompts_without_file, check_fire, check_partial, check_multimodal, check_forge)
UNSUPPORTED = (unsupported_multimodal,)
