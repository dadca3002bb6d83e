"""Gradients of every loss where log-probs are extreme: none through masked tokens, finite ones through trained tokens.

0 * inf is nan: a token that a mask or a clip leaves out of the loss still takes part in the backward pass. The tables
of the product are iterated, so that a new row is covered.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.train_infer_mismatch_helper import mis
from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.losses import KL_LOSS_TYPES, compute_approx_kl, compute_policy_loss
from slime.config.flags.train import AlgorithmFlags
from tests.training.algorithms.loss_world import LENGTHS, MASKS, MAX_RESPONSE, make_args, make_world, run
from tests.training.algorithms.test_value_loss import value_loss

AGGREGATIONS = next(f for f in dataclasses.fields(AlgorithmFlags) if f.name == "loss_agg_mode").metadata["choices"]
TIS = {"use_tis": True, "tis_clip_low": 0.5}
MIS = TIS | {"custom_tis_function_path": "examples.train_infer_mismatch_helper.mis.compute_mis"}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "engine's log-probs": {"use_rollout_logprobs": True},
    "tis": TIS,
    "icepop": TIS | {"custom_tis_function_path": "slime.backends.megatron_utils.loss.icepop_function"},
    "opsm": {"use_opsm": True},
    "distillation": {"use_opd": True},
    "dual clip": {"eps_clip_c": 3.0},
    "a function of the user's without masks": TIS | {"custom_tis_function_path": f"{__file__}:plain_weights"},
    **{
        f"mis {level} {mode}": MIS
        | {"tis_level": level, "tis_mode": mode, "use_rs": mode == "mask", "rs_veto_threshold": 1e-4}
        for level in mis.LEVELS
        for mode in mis.MODES
    },
}
MASKED = [(i, j) for i, mask in enumerate(MASKS) for j, is_trained in enumerate(mask) if not is_trained]
TRAINED = [(i, j) for i, mask in enumerate(MASKS) for j, is_trained in enumerate(mask) if is_trained]
COLUMNS = ("old", "rollout", "ref", "teacher")
ANYTHING = st.sampled_from([-100.0, -1e4, 95.0, -math.inf, math.inf, math.nan])
FAR = st.sampled_from([-1e4, -95.0, -25.0, 0.1, 25.0, 95.0, 1e4])
"""Log-ratios; float32 has no exp of 89."""
CASES = [
    *({"estimator": name} for name in ESTIMATORS),
    *({"correction": key} for key in CORRECTIONS),
    *({"kind": kind, "use_unbiased_kl": is_unbiased} for kind in KL_LOSS_TYPES for is_unbiased in (False, True)),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))


def plain_weights(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_):
    weights = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).clamp(max=2).exp()
    return pg_loss * weights, loss_masks, {}


@st.composite
def some_args(draw, case: dict[str, Any]):
    """Args of a case; what it leaves open is drawn."""
    case = {
        "estimator": draw(st.sampled_from(list(ESTIMATORS))),
        "correction": draw(st.sampled_from(list(CORRECTIONS))),
        "kind": draw(st.sampled_from(KL_LOSS_TYPES)),
        "use_unbiased_kl": draw(st.booleans()),
        **case,
    }
    mode = draw(st.sampled_from(AGGREGATIONS))
    correction = CORRECTIONS[case["correction"]]
    in_rewards = ESTIMATORS[case["estimator"]].takes_kl and draw(st.booleans())
    args = make_args(
        advantage_estimator=case["estimator"],
        kl_loss_type=case["kind"],
        use_unbiased_kl=case["use_unbiased_kl"],
        use_kl_loss=not in_rewards,
        kl_loss_coef=0.0 if in_rewards else 0.1,
        kl_coef=0.1 if in_rewards else 0.0,
        entropy_coef=0.01,
        normalize_advantages=draw(st.booleans()),
        loss_agg_mode=mode,
        calculate_per_token_loss=mode == "token-mean",
        rollout_max_response_len=MAX_RESPONSE,
    )
    vars(args).update(correction)
    return args


def world_of(values: dict[str, list[float]], places: list[tuple[int, int]], *, is_shift: bool):
    """The world of loss_world with one value of each column at each place, or so far from the present log-prob."""
    logits, columns, tokens = make_world(3)
    columns["teacher"] = [list(row) for row in columns["ref"]]
    for name, numbers in values.items():
        for (i, j), number in zip(places, numbers, strict=True):
            columns[name][i][j] = columns["new"][i][j] - number if is_shift else number
    return logits, columns, tokens


def numbers_for(places: list[tuple[int, int]], numbers: st.SearchStrategy[float]):
    of_column = st.lists(numbers, min_size=len(places), max_size=len(places))
    return st.fixed_dictionaries(dict.fromkeys(COLUMNS, of_column))


def rows_of(places: list[tuple[int, int]], tokens: list[list[int]]) -> list[int]:
    """The row of the logits that predicts each response token; prompts have two tokens."""
    return [sum(map(len, tokens[:i])) + 1 + j for i, j in places]


@each_case
def test_what_masked_tokens_hold_changes_no_gradient_and_no_metric(case):
    @settings(max_examples=3)
    @given(some_args(case), numbers_for(MASKED, ANYTHING), st.sampled_from([1.0, 1e3]))
    def check(args, values, scale):
        logits, columns, tokens = world_of(values, MASKED, is_shift=False)
        rows = rows_of(MASKED, tokens)
        plain = world_of({name: [0.0] * len(MASKED) for name in COLUMNS}, MASKED, is_shift=False)
        expected, expected_metrics, _ = run(args, *plain)
        logits[0, rows] *= scale  # the policy's own log-probs there, too
        gradient, metrics, _ = run(args, logits, columns, tokens)
        assert not gradient[0, rows].any()
        assert torch.equal(gradient, expected)
        assert metrics == expected_metrics
        assert all(map(math.isfinite, metrics.values()))

    check()


@each_case
def test_a_trained_token_far_from_the_policy_has_a_finite_gradient(case):
    @settings(max_examples=3)
    @given(some_args(case), numbers_for(TRAINED, FAR))
    def check(args, values):
        gradient, metrics, _ = run(args, *world_of(values, TRAINED, is_shift=True))
        assert gradient.isfinite().all()
        assert all(map(math.isfinite, metrics.values()))

    check()


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_demonstrations_masked_tokens_have_no_gradient(mode):
    logits, columns, tokens = make_world(3)
    rows = rows_of(MASKED, tokens)
    per_token = {"loss_agg_mode": mode, "calculate_per_token_loss": mode == "token-mean"}
    args = make_args(loss_type="sft_loss", rollout_max_response_len=MAX_RESPONSE, **per_token)
    expected, metrics, _ = run(args, logits, columns, tokens)
    logits[0, rows] *= 1e4
    gradient, same, _ = run(args, logits, columns, tokens)
    assert torch.equal(gradient, expected) and same == metrics and not gradient[0, rows].any()


@pytest.mark.parametrize("anything", [math.inf, -math.inf, math.nan])
def test_a_critic_learns_nothing_from_masked_returns(anything):
    ones = torch.ones(sum(LENGTHS)).double()
    loss, metrics, gradient = value_loss(0.1 * ones, 0 * ones, 9 * ones)
    assert value_loss(0.1 * ones, 0 * ones, 9 * ones, masked=anything)[:2] == (loss, metrics)
    assert torch.equal(value_loss(0.1 * ones, 0 * ones, 9 * ones, masked=anything)[2], gradient)


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.28), (-1.0, math.exp(20))])
def test_a_ratio_is_bounded_at_20_nats(advantage, loss):
    """A clipped token costs the clip; one that the clip does not hold, the bound, from where it has no gradient."""
    ppo_kl = torch.tensor([-95.0], requires_grad=True)
    losses, _ = compute_policy_loss(ppo_kl, torch.tensor([advantage]), 0.2, 0.28)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss) and ppo_kl.grad.tolist() == [0.0]


@pytest.mark.parametrize(("kind", "kl"), [("k3", math.exp(20) - 21), ("low_var_kl", 10.0)])
def test_the_exponent_of_a_kl_is_bounded_at_20_nats(kind, kl):
    log_probs = torch.tensor([-95.0], requires_grad=True)
    found = compute_approx_kl(log_probs, torch.zeros(1), kind)
    found.sum().backward()
    assert found.item() == pytest.approx(kl) and log_probs.grad.tolist() == [0.0]
