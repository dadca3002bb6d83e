"""Rules of what is generated: prompts without a file, images, the hot first token, partial rollouts, replays.

Each check reads `args` after derivation and returns sentences; only `check_generation_files` looks at files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from slime.config.args import Args
from slime.config.problems import NoEffect
from slime.config.rules.check_rollout import DEFAULT_ROLLOUT
from slime.utils.processing_utils import PROCESSOR_FILES, has_processor
from slime.utils.types import MultimodalTypes

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


CHECKS = (check_prompts_without_file, check_fire, check_partial, check_multimodal, check_forge)
UNSUPPORTED = (unsupported_multimodal,)
