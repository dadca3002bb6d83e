"""The reduction of per-token values: per rollout, per sample, per token; independent of the split."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean

LENGTHS = [3, 2, 1]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1]), torch.tensor([0])]
X = torch.tensor([1.0, 50.0, 3.0, 10.0, 20.0, 7.0])


def reducer(samples=slice(None), **options):
    totals = [length + 1 for length in LENGTHS[samples]]
    return get_sum_of_sample_mean(totals, LENGTHS[samples], MASKS[samples], **options)


def test_each_sample_counts_by_its_mean_over_trained_tokens():
    assert reducer()(X).item() == (1 + 3) / 2 + (10 + 20) / 2 + 0


def test_samples_of_one_rollout_share_a_denominator():
    assert reducer(sample_denoms=[4, 4, 0])(X).item() == (1 + 3 + 10 + 20) / 4


def test_per_token_is_the_plain_masked_sum():
    assert reducer(calculate_per_token_loss=True)(X).item() == 1 + 3 + 10 + 20


@pytest.mark.parametrize("options", [{}, {"calculate_per_token_loss": True}])
def test_the_sum_over_splits_is_the_sum(options):
    parts = reducer(slice(0, 1), **options)(X[:3]) + reducer(slice(1, 3), **options)(X[3:])
    assert parts.item() == reducer(**options)(X).item()


def test_a_masked_infinity_does_not_spread():
    x = X.clone()
    x[1], x[5] = float("inf"), float("nan")
    assert reducer()(x).item() == reducer()(X).item()


def test_gradients_are_the_weights():
    x = X.clone().requires_grad_()
    reducer()(x).backward()
    assert x.grad.tolist() == [0.5, 0.0, 0.5, 0.5, 0.5, 0.0]


def test_a_mask_of_another_length_is_an_error():
    with pytest.raises(ValueError, match="a response of 2 tokens in a sample of 3 has a loss mask of 1"):
        get_sum_of_sample_mean([3], [2], [torch.ones(1)])
