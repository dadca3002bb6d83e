"""What the rollout manager does about engines that fail a sync or release no memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime.backends.sglang_utils.server_control import Probe
from slime.config.args import Args
from slime.ray.rollout.engine_control import EngineControl
from slime.ray.utils import ActorFailure


class Engines:
    """In the place of the watch, the replacements and the servers: what the manager asks of them, no engine runs.

    `answers` says which engines are found lost at which probe.
    """

    def __init__(self, known: list[str], answers: dict[Probe, list[str]] | None = None) -> None:
        self.known, self.answers = known, answers or {}
        self.lost: list[str] = []
        self.probes: list[Probe] = []

    @property
    def watch(self) -> Engines:
        return self

    @property
    def count(self) -> int:
        return len(self.lost)

    def look(self, probe: Probe) -> None:
        self.probes.append(probe)
        self.lost += self.answers.get(probe, [])

    def lose_engine(self, engine: str, why: str) -> bool:
        self.lost += [engine] if engine in self.known else []
        return engine in self.known

    def pause(self) -> None:
        pass

    def release_memory(self) -> list[tuple[str, Exception]]:
        return [("b", ActorFailure("connection refused"))]


@pytest.fixture
def manager() -> Any:
    return EngineControl(cast(Args, SimpleNamespace()), [])


@pytest.mark.parametrize(
    ("numbers", "answers", "lost", "probes"),
    [
        ([1], {Probe.LISTENS: ["a"]}, ["b"], []),  # who is named is lost; others may only have waited for it
        ([], {Probe.LISTENS: ["a"], Probe.SCHEDULES: ["b"]}, ["a"], [Probe.LISTENS]),
        ([], {Probe.SCHEDULES: ["b"]}, ["b"], [Probe.LISTENS, Probe.SCHEDULES]),
        ([], {}, [], [Probe.LISTENS, Probe.SCHEDULES]),
    ],
)
def test_a_failed_sync_costs_the_engines_that_it_names_or_else_those_that_do_not_answer(
    manager: Any, numbers: list[int], answers: dict[Probe, list[str]], lost: list[str], probes: list[Probe]
) -> None:
    engines = Engines(["a", "b"], answers)
    manager.replacements = engines
    manager._updatable = ["a", "b"]
    assert manager.engines_failed(numbers, "flush_cache was not answered within 60 s") == len(lost)
    assert (engines.lost, engines.probes) == (lost, probes)


@pytest.mark.parametrize(
    ("known", "is_lost"),
    [(["a", "b"], True), (["a"], False), (None, False)],
    ids=["replaced", "a prefill server", "without --use-fault-tolerance"],
)
def test_an_engine_that_releases_no_memory_is_lost_where_another_can_take_its_place(
    manager: Any, known: list[str] | None, is_lost: bool
) -> None:
    manager._servers = Engines([])
    manager.replacements = None if known is None else Engines(known)
    if not is_lost:
        with pytest.raises(ActorFailure, match="connection refused"):
            manager.offload()
        return
    manager.offload()
    assert manager.replacements.lost == ["b"]


def test_engines_are_ended_though_what_watches_them_does_not_end_well(manager: Any) -> None:
    ended: list[str] = []

    def fail() -> None:
        ended.append("watch")
        raise OSError("the guest book cannot be written")

    manager._ending.callback(lambda: ended.append("engines"))
    manager._begin(SimpleNamespace(start=lambda: ended.append("start"), stop=fail))
    with pytest.raises(OSError, match="guest book"):
        manager._end_engines()
    assert ended == ["start", "watch", "engines"]
