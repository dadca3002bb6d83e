"""What can be wrong with one sample, and the error that says so: hook, sample index, head of the prompt.

`blame` turns whatever a generate function, a hook or a reward raised into a `SampleError`; the `check_*` functions
find returns that would only fail much later, in the trainer (slime.rollout.sample_values says which). What is done
about it (--on-sample-error) is decided by the rollout (slime.rollout.collector) and by the evaluation
(slime.rollout.eval).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any

from slime.config.args import Args
from slime.rollout.base_types import flatten
from slime.rollout.hook_errors import HookError, as_kind, as_kind_of, hook_name, must_pass
from slime.rollout.sample_values import sample_problem, to_lists, train_problem
from slime.utils.http_utils import HttpError
from slime.utils.misc import is_finite_number, shown
from slime.utils.types import Sample

_HEAD = 60
_OF_A_VALUE = (TypeError, AttributeError, LookupError, ValueError, AssertionError)


class SampleError(HookError):
    """Generating or scoring one sample failed.

    Attributes:
        is_final: the same request would fail again (an engine or a service refused it), so it is never retried.
    """

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final

    def __reduce__(self) -> Any:
        return _rebuild, (str(self), self.is_final)  # Ray pickles errors; keyword arguments would be lost


def _rebuild(message: str, is_final: bool) -> SampleError:
    return SampleError(message, is_final=is_final)


SampleTypeError = as_kind(SampleError, TypeError)
"""Something of another type than a Sample, a number, ... was returned."""
SampleValueError = as_kind(SampleError, ValueError, AssertionError)
"""A sample's values do not fit together, or cannot be trained on; upstream asserts some of these."""


def generate_name(args: Args, sample: Sample) -> str:
    """What completes a sample, for an error."""
    if sample.generate_function_path:
        return f"the sample's generate_function_path {hook_name(sample.generate_function_path)}"
    path = args.custom_generate_function_path
    return f"--custom-generate-function-path {hook_name(path)}" if path else "the engine's /generate"


def reward_name(args: Args, sample: Sample) -> str:
    """What scores a sample, for an error."""
    if sample.custom_rm_path:
        return f"the sample's custom_rm_path {hook_name(sample.custom_rm_path)}"
    if args.custom_rm_path:
        return f"--custom-rm-path {hook_name(args.custom_rm_path)}"
    kind = sample.metadata.get("rm_type") or args.rm_type or "(none is named)"
    return f"the reward {kind}" + (f" of --rm-url {args.rm_url}" if kind == "remote_rm" else "")


def describe(sample: Sample) -> str:
    """Which sample it is: its index, its prompt's number and how the prompt begins."""
    text = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt)
    head = text if len(text) <= _HEAD else text[:_HEAD] + "..."
    return f"sample {sample.index} (prompt {sample.group_index}: {head!r})"


@contextmanager
def blame(name: str, sample: Sample, *, about_label: str = "") -> Iterator[None]:
    """Raise what is raised inside as a SampleError that names the function and the sample.

    Args:
        name: the function.
        sample: what it was given.
        about_label: why the sample has no label, which is said where code that reads a label stumbled over a value.
    """
    try:
        yield
    except SampleError:
        raise
    except BaseException as error:  # a user's function may raise anything, SystemExit too
        if must_pass(error):
            raise
        refused = isinstance(error, HttpError) and error.status is not None and error.status < 500
        text = f"{name} failed on {describe(sample)}: {type(error).__name__}: {error}"
        if about_label and isinstance(error, _OF_A_VALUE) and _reads_label(error):
            text += f" ({about_label})"
        raise as_kind_of(SampleError, error)(text, is_final=refused) from error


def _reads_label(error: BaseException) -> bool:
    """Whether code that an error came through has `.label` in it."""
    return any("label" in frame.f_code.co_names for frame, _ in walk_tb(error.__traceback__))


def stray_cancellation(group: list[Sample]) -> SampleError:
    """The error of a group whose task was cancelled by something other than slime: user code can reach its task."""
    return SampleError(f"the task of {describe(group[0])} was cancelled by user code; slime did not cancel it")


def check_completed(args: Args, name: str, before: Sample, completed: Any, *, evaluation: bool = False) -> None:
    """A generate function returned a sample, or a list of them, that can be trained on (or evaluated).

    Args:
        args: as for `check_sample`.
        name: the function, for the error.
        before: the sample as the function got it; tokens of a partial sample must have been gone on from.
        completed: what it returned.
        evaluation: nothing is trained.

    Raises:
        SampleError: it did not.
    """
    try:
        samples = flatten(completed)
    except TypeError:
        samples = []
    if not samples:
        found = "an empty list" if completed == [] else f"{str(completed)[:80]!r} ({type(completed).__name__})"
        wrong = SampleValueError if completed == [] else SampleTypeError
        raise wrong(f"{name} returned {found} for {describe(before)}; it must return a Sample or a list of them")
    check_distinct(name, samples)
    for sample in samples:
        to_lists(sample)
        if before.response_length and not _goes_on(before, sample):
            raise SampleValueError(
                f"{name} did not go on from the {before.response_length} response tokens that {describe(before)} "
                "had from an earlier rollout; append to sample.tokens, or leave --partial-rollout out"
            )
        check_sample(args, name, sample, evaluation=evaluation)


def check_sample(args: Args, name: str, sample: Sample, *, evaluation: bool = False) -> None:
    """A sample's values can be trained on; arrays and tensors become lists.

    Args:
        args: what slime.rollout.sample_values reads, and whether samples of the rollout are trained on as they are.
        name: where it comes from, for the error.
        sample: with or without a response.
        evaluation: nothing is trained.

    Raises:
        SampleError: they cannot (slime.rollout.sample_values).
    """
    to_lists(sample)
    # The trainer never gets an aborted sample, nor what a converter is yet to make into training data.
    is_unread = args.debug_rollout_only or args.custom_convert_samples_to_train_data_path
    if evaluation or is_unread or sample.status is Sample.Status.ABORTED:
        problem = sample_problem(args, sample, evaluation=evaluation)
    else:
        problem = train_problem(args, sample)
    if problem:
        raise SampleValueError(f"{name} returned {describe(sample)} with {problem}")


def check_distinct(name: str, samples: list[Sample]) -> None:
    """No two of the samples are one object.

    Raises:
        SampleError: two are, so one would overwrite the other's response, reward and numbers.
    """
    seen: set[int] = set()
    for sample in samples:
        if id(sample) in seen:
            raise SampleValueError(
                f"{name} returned one Sample object twice: {describe(sample)}; return a copy for each response "
                "(dataclasses.replace, copy.deepcopy)"
            )
        seen.add(id(sample))


def _goes_on(before: Sample, sample: Sample) -> bool:
    """Whether a sample still has the prompt and the response tokens that it had; else it would train nonsense."""
    if not isinstance(sample.tokens, list):
        return True  # `check_sample` says what it is
    same_prompt = len(sample.tokens) - sample.response_length == len(before.tokens) - before.response_length
    return same_prompt and sample.tokens[: len(before.tokens)] == before.tokens


def check_reward(args: Args, name: str, sample: Sample, reward: Any, *, evaluation: bool = False) -> None:
    """A reward is a number, or a dict in which the entry that a flag names is one.

    Args:
        args: `reward_key`, `eval_reward_key`, and which hooks read rewards of their own kind.
        name: where it comes from, for the error.
        sample: which it is of.
        reward: what is checked.
        evaluation: it is of an evaluation, whose rewards no hook reads.

    Raises:
        SampleError: None, NaN, infinity, a dict of which no entry is named, or something else.
    """
    if (
        args.custom_reward_post_process_path
        and not evaluation
        and reward is not None
        and not isinstance(reward, float)
    ):
        return
    value = reward
    if isinstance(reward, dict):
        key, option = args.reward_key, "--reward-key"
        if evaluation and (args.eval_reward_key or key is None):
            key, option = args.eval_reward_key, "--eval-reward-key"
        if key is None and args.custom_convert_samples_to_train_data_path and not evaluation:
            return
        if key is None:
            raise SampleValueError(
                f"{name} returned a dict for {describe(sample)}, with the keys {shown(list(reward))}; {option} must "
                "name the one that is the reward"
            )
        if key not in reward:
            raise SampleValueError(
                f"{name} returned {shown(reward)} for {describe(sample)}, which has no {key!r} ({option})"
            )
        value = reward[key]
    if not is_finite_number(value):
        kind = "" if isinstance(value, float) else f" ({type(value).__name__})"
        wrong = SampleTypeError if kind else SampleValueError
        raise wrong(f"{name} returned {shown(value)!r}{kind} for {describe(sample)}; it must be a finite number")
