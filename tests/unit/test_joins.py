"""Engines that come and go: what they say to a run, and what it answers."""

from __future__ import annotations

import argparse
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils import join
from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.backends.sglang_utils.join import DRAINING, GONE, JOINED, REFUSED, SERVING, Guest, GuestBook, JoinRequest
from slime.backends.sglang_utils.server_control import Worker
from slime.ray.rollout import joins as module
from slime.ray.rollout.joins import EngineJoins
from slime.utils.errors import UsageError


class Places:
    """Stands for the run's places of engines: who is there, and whether it has weights."""

    def __init__(self) -> None:
        self.waits: dict[str, bool] = {}

    def join(self, seat: Any) -> None:
        assert seat.is_guest
        self.waits[seat.worker.url] = True

    def leave(self, url: str) -> None:
        del self.waits[url]

    def is_waiting(self, url: str) -> bool | None:
        return self.waits.get(url)

    def urls(self) -> dict[int, str]:
        return {0: "http://own:1"}


@pytest.fixture
def places() -> Places:
    return Places()


@pytest.fixture
def joins(tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch) -> EngineJoins:
    servers = SimpleNamespace(models=[SimpleNamespace(groups=[])], engines=["own"])
    args = SimpleNamespace(output_dir=str(tmp_path), hf_checkpoint="")
    monkeypatch.setattr(
        module,
        "discover_external_engines",
        lambda urls, *_, **__: [ExternalEngineInfo(urls[0], 1, worker_type="regular")],
    )
    monkeypatch.setattr(module, "external_engine_problems", lambda *_: [])
    return EngineJoins(servers, places, args, [])  # type: ignore[arg-type]


def test_an_engine_joins_serves_drains_and_goes(
    tmp_path: Path, joins: EngineJoins, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    book, url = GuestBook(tmp_path), "http://guest:1"
    book.ask("g", JoinRequest(url, "secret"))
    joins.tick()
    assert book.answer_to("g") == (JOINED, "")
    places.waits[url] = False
    joins.tick()
    assert book.answer_to("g")[0] == SERVING
    book.ask("g", JoinRequest(url, "secret", wants_to_leave=True))
    busy = iter([False, True])
    monkeypatch.setattr(module, "_is_idle", lambda _: next(busy))
    joins.tick()
    assert book.answer_to("g")[0] == DRAINING and places.waits == {}
    joins.tick()
    assert book.answer_to("g")[0] == DRAINING, "it still has requests"
    joins.tick()
    assert book.answer_to("g")[0] == GONE


def test_an_engine_that_is_lost_is_told_so(tmp_path: Path, joins: EngineJoins, places: Places) -> None:
    book, url = GuestBook(tmp_path), "http://guest:1"
    book.ask("g", JoinRequest(url))
    joins.tick()
    places.waits.clear()
    joins.tick()
    assert book.answer_to("g") == (GONE, "it gave no answer, and the run goes on without it")


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"url": "http://own:1"}, "one of the run's engines already"),
        ({"worker_type": "prefill"}, "only regular ones may join"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path,
    joins: EngineJoins,
    places: Places,
    monkeypatch: pytest.MonkeyPatch,
    info: dict[str, Any],
    reason: str,
) -> None:
    found = ExternalEngineInfo(**{"url": "http://guest:1", "num_gpus": 1} | info)
    monkeypatch.setattr(module, "discover_external_engines", lambda *_, **__: [found])
    book = GuestBook(tmp_path)
    book.ask("g", JoinRequest(found.url))
    joins.tick()
    state, why = book.answer_to("g")
    assert state == REFUSED and reason in why and places.waits == {}


def test_what_engines_and_the_run_say_is_for_this_user_alone(tmp_path: Path, joins: EngineJoins) -> None:
    book = GuestBook(tmp_path)
    book.ask("g", JoinRequest("http://guest:1", "secret"))
    joins.tick()
    files = list(book.folder.iterdir())
    assert {path.name for path in files} == {"run.json", "g.request.json", "g.answer.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert "secret" not in repr(book.requests())


def test_a_guest_stays_until_it_is_to_leave_and_waits_for_its_last_requests(tmp_path: Path) -> None:
    book = GuestBook(tmp_path)
    book.open()
    guest = Guest(book, JoinRequest("http://guest:1"))
    book.answer(guest.name, JOINED)
    assert guest.arrive() == JOINED
    staying = threading.Thread(target=lambda: found.append(guest.stay(lambda: None)))
    found: list[str] = []
    staying.start()
    guest.leaves.set()
    staying.join(10)
    assert found == [""]
    assert not guest.leave(0.01), "the run has not let it go yet"
    assert book.requests()[guest.name].wants_to_leave
    book.answer(guest.name, GONE)
    assert guest.leave(1.0)


def test_a_guest_sees_that_the_run_its_server_or_its_place_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "LOOK_S", 0.01)
    book = GuestBook(tmp_path)
    book.open()
    guest = Guest(book, JoinRequest("http://guest:1"))
    assert guest.stay(lambda: "engine 1 has ended") == "engine 1 has ended"
    book.answer(guest.name, GONE, "it gave no answer")
    assert guest.stay(lambda: None) == "it gave no answer"
    book.answer(guest.name, SERVING)
    book.close()
    assert guest.stay(lambda: None) == "the run has ended"
    book.open()
    monkeypatch.setattr(join, "SILENT_S", 0.0)
    assert guest.stay(lambda: None) == "the run has ended", "nobody beats any more"


def test_an_engine_has_a_seed_and_places_of_its_own_and_else_the_runs_arguments() -> None:
    launch = {"model_path": "m", "host": "127.0.0.1", "port": 1, "nccl_port": 2, "random_seed": 1, "base_gpu_id": 3}
    values = [join.server_values(launch, "10.0.0.2", 30000, 1) for _ in range(2)]
    assert values[0]["random_seed"] != values[1]["random_seed"]
    assert values[0] | {"random_seed": 0} == {
        "model_path": "m", "host": "10.0.0.2", "port": 30000, "nccl_port": 30001, "random_seed": 0, "base_gpu_id": 1,
    }  # fmt: skip
    with pytest.raises(UsageError, match="give its address with --url"):
        join.server_values(launch | {"nnodes": 2}, "10.0.0.2", 30000, 0)


def test_a_run_that_takes_no_engines_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = join.build_parser().parse_args(["--run", str(tmp_path)])
    with pytest.raises(UsageError, match="--elastic-rollout"):
        join.visit(options)
    GuestBook(tmp_path).open()
    with pytest.raises(UsageError, match=r"it has started no engine .*--url"):
        join.visit(options)


def test_a_run_that_gives_no_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "ANSWER_S", 0.01)
    GuestBook(tmp_path).open()
    options = argparse.Namespace(run=tmp_path, url="http://guest:1", drain_seconds=1.0)
    with pytest.raises(UsageError, match="has the run ended"):
        join.visit(options)
    assert [path.name for path in GuestBook(tmp_path).folder.iterdir()] == ["run.json"], "it leaves nothing behind"


class FakeRay:
    """Stands for Ray, and for the engine that is started on a node: tests say what the nodes and the engine do.

    A placement group is its number; the one of the run's own engines is 0.
    """

    def __init__(self) -> None:
        self.util = self
        self.free, self.draining, self.has_places, self.is_up = 1.0, dict[str, int](), True, True
        self.placements: list[int] = []
        self.ended: list[int] = []
        self.launched = 0

    # ---- Ray

    def available_resources(self) -> dict[str, float]:
        return {"slime_slot": self.free}

    def placement_group(self, bundles: Any, strategy: str) -> Any:
        self.placements.append(len(self.placements) + len(self.ended) + 1)
        can_place, self.free = self.free > 0 and not self.draining, 0.0
        return SimpleNamespace(number=self.placements[-1], wait=lambda timeout_seconds: can_place)

    def remove_placement_group(self, placement: Any) -> None:
        self.placements.remove(placement.number)
        self.ended.append(placement.number)
        self.free = 1.0

    def placement_group_table(self, placement: Any) -> dict[str, Any]:
        state = "CREATED" if self.has_places or placement != 0 else "RESCHEDULING"
        return {"state": state, "bundles_to_node_id": {0: "new"}}

    def nodes(self) -> list[dict[str, str]]:
        return [{"NodeID": "new", "NodeManagerAddress": "10.0.0.9"}]

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (refs, []) if self.is_up else ([], refs)

    def get_draining_nodes(self) -> dict[str, int]:
        return self.draining

    # ---- the engine

    def launch(self) -> list[str]:
        self.launched += 1
        return ["starting"]

    def shutdown(self) -> None:
        self.launched -= 1


@pytest.fixture
def nodes(joins: EngineJoins, monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "ray_state", fake)
    monkeypatch.setattr(module, "get", lambda *_: Worker("http://new:1"))
    monkeypatch.setattr(joins, "_slots", [SimpleNamespace(group=0)])
    monkeypatch.setattr(joins, "_group", lambda *_: fake)
    monkeypatch.setattr(joins._args, "accelerator", "cpu", raising=False)
    kind = SimpleNamespace(takes_weights=True, num_gpus_per_engine=1)
    monkeypatch.setattr(joins._model, "groups", [(kind, "own")])
    return fake


def test_an_engine_on_a_new_node_leaves_when_ray_drains_it_and_ends_with_its_last_request(
    joins: EngineJoins, places: Places, nodes: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins.tick()
    assert nodes.launched == 1 and places.waits == {}
    joins.tick()
    assert places.waits == {"http://new:1": True}
    places.waits["http://new:1"] = False
    nodes.draining = {"new": 0}
    busy = iter([False, False, True])
    monkeypatch.setattr(module, "_is_idle", lambda _: next(busy))
    for _ in range(2):
        joins.tick()
        assert places.waits == {} and nodes.launched == 1, "no more requests; those that it has go on"
    joins.tick()
    assert nodes.launched == 0 and nodes.placements == []
    joins.tick()
    assert nodes.launched == 0, "the slot that is free now is on the node that goes"


def test_an_engine_that_starts_on_a_node_that_is_drained_never_joins(
    joins: EngineJoins, places: Places, nodes: FakeRay
) -> None:
    nodes.is_up = False
    joins.tick()
    nodes.draining = {"new": 0}
    joins.tick()
    assert nodes.launched == 0 and places.waits == {} and nodes.placements == []


def test_an_engine_on_a_slot_that_the_runs_own_places_need_leaves(
    joins: EngineJoins, places: Places, nodes: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins.tick()
    joins.tick()
    nodes.has_places = False
    monkeypatch.setattr(module, "_is_idle", lambda _: True)
    joins.tick()
    assert nodes.launched == 0 and places.waits == {} and nodes.free == 1.0
    joins.tick()
    assert nodes.launched == 0, "the room is not taken again before they are back"
