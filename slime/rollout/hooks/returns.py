"""Checks of what hooks of a whole rollout returned; an error names flag, function, what came and what is expected.

Returns about one sample (generate functions, sample hooks, rewards) are checked in slime.rollout.hooks.sample_errors,
those of rollout functions in slime.rollout.base_types. Nothing here calls a hook.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from slime.config.args import Args
from slime.rollout.hooks.errors import HookError, blame_hook, hook_name
from slime.rollout.hooks.sample_errors import (
    LOG_PROBS,
    UNSEEN,
    SampleValueError,
    as_list,
    check_distinct,
    check_reward,
    describe,
    to_lists,
    train_problem,
    values_problem,
)
from slime.rollout.hooks.signatures import missing_methods
from slime.rollout.sampling.images import image_problem
from slime.utils.misc import is_finite_number, kind_of, needed, shown
from slime.utils.train_data import mask_sums
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
Group = list[Sample]
TRAIN_COLUMNS = (
    "tokens",
    "response_lengths",
    "rewards",
    "raw_reward",
    "truncated",
    "sample_indices",
    "rollout_ids",
    "loss_masks",
)
IMAGE_COLUMNS = ("multimodal_train_inputs", "image_spans")


class HookReturnError(HookError, ValueError):
    """A hook returned what cannot be used."""


def check_data_source(path: str, source: Any) -> Any:
    """The data source that a class, or a function, made.

    Raises:
        HookReturnError: it lacks a method that is called.
    """
    if problem := missing_methods(source):
        raise HookReturnError(f"--data-source-path {hook_name(path)} does not fit: {problem}")
    return source


def draw_groups(args: Args, source: Any, num_groups: int) -> list[Group]:
    """Draw groups from a data source and check them.

    Raises:
        HookError: the data source failed.
        HookReturnError: they are no list of groups of samples, or none at all, which would be asked for for ever.
    """
    with blame_hook(f"--data-source-path {hook_name(args.data_source_path)}: get_samples"):
        groups = source.get_samples(num_groups)
    if problem := _groups_problem(groups):
        raise HookReturnError(
            f"--data-source-path {hook_name(args.data_source_path)}: get_samples returned {problem}; "
            "it must return a list of groups, each a list of Samples"
        )
    if not groups:
        raise HookReturnError(
            f"--data-source-path {hook_name(args.data_source_path)}: get_samples returned no group, but a rollout "
            "needs more; begin the next epoch when the prompts are used up"
        )
    return groups


def return_groups(args: Args, source: Any, groups: list[Group]) -> None:
    """Give groups back to a data source.

    Raises:
        HookError: the data source failed.
    """
    with blame_hook(f"--data-source-path {hook_name(args.data_source_path)}: add_samples"):
        source.add_samples(groups)


def check_picked(args: Args, picked: Any, buffer: list[Group], num_samples: int) -> list[Group]:
    """The groups that a buffer filter picked.

    Raises:
        HookReturnError: they are no groups, too many, or still in the buffer, from which they would come again.
    """
    name = f"--buffer-filter-path {hook_name(args.buffer_filter_path or 'slime.rollout.data_source.pop_first')}"
    if problem := _groups_problem(picked):
        raise HookReturnError(f"{name} returned {problem}; it must return a list of groups, each a list of Samples")
    if len(picked) > num_samples:
        raise HookReturnError(f"{name} returned {len(picked)} groups; at most {num_samples} were asked for")
    kept = {id(group) for group in buffer}
    if num_left := sum(id(group) in kept for group in picked):
        raise HookReturnError(
            f"{name} left {num_left} of the {len(picked)} groups that it returned in the buffer; it must remove them"
        )
    return picked


def warn_if_ignored(path: str, returned: Any) -> None:
    """A sample filter that returns something was perhaps meant to return what is kept."""
    if returned is not None:
        logger.warning(
            "--rollout-sample-filter-path %s returned %s, which is ignored: it must set remove_sample on the samples "
            "that shall not be trained on",
            *(hook_name(path), kind_of(returned)),
        )


def check_rewards(path: str, returned: Any, num_samples: int) -> tuple[list[float], list[float]]:
    """(raw rewards, rewards for training) as a reward post-process returned them.

    Raises:
        HookReturnError: it is no pair of lists with a finite number for each sample.
    """
    name = f"--custom-reward-post-process-path {hook_name(path)}"
    wanted = f"it must return (raw rewards, rewards), two lists with a number for each of the {num_samples} samples"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise HookReturnError(f"{name} returned {kind_of(returned)}; {wanted}")
    pair = []
    for values in returned:
        if not isinstance(values, Iterable) or isinstance(values, str | dict):
            raise HookReturnError(f"{name} returned a pair with {kind_of(values)} in it; {wanted}")
        pair.append(list(values))
    raw, rewards = pair
    if not len(raw) == len(rewards) == num_samples:
        found = f"{len(raw)} raw and {len(rewards)} rewards for {num_samples} samples"
        raise HookReturnError(f"{name} returned {found}; {wanted}")
    for position, value in enumerate(raw + rewards):
        if not is_finite_number(value):
            raise HookReturnError(
                f"{name} returned {shown(value)!r} for sample {position % num_samples} of the rollout; {wanted}"
            )
    return [float(value) for value in raw], [float(value) for value in rewards]


def check_trainable(args: Args, name: str, samples: list[Sample]) -> None:
    """Every sample of a rollout can be trained on, wherever it comes from: the last check before the trainer.

    Args:
        args: what slime.rollout.hooks.sample_errors and `check_reward` read.
        name: where the samples come from.
        samples: of the whole rollout; arrays and tensors in them become lists.

    Raises:
        SampleError: one cannot, or two are one object.
    """
    check_distinct(name, samples)
    for position, sample in enumerate(samples):
        to_lists(sample)
        if problem := train_problem(args, sample):
            raise SampleValueError(
                f"{name} returned {describe(sample)}, number {position} of the rollout, with {problem} (or a hook "
                "changed the sample after that)"
            )
        if sample.reward is not None and not args.custom_reward_post_process_path:
            check_reward(args, name, sample, sample.reward)


def check_train_data(args: Args, columns: Any, samples: Iterable[Sample] = ()) -> dict[str, Any]:
    """The columns that a converter made of samples, with `rollout_mask_sums` filled in where it has none.

    Raises:
        HookReturnError: it is no dict, a column that training reads is missing, columns differ in length, or a sample
            cannot be trained on.
    """
    path = needed(args.custom_convert_samples_to_train_data_path)
    name = f"--custom-convert-samples-to-train-data-path {hook_name(path)}"
    if not isinstance(columns, dict):
        raise HookReturnError(f"{name} returned {kind_of(columns)}; it must return a dict of columns")
    if missing := [column for column in TRAIN_COLUMNS if column not in columns]:
        raise HookReturnError(
            f"{name} returned no {', '.join(missing)}; it must return the columns {', '.join(TRAIN_COLUMNS)}"
        )
    given = {name for name in IMAGE_COLUMNS if name in columns}
    if len(given) == 1 or (not given and any(sample.image_spans for sample in samples)):
        raise HookReturnError(
            f"{name} returned no {' and no '.join(sorted({*IMAGE_COLUMNS} - given))} of samples with images; it must "
            f"return {' and '.join(IMAGE_COLUMNS)}, with None and [] for a sample without"
        )
    columns = {column: values for column, values in columns.items() if values is not None or column not in LOG_PROBS}
    num_samples = len(columns["tokens"])
    for column in (*TRAIN_COLUMNS, *given, *(name for name in LOG_PROBS if name in columns)):
        if len(columns[column]) != num_samples:
            raise HookReturnError(
                f"{name} returned {len(columns[column])} {column} for {num_samples} samples of tokens; "
                "each column must have one entry for each sample"
            )
    for position in range(num_samples):
        if problem := _column_problem(args, columns, position):
            raise HookReturnError(f"{name} returned sample {position} with {problem}")
    if "rollout_mask_sums" in columns:
        return columns
    return {**columns, "rollout_mask_sums": mask_sums(columns["rollout_ids"], columns["loss_masks"])}


def _column_problem(args: Args, columns: dict[str, Any], position: int) -> str | None:
    """What keeps a converted sample from being trained on."""
    tokens, length = as_list(columns["tokens"][position]), columns["response_lengths"][position]
    if not 0 <= length < len(tokens):
        return f"{len(tokens)} tokens and response_length {length}; it must be from 0 to {len(tokens) - 1}"
    log_probs = {column: as_list(columns[column][position]) for column in LOG_PROBS if column in columns}
    mask = as_list(columns["loss_masks"][position])
    if missing := [column for column, values in {"loss_masks": mask, **log_probs}.items() if values is None]:
        return f"None in {missing[0]}; it must be a list with one entry for each response token"
    if problem := values_problem(tokens, length, mask, log_probs, vocab_size=args.vocab_size):
        return problem
    if spans := columns.get("image_spans"):
        inputs, places = columns["multimodal_train_inputs"][position], spans[position]
        images = {"images": places}  # as many as it says
        seen = Sample(tokens=tokens, image_spans=places, multimodal_train_inputs=inputs, multimodal_inputs=images)
        if problem := image_problem(seen) or (UNSEEN if places and not args.multimodal_keys else None):
            return problem
    for column in ("rewards", "raw_reward"):
        if not is_finite_number(value := columns[column][position]):
            return f"{shown(value)} in {column}; it must be a finite number"
    return None


def _groups_problem(groups: Any) -> str | None:
    if not isinstance(groups, list):
        return kind_of(groups)
    for group in groups:
        if not isinstance(group, list):
            return f"a list with {kind_of(group)} in it"
        if not group:
            return "a list with an empty group in it"
        for sample in group:
            if not isinstance(sample, Sample):
                return f"a group with {kind_of(sample)} in it"
    ids = [id(sample) for group in groups for sample in group]
    return "one Sample object twice" if len(set(ids)) < len(ids) else None
