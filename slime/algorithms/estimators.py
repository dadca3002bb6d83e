"""The meaning of `--advantage-estimator`: one row per algorithm, read by the command line, rewards, trainer and docs.

An advantage is made in three places, and a row says what happens in each, by the name of a function: the group's
baseline is subtracted from the rewards where the group is known (`BASELINES`), rewards become values of tokens on the
trainer (slime.algorithms.advantages), and the loss weighs them with a ratio of probabilities
(slime.algorithms.losses). docs/adding_an_estimator.md adds one as an example. DAPO's penalty for overlong responses,
which is added to rewards before, is here, too.

Plain floats, without torch, so that the command line can read it; equal rewards minus their baseline are exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime.plugins import Table
from slime.utils.eval_config import source_of
from slime.utils.misc import needed, try_to_load
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args

_FUNCTIONS: dict[str, tuple[str | None, ...]] = {
    "baseline": (None, "group_mean", "leave_one_out", "length_weighted", "greedy"),
    "returns": ("broadcast", "discounted", "minus_kl", "gae"),
    "loss": ("clipped", "cispo"),
}
"""Field of a row -> slime's functions; in their place a row may have the path of another, "package.module:name"."""


@dataclass(frozen=True)
class Estimator:
    """One algorithm."""

    summary: str
    """Paper, and A, the advantage, in terms of r, the reward of the response."""
    baseline: str | None = None
    """The baseline subtracted from a group's rewards, unless --disable-rewards-normalization; "greedy" is the reward
    of the prompt's greedy response."""
    divides_by_std: bool = False
    """... and the rest is divided by the group's deviation, unless --disable-grpo-std-normalization."""
    returns: str = "broadcast"
    """How a response's reward becomes one of each token."""
    ratio: Literal["token", "sequence"] = "token"
    """Whether new / old probability is each token's own, or the geometric mean of its sample's trained tokens."""
    loss: str = "clipped"
    process: bool = False
    """Whether rewards of tokens and turns (Sample.token_rewards, turn_rewards) enter; with a baseline, theirs is
    subtracted, too."""
    needs: tuple[str, ...] = ()
    """Switches that must be given with it, as attributes of args."""

    def __post_init__(self) -> None:
        for field, names in _FUNCTIONS.items():
            name = getattr(self, field)
            if name not in names and ":" not in str(name):
                known = ", ".join(map(str, names))
                raise ValueError(f"Estimator.{field} is {name!r}, not one of {known} or the path of a function")

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained next to the policy."""
        return self.returns == "gae"

    @property
    def takes_kl(self) -> bool:
        """Whether the KL enters the rewards: --kl-coef has an effect."""
        return self.returns != "broadcast"

    @property
    def discounts(self) -> bool:
        """Whether --gamma has an effect."""
        return self.returns in ("discounted", "gae") or ":" in self.returns

    @property
    def compares_groups(self) -> bool:
        """Whether the baseline is made of the other responses to the prompt, so that a group of one learns nothing."""
        return self.baseline not in (None, "greedy")


_OWN = {
    "grpo": Estimator(
        "DeepSeekMath, arXiv 2402.03300: A = (r - mean) / std of the group; Dr.GRPO (2503.20783) leaves out std",
        baseline="group_mean",
        divides_by_std=True,
    ),
    "gspo": Estimator(
        "arXiv 2507.18071: as grpo, with the ratio of whole sequences, exp(mean_t(new - old))",
        baseline="group_mean",
        divides_by_std=True,
        ratio="sequence",
    ),
    "cispo": Estimator(
        "MiniMax-M1, arXiv 2506.13585: as grpo, with the loss -sg(clip(ratio)) A log p, which clips no token out",
        baseline="group_mean",
        divides_by_std=True,
        loss="cispo",
    ),
    "reinforce_plus_plus": Estimator(
        "arXiv 2501.03262: discounted returns of reward and KL, whitened over the batch; no groups",
        returns="discounted",
        process=True,
        needs=("normalize_advantages",),
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "arXiv 2501.03262: A = r - mean of the group - kl_coef KL, whitened over the batch",
        baseline="group_mean",
        returns="minus_kl",
        needs=("normalize_advantages",),
    ),
    "ppo": Estimator(
        "arXiv 1707.06347: A by GAE from a critic's values, with -kl_coef KL of a token and r on the last as rewards",
        returns="gae",
        process=True,
    ),
    "turn_grpo": Estimator(
        "DeepSeekMath, arXiv 2402.03300, section 4.1.3: A = grpo's + the sum of (r - mean) / std over this and later "
        "turns, with mean and std of all turns of the group",
        baseline="group_mean",
        divides_by_std=True,
        returns="discounted",
        process=True,
    ),
    "rloo": Estimator("arXiv 2402.14740: A = r - mean of the group's other rewards", baseline="leave_one_out"),
    "remax": Estimator("arXiv 2310.10505: A = r - reward of the greedy response", baseline="greedy"),
    "opo": Estimator("arXiv 2505.23585: A = r - length-weighted mean of the group", baseline="length_weighted"),
}


def _path_problem(name: str, row: Estimator) -> str | None:
    paths = {field: str(getattr(row, field)) for field in _FUNCTIONS}
    problems = {field: try_to_load(path)[1] for field, path in paths.items() if ":" in path}
    field = next((field for field, problem in problems.items() if problem), None)
    return None if field is None else f"has a {field} that cannot be used{problems[field]}"


ESTIMATORS: Table[Estimator] = Table("slime.estimators", Estimator, _OWN, check=_path_problem)

Baseline = Callable[[Sequence[float], Sequence[int]], list[float]]
"""(rewards [n], trained tokens [n]) of a group -> the baseline of each [n]."""

GREEDY_REWARD = "greedy_reward"
"""Key of Sample.metadata: the reward of the prompt's greedy response, ReMax's baseline."""


def group_mean(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """mean(r), the same for all (GRPO, arXiv 2402.03300).

    Example:
        >>> group_mean([1.0, 0.0, 2.0], [5, 5, 5])
        [1.0, 1.0, 1.0]
    """
    return [_mean(rewards)] * len(rewards)


def leave_one_out(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """The mean of the others, which does not depend on the response itself (RLOO, arXiv 2402.14740).

    A response that is alone is its own baseline: there is nothing to compare it with, so its advantage is 0.

    Example:
        >>> leave_one_out([1.0, 0.0, 2.0], [5, 5, 5])
        [1.0, 1.5, 0.5]
    """
    count = len(rewards)
    if count < 2:
        return list(rewards)
    return [_mean([*rewards[:i], *rewards[i + 1 :]]) for i in range(count)]


def length_weighted(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """sum(l r) / sum(l): the baseline of least variance where a response's gradient grows with its length l (OPO,
    arXiv 2505.23585). The plain mean where nothing is trained.

    Example:
        >>> length_weighted([1.0, 0.0], [3, 1])
        [0.75, 0.75]
    """
    total = sum(lengths)
    if total == 0 or max(rewards) == min(rewards):
        return group_mean(rewards, lengths)
    weighted = math.fsum(reward * length for reward, length in zip(rewards, lengths, strict=True))
    return [weighted / total] * len(rewards)


def _mean(values: Sequence[float]) -> float:
    # the mean of equal numbers is that number also where a sum and a division would round
    return values[0] if min(values) == max(values) else math.fsum(values) / len(values)


BASELINES: dict[str, Baseline] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
}
"""Name -> function. "greedy" is not here: it is the reward of another response, in Sample.metadata."""


def overlong_penalty(length: int, *, max_length: int, buffer_length: int, factor: float) -> float:
    """Return what is added to the reward of a response near the length limit, which is never positive.

    DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13), with L = `length`, M = `max_length`, C = `buffer_length`::

        0                     for L <= M - C
        ((M - C) - L) / C     for M - C < L <= M      (falls from 0 to -1)
        -1                    for L > M

    times `factor` (1 in the paper).

    Args:
        length: response tokens.
        max_length: --rollout-max-response-len.
        buffer_length: --overlong-buffer-len.
        factor: --overlong-penalty-factor.

    Example:
        >>> overlong_penalty(15, max_length=20, buffer_length=10, factor=1.0)
        -0.5
    """
    excess = min(max(length - (max_length - buffer_length), 0), buffer_length)
    return -factor * excess / buffer_length if excess else 0.0


def overlong_penalties(args: Args, samples: Sequence[Sample]) -> list[float]:
    """Return what is added to each reward (`overlong_penalty`); zeros without --overlong-buffer-len.

    The limit is that of a sample's data set, where a mixture gives it one of its own.
    """
    if args.overlong_buffer_len is None:
        return [0.0] * len(samples)
    sources = [source_of(args, sample) for sample in samples]
    return [
        overlong_penalty(
            sample.response_length,
            max_length=needed((source and source.max_response_len) or args.rollout_max_response_len),
            buffer_length=args.overlong_buffer_len,
            factor=args.overlong_penalty_factor,
        )
        for sample, source in zip(samples, sources, strict=True)
    ]


def overlong_metrics(penalties: Sequence[float]) -> dict[str, float]:
    """Mean penalty, and share of the responses that got one."""
    count = max(len(penalties), 1)
    return {"overlong_penalty": sum(penalties) / count, "overlong_ratio": sum(p != 0 for p in penalties) / count}
