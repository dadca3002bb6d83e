"""What the driver does about engines that are lost: in a weight sync, before it, and while a rollout waits for one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.megatron_utils.update_weight.engines import WeightSyncError
from slime.observability.phases import Phases
from slime.ray import engine_upkeep as module
from slime.ray import utils as ray_utils
from slime.ray.engine_upkeep import EngineUpkeep
from slime.ray.utils import ActorFailure, ActorLost

METRICS = {"perf/update_weights_time": 1.0}


class World:
    """A manager, trainers and turns that note what the driver asks of whom; no process is needed to see that.

    Engines are names. One that is in `hangs` fails the next send, whose error names it; `budget` engines may be
    started in place of lost ones.
    """

    def __init__(self, *engines: str, budget: int = 10) -> None:
        self.calls: list[str] = []
        self.engines = list(engines)
        self.connected = list(engines)
        self.knows_engines = True
        self.hangs: set[str] = set()
        self.budget = budget
        self.count = 0
        self.waiting: list[str] = []
        self.places = len(engines)
        self.error: Exception | None = None
        self.ended: list[str] = []
        self.judges = ["judge"]
        """Engines of a model that takes no weights."""
        self.guests: list[str] = []
        """Engines that want to join."""

    def __getattr__(self, verb: str) -> Any:  # of the manager
        return SimpleNamespace(remote=lambda *values: getattr(self, f"do_{verb}")(*values))

    def lose(self, *names: str) -> None:
        self.engines = [name for name in self.engines if name not in names]
        self.count += 1

    def do_pause_watch(self) -> int:
        return self.count

    def do_engines_failed(self, numbers: tuple[int, ...], why: str) -> int:
        if lost := [self.connected[number] for number in numbers]:
            self.lose(*lost)
        return self.count

    def do_ended_engines(self) -> list[str]:
        return self.ended

    def do_get_updatable_engines(self) -> tuple[list[str], list[int]]:
        return list(self.engines), [1] * len(self.engines)

    def do_lacks_engines(self) -> bool:
        return not self.judges or not [engine for engine in self.engines if engine not in self.waiting]

    def do_admit_engines(self) -> tuple[list[str], list[int]]:
        if new := [name for name in self.guests if name not in self.engines]:
            self.engines, self.count, self.waiting = self.engines + new, self.count + 1, self.waiting + new
        return list(self.waiting), [1] * len(self.waiting)

    def do_hold_requests(self) -> None:
        self.calls.append("hold")

    def do_replace_engines(self) -> None:
        self.judges = ["judge"]
        while len(self.engines) < self.places and self.budget:
            self.budget, self.count = self.budget - 1, self.count + 1
            self.engines.append(f"new{self.count}")
            self.waiting.append(self.engines[-1])
        if not self.engines:
            raise ActorFailure("no engine of model default is left (--max-engine-restarts-per-hour)")
        self.calls.append(f"start {' '.join(self.engines)}")

    def do_register_engines(self) -> None:
        self.waiting.clear()
        self.calls.append("register")

    # of the trainers

    def connect_rollout_engines(self, engines: list[str], sizes: list[int], *, weight_version: int) -> None:
        self.calls.append(f"connect {' '.join(engines)} at {weight_version}")
        self.connected = engines

    def update_weights(self) -> dict[str, float]:
        self.calls.append("send")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if silent := [number for number, engine in enumerate(self.connected) if engine in self.hangs]:
            cause = WeightSyncError("flush_cache was not answered within 60 s", silent=silent)
            raise ActorFailure(f"the weight sync failed: {cause}", "", cause)
        return METRICS


@pytest.fixture
def upkeep_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineUpkeep]:
    def make(world: World, *, is_on: bool = True, may_grow: bool = False) -> EngineUpkeep:
        monkeypatch.setattr(module, "get", lambda value, *_, **__: value)
        turns = SimpleNamespace(
            to_engines=lambda: world.calls.append("engines' turn"),
            to_weight_sync=lambda _: world.calls.append("sync's turn"),
            to_trainer=lambda _: world.calls.append("trainer's turn"),
            trainers_leave=False,
        )
        parts: Any = SimpleNamespace(manager=world, actor=world, turns=turns)
        upkeep = EngineUpkeep(parts, Phases(), is_on=is_on, may_grow=may_grow)
        upkeep.version, upkeep.sends_weights = 4, True
        return upkeep

    return make


def test_an_engine_that_a_failed_sync_names_is_lost_and_the_others_get_the_weights(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a", "b")
    world.hangs = {"b"}
    upkeep = upkeep_of(world)
    assert upkeep.send_weights(5) == METRICS and upkeep.version == 5
    assert world.calls == ["sync's turn", "send", "sync's turn", "connect a at 4", "send"]


def test_trainers_that_were_begun_anew_are_given_the_engines_with_the_version_that_these_have(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    """--release-train; the engines have version 4, so that the sync makes 5 of it."""
    world = World("a", "b")
    world.knows_engines = False
    upkeep_of(world, is_on=False).send_weights(5)
    assert world.calls == ["sync's turn", "connect a b at 4", "send"]


def test_the_only_engine_that_hangs_in_a_sync_is_replaced_and_the_new_one_gets_the_weights(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a")
    world.hangs = {"a"}
    assert upkeep_of(world).send_weights(5) == METRICS
    assert world.calls == [
        *["sync's turn", "send", "sync's turn"],
        *["engines' turn", "start new2"],  # an engine takes all of its memory when it starts
        *["sync's turn", "connect new2 at 4", "send"],
    ]


def test_engines_that_hang_one_after_the_other_end_the_run_when_no_more_may_be_started(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a", budget=3)
    world.hangs = {"a", *(f"new{number}" for number in range(20))}
    with pytest.raises(ActorFailure, match="no engine of model default is left"):
        upkeep_of(world).send_weights(5)
    assert world.calls.count("send") == 1 + 3


@pytest.mark.parametrize(
    ("error", "is_on"),
    [
        (ActorFailure("the weights do not match"), True),  # it would fail again
        (ActorLost("rank 0 is lost"), True),  # there is nobody to send
        (ActorFailure("gone", "", WeightSyncError("gone", silent=[1])), False),  # without --use-fault-tolerance
    ],
)
def test_any_other_failure_of_a_sync_is_the_runs(
    upkeep_of: Callable[..., EngineUpkeep], error: ActorFailure, is_on: bool
) -> None:
    world = World("a", "b")
    world.error = error
    upkeep = upkeep_of(world, is_on=is_on)
    with pytest.raises(type(error)) as failed:
        upkeep.send_weights(5)
    assert failed.value is error and upkeep.version == 4
    assert world.calls == ["sync's turn", "send"]


def test_a_sync_that_fails_for_an_engine_that_has_ended_says_why_that_has(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a")
    world.error, world.ended = ActorFailure("cannot be reached"), ["engine 0 has ended: out of host memory"]
    with pytest.raises(ActorFailure, match="^engine 0 has ended: out of host memory; .* sync: cannot be reached$"):
        upkeep_of(world, is_on=False).send_weights(5)


def test_a_rollout_that_has_lost_its_last_engine_gets_another_with_the_same_weights(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a")
    upkeep = upkeep_of(world)
    upkeep.serve_all()
    assert world.calls == [], "nothing is done while an engine serves"
    world.lose("a")
    upkeep.serve_all()
    assert world.calls == [
        *["engines' turn", "start new2"],
        "hold",  # the requests of other models, whose engines release memory for the trainer, too
        *["sync's turn", "connect new2 at 3", "send", "engines' turn", "register"],
    ]
    assert upkeep.version == 4, "no rollout becomes older by it"
    del world.calls[:]
    upkeep.serve_all()
    assert world.calls == []


def test_weights_that_are_newer_than_their_version_are_said_to_be(
    upkeep_of: Callable[..., EngineUpkeep], caplog: pytest.LogCaptureFixture
) -> None:
    """train_async.py has trained on one rollout while the next one loses its engines."""
    world = World("a")
    upkeep = upkeep_of(world)
    upkeep.is_ahead = True
    world.lose("a")
    upkeep.serve_all()
    assert "newer than their weight version 4" in caplog.text and upkeep.version == 4


def test_an_engine_that_was_started_but_has_no_weights_yet_gets_them_when_a_rollout_waits_for_it(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    """train_async.py with --update-weights-interval 2: the next sync may be rollouts away."""
    world = World("a")
    world.lose("a")
    upkeep = upkeep_of(world)
    upkeep.replace()
    assert world.calls == ["start new2"]
    upkeep.serve_all()
    assert world.calls[-2:] == ["engines' turn", "register"] and world.calls.count("send") == 1


def test_a_reward_model_that_is_replaced_leaves_the_engines_of_the_trained_model_alone(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    """A sync would abort their requests, and what waits for its weights must not serve before the next one."""
    world = World("a", "b")
    world.waiting = ["b"]
    world.judges = []
    upkeep_of(world).serve_all()
    assert world.calls == ["engines' turn", "start a b"] and world.waiting == ["b"]


def test_a_rollout_ends_with_one_error_when_no_engine_may_be_started(upkeep_of: Callable[..., EngineUpkeep]) -> None:
    world = World("a", budget=0)
    world.lose("a")
    with pytest.raises(ActorFailure, match="no engine of model default is left"):
        upkeep_of(world).serve_all()


def test_new_trainers_find_an_engine_where_the_last_was_lost_with_the_old_ones(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    """Without one the run would go on, and never send weights again."""
    world = World("a")
    world.lose("a")
    upkeep = upkeep_of(world)
    assert upkeep.connect() and upkeep.sends_weights
    assert world.calls == ["engines' turn", "start new2", "trainer's turn", "connect new2 at 4"]


def test_a_rollout_that_is_to_end_before_new_trainers_start_gets_an_engine_with_any_weights(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    """The trainer is lost with the last engine: what it waits for is thrown away, but it is waited for."""
    world = World("a")
    world.lose("a")
    upkeep_of(world).serve_all(with_weights=False)
    assert world.calls == ["engines' turn", "start new2", "register"]


def test_engines_without_trainers_serve_as_soon_as_they_are_there(upkeep_of: Callable[..., EngineUpkeep]) -> None:
    """--debug-rollout-only: they have the weights that they are to have."""
    world = World("a")
    world.lose("a")
    upkeep = upkeep_of(world)
    upkeep.sends_weights = False
    upkeep.serve_all()
    assert "send" not in world.calls and world.calls[-1] == "register"


def test_an_engine_that_joins_alone_gets_the_weights_of_the_last_sync_and_then_takes_part_in_every_one(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a")
    upkeep = upkeep_of(world, may_grow=True)
    upkeep.send_weights(5)
    del world.calls[:]
    upkeep.look_after()
    assert world.calls == [], "nobody has come"
    world.guests = ["guest"]
    upkeep.look_after()
    assert world.calls == ["connect guest at 4", "send", "register"], "the others go on, and its version is theirs, 5"
    del world.calls[:]
    upkeep.send_weights(6)
    assert world.calls == ["sync's turn", "connect a guest at 5", "send"]


def test_an_engine_waits_for_the_next_sync_where_the_trainer_has_newer_weights(
    upkeep_of: Callable[..., EngineUpkeep],
) -> None:
    world = World("a")
    world.guests = ["guest"]
    upkeep = upkeep_of(world, may_grow=True)
    upkeep.look_after()
    assert world.calls == [], "no sync has been done by these trainers"
    upkeep.send_weights(5)
    upkeep.is_ahead = True  # it has trained since
    del world.calls[:]
    upkeep.look_after()
    assert world.calls == []


def test_an_engine_that_fails_with_its_first_weights_is_lost_alone(upkeep_of: Callable[..., EngineUpkeep]) -> None:
    world = World("a")
    upkeep = upkeep_of(world, may_grow=True)
    upkeep.send_weights(5)
    world.guests, world.hangs = ["guest"], {"guest"}
    upkeep.look_after()
    assert world.engines == ["a"] and world.calls[-1] == "register"
    world.guests = []
    assert upkeep.send_weights(6) == METRICS and world.connected == ["a"]


def test_a_wait_looks_at_the_engines_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    for is_on in (True, False):
        upkeep = EngineUpkeep(SimpleNamespace(), Phases(), is_on=is_on)  # type: ignore[arg-type]
        monkeypatch.setattr(module, "get", lambda ref, *_, meanwhile: given.append(meanwhile))
        upkeep.wait("a rollout", "it")  # type: ignore[arg-type]
        assert given[-1] == (upkeep.look_after if is_on else None)


def test_what_is_to_be_done_meanwhile_is_done_until_a_result_comes_and_its_error_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray is asked once a second; here it has nothing twice."""
    looks = iter([[], [], ["result"]] * 2)
    monkeypatch.setattr(ray_utils.ray, "wait", lambda refs, timeout: (next(looks), refs))
    monkeypatch.setattr(ray_utils, "fetch", lambda ref, what: 7)
    monkeypatch.setattr(ray_utils.ray, "ObjectRef", str)
    done: list[int] = []
    assert ray_utils.get("result", "a rollout", 60.0, meanwhile=lambda: done.append(len(done))) == 7  # type: ignore[arg-type]
    assert done == [0, 1]

    def fail() -> None:
        raise ActorFailure("no engine is left")

    with pytest.raises(ActorFailure, match="no engine is left"):
        ray_utils.get("result", "a rollout", 60.0, meanwhile=fail)  # type: ignore[arg-type]


def test_an_error_of_a_sync_keeps_the_engines_that_it_names_when_it_travels() -> None:
    copy = pickle.loads(pickle.dumps(WeightSyncError("it hangs", is_final=True, silent=[1, 2])))
    assert (str(copy), copy.is_final, copy.silent) == ("it hangs", True, (1, 2))
