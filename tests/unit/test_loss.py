"""Losses of one micro-batch on hand-made logits, their scaling, and the reports that become metrics."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import loss as losses
from slime.backends.megatron_utils.data import Packing
from slime.backends.megatron_utils.loss import DeferredLogits
from slime.training.micro_batches import MicroBatches, to_tensors
from slime.training.reports import reduce_reports
from tests.training.algorithms import loss_world

VOCAB = 10
ONE_RANK = SimpleNamespace(size=lambda: 1)


@pytest.fixture(autouse=True)
def no_tensor_parallelism(monkeypatch):
    parallel = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    monkeypatch.setattr(losses, "parallel_state", parallel)


def make_args(**changes):
    return loss_world.make_args(**{"vocab_size": VOCAB, **changes})


def make_data(**columns):
    data = {
        "tokens": [[5, 6, 7], [8, 9]],
        "response_lengths": [2, 1],
        "loss_masks": [[1, 1], [1]],
        "rewards": [1.0, -2.0],
        "rollout_log_probs": [[-1.0, -2.0], [-3.0]],
        "rollout_mask_sums": [2, 1],
        "micro_batch_indices": [[0, 1]],
        "num_microbatches": [1],
        "global_batch_sizes": [2],
    }
    data = to_tensors(data, torch.device("cpu"))
    return data | columns


def make_batch(args, **columns):
    data = make_data(**columns)
    losses.compute_advantages_and_returns(args, data)
    return next(iter(MicroBatches(data, Packing()).of_step(None)))


def make_logits(requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 5, VOCAB, generator=generator).requires_grad_(requires_grad)


def picked(logits):
    """log p of the response tokens 6 7 | 9, which rows 0 1 | 3 predict."""
    log_p = logits[0].detach().log_softmax(-1)
    return torch.stack([log_p[0, 6], log_p[1, 7], log_p[3, 9]])


def run(args, batch, logits, **scale):
    scale = {"num_microbatches": 1, "global_batch_size": 2, "dp_size": 1} | scale
    loss, num_tokens, report = losses.loss_function(args, batch, logits, **scale)
    return loss, num_tokens, dict(zip(report["keys"], report["values"][1:].tolist(), strict=True))


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_that_of_the_policy():
    args, logits = make_args(), make_logits(requires_grad=True)
    loss, _, metrics = run(args, make_batch(args), logits)
    assert metrics["ppo_kl"] == 0.0
    assert metrics["pg_clipfrac"] == 0.0
    assert metrics["pg_loss"] == pytest.approx(-1.0 + 2.0)
    assert loss.item() == pytest.approx((-1.0 + 2.0) / 2)
    loss.backward()
    other = make_logits(requires_grad=True)
    log_p = other[0].log_softmax(-1)
    (-(log_p[0, 6] + log_p[1, 7]) / 2 + 2 * log_p[3, 9]).div(2).backward()
    torch.testing.assert_close(logits.grad, other.grad)


def test_the_engines_gap_is_measured_against_the_policy_before_the_update():
    args, logits = make_args(), make_logits()
    old = [torch.tensor([-1.5, -2.5]), torch.tensor([-3.5])]
    metrics = run(args, make_batch(args, log_probs=old), logits)[2]
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(0.5 + 0.5)
    now = picked(logits)
    gap = (torch.cat(old) - now).tolist()
    assert metrics["ppo_kl"] == pytest.approx((gap[0] + gap[1]) / 2 + gap[2], rel=1e-5)
    # without a pass of its own, the policy before the update is the present one
    metrics = run(args, make_batch(args), logits)[2]
    gap = (now - torch.tensor([-1.0, -2.0, -3.0])).abs().tolist()
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx((gap[0] + gap[1]) / 2 + gap[2], rel=1e-5)


def test_rollout_log_probs_can_be_the_old_ones():
    args, logits = make_args(use_rollout_logprobs=True), make_logits()
    gap = (torch.tensor([-1.0, -2.0, -3.0]) - picked(logits)).tolist()
    metrics = run(args, make_batch(args), logits)[2]
    assert metrics["ppo_kl"] == pytest.approx((gap[0] + gap[1]) / 2 + gap[2], rel=1e-5)
    batch = make_batch(args)
    del batch["rollout_log_probs"]
    with pytest.raises(ValueError, match="--use-rollout-logprobs"):
        run(args, batch, logits)


def test_entropy_and_kl_enter_the_loss_with_their_weights():
    args, logits = make_args(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.5), make_logits()
    ref = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0])]
    metrics = run(args, make_batch(args, ref_log_probs=ref), logits)[2]
    expected = metrics["pg_loss"] - 0.1 * metrics["entropy_loss"] + 0.5 * metrics["kl_loss"]
    assert metrics["loss"] == pytest.approx(expected)
    now = picked(logits).tolist()
    assert metrics["kl_loss"] == pytest.approx((now[0] + now[1]) / 2 + 1 + now[2] + 1, rel=1e-5)
    log_p = logits[0].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert metrics["entropy_loss"] == pytest.approx(((entropy[0] + entropy[1]) / 2 + entropy[3]).item(), rel=1e-5)


def test_temperature_divides_the_logits():
    logits = make_logits()
    hot = run(make_args(rollout_temperature=2.0), make_batch(make_args()), logits)[2]
    assert hot == run(make_args(), make_batch(make_args()), logits / 2)[2]


def test_top_p_cuts_the_log_probs_not_the_entropy_and_reports_what_is_kept():
    logits, hidden = make_logits(requires_grad=True), DeferredLogits(make_logits()[0], torch.eye(VOCAB))
    args = make_args(rollout_top_p=0.5, log_probs_chunk_size=2)
    p = logits[0, [0, 1, 3]].detach().double().softmax(-1)
    falling, order = p.sort(descending=True)
    kept = torch.zeros_like(p, dtype=torch.bool).scatter(1, order, falling.cumsum(-1) - falling <= 0.5)
    kept[[0, 1, 2], [6, 7, 9]] = True
    size = kept.sum(-1).tolist()
    for given in (logits, hidden):
        log_probs, _ = losses.get_log_probs_and_entropy(args, make_batch(args), given)
        expected = picked(logits) - (p * kept).sum(-1).log()
        torch.testing.assert_close(log_probs.detach(), expected.float())
        metrics = run(args, make_batch(args), given)[2]
        assert metrics["top_p_kept_vocab_per_token"] == pytest.approx((size[0] + size[1]) / 2 + size[2])
        assert metrics["entropy_loss"] == run(make_args(), make_batch(args), make_logits())[2]["entropy_loss"]
        assert metrics["ppo_kl"] == 0.0
        assert "train_rollout_logprob_abs_diff" not in metrics, "the engine's are of the whole distribution"


@pytest.mark.parametrize("sampling", [{}, {"rollout_top_p": 0.5}, {"rollout_temperature": 0.5}])
def test_sft_is_minus_the_mean_log_prob_of_the_models_own_distribution(sampling):
    args, logits = make_args(loss_type="sft_loss", **sampling), make_logits()
    now = picked(logits).tolist()
    loss, num_tokens, metrics = run(args, make_batch(args), logits)
    assert metrics == {"loss": pytest.approx(-(now[0] + now[1]) / 2 - now[2], rel=1e-5)}
    assert loss.item() == pytest.approx(metrics["loss"] / 2)
    assert num_tokens.item() == 1


@pytest.mark.parametrize(("num_microbatches", "dp_size"), [(1, 1), (3, 2)])
def test_the_scale_undoes_what_megatron_divides_by(num_microbatches, dp_size):
    args, logits = make_args(), make_logits()
    loss, _, metrics = run(args, make_batch(args), logits, num_microbatches=num_microbatches, dp_size=dp_size)
    assert loss.item() / num_microbatches / dp_size == pytest.approx(metrics["loss"] / 2)


def test_a_per_token_loss_is_a_sum_with_its_tokens():
    args, logits = make_args(loss_type="sft_loss", calculate_per_token_loss=True), make_logits()
    loss, num_tokens, _ = run(args, make_batch(args), logits, num_microbatches=3, dp_size=2)
    assert loss.item() == pytest.approx(-picked(logits).sum().item(), rel=1e-5)
    assert num_tokens.item() == 3


def squared(args, batch, logits, sum_of_sample_mean):
    values, _ = losses.get_log_probs_and_entropy(args, batch, logits)
    weights = torch.tensor(batch["my_weights"]).repeat_interleave(torch.tensor(batch["response_lengths"]))
    loss = sum_of_sample_mean(weights * values.square())
    return loss, {"squared": loss.detach(), "constant": 4.0}


def test_a_custom_loss_sees_its_own_columns_and_its_metrics_are_reported():
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:squared")
    logits = make_logits()
    now = picked(logits).tolist()
    metrics = run(args, make_batch(args, my_weights=[1.0, 3.0]), logits)[2]
    expected = (now[0] ** 2 + now[1] ** 2) / 2 + 3 * now[2] ** 2
    assert metrics["squared"] == metrics["loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["constant"] == 4.0


def kept_bytes_and_gradient(args):
    logits, sizes = make_logits(requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.nbytes), t)[1], lambda t: t):
        loss, _, _ = run(args, make_batch(args), logits)
    loss.backward()
    return sum(sizes), logits.grad


def test_a_custom_loss_can_be_run_again_instead_of_keeping_what_it_computed():
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__file__}:wasteful"}
    kept, gradient = kept_bytes_and_gradient(make_args(**custom))
    kept_again, gradient_again = kept_bytes_and_gradient(make_args(**custom, recompute_loss_function=True))
    assert kept_again < kept / 2
    assert torch.equal(gradient, gradient_again)


def wasteful(args, batch, logits, sum_of_sample_mean):
    probability = logits[0].exp().square().exp().log().sqrt().softmax(-1)
    return sum_of_sample_mean(probability[:3, 0]), {}


def test_reports_add_up_over_micro_batches():
    args, logits = make_args(loss_type="sft_loss"), make_logits()
    scale = {"num_microbatches": 2, "global_batch_size": 4, "dp_size": 1}
    reports = [losses.loss_function(args, make_batch(args), logits, **scale)[2] for _ in range(2)]
    total = -picked(logits)[:2].sum().item() / 2 - picked(logits)[2].item()
    assert reduce_reports(reports, 4, ONE_RANK) == {"loss": pytest.approx(2 * total / 4, rel=1e-5)}
    assert reduce_reports(reports, None, ONE_RANK) == {"loss": pytest.approx(2 * total / 6, rel=1e-5)}


def test_advantages_are_the_rewards_and_kl_is_measured_where_it_can_be():
    args, data = make_args(kl_loss_type="k2"), make_data()
    losses.compute_advantages_and_returns(args, data)
    assert [a.tolist() for a in data["advantages"]] == [[1.0, 1.0], [-2.0]]
    assert [a.tolist() for a in data["kl"]] == [[0.0, 0.0], [0.0]]
    both = {"log_probs": data["rollout_log_probs"], "ref_log_probs": [torch.tensor([-1.0, -1.0]), torch.zeros(1)]}
    data = make_data(**both)
    losses.compute_advantages_and_returns(args, data)
    assert [a.tolist() for a in data["kl"]] == [[0.0, 0.5], [4.5]]


def sets_both(args, rollout_data):
    rollout_data["advantages"] = [kl + 7 for kl in rollout_data["kl"]]
    rollout_data["returns"] = rollout_data["advantages"]


def sets_nothing(args, rollout_data):
    assert "kl" in rollout_data


def test_a_custom_advantage_function_replaces_the_table_and_must_fill_it():
    data = make_data()
    losses.compute_advantages_and_returns(make_args(custom_advantage_function_path=f"{__file__}:sets_both"), data)
    assert [a.tolist() for a in data["advantages"]] == [[7.0, 7.0], [7.0]]
    with pytest.raises(ValueError, match=r"did not set rollout_data\['advantages'\]"):
        losses.compute_advantages_and_returns(
            make_args(custom_advantage_function_path=f"{__file__}:sets_nothing"), make_data()
        )


def loss_of_ratios(first, second, **changes):
    """pg_loss where both tokens of the sample with advantage 1 have the first ratio, the one with -2 the second."""
    args, logits = make_args(**changes), make_logits()
    now = picked(logits)
    old = [now[:2] - torch.tensor(first).log(), now[2:] - torch.tensor(second).log()]
    return run(args, make_batch(args, log_probs=old), logits)[2]["pg_loss"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, -(1 + 0.28) + 2 * (1 - 0.2)),
        ({"eps_clip_high": 0.4}, -(1 + 0.4) + 2 * (1 - 0.2)),
        ({"eps_clip": 0.3}, -(1 + 0.28) + 2 * (1 - 0.3)),
    ],
)
def test_ratios_are_clipped_at_the_flags_distances_from_one(changes, expected):
    assert loss_of_ratios(1.5, 0.5, **changes) == pytest.approx(expected, rel=1e-5)


def test_dual_clip_bounds_what_a_bad_sample_costs():
    assert loss_of_ratios(1.0, 10.0) == pytest.approx(-1 + 2 * 10, rel=1e-5)
    assert loss_of_ratios(1.0, 10.0, eps_clip_c=3.0) == pytest.approx(-1 + 2 * 3, rel=1e-5)
