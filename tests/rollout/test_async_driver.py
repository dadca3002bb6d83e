"""The schedule of train_async.py on a fake run: how far it runs ahead, what a sync waits for, evaluation meanwhile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import train_async
from slime.ray import checkpoints, engine_upkeep
from slime.ray import run as run_module
from slime.ray.lifetime import RunPlan
from slime.ray.rollout.shares import HOOKS_ON_SAMPLES
from slime.ray.run import PendingRollout, TrainingRun
from slime.ray.run_parts import GpuTurns
from tests.unit.test_drivers import FakeRun, run_args

_QUIET = {"eval_interval": None, "save": None}


@pytest.fixture(autouse=True)
def fake_run(monkeypatch):
    monkeypatch.setattr(train_async, "TrainingRun", FakeRun)


def calls_of(**changes):
    args = run_args(**changes)
    train_async.train(args)
    return args.calls


def test_with_a_buffer_of_two_rollouts_two_are_ahead_and_all_are_drained_before_a_sync():
    calls = calls_of(num_rollout=4, async_buffer_size=2, **_QUIET)
    assert calls == [
        *["start 0", "wait 0", "start 1", "start 2", "train 0", "drain 2", "sync"],
        *["wait 1", "start 3", "train 1", "drain 3", "sync"],
        *["wait 2", "train 2", "drain 3", "sync"],
        *["wait 3", "train 3", "drain None", "sync"],
        "finish",
    ]


@pytest.mark.parametrize(
    ("bound", "interval", "most_ahead"),
    [(0, 1, 0), (1, 1, 1), (2, 1, 2), (0, 3, 2), (None, 1, 3)],
)
def test_rollouts_that_would_be_trained_too_many_versions_later_are_not_begun(bound, interval, most_ahead):
    """The rollouts between two syncs are trained at one version: those may be ahead even at bound 0."""
    calls = calls_of(
        num_rollout=9, async_buffer_size=3, max_weight_staleness=bound, update_weights_interval=interval, **_QUIET
    )
    version, begun_at, ahead = 1, {}, []
    for call in calls:
        verb, _, number = call.partition(" ")
        if verb == "start":
            begun_at[int(number)] = version
        elif verb == "sync":
            version += 1
        elif verb == "train":
            assert bound is None or version - begun_at[int(number)] <= bound
            ahead.append(len(begun_at) - 1 - int(number))
    assert [call for call in calls if call.startswith("train")] == [f"train {i}" for i in range(9)]
    assert max(ahead) == most_ahead


def begun_with(calls: list[str], *, first: int) -> dict[int, int]:
    """Rollout -> the number of rollouts that the weights have seen with which it was begun."""
    weights, begun = first, {}
    for call in calls:
        verb, _, number = call.partition(" ")
        weights += verb == "sync"
        if verb == "start":
            begun[int(number)] = weights
    return begun


@pytest.mark.parametrize("stopped_behind", [1, 3, 5, 8])
def test_a_deterministic_run_that_is_resumed_begins_every_rollout_with_the_weights_of_one_that_was_not(stopped_behind):
    """It saves every second rollout, and the ninth, with which an epoch ends."""
    flags = {"deterministic": True, "async_buffer_size": 3, "save_interval": 2, "eval_interval": None}
    straight = begun_with(calls_of(num_rollout=12, **flags), first=0)
    assert straight[3] == 2 and straight[5] == 4, "ahead where it may be: with the weights before rollout 2 and 4"
    resumed = begun_with(calls_of(num_rollout=12, first=stopped_behind + 1, **flags), first=stopped_behind + 1)
    assert resumed == {number: weights for number, weights in straight.items() if number > stopped_behind}
    free = begun_with(calls_of(num_rollout=12, **(flags | {"deterministic": False})), first=0)
    assert free[4] == 1, "otherwise three ahead, over the checkpoint"


def test_with_requests_in_flight_a_sync_waits_for_no_rollout():
    calls = calls_of(num_rollout=3, update_weights_in_flight=True, **_QUIET)
    assert calls == [
        *["start 0", "wait 0", "start 1", "train 0", "sync"],
        *["wait 1", "start 2", "train 1", "sync"],
        *["wait 2", "train 2", "sync"],
        "finish",
    ]


def test_an_evaluation_goes_on_while_the_next_rollout_is_trained_and_ends_before_the_next_sync():
    calls = calls_of(num_rollout=3, save=None, skip_eval_before_train=True)
    kept = [call for call in calls if call.split()[0] in ("train", "sync", "eval", "evaluated")]
    assert kept == [
        *["train 0", "sync", "eval 1"],
        *["train 1", "evaluated 1", "sync", "eval 2"],
        *["train 2", "evaluated 2", "sync", "eval 3", "evaluated 3"],
    ]


def test_an_evaluation_sees_one_version_of_the_weights_also_where_syncs_are_rare():
    calls = calls_of(num_rollout=4, save=None, update_weights_interval=2, skip_eval_before_train=True)
    running = False
    for call in calls:
        verb = call.split()[0]
        running = verb == "eval" or (running and verb != "evaluated")
        assert not (verb == "sync" and running)
    kept = [call for call in calls if call.split()[0] in ("train", "sync", "eval", "evaluated")]
    assert kept[:5] == ["train 0", "eval 1", "train 1", "evaluated 1", "sync"], "no sync was between the first two"


def test_the_state_of_the_data_source_is_that_of_the_rollout_that_is_saved(monkeypatch):
    """With rollouts ahead several saves are asked for before the first is waited for."""
    waited = []
    monkeypatch.setattr(checkpoints, "get", lambda ref, what, deadline: waited.append(ref))

    def method(name):
        return SimpleNamespace(remote=lambda *rollout_id: " ".join([name, *map(str, rollout_id)]))

    run = TrainingRun(run_args(save_interval=1))
    run.plan = RunPlan(start_rollout_id=0, num_rollout=3, num_rollout_per_epoch=9)
    run.parts.manager = SimpleNamespace(
        generate=method("generate"), train_data=method("train_data"), save=method("save")
    )
    off = {"colocate": False, "offload_train": False, "offload_rollout": False, "release_train": False}
    off["accelerator"] = "cpu"
    run.parts._turns = GpuTurns(SimpleNamespace(**off), run._manager)
    run.parts.actor = SimpleNamespace(save_model=lambda rollout_id: waited.append(f"model {rollout_id}"))
    monkeypatch.setattr(run, "_log_rollout_record", lambda metrics: None)
    for rollout_id in range(3):
        run.start_generate(rollout_id)
    for rollout_id in range(3):
        run.save_if_due(rollout_id)
    assert waited == ["save 0", "model 0", "save 1", "model 1", "save 2", "model 2"]


def test_the_engines_keep_their_memory_until_a_hook_that_reads_the_samples_has_run(monkeypatch):
    waited = []
    for flags in ({}, {HOOKS_ON_SAMPLES[0]: "mine"}):
        run = TrainingRun(run_args(**flags))
        monkeypatch.setattr(run.upkeep, "wait", lambda ref, what: waited.append(ref))
        run.wait_generated(PendingRollout("samples", "training data"))
        waited.append("trained")
    assert waited == ["samples", "trained", "samples", "training data", "trained"]


def test_an_evaluation_is_logged_at_the_step_at_which_it_began(monkeypatch):
    logged, shown = [], []
    monkeypatch.setattr(engine_upkeep, "get", lambda ref, what, deadline, meanwhile: ref)
    monkeypatch.setattr(run_module.logging_utils, "log", lambda args, metrics, key: logged.append(metrics[key]))
    monkeypatch.setattr(run_module.logging_utils, "log_eval_samples", lambda samples, step: shown.append(step))
    run = TrainingRun(run_args(eval_interval=1))
    run.plan = RunPlan(start_rollout_id=0, num_rollout=9, num_rollout_per_epoch=9)
    evaluation = SimpleNamespace(remote=lambda rollout_id, step: ([({"eval/step": step}, "eval/step")], []))
    run.parts.manager = SimpleNamespace(eval=evaluation)
    run.start_eval_if_due(4)
    assert not logged, "nothing waits"
    run.start_eval_if_due(5)
    assert (logged, shown) == ([5], [5]), "one at a time: the first one ends first"
    run.finish_eval()
    run.finish_eval()
    assert (logged, shown) == ([5, 6], [5, 6])
