"""What the benchmarks of a GPU conclude from what a run logged: the figures are made up, the arithmetic is here."""

from __future__ import annotations

import json
import math
import statistics
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks import (
    draft_runs,
    fixed_length,
    gpu_engine_sweep,
    gpu_fsdp,
    gpu_fusion,
    gpu_learning,
    gpu_longest,
    gpu_lora,
    gpu_models,
    gpu_multi_async,
    gpu_multi_layouts,
    gpu_multi_sync,
    gpu_runs,
    gpu_sleep_wake,
    gpu_soak,
    gpu_speculative,
    gpu_step,
    gpu_vs_verl,
    gpu_weight_sync,
)
from benchmarks.gpu_runs import Row, Run, Series


def series(**values: list[float]) -> Series:
    """Metrics by rollout, `__` standing for `/`."""
    return {name.replace("__", "/"): dict(enumerate(column)) for name, column in values.items()}


def test_the_rest_of_a_step_is_what_neither_the_rollout_nor_a_pass_took() -> None:
    logged = series(
        perf__step_time=[99, 99, 10, 20],  # the first two warm up
        perf__rollout_time=[99, 99, 6, 12],
        perf__log_probs_time=[9, 9, 1, 2],
        perf__actor_train_time=[9, 9, 2.5, 4.4],
    )
    # (10 - 9.5) / 10 and (20 - 18.4) / 20
    assert gpu_step.rest_shares(logged) == pytest.approx([0.05, 0.08])
    row = gpu_step.judge(logged, "SmolLM2-135M", "shape")
    assert row.ratio == pytest.approx(0.065) and row.holds, "the median of two is their mean, and 8% the target"
    assert gpu_step.judge(logged, "0.6B", "shape").holds is False, "3% are its target"
    logged["perf/actor_train_time"] = {2: 2.9, 3: 5.5}  # (10 - 9.9) / 10 and (20 - 19.5) / 20: 0.0175 in the middle
    assert gpu_step.judge(logged, "0.6B", "shape").holds


def test_a_sync_is_counted_without_its_pause_and_beside_two_copies() -> None:
    logged = series(
        perf__update_weights_time=[9, 9, 0.120, 0.030, 0.140], perf__update_weights_pause_time=[9, 9, 0.1, 0.01, 0.1]
    )
    row = gpu_weight_sync.judge(logged, "0.6B", 1_200_000_000, 4000.0)
    # 20, 20 and 40 ms; two copies of 1.2 GB at 4 TB/s take 0.6 ms
    assert row.figure == "20.0 ms" and row.ratio == pytest.approx(0.020 / 0.0006) and row.holds
    assert gpu_weight_sync.judge({}, "0.6B", 1, 1.0).holds is None


def test_a_step_is_compared_with_verls_after_the_first_of_each(tmp_path: Path) -> None:
    options = Namespace(
        model="0.6B", prompts=64, response=512, lengths="fixed", old_log_probs=False, requests=512, graphs=[1, 512]
    )
    logged = [
        {"timing_s/step": step, "timing_s/gen": gen, "timing_s/adv": 0.5, "response_length/mean": 100.0}
        for step, gen in ((99, 9), (10, 6), (14, 10))
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": 1, "data": data}) + "\n" for data in logged))
    theirs = gpu_vs_verl.verl_steps(path, options)
    ours = [{"step": step, "generation": 5.0, "tokens": 51200.0} for step in (50.0, 8.0, 9.0)]
    step, rest, rate = gpu_vs_verl.judge(ours, theirs, options)
    # medians of two are their means: 8.5 of 12; 3.5 of 4 without generation; 51,200 tokens in 5 s, and in 6 and 10 s
    assert step.ratio == pytest.approx(8.5 / 12) and step.holds and "adv 0.50 s" in step.note
    assert rest.ratio == pytest.approx(3.5 / 4) and not rest.holds
    assert rate.ratio == pytest.approx((1 / 5) / statistics.mean([1 / 6, 1 / 10])) and rate.holds
    assert [row.holds for row in gpu_vs_verl.judge(ours[:1], theirs, options)] == [None]


def test_lengths_of_both_sides_are_drawn_by_the_number_of_the_sample() -> None:
    options = Namespace(lengths="heavy-tailed", response=4096)
    drawn = [length for prompt in range(4) for length in gpu_vs_verl.lengths_of(prompt, options)]
    assert drawn == [fixed_length.drawn_length(index, 4096) for index in range(32)]
    assert all(1 <= length <= 4096 for length in drawn) and len(set(drawn)) > 8


def test_settings_of_an_engine_are_compared_with_its_own_sizes_of_graphs() -> None:
    options = Namespace(model="0.6B", requests=512, at_once=3)
    rates = {gpu_engine_sweep.ALL_SIZES: {"start": 90.0, "fixed": 200.0, "heavy-tailed": 100.0}}
    found = {**rates, "our sizes": {"start": 60.0, "fixed": 199.0, "heavy-tailed": 97.0}, "fa3": "no kernels"}
    rows = gpu_engine_sweep.judge(found, options)
    assert [row.ratio for row in rows[2:]] == [pytest.approx(0.995), pytest.approx(0.97), None]
    assert [row.holds for row in rows] == [True, True, True, False, None]  # 0.97 < 0.98; one is not available


def test_the_longest_sequence_is_found_by_a_line_through_what_was_tried() -> None:
    def peak(length: int) -> float:
        return 4.0 + length / 1000 + (length / 20_000) ** 2  # 24 GiB at 19,083 tokens, where it is 4 + 19.08 + 0.91

    found = list(gpu_longest.tries(peak, 16_000, 24.0))
    assert abs(found[-1][1] - 24.0) <= 0.005 * 24 and len(found) <= 4
    row = gpu_longest.judge("full", Namespace(shape="0.6B", budget=24.0), planned=18_800, tried=found)
    assert row.ratio == pytest.approx(18_800 / 19_083, rel=1e-3) and row.holds


def test_sleeping_is_compared_with_copies_of_what_has_to_survive() -> None:
    logged = series(
        perf__sleep_time=[9, 9, 1.2, 1.2], perf__wake_up_time=[9, 9, 1.0, 1.0],
        memory__after_update_weights__gpu_used_gb=[90, 90, 90, 90], memory__after_sleep__gpu_used_gb=[9, 9, 10, 10],
        memory__after_sleep__gpu_process_gb=[9, 9, 2, 2],
    )  # fmt: skip
    time_row, residue = gpu_sleep_wake.judge(
        logged, {"to_host": 50.0, "to_device": 25.0}, shape="4B", parameters=4 * 10**9
    )
    # 14 bytes x 4e9 = 56 GB: 1.12 s out and 2.24 s in
    assert time_row.ratio == pytest.approx(2.2 / 3.36) and time_row.holds and "80.0 GB more free" in time_row.note
    assert residue.figure == "2.00 GB" and residue.holds
    (nothing,) = gpu_sleep_wake.judge({}, {"to_host": 1.0, "to_device": 1.0}, shape="4B", parameters=1)
    assert nothing.holds is None and "does not sleep" in nothing.note


def test_memory_that_creeps_is_seen_on_the_gpu_and_on_the_host() -> None:
    logged = series(memory__after_sleep__gpu_used_gb=[50, 50, 50, 50, 50, 2.0, 2.05, 2.09, 2.11])
    (row,) = gpu_soak.gpu_rows(logged, shape="s")
    assert row.holds is False and row.note == "spread 110 MB"
    logged["memory/after_sleep/gpu_used_gb"][8] = 2.099
    assert gpu_soak.gpu_rows(logged, shape="s")[0].holds
    assert gpu_soak.gpu_rows({}, shape="s")[0].holds is None
    assert gpu_soak.host_row([10.0] * 5 + [10.05] * 5, shape="s").holds
    assert gpu_soak.host_row([10.0] * 5 + [10.2] * 5, shape="s").holds is False
    assert gpu_soak.host_row([10.0] * 5, shape="s").holds is None


def test_learning_is_the_mean_of_the_last_evaluations_in_time_and_the_control_stays_flat() -> None:
    curve = {0.0: 0.20, 20.0: 0.3, 40.0: 0.40, 60.0: 0.42, 80.0: 0.44}
    assert gpu_learning.judge("grpo", curve, 19.0).holds  # 0.42 - 0.20
    assert gpu_learning.judge("grpo", curve, 21.0).holds is False
    assert gpu_learning.judge("random", curve, 19.0).holds is False
    assert gpu_learning.judge("random", dict.fromkeys(curve, 0.2), 19.0).holds
    assert gpu_learning.judge("grpo", {0.0: 0.2, 20.0: 0.5}, 1.0).holds is None


def test_a_run_is_not_repeated_while_its_flags_stay_the_same(tmp_path: Path) -> None:
    options = Namespace(output=tmp_path, extra_flags="--seed 1", report=False)
    run = Run("r", "tiny", ("--lr", "1"))
    assert not gpu_runs.is_complete(run, options)
    folder = gpu_runs.folder_of(run, options)
    folder.mkdir(parents=True)
    (folder / "done.json").write_text(json.dumps({"recipe": ["train.py", "tiny", "--lr", "1", "--seed", "1"]}))
    assert gpu_runs.is_complete(run, options) and gpu_runs.run_train(run, options)
    assert not gpu_runs.is_complete(run, Namespace(**(vars(options) | {"extra_flags": ""})))


def test_the_report_fails_where_a_row_was_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Namespace(output=tmp_path, benchmark="gpu_x")
    good = Row("a", "s", "1 s", "2 s", 0.5, "<= 1", True)
    assert gpu_runs.report([good], options) == 0
    assert gpu_runs.report([good, gpu_runs.not_measured("b", "s", "<= 1", "no GPU")], options) == 1
    assert "| b | s |  |  |  | <= 1 | not measured; no GPU |" in capsys.readouterr().out
    assert [row["holds"] for row in json.loads((tmp_path / "gpu_x.json").read_text())["rows"]] == [True, None]


def test_random_weights_have_the_names_and_sizes_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    monkeypatch.setattr(gpu_models, "SHARD_BYTES", 100_000)
    config = gpu_models.QWEN3 | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
        "vocab_size": 512,
    }  # fmt: skip
    gpu_models.write_random_weights(config, tmp_path, device="cpu")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    # embedding; per layer q, k, v, o of 8 heads of 128, 2 head norms, the MLP's three, 2 norms; the last norm
    layer = 4 * 64 * 8 * 128 + 2 * 128 + 3 * 64 * 128 + 2 * 64
    assert gpu_models.num_parameters(tmp_path) == 512 * 64 + 2 * layer + 64 == index["metadata"]["total_size"] / 2
    assert len(set(index["weight_map"].values())) > 1 and "lm_head.weight" not in index["weight_map"]
    with safe_open(tmp_path / index["weight_map"]["model.norm.weight"], "pt") as file:
        assert file.get_tensor("model.norm.weight").eq(1).all()


def test_a_sync_over_a_link_is_compared_with_a_broadcast() -> None:
    logged = series(perf__update_weights_time=[9, 9, 0.11, 0.12, 0.2], perf__update_weights_pause_time=[9, 9, 0, 0, 0])
    row = gpu_multi_sync.judge(logged, "4B", 8_000_000_000, 100.0)
    # 8 GB at 100 GB/s take 0.08 s
    assert row.figure == "0.120 s" and row.ratio == pytest.approx(0.12 / 0.08) and row.holds
    assert gpu_multi_sync.judge({}, "4B", 1, 1.0).holds is None


def test_a_sync_over_files_says_what_it_wrote() -> None:
    logged = series(
        perf__update_weights_wire_bytes=[8e9, 8e9, 2e8], perf__update_weights_write_time=[9, 9, 1.5],
        perf__update_weights_send_time=[9, 9, 0.5], perf__update_weights_density=[1, 1, 0.03],
    )  # fmt: skip
    row = gpu_multi_sync.files_row(logged, "4B", "delta", 8_000_000_000)
    assert row.ratio == pytest.approx(0.025) and row.note == "3.00% of the elements changed"
    assert gpu_multi_sync.files_row({}, "4B", "delta", 1).holds is None


def test_running_ahead_is_compared_with_taking_turns() -> None:
    in_turn = series(perf__step_time=[9, 9, 9.0], perf__rollout_time=[9, 9, 5.0], perf__train_time=[9, 9, 3.0])
    row = gpu_multi_async.judge(in_turn, series(perf__step_time=[9, 9, 5.5]), shape="0.6B")
    assert row.ratio == pytest.approx(9 / 5.5) and row.holds and row.limit.startswith("1.60,")  # (5 + 3) / 5
    assert gpu_multi_async.judge(in_turn, {}, shape="0.6B").holds is None


def test_a_layout_may_differ_as_other_micro_batches_do() -> None:
    one = series(train__grad_norm=[1.0, 2.0], train__loss=[0.5, -0.25])
    other = series(train__grad_norm=[1.01, 1.98], train__loss=[0.5, -0.24])
    assert gpu_multi_layouts.difference(one, other) == pytest.approx(0.01)
    row = gpu_multi_layouts.judge("TP 2", "0.6B", one, other, 0.005)
    assert row.ratio == pytest.approx(2.0) and row.holds and "at most 1.0e-02" in row.note
    assert gpu_multi_layouts.judge("TP 2", "0.6B", one, other, 0.003).holds is False
    assert gpu_multi_layouts.judge("TP 2", "0.6B", one, {}, 0.005).holds is None


def test_each_fused_part_of_the_comparison_is_run_forward_and_backward() -> None:
    names = []
    for part in gpu_fusion.parts("0.6B", "cpu"):
        for way in gpu_fusion.WAYS:
            with torch.compiler.set_stance("force_eager"):  # Megatron's own would be compiled here, too
                gradient = part.prepare(4, way)()
            assert gradient.shape[0] == 4 and gradient.isfinite().all() and gradient.any(), (part.name, way)
        names.append(part.name)
    assert len(names) == 6 == len(set(names))


def test_an_adapter_has_arrived_when_the_gap_is_a_small_part_of_what_it_moves() -> None:
    logged = series(
        perf__update_weights_time=[9, 9, 0.040, 0.060], perf__update_weights_pack_time=[9, 9, 0.020, 0.030],
        train__train_rollout_logprob_abs_diff=[0.002, 0.01], train__kl_loss=[0.0, 0.0050],
    )  # fmt: skip
    assert gpu_lora.sync_row(logged, "4B").figure == "50.0 ms" and gpu_lora.sync_row(logged, "4B").holds
    gap, arrived = gpu_lora.arrival_rows(logged, "4B")
    assert gap.figure == "0.0060" and gap.holds
    # a k3 of 0.005 is a distance of 0.1; a tenth of it is the gap
    assert arrived.ratio == pytest.approx(0.1) and arrived.holds
    logged["train/train_rollout_logprob_abs_diff"][1] = 0.1
    assert [row.holds for row in gpu_lora.arrival_rows(logged, "4B")] == [False, False]
    assert gpu_lora.arrival_rows({}, "4B")[0].holds is None


def test_a_way_to_train_is_compared_by_its_train_part_with_megatron() -> None:
    def found(train: float) -> dict[str, float]:
        return {
            "train": train,
            "log-probs": 0.1,
            "whole": 9.0,
            "tokens": 1000.0,
            "memory_gib": 2.0,
            "matmul_tflops": 700,
        }

    base = found(0.5)
    assert gpu_fsdp.step_row("0.6B", "Megatron", base, None, "").ratio is None
    row = gpu_fsdp.step_row("0.6B", "FSDP2", found(0.54), base, "")
    assert row.ratio == pytest.approx(1.08) and row.holds and row.figure.startswith("540 ms, 1852 tok/s")
    assert gpu_fsdp.step_row("0.6B", "FSDP2", found(0.56), base, "").holds is False
    assert gpu_fsdp.step_row("0.6B", "FSDP2", None, base, "out of memory").note == "out of memory"


def test_the_worst_gap_of_a_run_of_fsdp_counts() -> None:
    logged = series(
        train__train_rollout_logprob_abs_diff=[0.004, 0.03, 0.002], memory__after_sleep__gpu_process_gb=[1] * 3
    )
    gap, held = gpu_fsdp.judge(logged, shape="0.6B")
    assert gap.ratio == 0.03 and gap.holds is False and held.holds
    assert [row.holds for row in gpu_fsdp.judge({}, shape="0.6B")] == [None]


def test_break_even_lies_between_the_lengths_that_were_measured() -> None:
    # from 0.8 x at 1.5 tokens to 1.2 x at 2.5: half of the way
    assert gpu_speculative.break_even({1.0: 0.6, 1.5: 0.8, 2.5: 1.2}) == pytest.approx(2.0)
    assert gpu_speculative.break_even({1.0: 1.1, 2.0: 1.5}) == 1.0 and gpu_speculative.break_even({1.0: 0.5}) is None
    row = gpu_speculative.break_even_row("4B", 8, 3, 1000.0, {1.0: 0.6, 4.0: 1.8})
    assert row.figure == "2.00 tokens" and row.ratio == 1.8 and row.holds  # 1 + 0.4 / 1.2 x 3
    assert gpu_speculative.break_even_row("4B", 8, 1, 1.0, {1.0: 0.6, 2.0: 0.9}).figure == "never"


def test_two_samples_of_one_distribution_are_told_from_two_of_two() -> None:
    draw = torch.Generator().manual_seed(0)
    share = torch.tensor([0.5, 0.3, 0.15, 0.05])
    first, second = (torch.multinomial(share, 4000, replacement=True, generator=draw).tolist() for _ in range(2))
    assert gpu_speculative.chi_square(first, second) > 0.01
    other = torch.multinomial(torch.tensor([0.45, 0.35, 0.15, 0.05]), 4000, replacement=True, generator=draw).tolist()
    assert gpu_speculative.chi_square(first, other) < 1e-4
    # 2 x 2: statistic 4 x 10^2 / 50 = 8 with one degree of freedom, of which erfc(sqrt(8 / 2)) is above
    assert gpu_speculative.chi_square([0] * 60 + [1] * 40, [0] * 40 + [1] * 60) == pytest.approx(math.erfc(2.0))
    assert gpu_speculative.chi_square([7] * 20, [7] * 20) == 1.0


def test_acceptance_is_read_at_the_start_and_at_the_end_of_a_run() -> None:
    logged = series(rollout__spec_accept_length=[1.0, 1.1, 1.2, 1.5, 1.9, 2.0, 2.1], rollout__raw_reward=[0.1] * 7)
    row = draft_runs.judge(logged, "r", is_trained=True)
    assert (row.figure, row.limit, row.holds) == ("2.00 tokens", "1.10 at the start", True)
    assert draft_runs.judge({}, "r", is_trained=True).holds is None


def test_drafts_that_were_to_stop_have_stopped() -> None:
    logged = series(
        rollout__spec_drafts=[1, 1, 1, 0, 0, 0], rollout__spec_accept_length=[1.1, 1.0, 1.2],
        perf__tokens_per_gpu_per_sec=[9, 50, 50, 9, 60, 60],
    )  # fmt: skip
    row = draft_runs.judge_stop(logged, "r")
    assert row.holds and row.ratio == pytest.approx(60 / 50)
    logged["rollout/spec_drafts"][3] = 1
    assert draft_runs.judge_stop(logged, "r").holds is False
    assert draft_runs.judge_stop({}, "r").holds is None
