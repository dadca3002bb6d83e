"""The loss of a critic."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.training.algorithms.loss_world import LENGTHS, MASKS, ROLLOUTS, aggregate
from tests.training.algorithms.test_critic import FAR


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"])
def test_the_loss_is_the_larger_of_the_squared_errors_averaged_like_any_loss(aggregation: str):
    generator = torch.Generator().manual_seed(0)
    values, before, returns = (2 * torch.randn(sum(LENGTHS), generator=generator).double() for _ in range(3))
    loss, metrics, gradient = value_loss(values, before, returns, loss_agg_mode=aggregation)
    expected, clipped = [], []
    for v, b, r in zip(values.tolist(), before.tolist(), returns.tolist(), strict=True):
        near = min(max(v, b - 0.2), b + 0.2)
        expected.append(max((v - r) ** 2, (near - r) ** 2))
        clipped.append(float((near - r) ** 2 > (v - r) ** 2))
    assert loss == pytest.approx(aggregate(aggregation, ragged(expected)), rel=1e-5)
    assert metrics["value_loss"] == loss
    mean = "token-mean" if aggregation == "token-mean" else "seq-mean-token-mean"
    assert metrics["value_clipfrac"] == pytest.approx(aggregate(mean, ragged(clipped)), rel=1e-5)
    assert 0 < sum(clipped) < len(clipped)
    masked = [not m for mask in MASKS for m in mask]
    assert not gradient[torch.tensor(masked)].any(), "masked tokens teach nothing"


def test_a_value_that_moves_further_than_the_clip_is_not_followed():
    ones = torch.ones(sum(LENGTHS)).double()
    # the target is far above; each value went half a unit towards it since the update began
    _, metrics, gradient = value_loss(0.5 * ones, 0 * ones, 9 * ones, value_clip=0.2)
    assert not gradient.any() and metrics["value_clipfrac"] > 0
    _, metrics, gradient = value_loss(0.5 * ones, 0 * ones, 9 * ones, value_clip=0.6)
    assert gradient.any() and metrics["value_clipfrac"] == 0
    # away from the target it is followed back, however far it went
    _, metrics, gradient = value_loss(-0.5 * ones, 0 * ones, 9 * ones, value_clip=0.2)
    assert gradient.any() and metrics["value_clipfrac"] == 0


def test_a_value_within_the_clip_never_counts_as_clipped_whatever_is_rounded():
    from slime.algorithms.losses import clipped_value_loss

    generator = torch.Generator().manual_seed(0)
    before, values, returns = (scale * torch.rand(1000, generator=generator) for scale in (0.01, 0.1, 1))
    losses, is_clipped = clipped_value_loss(values, before, returns, 0.2)  # no value is further than 0.1
    assert not is_clipped.any() and torch.equal(losses, (values - returns).square())


def ragged(values: list[float]) -> list[list[float]]:
    return [row.tolist() for row in torch.tensor(values, dtype=torch.float64).split(LENGTHS)]


def value_loss(
    values: torch.Tensor,
    before: torch.Tensor,
    returns: torch.Tensor,
    *,
    loss_agg_mode: str = "seq-mean-token-mean",
    value_clip: float = 0.2,
    masked: float = FAR,
) -> tuple[float, dict[str, float], torch.Tensor]:
    """Loss, metrics and gradient of the values of the samples of loss_world; masked tokens hold far numbers."""
    from slime.algorithms.losses import Aggregation
    from slime.backends.megatron_utils.loss import value_loss_function

    is_masked = torch.tensor([not m for mask in MASKS for m in mask])
    values, before, returns = (
        torch.where(is_masked, far, column)
        for column, far in ((values, FAR), (before, -masked), (returns, 2 * masked))
    )
    rows = torch.arange(sum(LENGTHS)) + 2
    logits = torch.zeros(1, sum(LENGTHS) + 2, 1).double()
    logits[0, rows, 0] = values
    logits.requires_grad_()
    sums = [sum(sum(MASKS[j]) for j in range(len(MASKS)) if ROLLOUTS[j] == ROLLOUTS[i]) for i in range(len(MASKS))]
    batch = {
        "loss_masks": [torch.tensor(mask) for mask in MASKS],
        "response_lengths": LENGTHS,
        "response_rows": rows,
        "returns": list(returns.split(LENGTHS)),
        "rollout_mask_sums": sums,
        "total_lengths": [length + 1 for length in LENGTHS],
        "values": list(before.split(LENGTHS)),
    }
    per_token = loss_agg_mode == "token-mean"
    args = SimpleNamespace(
        calculate_per_token_loss=per_token,
        loss_agg_mode=loss_agg_mode,
        rollout_max_response_len=None,
        value_clip=value_clip,
    )
    loss, metrics = value_loss_function(args, batch, logits, Aggregation.of(args).of_loss(batch, batch["loss_masks"]))
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, logits.grad[0, rows, 0]
