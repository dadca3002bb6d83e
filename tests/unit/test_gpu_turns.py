"""Who leaves and who takes the GPU, and in which order: trainers and engines are fakes that write down the verbs.

The order is the whole behaviour of GpuTurns and of the driver's verbs around it; what a verb does is tested where it
is written.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import train
from slime.config.args import Args
from slime.ray import actor_group, checkpoints, engine_upkeep, lifetime, run_parts
from slime.ray import run as run_module
from slime.ray.actor_group import ReleasedTrainGroup
from slime.ray.lifetime import RunPlan
from slime.ray.rollout.shares import HOOKS_ON_SAMPLES
from slime.ray.run import TrainingRun
from slime.ray.utils import ActorFailure


class Group:
    """Trainer ranks that need no GPU: only the order of the calls counts here."""

    def __init__(self, role: str, calls: list[str]) -> None:
        self.role, self.calls = role, calls

    def __getattr__(self, verb: str) -> Any:
        answers = {
            "train": ([], None),
            "wait_started": {"role": self.role, "warnings": []},
            "compute_values": None,
            "save_model": None,
            "load": {f"{self.role} loads": f"the process of the {self.role}"},
        }
        return lambda *_, **__: (
            self.calls.append(f"{self.role} {verb}") or answers.get(verb, {f"perf/{verb}_time": 1.0})
        )


class Manager:
    """Engines that need no GPU, likewise."""

    def __init__(self, calls: list[str], dies_at: str = "") -> None:
        self.calls, self.dies_at = calls, dies_at

    def __getattr__(self, verb: str) -> Any:
        return SimpleNamespace(remote=lambda *values: self.say(verb, *values))

    def say(self, verb: str, *_: object) -> Any:
        if verb == self.dies_at:
            raise ActorFailure(f"{verb} failed: HttpError: the engine is gone")
        self.calls.append(f"engines {verb}")
        return {"eval": ([], []), "train_data": ([], []), "start": "engines start"}.get(verb, [])


ON = {"max_restarts": 0, "colocate": True, "offload_train": True, "offload_rollout": True, "release_train": False}
ON |= {"exit_signal_handler": False, "exit_duration_in_mins": None, "async_save": False}
ON |= dict.fromkeys(HOOKS_ON_SAMPLES)
ON |= {"deterministic": False, "peer_checkpoint_interval": None}
ON |= {"elastic_rollout": False, "accelerator": "cuda"}
ON |= {"verify_checkpoint": "none", "use_fault_tolerance": False, "save": "somewhere", "save_hf": None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for module in (run_module, lifetime, run_parts, checkpoints, engine_upkeep):
        monkeypatch.setattr(module, "get", lambda value, *_, **__: value)
    return []


def run_of(calls: list[str], *, critic: bool = False, dies_at: str = "", **flags: Any) -> TrainingRun:
    """A run that is started but for its connection to the engines."""
    values = dict.fromkeys(["debug_train_only", "debug_rollout_only", "eval_only", "skip_eval_before_train"], False)
    values |= {"save_interval": 1, "eval_interval": 1, "max_weight_staleness": None, "num_rollout": 1}
    run = TrainingRun(SimpleNamespace(**(values | ON | flags)))
    run._log = lambda records: None  # type: ignore[method-assign]
    run.parts.take_manager(Manager(calls, dies_at))
    run.parts.actor = Group("actor", calls)  # type: ignore[assignment]
    run.parts.critic = Group("critic", calls) if critic else None  # type: ignore[assignment]
    run.plan = RunPlan(start_rollout_id=0, num_rollout=1, num_rollout_per_epoch=9)
    run.upkeep.sends_weights = True
    run.turns.start_trainers(run.parts.groups)
    return run


def step(run: TrainingRun) -> None:
    """What train.py does in a rollout."""
    run.train_step(0, run.generate(0))
    run.save_if_due(0)
    run.sync_weights()
    run.eval_if_due(0)


FIRST_SYNC = ["engines onload_weights", "actor update_weights", "engines set_weight_version", "actor sleep"]


def test_a_shared_gpu_goes_from_the_engines_to_the_trainer_and_back(calls: list[str]) -> None:
    run = run_of(calls)
    assert calls == ["engines offload", "actor start", "actor wait_started"], "trainers are built in the room left"
    calls.clear()
    run.sync_weights()
    assert calls == [*FIRST_SYNC, "engines onload_kv"]
    calls.clear()
    step(run)
    assert calls == [
        *["engines generate", "engines train_data", "engines save", "engines offload"],
        *["actor wake_up", "actor train", "actor save_model"],
        *["engines onload_weights", "actor update_weights", "engines set_weight_version", "actor sleep"],
        *["engines onload_kv", "engines eval"],
    ]


def test_actor_and_critic_take_turns_and_never_both_have_memory(calls: list[str]) -> None:
    run = run_of(calls, critic=True)
    assert calls == [
        *["engines offload", "critic start", "critic wait_started"],
        *["critic sleep", "actor start", "actor wait_started"],
    ]
    run.sync_weights()
    calls.clear()
    step(run)
    assert calls == [
        *["engines generate", "engines train_data", "engines save", "engines offload"],
        *["critic wake_up", "critic compute_values", "critic sleep"],
        *["actor wake_up", "actor train", "actor sleep"],
        *["critic wake_up", "critic train", "critic save_model", "critic sleep"],
        *["actor wake_up", "actor save_model"],
        *["engines onload_weights", "actor update_weights", "engines set_weight_version", "actor sleep"],
        *["engines onload_kv", "engines eval"],
    ]


def start(calls: list[str], monkeypatch: pytest.MonkeyPatch, *, dies: bool = False, **flags: Any) -> list[str]:
    """What a run asks for and waits for until everything is running."""

    def wait(value: Any, what: str, *_: object, beside: Any = None) -> Any:
        calls.append(f"wait for {what}")
        if dies and what == "the start of the engines":
            raise ActorFailure("the engines failed: EngineStartError: no memory")
        return value

    monkeypatch.setattr(run_parts, "get", wait)
    monkeypatch.setattr(run_parts, "RayTrainGroup", lambda *_, role="actor": Group(role, calls))
    off = {"debug_train_only": False, "debug_rollout_only": False}
    values = ON | off | {"use_critic": True, "num_rollout": 1} | flags
    run = TrainingRun(SimpleNamespace(**values))
    run.parts._trainer_placement = None  # type: ignore[assignment]
    run.parts.take_manager(Manager(calls))
    run.parts.start()
    return calls


LOADING = ["engines start", "critic load", "actor load"]
"""Begun at once, in any run: engines take longest, and loading needs no GPU."""


def test_trainers_load_beside_the_engines_and_take_the_gpu_when_these_have_released_it(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start(calls, monkeypatch) == [
        *[*LOADING, "wait for the start of the engines"],
        *["engines offload", "wait for the engines to release their GPU memory"],
        *["critic start", "critic wait_started", "critic sleep", "actor start", "actor wait_started"],
        "wait for the start of the engines",
    ]


def test_on_gpus_of_their_own_trainers_do_not_wait_for_engines(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = start(calls, monkeypatch, colocate=False, offload_train=False, offload_rollout=False)
    assert found == [
        *[*LOADING, "critic start", "actor start", "critic wait_started", "actor wait_started"],
        "wait for the start of the engines",
    ]


def test_engines_that_stay_on_a_shared_gpu_take_their_share_before_trainers_are_built(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stay = {"offload_train": False, "offload_rollout": False}
    built = ["critic start", "actor start", "critic wait_started", "actor wait_started"]
    waits = "wait for the start of the engines"
    assert start(calls, monkeypatch, **stay) == [*LOADING, waits, *built, waits]
    calls.clear()
    assert start(calls, monkeypatch, accelerator="cpu", **stay) == [*LOADING, *built, waits], "no share of the host"


def test_engines_that_do_not_start_end_the_run_before_a_trainer_is_built(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ActorFailure, match="EngineStartError: no memory"):
        start(calls, monkeypatch, dies=True)
    assert calls == [*LOADING, "wait for the start of the engines"]


MOVES = ("sleep", "wake_up", "offload", "onload_weights", "onload_kv")


def moves(run: TrainingRun, calls: list[str]) -> list[str]:
    run.sync_weights()
    calls.clear()
    step(run)
    return [call for call in calls if call.split()[1] in MOVES]


def test_whoever_is_told_to_stay_stays(calls: list[str]) -> None:
    off = {"offload_train": False, "offload_rollout": False}
    assert moves(run_of(calls, **off), calls) == []
    assert moves(run_of(calls, critic=True, **off), calls) == []
    assert moves(run_of(calls, offload_train=False), calls) == [
        *["engines offload", "engines onload_weights", "engines onload_kv"]
    ]
    assert moves(run_of(calls, offload_rollout=False), calls) == ["actor wake_up", "actor sleep"]


def test_engines_on_gpus_of_their_own_never_leave_and_the_actor_stays_unless_the_critic_needs_the_room(
    calls: list[str],
) -> None:
    assert moves(run_of(calls, colocate=False), calls) == []
    assert moves(run_of(calls, critic=True, colocate=False), calls) == [
        *["actor sleep", "critic wake_up", "critic sleep", "actor wake_up"],  # values, then the actor's training
        *["actor sleep", "critic wake_up", "critic sleep", "actor wake_up"],  # the critic's, then the weight sync
    ]


def test_engines_that_take_no_weights_come_back_all_the_same(calls: list[str]) -> None:
    run = run_of(calls)
    run.upkeep.sends_weights = False
    calls.clear()
    run.sync_weights()
    assert calls == ["actor sleep", "engines onload_weights", "engines onload_kv"]


@pytest.mark.parametrize("dies_at", ["onload_weights", "onload_kv", "offload"])
def test_an_engine_that_is_gone_while_it_has_no_memory_ends_the_run_with_its_error(
    calls: list[str], dies_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run(TrainingRun):
        def _start(self) -> None:
            started = run_of(calls)
            vars(self).update(vars(started))
            self._manager.dies_at = dies_at
            if dies_at == "offload":
                self.sync_weights()

        def finish(self, *, failed: bool = False) -> None:
            calls.append(f"finish {failed=}")

    monkeypatch.setattr(train, "TrainingRun", Run)
    with pytest.raises(ActorFailure, match=f"{dies_at} failed.*the engine is gone"):
        train.train(SimpleNamespace(**ON, debug_train_only=False, debug_rollout_only=False))
    assert calls[-1] == "finish failed=True"


def test_an_engine_in_place_of_the_only_one_takes_turns_with_the_trainer_in_the_middle_of_a_rollout(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(calls, use_fault_tolerance=True)
    found = {"pause_watch": 0, "get_updatable_engines": (["new"], [1]), "engines_failed": 0}
    lacks = iter([False, False, True, True])  # two looks of an earlier wait; lost; started, but without weights
    say = Manager.say

    def answer(manager: Manager, verb: str, *values: object) -> Any:
        if verb == "lacks_engines":
            return next(lacks)
        say(manager, verb, *values)
        found["pause_watch"] += verb == "replace_engines"
        return found.get(verb, [])

    monkeypatch.setattr(Manager, "say", answer)
    run.sync_weights()
    run.upkeep.serve_all()
    run.upkeep.serve_all()
    calls.clear()
    run.upkeep.serve_all()
    assert calls == [
        "engines replace_engines",  # it takes all of its memory when it starts: the trainer sleeps
        *["engines hold_requests", "engines offload", "actor wake_up", "engines onload_weights"],
        *["engines pause_watch", "engines get_updatable_engines", "actor connect_rollout_engines"],
        *["actor update_weights", "actor sleep", "engines onload_kv", "engines register_engines"],
    ]
    assert run.upkeep.version == 1


def test_times_of_several_moves_add_up_and_the_critics_have_its_name(calls: list[str]) -> None:
    turns = run_of(calls, critic=True).turns
    turns.take_metrics()
    actor, critic = Group("actor", calls), Group("critic", calls)
    for group in (critic, actor, critic, actor):
        turns.to_trainer(group)  # type: ignore[arg-type]
    assert turns.take_metrics() == {
        "perf/wake_up_time": 2.0,
        "perf/sleep_time": 2.0,  # the one that was awake, and the actor
        "perf/critic_wake_up_time": 2.0,
        "perf/critic_sleep_time": 2.0,
    }
    assert turns.take_metrics() == {}


def test_released_trainers_leave_whoever_has_the_other_gpus(calls: list[str]) -> None:
    off = {"offload_train": False, "offload_rollout": False}
    for flags in ({"release_train": True, "colocate": False}, {"release_train": True}):
        calls.clear()
        run = run_of(calls, **(off | flags))
        calls.clear()
        run.sync_weights()
        assert calls == ["actor update_weights", "engines set_weight_version", "actor sleep"]
        calls.clear()
        step(run)
        assert [call for call in calls if call.startswith("actor")] == [
            *["actor wake_up", "actor train", "actor save_model", "actor update_weights", "actor sleep"],
        ]


class Ranks(ReleasedTrainGroup):
    """Its processes are lists of what they were asked."""

    def __init__(self, args: Args) -> None:
        self.made: list[list[Any]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(actor_group, "parse_megatron_role_args", lambda args, role: args)
            super().__init__(args, SimpleNamespace(trainer_bundles=[0]))  # type: ignore[arg-type]

    def _create_actors(self) -> list[Any]:
        self.made.append([(self.args.load, self.args.finetune)])
        return [SimpleNamespace(load=SimpleNamespace(remote=lambda: self.made[-1].append("load")))]

    def _all(self, method: str, what: str, *values: Any, deadline_s: float = 0.0) -> list[Any]:
        self.made[-1].append((method, *values))
        return [{}]

    def start(self, beside: Any = None) -> None:
        self.made[-1].append("start")

    def shutdown(self, *, graceful: bool = True) -> None:
        self.made[-1].append("end")
        self._is_awake = False


def test_released_trainers_begin_again_from_the_last_save_and_know_no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_group, "get", lambda *_, **__: [{}])
    args = Args(
        load="hf", save="out", ckpt_step=7, finetune=True, no_load_optim=True, no_load_rng=True, output_dir="."
    )
    group = Ranks(args)
    group.start()
    group.wait_started()
    assert not group.knows_engines
    group.connect_rollout_engines(["engine"], [1])
    assert group.knows_engines
    group.sleep()
    group.wake_up()
    assert not group.knows_engines
    group.save_model(0)
    group.sleep()
    group.wake_up()
    first, second, third = group.made
    assert first == [("hf", True), "start", ("connect_rollout_engines", ["engine"], [1], 0), "end"]
    assert second == [("hf", True), "load", "start", ("save_model", 0), "end"], "nothing was saved yet"
    assert third == [("out", False), "load", "start"]


def test_a_checkpoint_that_does_not_fit_is_said_and_the_run_goes_on_unless_it_was_the_last(
    calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(calls, save_interval=1)
    run.plan = RunPlan(start_rollout_id=0, num_rollout=2, num_rollout_per_epoch=2)
    logged: list[dict[str, float]] = []
    run._log = lambda records: logged.extend(metrics for metrics, _ in records)  # type: ignore[method-assign]
    run.parts.actor = SimpleNamespace(role="actor", save_model=lambda _: "/disk has 0.01 GB free", wake_up=lambda: {})  # type: ignore[assignment]
    run.save_if_due(0)
    assert "the checkpoint of rollout 0 was not written: /disk has 0.01 GB free" in caplog.text
    assert [one for one in logged if "perf/checkpoint_not_written" in one][-1]["perf/checkpoint_not_written"] == 1
    with pytest.raises(ActorFailure, match=r"of rollout 1 was not written: .*start again with --load somewhere"):
        run.save_if_due(1)
