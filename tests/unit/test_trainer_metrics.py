"""Means of a share's columns, and times as rates."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.data import Packing
from slime.training import reports
from slime.training.micro_batches import MicroBatches, to_tensors
from slime.training.reports import column_means, perf_metrics
from slime.utils.flops_utils import PEAK_TFLOPS, calculate_fwd_flops, calculate_prediction_flops

ONE_RANK = SimpleNamespace(size=lambda: 1)


def make_micro_batches(**columns):
    data = {
        "tokens": [[5, 6, 7], [8, 9]],
        "response_lengths": [2, 1],
        "loss_masks": [[1, 0], [1]],
        "micro_batch_indices": [[0, 1]],
        "num_microbatches": [1],
        "global_batch_sizes": [2],
    }
    return MicroBatches(to_tensors(data, torch.device("cpu")) | columns, Packing())


def test_numbers_and_per_token_tensors_are_averaged_over_samples():
    per_token = [torch.tensor([1.0, 100.0]), torch.tensor([4.0])]
    means = column_means(
        make_micro_batches(
            raw_reward=[1.0, 0.0],
            advantages=per_token,
            source_names=["a", "b"],
            sample_indices=[7, 8],
            truncated=[1, 0],
        ),
        ONE_RANK,
    )
    assert means == {
        "rollout/advantages": pytest.approx((1.0 + 4.0) / 2),
        "rollout/raw_reward": 0.5,
        "rollout/response_lengths": 1.5,
        "rollout/total_lengths": 2.5,
        "rollout/truncated": 0.5,
    }


def test_a_reward_that_is_not_trusted_is_in_no_mean():
    means = column_means(make_micro_batches(raw_reward=[float("nan"), 3.0], rewards=[0.0, 1.0]), ONE_RANK)
    assert (means["rollout/raw_reward"], means["rollout/rewards"]) == (3.0, 1.0)
    assert means["rollout/response_lengths"] == (2 + 1) / 2, "other columns are of all samples"
    means = column_means(make_micro_batches(raw_reward=[float("nan")] * 2, rewards=[0.0, 0.0]), ONE_RANK)
    assert "rollout/raw_reward" not in means


def test_kl_is_reported_only_where_it_was_measured():
    kl = [torch.zeros(2), torch.zeros(1)]
    assert "rollout/kl" not in column_means(make_micro_batches(kl=kl), ONE_RANK)
    assert "rollout/kl" in column_means(make_micro_batches(kl=kl, log_probs=kl, ref_log_probs=kl), ONE_RANK)


def test_times_become_rates(monkeypatch):
    args = SimpleNamespace(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=2,
        num_query_groups=2,
        kv_channels=2,
        ffn_hidden_size=8,
        swiglu=True,
        padded_vocab_size=16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        context_parallel_size=5,
        ppo_epochs=2,
        enable_mtp_training=False,
    )
    seconds = {"train_wait": 3.0, "train": 1.0, "actor_train": 0.5, "log_probs": 0.25}
    metrics = perf_metrics(args, seconds, [10, 20], [4, 5])
    tflops = calculate_fwd_flops([10, 20], args) / (2 * 3 * 5) / 1e12
    assert metrics["perf/step_time"] == 4.0
    assert metrics["perf/wait_time_ratio"] == 0.75
    assert metrics["perf/actor_train_time"] == 0.5
    assert metrics["perf/actor_train_tok_per_s"] == 2 * (10 + 20) / 0.5
    assert metrics["perf/actor_train_tok_per_gpu_per_sec"] == 2 * (10 + 20) / 0.5 / (2 * 3 * 5)
    assert metrics["perf/actor_train_tflops"] == pytest.approx(2 * 3 * tflops / 0.5)
    assert metrics["perf/log_probs_tflops"] == pytest.approx(tflops / 0.25)
    assert "perf/actor_train_mfu" not in metrics, "the peak of a CPU is not known"
    monkeypatch.setattr(reports, "gpu_name", lambda: "NVIDIA H200")
    on_h200 = perf_metrics(args, seconds, [10, 20], [4, 5])
    assert on_h200["perf/actor_train_mfu"] == pytest.approx(metrics["perf/actor_train_tflops"] / PEAK_TFLOPS["H200"])

    args.mtp_num_layers, args.enable_mtp_training = 1, True
    more = calculate_prediction_flops([10, 20], 4 + 5, args) / (2 * 3 * 5) / 1e12
    found = perf_metrics(args, seconds, [10, 20], [4, 5])
    assert found["perf/actor_train_tflops"] == pytest.approx(2 * (3 * tflops + more) / 0.5)
    assert found["perf/log_probs_tflops"] == metrics["perf/log_probs_tflops"]  # predictions do not run there
    assert "perf/ref_log_probs_tflops" not in metrics
