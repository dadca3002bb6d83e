"""Models, routers and engines as a whole, without Ray: fakes stand for routers and groups of engines."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo
from slime.backends.sglang_utils.server_control import Worker
from slime.config.sglang.topology import EngineGroupPlan, ModelPlan
from slime.ray.rollout import servers as module
from slime.ray.rollout.router import Router, RouterAddress
from slime.ray.rollout.servers import ModelServers, RolloutServers
from slime.ray.utils import ActorFailure


class FakeRouter:
    def __init__(self, port: int, events: list[str], *, is_ours: bool = True) -> None:
        self.address, self.is_ours, self._events = RouterAddress("127.0.0.1", port), is_ours, events

    def launch(self) -> None:
        self._events.append(f"router {self.address.port}")

    def wait_ready(self) -> None:
        self._events.append(f"router {self.address.port} answers")

    def shutdown(self) -> None:
        self._events.append(f"end router {self.address.port}")


class FakeGroup:
    """Engines are names; a launch is answered with the workers themselves instead of references to them."""

    def __init__(self, names: list[str], worker_type: str, events: list[str]) -> None:
        self.engines, self._type, self._events = names, worker_type, events

    def launch(self, encoder_urls: list[str]) -> list[Worker]:
        self._events.append(f"{self._type} {' '.join(self.engines)} with {encoder_urls}")
        return [Worker(f"http://{name}", self._type) for name in self.engines]

    def shutdown(self) -> None:
        self._events.append(f"end {' '.join(self.engines)}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(module, "get", lambda refs, what, deadline_s: list(refs))
    control = module.server_control
    monkeypatch.setattr(
        control, "register_worker_sync", lambda url, w: log.append(f"{w.url} {w.worker_type} -> {url[-1]}")
    )
    monkeypatch.setattr(control, "remove_worker_sync", lambda url, w, **_: log.append(f"remove {w}"))
    monkeypatch.setattr(control, "list_workers_sync", lambda url: ["http://ext0"])
    return log


def model(events: list[str], port: int, name: str, *groups: Any, update: bool = True, ours: bool = True) -> Any:
    plans = tuple(EngineGroupPlan(kind, size * len(names), size, 0) for kind, names, size in groups)
    pairs = [(p, FakeGroup(names, kind, events)) for p, (kind, names, _) in zip(plans, groups, strict=True)]
    router: Any = FakeRouter(port, events, is_ours=ours)
    return ModelServers(ModelPlan(name, "/m", update, plans), router, pairs)  # type: ignore[arg-type]


def run_args(*external: ExternalEngineInfo) -> Namespace:
    return Namespace(accelerator="cpu", rollout_external=bool(external), rollout_external_engine_infos=list(external))


def test_encoders_start_first_and_a_router_that_cannot_start_is_known_before_the_engines_are_waited_for(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "get", lambda refs, what, deadline_s: events.append(what) or list(refs))
    policy = model(events, 1, "policy", ("encoder", ["v0", "v1"], 1), ("regular", ["a"], 1))
    teacher = model(events, 2, "teacher", ("regular", ["t"], 1), update=False)
    RolloutServers(run_args(), [policy, teacher]).launch()
    assert events == [
        "router 1",
        "router 2",
        "encoder v0 v1 with []",
        "the start of 2 engine(s)",
        "regular a with ['http://v0', 'http://v1']",  # the encoders of its own model
        "regular t with []",
        "router 1 answers",
        "router 2 answers",
        "the start of 2 engine(s)",
        "http://a regular -> 1",  # encoders are behind no router
        "http://t regular -> 2",
    ]


def test_weights_go_to_the_engines_that_take_them_each_with_its_size(events: list[str]) -> None:
    groups = [("encoder", ["v"], 1), ("prefill", ["p0", "p1"], 2), ("decode", ["d"], 4)]
    policy = model(events, 1, "policy", *groups)
    teacher = model(events, 2, "teacher", ("regular", ["t"], 1), update=False)
    servers = RolloutServers(run_args(), [policy, teacher])
    assert servers.updatable == [("p0", 2), ("p1", 2), ("d", 4)]
    assert servers.engines == ["v", "p0", "p1", "d", "t"]


def test_memory_is_released_by_the_engines_on_the_trainers_gpus_only(events: list[str]) -> None:
    class Engine:  # in the place of a Ray actor: notes what it is asked
        def __init__(self, name: str) -> None:
            self.name = name

        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *values: events.append(f"{self.name} {method} {values}") or [])

    policy = model(events, 1, "policy", ("encoder", ["v"], 1), ("prefill", ["p0", "p1"], 2), ("decode", ["d"], 4))
    judge = model(events, 2, "reward", ("regular", ["r"], 1), update=False)
    for seat in judge.seats:
        seat.kind = replace(seat.kind, first_slot=9)  # behind the 9 of the policy
    for _, group in [*policy.groups, *judge.groups]:
        group.engines = [Engine(name) for name in group.engines]
    shared = {"offload_rollout": True, "colocate": True, "rollout_num_gpus": 9}
    for changes, asked in (({}, ["p0", "p1", "d"]), ({"colocate": False}, []), ({"offload_rollout": False}, [])):
        events.clear()
        servers = RolloutServers(Namespace(**(vars(run_args()) | shared | changes)), [policy, judge])
        assert servers.release_memory() == servers.resume_memory(["weights"]) == []
        assert events == [f"{name} release_memory_occupation ()" for name in asked] + [
            f"{name} resume_memory_occupation (['weights'],)" for name in asked
        ]


def test_the_others_move_their_memory_where_an_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ActorFailure("connection refused")

    def value_of(answer: Any, *_: Any) -> None:  # in the place of a wait
        if isinstance(answer, Exception):
            raise answer

    monkeypatch.setattr(module, "get", value_of)
    events: list[str] = []
    policy = model(events, 1, "policy", ("regular", ["a", "b", "c"], 1))
    group = policy.groups[0][1]

    class Engine:  # in the place of a Ray actor
        def __init__(self, answer: Any) -> None:
            self.release_memory_occupation = SimpleNamespace(remote=lambda: answer)

    group.engines = [Engine(None), Engine(gone), Engine(None)]
    shared = {"offload_rollout": True, "colocate": True, "rollout_num_gpus": 3}
    servers = RolloutServers(Namespace(**(vars(run_args()) | shared)), [policy])
    assert servers.release_memory() == [(group.engines[1], gone)]


def test_prefill_and_decode_engines_are_registered_as_what_they_are(events: list[str]) -> None:
    RolloutServers(run_args(), [model(events, 1, "p", ("prefill", ["p"], 1), ("decode", ["d"], 1))]).launch()
    assert events[-2:] == ["http://p prefill -> 1", "http://d decode -> 1"]


def test_the_first_models_router_is_the_default_and_each_is_found_by_its_name(events: list[str]) -> None:
    from slime.rollout.sampling.engine_request import get_model_url

    args = run_args()
    RolloutServers(args, [model(events, 1, "policy"), model(events, 2, "teacher")]).publish()
    assert (args.sglang_router_ip, args.sglang_router_port) == ("127.0.0.1", 1)
    assert args.sglang_model_routers == {"policy": ("127.0.0.1", 1), "teacher": ("127.0.0.1", 2)}
    assert get_model_url(args, "teacher", "/classify") == "http://127.0.0.1:2/classify"
    assert get_model_url(args, "unknown") == "http://127.0.0.1:1/generate"


def test_a_router_that_is_not_ours_loses_only_the_engines_that_we_put_there(events: list[str]) -> None:
    known, new = ExternalEngineInfo("http://ext0", 2), ExternalEngineInfo("http://ext1", 1)
    servers = RolloutServers(run_args(known, new), [model(events, 1, "policy", ours=False)])
    servers.launch()
    assert [(type(engine), size) for engine, size in servers.updatable] == [(ExternalEngine, 2), (ExternalEngine, 1)]
    events.clear()
    servers.shutdown()
    assert events == ["remove http://ext1", "end router 1"]


def test_engines_behind_our_own_router_end_with_it(events: list[str]) -> None:
    servers = RolloutServers(run_args(), [model(events, 1, "policy", ("regular", ["a"], 1))])
    servers.launch()
    events.clear()
    servers.shutdown()
    assert events == ["end router 1", "end a"]


def test_a_router_that_does_not_end_keeps_no_engine_from_being_ended(events: list[str]) -> None:
    def hang() -> None:
        raise TimeoutError("it does not end")

    models = [model(events, port, name, ("regular", [name], 1)) for port, name in ((1, "a"), (2, "b"))]
    for one in models:
        one.router.shutdown = hang
    with pytest.raises(TimeoutError, match="it does not end"):
        RolloutServers(run_args(), models).shutdown()
    assert sorted(events) == ["end a", "end b"]


def test_only_the_first_models_router_is_the_one_of_the_flags(tmp_path: Path) -> None:
    args = Namespace(sglang_router_ip="10.0.0.7", sglang_router_port=3000)
    first, second = (
        Router(args, host="127.0.0.1", log_path=tmp_path / "log", is_first=is_first) for is_first in (True, False)
    )
    assert (first.is_ours, first.address) == (False, RouterAddress("10.0.0.7", 3000))
    assert (second.is_ours, second.address) == (True, RouterAddress("127.0.0.1", 0))


def taking(engines: list[Any]) -> list[Any]:
    """Places of engines that take weights."""
    return [SimpleNamespace(engine=engine, num_gpus=1, takes_weights=True) for engine in engines]


def test_engines_of_every_kind_go_on_after_a_sync_whose_trainer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are Ray actors, external ones plain objects; one that is gone keeps nobody waiting."""
    gone_on: list[str] = []

    class OneOfOurs:
        class continue_generation:
            @staticmethod
            def remote() -> str:
                return "ours"

    def get(ref: str, what: str, deadline_s: float) -> None:
        gone_on.append(ref)
        raise RuntimeError("it is gone")

    external = ExternalEngine(ExternalEngineInfo("http://ext0", 1), rank=1)
    monkeypatch.setattr(module, "get", get)
    monkeypatch.setattr(ExternalEngine, "continue_generation", lambda engine: gone_on.append(engine.url))
    model = SimpleNamespace(there=taking([OneOfOurs(), external]))
    RolloutServers(Namespace(), [model]).let_go_on()  # type: ignore[list-item]
    assert gone_on == ["ours", "http://ext0"]


def test_every_engine_that_drafts_is_told_to_stop_and_one_that_does_not_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """--elastic-rollout brings external engines, plain objects, beside ours, which are Ray actors."""
    told: list[str] = []

    class OneOfOurs:
        class stop_drafts:
            @staticmethod
            def remote() -> str:
                return "ours"

    def get(ref: str, what: str, deadline_s: float) -> None:
        told.append(ref)
        raise RuntimeError("it is gone")

    def stop(engine: ExternalEngine) -> None:
        told.append(engine.url)
        raise RuntimeError("engine 1 refused weights_checker")

    infos = [ExternalEngineInfo("http://ext0", 1, drafts=True), ExternalEngineInfo("http://ext1", 1)]
    monkeypatch.setattr(module, "get", get)
    monkeypatch.setattr(ExternalEngine, "stop_drafts", stop)
    engines = [OneOfOurs(), *(ExternalEngine(info, rank=i + 1) for i, info in enumerate(infos))]
    model = SimpleNamespace(there=taking(engines))
    RolloutServers(Namespace(), [model]).stop_drafts()  # type: ignore[list-item]
    assert told == ["ours", "http://ext0"]  # the other one does not draft
    assert [record.getMessage() for record in caplog.records] == [
        "an engine may still draft: it is gone",
        "an engine may still draft: engine 1 refused weights_checker",
    ]
