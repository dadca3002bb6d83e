"""Whether a sample can be trained on: token ids, masks, log-probs and lengths, checked here for every source.

Sources are generate functions, sample hooks, custom rollout functions, the rollout buffer, data sources that give back
what was begun, dumps and converters. slime.rollout.sample_errors and slime.rollout.hook_returns name the source and
the sample; the functions here return only the problem, as the end of a sentence ("... with <problem>"), or None.

A mask is 0 or 1 for each response token. A log-prob of a trained token is a finite number; a masked token may have
any number or None, since no loss reads it (slime.rollout.train_data gives such tokens 0.0).

Cost: about 50 ns a token on one CPU core, so 5 ms for a sample of 100,000 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from slime.config.args import Args
from slime.utils.types import Sample

LOG_PROBS = ("rollout_log_probs", "teacher_log_probs")
_LARGEST = float(np.finfo(np.float32).max)  # the trainer takes log-probs as float32
_LARGEST_ID = 2**63 - 1  # and ids as int64
_BITS = frozenset((0, 1))


def to_lists(sample: Sample) -> None:
    """Turn arrays and tensors of a sample into the lists and numbers that its other readers expect."""
    for name in ("tokens", "loss_mask", *LOG_PROBS):
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
    ) or (None if args.debug_rollout_only else _image_problem(sample))


def train_problem(args: Args, sample: Sample) -> str | None:
    """What keeps a completed sample from being trained on.

    Args:
        args: as for `sample_problem`, and with `use_rollout_routing_replay` `num_layers` and `moe_router_topk`.
        sample: its lists are lists (`to_lists`).
    """
    if problem := sample_problem(args, sample):
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


def _image_problem(sample: Sample) -> str | None:
    """What besides text a sample has: the trainer reads nothing of it."""
    for name in ("multimodal_train_inputs", "multimodal_inputs"):
        values = vars(sample)[name]
        if values is not None and not isinstance(values, Mapping):
            return f"{name} of the type {type(values).__name__}; it must be a dict"
        if any(_is_there(value) for value in (values or {}).values()):
            return (
                f"{name}: images cannot be trained on yet, the model would only see the tokens that stand for them; "
                "use --debug-rollout-only or --eval-only"
            )
    return None


def _is_there(value: Any) -> bool:
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


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
