"""Each row of the table of estimators against a reference of plain float64 Python: baselines, returns, whitening."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms import advantages
from slime.algorithms.advantages import RETURNS, chunked_discounted_returns, whiten
from slime.algorithms.estimators import BASELINES, ESTIMATORS
from slime.algorithms.losses import LOSSES
from slime.rollout.train_data import post_process_rewards
from slime.utils.types import Sample
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

# (group, reward, trained tokens): an uneven pair of groups, equal rewards, far rewards, a group of one
SAMPLES = [
    *((0, 1.0, 4), (0, 0.0, 2), (0, 5.0, 1)),
    *((1, 0.1, 3), (1, 0.1, 7), (1, 0.1, 2)),
    *((2, 1e4, 5), (2, -1e4, 1)),
    (3, 2.5, 3),
]


def flags(estimator, **changes):
    values = {
        "advantage_estimator": estimator,
        "custom_reward_post_process_path": None,
        "grpo_std_normalization": True,
        "overlong_buffer_len": None,
        "reward_key": None,
        "rewards_normalization": True,
    }
    return SimpleNamespace(**(values | changes))


def rewards_of(args, rows=SAMPLES, greedy=None):
    samples = []
    for i, (group, reward, length) in enumerate(rows):
        mask = [1] * length + [0] * 2  # masked tokens do not count
        metadata = {} if greedy is None else {"greedy_reward": greedy[group]}
        samples.append(
            Sample(
                group_index=group,
                index=i,
                reward=reward,
                tokens=[1] * (3 + len(mask)),
                response_length=len(mask),
                loss_mask=mask,
                metadata=metadata,
            )
        )
    return post_process_rewards(args, samples)[1]


def reference_rewards(estimator, *, divides=True, greedy=None):
    result = []
    for i, (group, reward, _) in enumerate(SAMPLES):
        members = [(j, r, n) for j, (g, r, n) in enumerate(SAMPLES) if g == group]
        values = [r for _, r, _ in members]
        mean = math.fsum(values) / len(values)
        others = [r for j, r, _ in members if j != i]
        baseline = {
            "reinforce_plus_plus": 0.0,
            "ppo": 0.0,
            "rloo": math.fsum(others) / len(others) if others else reward,
            "remax": greedy and greedy[group],
            "opo": math.fsum(r * n for _, r, n in members) / sum(n for *_, n in members),
        }.get(estimator, mean)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
        scale = std + 1e-6 if divides and estimator in ("grpo", "gspo", "cispo", "turn_grpo") else 1.0
        result.append((reward - baseline) / scale)
    return result


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_baseline_of_each_group_is_that_of_the_estimator(estimator):
    greedy = {0: 0.5, 1: 0.1, 2: -3.0, 3: 1e4} if estimator == "remax" else None
    expected = reference_rewards(estimator, greedy=greedy)
    assert rewards_of(flags(estimator), greedy=greedy) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    raw = [reward for _, reward, _ in SAMPLES]
    assert rewards_of(flags(estimator, rewards_normalization=False)) == raw
    undivided = rewards_of(flags(estimator, grpo_std_normalization=False), greedy=greedy)
    without = reference_rewards(estimator, divides=False, greedy=greedy)
    assert undivided == pytest.approx(without, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_equal_rewards_teach_exactly_nothing(estimator):
    assert rewards_of(flags(estimator), [(0, 0.1, n) for n in (1, 5, 3, 7, 2, 9)]) == [0.0] * 6


def test_no_two_estimators_have_the_same_baseline_on_these_samples():
    different = {"grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert len({tuple(rewards_of(flags(estimator))) for estimator in different}) == len(different)


def test_a_length_weighted_baseline_of_nothing_trained_is_the_mean():
    assert rewards_of(flags("opo"), [(0, 1.0, 0), (0, 3.0, 0)]) == [-1.0, 1.0]


def test_remax_says_where_its_baseline_should_have_come_from():
    with pytest.raises(ValueError, match=r"sample 0 has no metadata\['greedy_reward'\]"):
        rewards_of(flags("remax"))


# ---- from rewards to tokens

MASKS = [[1, 0, 1, 1, 0], [1], [0, 0], [0, 1, 1]]
REWARDS = [2.0, -1e4, 7.0, 1e4]
KL = [[0.5, 9.0, -0.25, 1.0, 9.0], [0.125], [3.0, 3.0], [4.0, 0.5, 0.25]]


def reference_returns(estimator, kl_coef, gamma):
    result = []
    for reward, kl, mask in zip(REWARDS, KL, MASKS, strict=True):
        if estimator in ("reinforce_plus_plus", "turn_grpo"):
            row, later, is_last = [0.0] * len(mask), 0.0, True
            for t in reversed(range(len(mask))):
                if mask[t]:
                    later = -kl_coef * kl[t] + (reward if is_last else 0.0) + gamma * later
                    row[t], is_last = later, False
        elif estimator == "reinforce_plus_plus_baseline":
            row = [(reward - kl_coef * k) * m for k, m in zip(kl, mask, strict=True)]
        else:
            row = [reward] * len(mask)
        result.append(row)
    return result


@pytest.mark.parametrize("estimator", [name for name, row in ESTIMATORS.items() if not row.needs_critic])
@pytest.mark.parametrize(("kl_coef", "gamma"), [(0.0, 1.0), (0.5, 1.0), (0.5, 0.9), (0.1, 0.0)])
def test_returns_of_tokens_are_those_of_the_reference(estimator, kl_coef, gamma):
    masks = [torch.tensor(mask) for mask in MASKS]
    kl = [torch.tensor(row) for row in KL]
    found = RETURNS[ESTIMATORS[estimator].returns](torch.tensor(REWARDS), kl, masks, kl_coef, gamma)
    for row, expected in zip(found, reference_returns(estimator, kl_coef, gamma), strict=True):
        assert row.dtype == torch.float32
        assert row.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("discount", [1.0, 0.97, 0.0])
def test_discounted_returns_do_not_depend_on_the_chunks(discount):
    rewards = torch.randn(2, 301, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected, later = torch.empty_like(rewards), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(301)):
        later = rewards[:, t] + discount * later
        expected[:, t] = later
    for size in (1, 7, 128, 1000):
        torch.testing.assert_close(chunked_discounted_returns(rewards, discount, size), expected)
    assert chunked_discounted_returns(rewards[:, :0], discount).shape == (2, 0)


# ---- whitening


def reference_whitening(values, masks):
    kept = [v for row, mask in zip(values, masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    mean = math.fsum(kept) / len(kept)
    variance = math.fsum((v - mean) ** 2 for v in kept) / max(len(kept) - 1, 1)
    return [
        [(v - mean) / math.sqrt(variance + 1e-8) * m for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(values, masks, strict=True)
    ]


def whitened(values, masks, group=None):
    tensors = [torch.tensor(row, dtype=torch.float64) for row in values]
    return [row.tolist() for row in whiten(tensors, [torch.tensor(mask) for mask in masks], group)]


VALUES = [[1e4 + 1, math.nan, 1e4 + 2, 1e4, math.inf], [1e4 - 2], [5.0, 5.0], [0.0, 1e4, 1e4 + 3]]
FINITE = [[v if math.isfinite(v) else 0.0 for v in row] for row in VALUES]


def test_whitening_looks_at_trained_tokens_only_and_far_from_zero_too():
    for found, expected in zip(whitened(VALUES, MASKS), reference_whitening(FINITE, MASKS), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert whitened([[3.0], [8.0]], [[1], [0]]) == [[0.0], [0.0]], "one token is its own mean"
    assert whitened([[3.0]], [[0]]) == [[0.0]]


def test_whitening_is_over_all_ranks_also_an_empty_one(monkeypatch):
    ranks = [slice(0, 2), slice(3, 4), slice(2, 3)]  # the last has only a fully masked sample
    barrier, posted, results = threading.Barrier(len(ranks)), {}, {}
    here = threading.local()

    def all_reduce(values, group):
        posted[here.rank] = values.clone()
        barrier.wait(10)
        values.copy_(sum(posted[rank] for rank in range(len(ranks))))
        barrier.wait(10)

    monkeypatch.setattr(advantages, "dist", SimpleNamespace(all_reduce=all_reduce))

    def work(rank):
        here.rank = rank
        group = SimpleNamespace(size=lambda: len(ranks))
        results[rank] = whitened(VALUES[ranks[rank]], MASKS[ranks[rank]], group)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = reference_whitening(FINITE, MASKS)
    for rank, part in enumerate(ranks):
        for found, row in zip(results[rank], expected[part], strict=True):
            assert found == pytest.approx(row, rel=1e-5)


# ---- flags


def test_every_row_names_functions_that_exist():
    for row in ESTIMATORS.values():
        assert row.baseline in (None, "greedy", *BASELINES)
        assert row.returns in ("gae", *RETURNS)
        assert row.loss in LOSSES
        assert row.summary


def test_the_rows_import_without_torch():
    program = "import slime.algorithms.estimators, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_normalisation_that_an_estimator_does_not_have_is_refused(check: Check) -> None:
    plus_plus = "--advantage-estimator reinforce_plus_plus --normalize-advantages"
    has(check(f"{plus_plus} --disable-rewards-normalization").problems.wrong, "subtracts no baseline of a group")
    has(
        check("--advantage-estimator rloo --disable-grpo-std-normalization").problems.wrong,
        "does not divide by the group's standard deviation",
    )
    has(check("--advantage-estimator cispo --eps-clip-c 3").problems.wrong, "--eps-clip-c has no effect with")
