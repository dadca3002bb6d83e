"""perf/other_time: what is left of a step, in runs that wait for a rollout and in runs that generate it ahead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.observability.timer import MetricRecord, StepTimes, with_slowest_rank
from slime.ray import engine_upkeep
from slime.ray import run as run_module
from slime.ray.rollout.shares import HOOKS_ON_SAMPLES
from slime.ray.run import PendingRollout, TrainingRun
from slime.ray.run_parts import GpuTurns

TRAINED = [
    (
        {
            "perf/step_time": 100.0,
            "perf/train_wait_time": 60.0,
            "perf/train_time": 40.0,
            "perf/data_preprocess_time": 1.0,
            "perf/log_probs_time": 5.0,
            "perf/ref_log_probs_time": 4.0,
            "perf/actor_train_time": 20.0,
        },
        "rollout/step",
    ),
    ({"train/loss": 0.5}, "train/step"),
]
COMPUTED = 5.0 + 4.0 + 20.0


def generated(times: StepTimes, *, rollout_s: float, waited_s: float) -> None:
    times.waited(waited_s)
    times.generated([({"perf/rollout_time": rollout_s}, "rollout/step")])


def test_the_rest_is_neither_generation_nor_computation():
    times = StepTimes()
    generated(times, rollout_s=50.0, waited_s=52.0)
    assert times.trained(TRAINED) == {"perf/other_time": 100 - 50 - COMPUTED}, "two seconds were the manager's"


def test_of_a_rollout_ahead_only_what_was_waited_for_counts():
    times = StepTimes()
    times.waited(7.0)  # draining before the sync
    generated(times, rollout_s=50.0, waited_s=3.0)
    assert times.trained(TRAINED) == {"perf/other_time": 100 - 10 - COMPUTED}


def test_each_step_counts_its_own_generation():
    times = StepTimes()
    for seconds in (50.0, 30.0):
        generated(times, rollout_s=seconds, waited_s=60.0)
        assert times.trained(TRAINED) == {"perf/other_time": 100 - seconds - COMPUTED}


def test_the_passes_of_a_critic_are_computation():
    times = StepTimes()
    critic = [({"perf/critic_values_time": 2.0, "perf/critic_train_time": 8.0}, "rollout/step")]
    assert times.trained([*TRAINED, *critic]) == {"perf/other_time": 100 - COMPUTED - 10}


def test_a_rollout_without_times_counts_as_long_as_it_was_waited_for():
    times = StepTimes()
    times.waited(20.0)
    times.generated([])  # a log hook may take the manager's metrics away
    assert times.trained(TRAINED) == {"perf/other_time": 100 - 20 - COMPUTED}
    assert times.trained([]) == {}


def test_a_run_logs_the_rest_beside_the_times_of_the_step(monkeypatch: pytest.MonkeyPatch):
    logged: list[dict[str, float]] = []
    answers = {"samples": None, "data": ([], [({"perf/rollout_time": 0.0}, "rollout/step")])}
    for module in (run_module, engine_upkeep):
        monkeypatch.setattr(module, "get", lambda pending, *_, **__: answers[pending])
    monkeypatch.setattr(run_module.logging_utils, "log", lambda args, metrics, key: logged.append(metrics))
    flags = (
        "debug_train_only",
        "debug_rollout_only",
        "use_fault_tolerance",
        "elastic_rollout",
        "exit_signal_handler",
        "async_save",
        "release_train",
    )
    run = TrainingRun(
        SimpleNamespace(
            **dict.fromkeys(flags, False),
            **dict.fromkeys(
                ("exit_duration_in_mins", "save", "save_hf", "peer_checkpoint_interval", *HOOKS_ON_SAMPLES)
            ),
        )
    )
    run.parts._turns = GpuTurns(
        SimpleNamespace(
            accelerator="cpu", colocate=False, offload_train=False, offload_rollout=False, release_train=False
        ),
        None,
    )
    run.parts.actor = SimpleNamespace(train=lambda *_: (TRAINED, []))
    run.plan = SimpleNamespace(start_rollout_id=0, num_rollout=4)
    run.train_step(3, run.wait_generated(PendingRollout("samples", "data")))
    assert logged[-1] == {"perf/other_time": 100 - COMPUTED, "rollout/step": 3}


def test_the_slowest_rank_is_compared_in_passes_that_wait_for_no_other():
    def rank(log_probs: float, train: float = 9.0) -> list[MetricRecord]:
        times = {"perf/log_probs_time": log_probs, "perf/data_preprocess_time": 1.0, "perf/actor_train_time": train}
        return [({**times, "rollout/step": 3}, "rollout/step"), ({"train/step": 1}, "train/step")]

    (perf, key), *rest = with_slowest_rank([rank(3.0), rank(3.0, 50.0), rank(7.0)])
    assert perf["perf/slowest_rank_ratio"] == (7.0 + 1.0) / (3.0 + 1.0) and key == "rollout/step"
    assert rest == rank(3.0)[1:] and perf["perf/log_probs_time"] == 3.0, "the rest is rank 0's"
    for alone in ([rank(3.0)], [[({"rollout/step": 3}, "rollout/step")]] * 2):
        assert with_slowest_rank(alone) == alone[0]
