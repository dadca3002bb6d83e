"""Rewards of tokens and turns: which tokens they are of, what is wrong with them, and the column that is trained on.

A sample has either `token_rewards`, one entry for each response token, or `turn_rewards`, one for each turn: a run of
trained tokens (1 in its loss mask). An entry of None is no reward. The reward of a turn is that of its last token. A
reward at a token that is not trained (a tool's answer) is earned by what the policy wrote before it, so it counts at
the last trained token before; where there is none, no action has earned it.

Estimators with a baseline subtract one here, too, as process supervision with GRPO does (DeepSeekMath, arXiv
2402.03300, section 4.1.3): of all rewards r_k of a group's tokens or turns together,

    r~_k = (r_k - mean(r)) / std(r)

and the advantage of a token is the sum of the r~_k that follow it, which the trainer makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.algorithms.estimators import ESTIMATORS
from slime.config.args import Args
from slime.utils.misc import group_by, is_finite_number, shown
from slime.utils.types import Sample

STD_EPSILON = 1e-6
"""As of a group's rewards (slime.rollout.train_data)."""
ABLE = " or ".join(name for name, row in ESTIMATORS.items() if row.process)
"""The estimators that use them."""


def turn_spans(sample: Sample) -> list[tuple[int, int]]:
    """[start, end) of each turn in the response: its runs of trained tokens, also where the sample is removed.

    Example:
        >>> turn_spans(Sample(response_length=5, loss_mask=[1, 1, 0, 0, 1]))
        [(0, 2), (4, 5)]
    """
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    edges = np.flatnonzero(np.diff(np.asarray(mask, np.int8), prepend=0, append=0))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def take_process_rewards(sample: Sample, given: Any) -> None:
    """Put what a --process-reward-path returned on a sample: a reward of each token, or of each turn.

    Raises:
        ValueError: it is a list of neither.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    num_turns, num_tokens = len(turn_spans(sample)), sample.response_length
    if not isinstance(values, list) or len(values) not in (num_tokens, num_turns):
        found = f"{len(values)} rewards" if isinstance(values, list) else shown(given)
        raise ValueError(
            f"{found} for {num_tokens} response tokens in {num_turns} turns; return a list with one entry for each "
            "token, or for each turn"
        )
    if len(values) == num_turns:
        sample.turn_rewards = values
    else:
        sample.token_rewards = values


def turns_as_tokens(sample: Sample) -> None:
    """Give rewards of turns to the last tokens of these, so that they stay in order when the mask changes."""
    if sample.turn_rewards is None:
        return
    rewards: list[float | None] = [None] * sample.response_length
    for (_, end), reward in zip(turn_spans(sample), sample.turn_rewards, strict=False):  # an aborted turn has none yet
        rewards[end - 1] = reward
    sample.token_rewards, sample.turn_rewards = rewards, None


def process_problem(args: Args, sample: Sample) -> str | None:
    """What is wrong with a sample's rewards of tokens or turns, as the end of a sentence ("... with <problem>")."""
    given = {name: vars(sample)[name] for name in ("token_rewards", "turn_rewards") if vars(sample)[name] is not None}
    if not given:
        return None
    if len(given) == 2:
        return "token_rewards and turn_rewards; set one of them"
    ((name, values),) = given.items()
    if not ESTIMATORS[args.advantage_estimator].process and args.custom_advantage_function_path is None:
        return f"{name}, which --advantage-estimator {args.advantage_estimator} does not use; choose {ABLE}"
    if not isinstance(values, list):
        return f"{name} of the type {type(values).__name__}; it must be a list"
    spans = turn_spans(sample)
    expected, of = (sample.response_length, "response tokens") if name == "token_rewards" else (len(spans), "turns")
    if len(values) != expected:
        return f"{len(values)} {name} for {expected} {of}; they must be equal"
    at = next((i for i, value in enumerate(values) if value is not None and not is_finite_number(value)), None)
    return None if at is None else f"{shown(values[at])} in {name} at {at}; an entry is a finite number or None"


def token_reward_column(
    args: Args, samples: Sequence[Sample], loss_masks: Sequence[Sequence[int]]
) -> list[list[float]] | None:
    """[S][R] what each trained token earned beside its response's reward, 0 for the others; None where no sample has
    rewards of tokens or turns.

    Args:
        args: reads `advantage_estimator`, `rewards_normalization`, `grpo_std_normalization`, `on_untrusted_reward`.
        samples: their rewards are in order (`process_problem`).
        loss_masks: [S][R] as they are trained.
    """
    if all(sample.token_rewards is None and sample.turn_rewards is None for sample in samples):
        return None
    given = [_by_token(sample) if sample.counts(args) else _nothing(sample) for sample in samples]
    estimator = ESTIMATORS[args.advantage_estimator]
    if estimator.baseline is not None and args.rewards_normalization:
        _subtract_baseline(samples, given, divide=estimator.divides_by_std and args.grpo_std_normalization)
    return [_on_trained(values, np.asarray(mask)).tolist() for values, mask in zip(given, loss_masks, strict=True)]


def _nothing(sample: Sample) -> np.ndarray:
    return np.full(sample.response_length, np.nan)


def _by_token(sample: Sample) -> np.ndarray:
    """[R], NaN where there is no reward."""
    if sample.turn_rewards is None:
        return _nothing(sample) if sample.token_rewards is None else np.array(sample.token_rewards, float)
    values = _nothing(sample)
    values[[end - 1 for _, end in turn_spans(sample)]] = np.array(sample.turn_rewards, float)
    return values


def _subtract_baseline(samples: Sequence[Sample], given: Sequence[np.ndarray], *, divide: bool) -> None:
    owners = [("alone", i) if s.group_index is None else ("group", s.group_index) for i, s in enumerate(samples)]
    for members in group_by(range(len(samples)), lambda i: owners[i]).values():
        known = np.concatenate([given[i][~np.isnan(given[i])] for i in members])
        if not len(known):
            continue
        is_equal = known.min() == known.max()  # a mean of equal numbers may be rounded
        std = 0.0 if is_equal else float(known.std(ddof=1))
        for i in members:
            given[i] -= known[0] if is_equal else known.mean()
            given[i] /= std + STD_EPSILON if divide else 1.0


def _on_trained(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[R], each reward at the last trained token up to its own."""
    places, trained = np.flatnonzero(~np.isnan(values)), np.flatnonzero(mask)
    before = np.searchsorted(trained, places, side="right") - 1
    column = np.zeros(len(values))
    np.add.at(column, trained[before[before >= 0]], values[places[before >= 0]])
    return column
