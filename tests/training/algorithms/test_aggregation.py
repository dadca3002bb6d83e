"""--loss-agg-mode: every estimator in every mode against plain float64 Python, and the hook that replaces them."""

from __future__ import annotations

import pytest
import torch

from slime.algorithms.estimators import ESTIMATORS
from tests.training.algorithms.loss_world import (
    MASKS,
    MAX_RESPONSE,
    NUM_ROLLOUTS,
    advantages_of,
    aggregate,
    make_args,
    make_world,
    reference_pg_loss,
    rows,
    run,
)

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def mode_args(mode, **changes):
    per_token = mode == "token-mean"  # as slime.config.derive says
    values = {"loss_agg_mode": mode, "calculate_per_token_loss": per_token, "rollout_max_response_len": MAX_RESPONSE}
    return make_args(**values, **changes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_mode_is_the_references(estimator, mode):
    logits, columns, tokens = make_world(3)
    extra = {"entropy_coef": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.25, "kl_loss_type": "k2"}
    _, metrics, data = run(mode_args(mode, advantage_estimator=estimator, **extra), logits, columns, tokens)
    pg_loss = reference_pg_loss(estimator, columns, advantages_of(data), mode)
    assert metrics["pg_loss"] == pytest.approx(pg_loss, rel=1e-5)
    kl = rows(lambda new, ref: (new - ref) ** 2 / 2, columns["new"], columns["ref"])
    expected = pg_loss - 0.5 * aggregate(mode, columns["entropy"]) + 0.25 * aggregate(mode, kl)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)
    # what is only reported is a mean in every mode
    mean = mode if mode == "token-mean" else "seq-mean-token-mean"
    assert metrics["entropy_loss"] == pytest.approx(aggregate(mean, columns["entropy"]), rel=1e-5)
    assert metrics["kl_loss"] == pytest.approx(aggregate(mean, kl), rel=1e-5)


def test_the_modes_differ_and_the_norm_divides_by_a_constant():
    logits, columns, tokens = make_world(3)
    found = {mode: run(mode_args(mode), logits, columns, tokens)[0] for mode in MODES}
    for mode in MODES[1:]:
        assert not torch.allclose(found[mode], found["token-mean"])
    torch.testing.assert_close(found["seq-mean-token-sum"] / MAX_RESPONSE, found["seq-mean-token-sum-norm"])
    # a token-mean's gradient is divided by the step's tokens later, by Megatron; the sums of both are the same
    torch.testing.assert_close(found["seq-mean-token-sum"] * NUM_ROLLOUTS, found["token-mean"])


def test_what_megatron_divides_by_is_made_good_unless_it_divides_by_tokens():
    """It averages over the micro-batches of a step and over ranks; the step is to be a mean over its rollouts."""
    logits, columns, tokens = make_world(3)
    for mode, factor in {"token-mean": 1, "seq-mean-token-mean": 3 * 2}.items():
        alone = run(mode_args(mode), logits, columns, tokens)[0]
        one_of_many = run(mode_args(mode), logits, columns, tokens, num_microbatches=3, dp_size=2)[0]
        torch.testing.assert_close(one_of_many, factor * alone)


def test_the_modes_hold_for_demonstrations_too():
    logits, columns, tokens = make_world(1)
    for mode in MODES:
        metrics = run(mode_args(mode, loss_type="sft_loss"), logits, columns, tokens)[1]
        assert metrics["loss"] == pytest.approx(-aggregate(mode, columns["new"]), rel=1e-5)


def ten_times_the_first_token(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert [mask.tolist() for mask in loss_masks] == MASKS and calculate_per_token_loss is False
    assert [total - response for total, response in zip(total_lengths, response_lengths, strict=True)] == [2] * 4
    return lambda values: 10 * values[0]


def test_the_users_reducer_takes_the_policy_loss_alone():
    logits, columns, tokens = make_world(1)
    changes = {"entropy_coef": 0.5, "use_kl_loss": True, "kl_loss_coef": 0.25}
    path = f"{__file__}:ten_times_the_first_token"
    _, plain, data = run(make_args(**changes), logits, columns, tokens)
    _, custom, _ = run(make_args(**changes, custom_pg_loss_reducer_function_path=path), logits, columns, tokens)
    only_first = [[x * (i == j == 0) for j, x in enumerate(row)] for i, row in enumerate(advantages_of(data))]
    first = reference_pg_loss("grpo", columns, only_first, "token-mean")
    assert custom["pg_loss"] == pytest.approx(10 * first, rel=1e-5)
    assert custom["loss"] - custom["pg_loss"] == pytest.approx(plain["loss"] - plain["pg_loss"], abs=1e-5)
