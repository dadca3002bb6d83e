"""A weight sync that fails: what the driver does where an engine was lost meanwhile, and where none was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.ray import run as run_module
from slime.ray.run import TrainingRun
from slime.ray.utils import ActorFailure, ActorLost
from tests.unit.test_drivers import run_args

METRICS = {"perf/update_weights_time": 1.0}


class World:
    """A manager whose engines die when the trainers first send, and trainers that fail then; no process is needed to
    see what the driver asks of whom."""

    def __init__(self, error: Exception, *, dies: bool = True, at_connect: bool = False) -> None:
        self.calls: list[str] = []
        self.engines = ["a", "b"]
        self.error: Exception | None = error
        self.dies, self.at_connect = dies, at_connect
        self.pause_watch = SimpleNamespace(remote=lambda: 2 - len(self.engines) + at_connect)
        self.get_updatable_engines = SimpleNamespace(remote=lambda: (list(self.engines), [1] * len(self.engines)))

    def connect_rollout_engines(self, engines: list[str], sizes: list[int]) -> None:
        self.calls.append(f"connect {' '.join(engines)}")
        if self.at_connect:
            self._fail()

    def update_weights(self) -> dict[str, float]:
        self.calls.append("send")
        self._fail()
        return METRICS

    def _fail(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            if self.dies:
                self.engines.pop()
            raise error


def run_of(world: World, monkeypatch: pytest.MonkeyPatch, *, use_fault_tolerance: bool = True) -> TrainingRun:
    monkeypatch.setattr(run_module, "get", lambda value, *_: value)
    run = TrainingRun(run_args(use_fault_tolerance=use_fault_tolerance))
    run._parts.manager, run._parts.actor = world, world  # type: ignore[assignment]
    return run


@pytest.mark.parametrize(
    ("at_connect", "calls"),
    [(False, ["send", "connect a", "send"]), (True, ["connect a b", "connect a", "send"])],
)
def test_a_sync_in_which_an_engine_dies_is_done_again_with_the_others(
    monkeypatch: pytest.MonkeyPatch, at_connect: bool, calls: list[str]
) -> None:
    world = World(ActorFailure("the weight sync failed: engine b is gone"), at_connect=at_connect)
    assert run_of(world, monkeypatch)._send_weights() == METRICS
    assert world.calls == calls


@pytest.mark.parametrize(
    "world",
    [
        World(ActorFailure("the weights do not match"), dies=False),  # it would fail again
        World(ActorLost("rank 0 is lost")),  # there is nobody to send
    ],
)
def test_any_other_failure_of_a_sync_is_the_runs(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    assert world.error is not None
    with pytest.raises(type(world.error)):
        run_of(world, monkeypatch)._send_weights()
    assert world.calls == ["send"]


def test_without_fault_tolerance_no_engine_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(ActorFailure("engine b is gone"))
    with pytest.raises(ActorFailure, match="engine b is gone"):
        run_of(world, monkeypatch, use_fault_tolerance=False)._send_weights()
    assert world.calls == ["send"]


def test_the_last_engine_of_the_model_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = World(ActorFailure("engine a is gone"))
    world.engines = ["a"]
    run = run_of(world, monkeypatch)
    run._engine_count = 1
    with pytest.raises(ActorFailure, match="every engine of the trained model is lost"):
        run._send_weights()
