"""--shuffle-mini-batches: the samples of a rollout in other train steps in each pass, their columns with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.config.problems import Problems
from tests.integration.trainer_world import NUM_SAMPLES, parameters, train, trainer_args
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

PASSES = 4
SEEN: list[dict[str, Any]] = []
"""Micro-batches of this process, in the order in which they were trained."""


def recorded_loss(
    args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The policy loss; notes what it is given."""
    from slime.backends.megatron_utils.loss import policy_loss_function

    names = ("sample_indices", "log_probs", "advantages", "rewards", "unconcat_tokens")
    rows = zip(*(batch[name] for name in names), strict=True)
    SEEN.append({row[0]: row[1:] for row in rows})
    return policy_loss_function(args, batch, logits, sum_of_sample_mean)


def save(actor: Any, records: list[Any], out: Path) -> None:
    """Everything that the ranks saw: [rank][micro-batch]{sample: columns}, and the weights."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, SEEN)
    if dist.get_rank() == 0:
        steps = [metrics for metrics, key in records if key == "train/step"]
        torch.save((seen, steps, parameters(actor)), out)


def run(hf_path: Path, out: Path, *, dp_size: int = 2, **changes: Any) -> tuple[list[Any], list[Any], dict[str, Any]]:
    args = trainer_args(
        hf_path,
        dp_size=dp_size,
        lr=1e-3,
        global_batch_size=4,  # of 12 executions: 3 train steps a pass
        max_tokens_per_gpu=10**6,  # 1 micro-batch a step and rank
        ppo_epochs=PASSES,
        loss_type="custom_loss",
        custom_loss_function_path=f"{__name__}.recorded_loss",
        **{"shuffle_mini_batches": True} | changes,
    )
    train(args, save, out, dp_size=dp_size)
    return torch.load(out, weights_only=False)


def members(seen: list[Any]) -> list[frozenset[int]]:
    """The samples of each train step over all ranks."""
    return [frozenset().union(*ranks) for ranks in zip(*seen, strict=True)]


def test_each_pass_has_every_sample_once_in_other_steps_with_its_own_columns(hf_path: Path, tmp_path: Path):
    seen, steps, _ = run(hf_path, tmp_path / "a")
    of_step = members(seen)
    assert len(of_step) == len(steps) == 3 * PASSES
    passes = [of_step[3 * k : 3 * k + 3] for k in range(PASSES)]
    for samples in passes:
        assert frozenset().union(*samples) == set(range(NUM_SAMPLES))
        assert sum(map(len, samples)) == NUM_SAMPLES
        assert any({4, 5} <= step for step in samples), "the two samples of one execution stay together"
    assert len({frozenset(samples) for samples in passes}) == PASSES, "no two passes have the same steps"
    # executions in the order of the rollout, 4 a step; samples 4 and 5 are one
    assert passes[0] == [frozenset(range(4)), frozenset(range(4, 9)), frozenset(range(9, NUM_SAMPLES))]
    first = {sample: columns for rank in seen for batch in rank[:3] for sample, columns in batch.items()}
    for rank in seen:
        for sample, columns in (item for batch in rank[3:] for item in batch.items()):
            assert all(
                torch.equal(torch.as_tensor(a), torch.as_tensor(b))
                for a, b in zip(columns, first[sample], strict=True)
            )
    homes = [frozenset().union(*seen[0][3 * k : 3 * k + 3]) for k in range(PASSES)]
    assert any(home != homes[0] for home in homes), "samples also change ranks"


def test_the_order_follows_from_the_seed_whatever_the_number_of_ranks(hf_path: Path, tmp_path: Path):
    seen, _, weights = run(hf_path, tmp_path / "a")
    alone, _, weights_alone = run(hf_path, tmp_path / "b", dp_size=1)
    other, _, _ = run(hf_path, tmp_path / "c", dp_size=1, seed=7)
    plain, _, _ = run(hf_path, tmp_path / "d", dp_size=1, shuffle_mini_batches=False)
    assert members(seen) == members(alone)
    assert members(other)[:3] == members(alone)[:3] and members(other) != members(alone)
    assert members(plain) == members(alone)[:3] * PASSES
    for name, weight in weights.items():
        torch.testing.assert_close(weight, weights_alone[name], rtol=0, atol=2e-4)


def test_a_shuffle_without_effect_is_refused(check: Check) -> None:
    line = "--ppo-epochs 2 --global-batch-size 4 --shuffle-mini-batches"
    assert check(line).problems == Problems()
    has(check(line + " --ppo-epochs 1").problems.wrong, "--shuffle-mini-batches has no effect with --ppo-epochs 1")
    has(
        check(line + " --global-batch-size 8").problems.wrong,
        "--shuffle-mini-batches has no effect with --global-batch-size 8: a rollout is one train step",
    )
