"""The meaning of `--advantage-estimator`: one row per algorithm, read by the command line, rewards, trainer and docs.

An advantage is made in three places, and a row says what happens in each, by the name of a function: the group's
baseline is subtracted from the rewards where the group is known (slime.algorithms.baselines), rewards become values of
tokens on the trainer (slime.algorithms.returns), and the loss weighs them with a ratio of probabilities
(slime.algorithms.losses). It imports no torch, so that the command line can read it. docs/adding_an_estimator.md adds
one as an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.plugins import Table
from slime.utils.misc import try_to_load

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
