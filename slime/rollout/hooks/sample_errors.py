"""What can be wrong with one sample, and the error that says so: hook, sample index, head of the prompt.

1. Values: token ids, masks, log-probs and lengths, of every source: generate functions, sample hooks, custom rollout
   functions, the rollout buffer, data sources that give back what was begun, dumps and converters. These functions
   return the problem as the end of a sentence ("... with <problem>"), or None. A mask is 0 or 1 for each response
   token. A log-prob of a trained token is a finite number; a masked token may have any number or None, since no loss
   reads it (slime.rollout.train_data gives such tokens 0.0). It costs about 50 ns a token on one CPU core, so 5 ms
   for a sample of 100,000 tokens.
2. Errors: `blame` turns whatever a generate function, a hook or a reward raised into a `SampleError`; the `check_*`
   functions find returns that would only fail much later, in the trainer.

The rollout (slime.rollout.collector) and the evaluation (slime.rollout.eval) decide what becomes of such a sample
(--on-sample-error).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from traceback import walk_tb
from typing import Any

import numpy as np

from slime.config.args import Args
from slime.rollout.base_types import flatten
from slime.rollout.hooks.errors import HookError, as_kind, as_kind_of, hook_name, must_pass
from slime.rollout.hooks.process_rewards import process_problem
from slime.rollout.sampling.images import image_problem
from slime.utils.http_utils import HttpError
from slime.utils.misc import is_finite_number, shown
from slime.utils.rewards import reward_weights
from slime.utils.types import END_REASONS, Sample

LOG_PROBS = ("rollout_log_probs", "teacher_log_probs")
_LARGEST = float(np.finfo(np.float32).max)  # the trainer takes log-probs as float32
_LARGEST_ID = 2**63 - 1  # and ids as int64
_BITS = frozenset((0, 1))


def to_lists(sample: Sample) -> None:
    """Turn arrays and tensors of a sample into the lists and numbers that its other readers expect."""
    for name in ("tokens", "loss_mask", *LOG_PROBS, "token_rewards", "turn_rewards"):
        setattr(sample, name, as_list(vars(sample)[name]))
    if hasattr(sample.response_length, "item"):
        sample.response_length = sample.response_length.item()


def as_list(values: Any) -> Any:
    """Turn an array, a tensor, a tuple, a range or a list of scalar tensors into a list; leave anything else."""
    if hasattr(values, "tolist"):
        return values.tolist()
    if isinstance(values, tuple | range):
        values = list(values)
    if isinstance(values, list) and values and hasattr(values[0], "item"):
        return [value.item() if hasattr(value, "item") else value for value in values]
    return values


def sample_problem(args: Args, sample: Sample, *, evaluation: bool = False) -> str | None:
    """What is wrong with a completed sample; one without tokens is left to `train_problem`.

    Args:
        args: `vocab_size` (None: unknown), `debug_rollout_only`.
        sample: its lists are lists (`to_lists`).
        evaluation: nothing is trained, so values may be anything.
    """
    if problem := _kind_problem(sample):
        return problem
    tokens, length = sample.tokens, sample.response_length
    if tokens and length > len(tokens):
        return f"response_length {length} but only {len(tokens)} tokens"
    log_probs = {name: vars(sample)[name] for name in LOG_PROBS}
    if evaluation or not tokens:
        return _length_problem(length, {"loss_mask": sample.loss_mask, **log_probs})
    return values_problem(
        tokens,
        length,
        sample.loss_mask,
        log_probs,
        vocab_size=args.vocab_size,
        is_trained=not sample.remove_sample,
    ) or (None if args.debug_rollout_only else image_problem(sample))


UNSEEN = "images, of which a trainer sees nothing without --multimodal-keys; its field may be one that no row has"


def train_problem(args: Args, sample: Sample) -> str | None:
    """What keeps a completed sample from being trained on.

    Args:
        args: as for `sample_problem`, and with `use_rollout_routing_replay` `num_layers` and `moe_router_topk`.
        sample: its lists are lists (`to_lists`).
    """
    if problem := sample_problem(args, sample):
        return problem
    if sample.image_spans and not args.multimodal_keys:
        return UNSEEN
    if problem := process_problem(args, sample):
        return problem
    num_tokens, length = len(sample.tokens), sample.response_length
    if length >= num_tokens:
        return (
            f"{num_tokens} tokens and response_length {length}; a trained sample needs a prompt of at least one "
            "token, whose logits predict the first of the response"
        )
    if args.use_rollout_routing_replay and sample.rollout_routed_experts is not None:
        shape = tuple(np.shape(sample.rollout_routed_experts))
        expected = (num_tokens - 1, args.num_layers, args.moe_router_topk)
        if shape != expected:
            return f"rollout_routed_experts of the shape {shape} for {num_tokens} tokens; it must be {expected}"
    return None


def values_problem(
    tokens: Any,
    response_length: int,
    loss_mask: Any,
    log_probs: Mapping[str, Any],
    *,
    vocab_size: int | None,
    is_trained: bool = True,
) -> str | None:
    """What is wrong with the values of one sample.

    Args:
        tokens: [prompt + R].
        response_length: R.
        loss_mask: [R]; None is all ones.
        log_probs: name -> [R], or None where the sample has none.
        vocab_size: token ids are below it; None leaves that unchecked.
        is_trained: False takes the mask for all zeros.
    """
    if problem := _length_problem(response_length, {"loss_mask": loss_mask, **log_probs}):
        return problem
    if problem := _token_problem(tokens, vocab_size) or _mask_problem(loss_mask):
        return problem
    mask = [is_trained] * response_length if loss_mask is None or not is_trained else loss_mask
    problems = (_log_prob_problem(name, values, mask) for name, values in log_probs.items() if values is not None)
    return next(filter(None, problems), None)


def _length_problem(length: int, lists: Mapping[str, Sequence[Any] | None]) -> str | None:
    """Which list that has one entry for each response token has another number of them."""
    for name, values in lists.items():
        if values is not None and len(values) != length:
            return f"a {name} of {len(values)} entries for response_length {length}; they must be equal"
    return None


def _kind_problem(sample: Sample) -> str | None:
    """Which attribute is not of its type."""
    length, versions = sample.response_length, sample.weight_versions
    if not isinstance(length, Integral) or length < 0:
        return f"response_length {length!r}; it must be a whole number from 0"
    for name in ("tokens", "loss_mask", *LOG_PROBS):
        values = vars(sample)[name]
        if not isinstance(values, list) and (values is not None or name == "tokens"):
            return f"{name} of the type {type(values).__name__}; it must be a list"
    if not isinstance(sample.status, Sample.Status):
        return f"the status {sample.status!r}; it must be one of Sample.Status"
    if not isinstance(sample.metadata, dict):
        return f"metadata of the type {type(sample.metadata).__name__}; it must be a dict"
    if not isinstance(versions, list) or not all(isinstance(version, str) for version in versions):
        return f"weight_versions {str(versions)[:80]}; it must be a list of strings"
    if sample.end_reason is not None and sample.end_reason not in END_REASONS:
        return f"the end_reason {shown(sample.end_reason)!r}; it must be None or one of {', '.join(END_REASONS)}"
    if not isinstance(sample.reward_is_trusted, bool | np.bool_):
        return f"reward_is_trusted {shown(sample.reward_is_trusted)!r}; it must be True or False"
    return None


def _token_problem(tokens: Any, vocab_size: int | None) -> str | None:
    end = _LARGEST_ID + 1 if vocab_size is None else vocab_size
    ids = _as_array(tokens)
    if ids is not None and ids.dtype.kind in "iu":
        wrong = (ids < 0) | (ids >= end)
    else:  # one by one: a text, a None or a float is among them
        wrong = np.array([not _is_id(token, end) for token in tokens], bool)
    if not wrong.any():
        return None
    at = int(wrong.argmax())
    known = "from 0" if vocab_size is None else f"from 0 to {vocab_size - 1}, the end of the model's vocabulary"
    return f"{_text(tokens[at])} as token {at} of {len(tokens)}; token ids are whole numbers {known}"


def _mask_problem(mask: Any) -> str | None:
    try:
        if mask is None or _BITS.issuperset(mask):  # True and 1.0 are a 1
            return None
    except TypeError:  # a list or a dict is among them
        pass
    at = next(i for i, value in enumerate(mask) if not isinstance(value, Real) or value not in (0, 1))
    return f"{_text(mask[at])} in the loss_mask at response token {at}; a mask has only zeros and ones"


def _log_prob_problem(name: str, values: Any, mask: Sequence[Any]) -> str | None:
    numbers = _as_array(values)
    if numbers is not None and numbers.dtype.kind in "iuf" and (np.abs(numbers.astype(float)) <= _LARGEST).all():
        return None
    at = next((i for i, value in enumerate(values) if not _is_log_prob(value, mask[i])), None)
    if at is None:
        return None
    kind = ", which is trained" if mask[at] else ""
    return f"{_text(values[at])} in {name} at response token {at}{kind}; a log-prob is a finite number"


def _is_log_prob(value: Any, is_used: bool) -> bool:
    if not is_used and (value is None or isinstance(value, float | np.floating)):
        return True
    number = float(value) if isinstance(value, np.floating) else value  # float16 takes no bound of float32
    return isinstance(number, int | float) and -_LARGEST <= number <= _LARGEST


def _is_id(value: Any, end: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < end


def _as_array(values: Sequence[Any]) -> np.ndarray | None:
    """The values as numpy reads them; None where they are no plain list of numbers."""
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError):  # lists of several lengths, tensors of a GPU
        return None
    return found if found.ndim == 1 else None


def _text(value: Any) -> str:
    return repr(value)[:40]


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


# Something of another type than a Sample, a number, ... was returned.
SampleTypeError = as_kind(SampleError, TypeError)
# A sample's values do not fit together, or cannot be trained on; upstream asserts some of these
SampleValueError = as_kind(SampleError, ValueError, AssertionError)


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
        reads_label = any("label" in frame.f_code.co_names for frame, _ in walk_tb(error.__traceback__))
        if about_label and isinstance(error, _OF_A_VALUE) and reads_label:
            text += f" ({about_label})"
        raise as_kind_of(SampleError, error)(text, is_final=refused) from error


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
        args: what this module reads, and whether samples of the rollout are trained on as they are.
        name: where it comes from, for the error.
        sample: with or without a response.
        evaluation: nothing is trained.

    Raises:
        SampleError: they cannot (slime.rollout.hooks.sample_errors).
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
    values = [reward]
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
        parts = reward_weights(key)
        if missing := [part for part in parts if part not in reward]:
            raise SampleValueError(
                f"{name} returned {shown(reward)} for {describe(sample)}, which has no {missing[0]!r} ({option})"
            )
        values = [reward[part] for part in parts]
    for value in (value for value in values if not is_finite_number(value)):
        kind = "" if isinstance(value, float) else f" ({type(value).__name__})"
        wrong = SampleTypeError if kind else SampleValueError
        raise wrong(f"{name} returned {shown(value)!r}{kind} for {describe(sample)}; it must be a finite number")
