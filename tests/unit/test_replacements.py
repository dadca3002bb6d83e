"""Which engines are started in the place of lost ones, and what becomes of external ones that are lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.server_control import Worker
from slime.ray.rollout import replacements as module
from slime.ray.rollout import watches
from slime.ray.rollout.replacements import Replacements
from slime.ray.rollout.servers import Seat
from slime.ray.utils import ActorFailure, ActorLost
from slime.utils.errors import HttpError
from slime.utils.http.network import Outages

ROUTER = "http://127.0.0.1:1"


class Model:
    """A model's servers that note what is done to them: whether they run does not matter to who is to be started."""

    def __init__(self, num_engines: int, *, external: int = 0, router_is_ours: bool = True) -> None:
        self.calls: list[str] = []
        self.router = SimpleNamespace(is_ours=router_is_ours, address=SimpleNamespace(url=ROUTER))
        self.plan = SimpleNamespace(update_weights=True, name="default")
        self.without_slots: set[int] = set()
        self.failures: dict[int, Exception] = {}
        group = SimpleNamespace(
            engines=[f"handle{n}" for n in range(num_engines)],
            end=lambda n: self.calls.append(f"end {n}"),
            replace=self.replace,
            is_placed=lambda n: n not in self.without_slots,
        )
        self.group, kind = group, SimpleNamespace(worker_type="regular", takes_weights=True)
        self.seats = [Seat(self, kind, group, n, worker=Worker(f"ours{n}")) for n in range(num_engines)]
        self.seats += [seat_of(self, External(f"external{n}")) for n in range(external)]

    @property
    def lost(self) -> list[Any]:
        return [seat.engine for seat in self.seats if seat.is_lost]

    @property
    def external(self) -> list[Any]:
        return [seat.external for seat in self.seats if seat.external is not None]

    def replace(self, number: int) -> Worker | Exception:
        self.calls.append(f"start {number}")
        return self.failures.get(number) or Worker(f"new{number}")

    def take_from_router(self, url: str) -> None:
        self.calls.append(f"take {url}")

    def put_behind_router(self, worker: Worker) -> None:
        self.calls.append(f"put {worker.url}")


class External:
    """An engine of somebody else's."""

    def __init__(self, url: str) -> None:
        self.info = SimpleNamespace(worker=Worker(url), worker_type="regular")


def seat_of(model: Any, engine: Any, *, is_guest: bool = False) -> Seat:
    return Seat(model, external=engine, worker=engine.info.worker, is_guest=is_guest)


def value_of(value: Any, *_: Any) -> Any:
    """In the place of a wait: what there is to come, or its error."""
    if isinstance(value, Exception):
        raise value
    return value


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Addresses of external engines that answer."""
    found: set[str] = set()
    monkeypatch.setattr(module, "get", value_of)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    monkeypatch.setattr(module, "OUTAGES", Outages())
    monkeypatch.setattr(
        server_control, "why_unhealthy_sync", lambda url, **_: None if url in found else "connection refused"
    )
    return found


HEALTH_CHECK = {f"rollout_health_check_{name}": 1.0 for name in ("interval", "timeout", "first_wait")}


def replacements_of(model: Model, *, most: int = 10) -> Replacements:
    args = SimpleNamespace(**HEALTH_CHECK, accelerator="cpu", max_engine_restarts_per_hour=most)
    return Replacements(SimpleNamespace(models=[model]), args)  # type: ignore[arg-type]


def test_a_lost_engine_serves_again_when_another_has_its_weights() -> None:
    model = Model(2)
    one = replacements_of(model)
    one.lose(1, one.urls()[1], "it died")
    assert model.calls == ["take ours1", "end 1"] and len(model.lost) == 1
    guests = {"rollout/engines_joined": 0, "rollout/engines_left": 0}
    assert one.metrics() == guests | {
        "rollout/engines": 1,
        "rollout/engines_lost": 1,
        "rollout/engines_replaced": 0,
    }
    assert one.replace() == 1 and model.calls[2:] == ["start 1"] and not model.lost
    assert one.metrics()["rollout/engines"] == 1, "it has no weights yet"
    one.register()
    assert model.calls[3:] == ["put new1"]
    assert one.metrics() == guests | {
        "rollout/engines": 2,
        "rollout/engines_lost": 1,
        "rollout/engines_replaced": 1,
    }


def test_only_so_many_engines_are_started_within_an_hour(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(watches.time, "monotonic", lambda: now[0])
    model = Model(3)
    one = replacements_of(model, most=2)
    for number in range(3):
        one.lose(number, one.urls()[number], "it died")
    with caplog.at_level(logging.ERROR):
        assert one.replace() == 2
        assert one.replace() == 0
    said = [record.getMessage() for record in caplog.records if "per-hour 2" in record.getMessage()]
    assert len(said) == 1 and "1 place(s) stay empty" in said[0], "it is said once"
    assert len(model.lost) == 1 and one.urls() == {0: "new0", 1: "new1"}
    now[0] = 3601.0
    assert one.replace() == 1 and not model.lost


def test_an_external_engine_is_taken_back_when_it_answers_and_has_the_weights(answers: set[str]) -> None:
    model = Model(1, external=1)
    one = replacements_of(model)
    one.lose(1, one.urls()[1], "it does not answer")
    assert model.calls == ["take external0"], "it is not ours to end"
    assert one.replace() == 0 and model.lost == model.external
    answers.add("external0")
    assert one.replace() == 1 and not model.lost and model.calls == ["take external0"]
    one.register()
    assert model.calls == ["take external0", "put external0"]


def test_the_router_of_somebody_else_is_told_nothing_of_engines_of_somebody_else(answers: set[str]) -> None:
    model = Model(0, external=1, router_is_ours=False)
    one, before = replacements_of(model), 0
    one.lose(0, one.urls()[0], "it does not answer")
    assert one.count > before, "but the trainer sends it no weights"
    answers.add("external0")
    one.replace()
    one.register()
    assert model.calls == [] and not model.lost


def test_an_engine_whose_node_is_gone_keeps_its_place_empty_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PLACE_S", 0.2)
    model = Model(3)
    one = replacements_of(model, most=1)
    model.without_slots = {1}
    one.lose(1, one.urls()[1], "its node died")
    del model.calls[:]
    assert one.replace() == 0 and model.calls == [], "nothing is started where there is no room"
    assert "no room for 1 engine(s)" in caplog.text and "ours1" in caplog.text
    assert len(model.lost) == 1 and one.urls() == {0: "ours0", 2: "ours2"}
    monkeypatch.setattr(module, "PLACE_S", 3600.0)
    assert one.replace() == 0, "and nobody waits for the same slots a second time"
    model.without_slots = set()
    assert one.replace() == 1 and model.calls == ["start 1"] and not model.lost, "looking was no start"


def test_a_lost_place_without_slots_costs_another_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLACE_S", 0.0)
    model = Model(3)
    one = replacements_of(model, most=1)
    model.without_slots = {0}
    one.lose(0, one.urls()[0], "its node died")
    one.lose(1, one.urls()[1], "it died")
    assert one.replace() == 1 and one.urls() == {1: "new1", 2: "ours2"}


@pytest.mark.parametrize("error", [ActorFailure("no memory"), ActorLost("it died"), TimeoutError("too long")])
def test_an_engine_that_does_not_start_is_tried_again_while_others_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    model = Model(3)
    one = replacements_of(model, most=3)
    model.failures = {0: error}
    before = one.count
    one.lose(0, one.urls()[0], "it died")
    one.lose(1, one.urls()[1], "it died")
    del model.calls[:]
    late = isinstance(error, TimeoutError)
    if late:  # `get` says so at each look, until the deadline
        monkeypatch.setattr(module, "START_MARGIN_S", -module.START_DEADLINE_S["cpu"])
    assert one.replace() == 1 and model.calls == ["start 0", "start 1", "end 0"]
    assert "tried again" in caplog.text and ("took too long" if late else str(error)) in caplog.text
    assert len(model.lost) == 1 and one.urls() == {1: "new1", 2: "ours2"} and one.count > before
    model.failures = {}
    assert one.replace() == 1 and not model.lost
    one.lose(0, one.urls()[0], "it died again")
    assert one.replace() == 0, "a start that fails counts in its hour"


def test_a_model_without_any_engine_ends_the_run_when_none_starts() -> None:
    model = Model(2)
    one = replacements_of(model)
    model.without_slots, model.failures = {0, 1}, {n: ActorFailure("no memory") for n in range(2)}
    one.lose(0, one.urls()[0], "it died")
    one.lose(1, one.urls()[1], "it died")
    with pytest.raises(ActorFailure, match=r"no engine of model default is left.*per-hour 10.*no memory"):
        one.replace()
    assert sum(call.startswith("start") for call in model.calls) == 10, "each try counts, and all are made"


def failed_requests(url: str) -> str:
    """How a request to a router fails now; empty while it waits or is sent."""

    async def ask() -> None:
        await asyncio.wait_for(module.OUTAGES.over(url), 0.01)

    try:
        asyncio.run(ask())
    except HttpError as error:
        return str(error)
    except TimeoutError:
        return ""
    return ""


def test_requests_wait_for_the_only_engine_until_another_has_its_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(1)
    one = replacements_of(model)
    model.failures = {0: ActorFailure("the GPU's memory is not free yet")}
    one.lose(0, one.urls()[0], "it died")
    assert "the others" not in caplog.text and "the last of model default" in caplog.text
    assert module.OUTAGES.is_on(f"{ROUTER}/generate") and one.without_engine() == [model]
    start, tries = model.replace, []

    def succeed_at_third_try(number: int) -> Worker | Exception:
        tries.append(number)
        if len(tries) == 3:
            model.failures = {}
        return start(number)

    model.group.replace = succeed_at_third_try
    assert one.replace() == 1 and len(tries) == 3
    assert one.without_engine() == [model] and module.OUTAGES.is_on(ROUTER), "it has no weights yet"
    one.register()
    assert not module.OUTAGES.is_on(ROUTER) and one.without_engine() == []


@pytest.mark.parametrize("most", [0, 2])
def test_requests_fail_at_once_when_no_engine_may_be_started_any_more(most: int) -> None:
    model = Model(1)
    model.failures = {0: ActorFailure("no memory")}
    one = replacements_of(model, most=most)
    one.lose(0, one.urls()[0], "it died")
    with pytest.raises(ActorFailure, match=f"no engine of model default is left.*per-hour {most}"):
        one.replace()
    assert "no engine of model default is left" in failed_requests(f"{ROUTER}/generate")
    assert model.calls.count("start 0") == most


def test_the_place_of_the_only_engine_is_filled_before_that_of_another() -> None:
    many, lone = Model(2), Model(1)
    args = SimpleNamespace(**HEALTH_CHECK, accelerator="cpu", max_engine_restarts_per_hour=1)
    one = Replacements(SimpleNamespace(models=[many, lone]), args)  # type: ignore[arg-type]
    one.lose(0, one.urls()[0], "it died")
    one.lose(2, one.urls()[2], "it died")
    assert one.replace() == 1 and lone.calls[-1] == "start 0" and "start 0" not in many.calls


def test_an_external_engine_that_is_the_only_one_is_given_time_to_answer(
    monkeypatch: pytest.MonkeyPatch, answers: set[str]
) -> None:
    monkeypatch.setattr(module, "EXTERNAL_S", 0.0)
    model = Model(0, external=1)
    one = replacements_of(model)
    one.lose(0, one.urls()[0], "it does not answer")
    with pytest.raises(ActorFailure, match="no engine of model default is left: none has answered"):
        one.replace()
    answers.add("external0")
    assert one.replace() == 1


def test_an_engine_that_its_router_does_not_take_is_lost_and_ends_nothing() -> None:
    model = Model(2)
    one = replacements_of(model)
    one.lose(1, one.urls()[1], "it died")
    one.replace()

    def refuse(worker: Worker) -> None:
        raise HttpError("connection refused")

    model.put_behind_router = refuse  # type: ignore[method-assign]
    one.register()
    assert one.urls() == {0: "ours0"} and one.counts["rollout/engines_lost"] == 2


def test_an_engine_is_lost_by_its_handle_and_one_that_cannot_be_replaced_is_not_known() -> None:
    model = Model(2)
    one = replacements_of(model)
    assert one.lose_engine(model.group.engines[1], "it released no memory")
    assert one.urls() == {0: "ours0"}
    assert not one.lose_engine("prefill", "it released no memory")


def test_an_answer_that_was_due_of_a_lost_engine_does_not_cost_the_one_in_its_place() -> None:
    """Two looks at once: the second hears of the loss when the first has had the engine replaced."""
    one = replacements_of(Model(2))
    one.lose(1, "ours1", "it died")
    one.replace()
    one.lose(1, "ours1", "it did not answer")
    assert one.urls() == {0: "ours0", 1: "new1"} and one.counts["rollout/engines_lost"] == 1


def test_requests_of_every_model_wait_while_memory_changes_hands() -> None:
    model = Model(1)
    one = replacements_of(model)
    one.hold_requests()
    assert module.OUTAGES.is_on(ROUTER)
    one.register()
    assert not module.OUTAGES.is_on(ROUTER)


def test_an_engine_whose_node_dies_before_it_is_there_is_waited_for_no_longer_than_for_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PLACE_S", 0.2)
    model = Model(2)
    one = replacements_of(model)
    one.lose(0, one.urls()[0], "its node does not answer")

    def never(starting: Any, what: str, deadline_s: float) -> None:
        model.without_slots = {0}  # Ray notices after a while
        threading.Event().wait(0.05)
        raise TimeoutError

    monkeypatch.setattr(module, "get", never)
    begun = time.monotonic()
    assert one.replace() == 0 and time.monotonic() - begun < 10
    assert "its node is gone, and no other has free slots" in caplog.text


def test_a_guest_serves_once_the_driver_let_it_in_and_it_has_weights() -> None:
    model = Model(1)
    one = replacements_of(model)
    guest = External("guest")
    one.join(seat_of(model, guest, is_guest=True))
    one.register()
    assert model.calls == [] and one.is_waiting("guest"), "a sync that had begun before it came has not reached it"
    before = one.count
    assert one.admit() == [guest] and model.external == [guest] and one.count > before
    one.register()
    assert model.calls == ["put guest"] and one.is_waiting("guest") is False
    assert one.metrics()["rollout/engines"] == 2 and one.metrics()["rollout/engines_joined"] == 1


def test_a_guest_that_leaves_gets_no_requests_and_no_weights_and_is_no_loss() -> None:
    model = Model(1)
    one = replacements_of(model)
    guest = External("guest")
    one.join(seat_of(model, guest, is_guest=True))
    one.admit()
    one.register()
    before = one.count
    one.leave("guest")
    assert model.calls == ["put guest", "take guest"] and model.external == [] and one.count > before
    assert one.is_waiting("guest") is None and one.urls() == {0: "ours0"} and one.replace() == 0
    found = one.metrics()
    assert (found["rollout/engines_left"], found["rollout/engines_lost"]) == (1, 0)


def test_a_guest_that_is_lost_is_not_replaced_and_one_that_leaves_at_the_door_never_came() -> None:
    model = Model(1)
    one = replacements_of(model)
    for name in ("first", "second"):
        guest = External(name)
        one.join(seat_of(model, guest, is_guest=True))
    one.leave("second")
    one.admit()
    one.register()
    one.lose(1, "first", "it died")
    assert model.calls == ["put first", "take first"] and one.replace() == 0 and one.urls() == {0: "ours0"}
    assert one.metrics()["rollout/engines_lost"] == 1
    one.lose(1, "first", "once more")
    assert one.metrics()["rollout/engines_lost"] == 1
