"""How an engine actor deals with a snatched port, and how many threads an engine gets; no server is started."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, build_server_args, cores_of_ranks
from slime.backends.sglang_utils.sglang_engine import EngineStartError
from slime.ray.placement import Slot
from slime.ray.rollout import server_group
from slime.ray.rollout.router import Router, RouterAddress, router_values
from slime.ray.rollout.server_group import SHOW_ALL_GPUS, EngineActor, nodes_of_engine, threads_per_engine
from slime.utils.errors import UsageError


class FakeEngine(EngineActor):
    """Starts as the script says; the rest, ports included, is real."""

    def __init__(self, log_path: Path, *outcomes: Exception | None, worker_type: str = "regular") -> None:
        args = Namespace(accelerator="cpu", seed=0, trust_remote_code=False, params_dtype="float32")
        args.update_weights_in_flight = args.use_rollout_routing_replay = args.freeze_vision_tower = False
        spec = EngineSpec(0, "/models/m", worker_type=worker_type)
        super().__init__(args, spec, host="127.0.0.1", log_path=str(log_path), num_threads=1)
        self.outcomes = list(outcomes)
        self.ports: list[int] = []

    def start(self, deadline_s: float) -> str:
        self.ports.append(self._server_kwargs["port"])
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return self.url


def test_a_snatched_port_leads_to_a_start_on_others(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "log", EngineStartError("taken", True), None)
    worker = engine.launch(10)
    assert len(set(engine.ports)) == 2 and worker.url == f"http://127.0.0.1:{engine.ports[1]}"


def test_any_other_failure_is_final(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "log", EngineStartError("no such model"), None)
    with pytest.raises(EngineStartError, match="no such model"):
        engine.launch(10)
    assert len(engine.ports) == 1


def test_it_gives_up_after_three_snatched_ports(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "log", *[EngineStartError(f"taken {i}", True) for i in range(9)])
    with pytest.raises(EngineStartError, match="taken 2"):
        engine.launch(10)


@pytest.mark.parametrize(
    ("num_bytes", "cores", "engines", "threads"),
    [(1000, 8, 1, 1), (10**9, 8, 1, 8), (10**9, 8, 3, 2), (10**9, 2, 4, 1)],
)
def test_a_large_model_gets_its_share_of_the_cores_and_a_small_one_one(
    tmp_path: Path, num_bytes: int, cores: int, engines: int, threads: int
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)  # sparse
    assert threads_per_engine(tmp_path, cores, engines) == threads


def test_router_flags_override_ours_but_not_the_address() -> None:
    overrides: dict[str, Any] = {"policy": "round_robin", "disable_circuit_breaker": True, "port": 1}
    args = Namespace(sglang_router_request_timeout_secs=77, router_overrides=overrides)
    values = router_values(args, RouterAddress("127.0.0.1", 15000), prometheus_port=15001)
    expected = {"policy": "round_robin", "disable_circuit_breaker": True, "port": 15000, "request_timeout_secs": 77}
    assert {name: values[name] for name in expected} == expected


def test_the_values_are_fields_of_the_installed_router() -> None:
    import dataclasses

    from sglang_router.router_args import RouterArgs

    args = Namespace(sglang_router_request_timeout_secs=77, router_overrides={})
    values = router_values(args, RouterAddress("127.0.0.1", 15000), prometheus_port=15001)
    assert set(values) <= {field.name for field in dataclasses.fields(RouterArgs)}


def test_only_the_router_of_disaggregated_engines_separates_prefill_from_decoding() -> None:
    args, address = Namespace(sglang_router_request_timeout_secs=77, router_overrides={}), RouterAddress("h", 1)
    assert "pd_disaggregation" not in router_values(args, address, prometheus_port=2)
    assert router_values(args, address, prometheus_port=2, has_pd=True)["pd_disaggregation"] is True


def test_an_engine_says_what_a_router_is_to_know_of_it(tmp_path: Path) -> None:
    prefill = FakeEngine(tmp_path / "log", None, worker_type="prefill").launch(10)
    assert prefill.worker_type == "prefill" and prefill.bootstrap_port not in (None, int(prefill.url[-5:]))
    assert FakeEngine(tmp_path / "log", None, worker_type="decode").launch(10).bootstrap_port is None


def test_an_address_of_ip_version_6_is_bracketed() -> None:
    assert RouterAddress("::1", 80).url == "http://[::1]:80"


def test_the_start_error_survives_the_pickling_that_ray_does() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(EngineStartError("engine 0 ended", True)))
    assert str(error) == "engine 0 ended" and error.port_taken


def test_a_router_that_runs_already_is_used_and_not_started(tmp_path: Path) -> None:
    args = Namespace(sglang_router_ip="10.0.0.7", sglang_router_port=3000)
    router = Router(args, host="127.0.0.1", log_path=tmp_path / "router.log")
    router.launch()
    assert (router.is_ours, router.address.url) == (False, "http://10.0.0.7:3000")
    assert not any(tmp_path.iterdir())
    ours = Namespace(sglang_router_ip=None, sglang_router_port=3000)
    router = Router(ours, host="127.0.0.1", log_path=tmp_path / "router.log")
    assert (router.is_ours, router.address.url) == (True, "http://127.0.0.1:3000")


@pytest.mark.parametrize("kind", ["CUDA", "HIP"])
def test_an_engine_sees_all_gpus_that_ray_was_given_and_starts_at_its_own(monkeypatch, kind: str) -> None:
    from ray._private.accelerators import amd_gpu, nvidia_gpu

    # Ray reads the variables by these names; a new name would leave an engine of two GPUs with one.
    modules = {"CUDA": nvidia_gpu, "HIP": amd_gpu}
    assert vars(modules[kind])[f"NOSET_{kind}_VISIBLE_DEVICES_ENV_VAR"] in SHOW_ALL_GPUS
    for name in modules:
        monkeypatch.delenv(f"{name}_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(server_group.ray, "get_gpu_ids", lambda: ["6"])
    assert server_group.device_arguments("cuda") == {"base_gpu_id": 6}
    monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", "4,5,6,7")
    assert server_group.device_arguments("cuda") == {"base_gpu_id": 2}
    assert server_group.device_arguments("cpu") == {}


def test_the_slots_of_an_engine_are_shared_out_over_nodes_evenly_or_not_at_all() -> None:
    slots = [Slot(None, bundle, node) for bundle, node in enumerate("aabbbb")]
    assert [slot.bundle for slot in nodes_of_engine(slots[:4], "engine 0")] == [0, 2]
    assert [slot.bundle for slot in nodes_of_engine(slots[2:], "engine 0")] == [2]
    with pytest.raises(UsageError, match="engine 7 of 5 GPUs .* would have 1 on a, 4 on b, but it takes as many"):
        nodes_of_engine(slots[1:], "engine 7")


def test_the_log_of_an_engine_that_was_there_before_does_not_end_the_next_start(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "log")
    engine.log_path.write_text("Received sigquit from a child process\n")
    engine._log_begin = engine.log_path.stat().st_size
    engine.process = Namespace(poll=lambda: None)  # runs
    engine.check_alive()
    with engine.log_path.open("a") as log:
        log.write("Received sigquit from a child process\n")
    with pytest.raises(EngineStartError, match="failed before it was healthy"):
        engine.check_alive()


@pytest.mark.parametrize(
    ("failure", "message", "is_port_taken"),
    [
        (RayTaskError("check", "", EngineStartError("its ranks ended", True)), "node 1 of engine 0: its", True),
        (GetTimeoutError("silence"), "node 1 of engine 0 is lost: silence", False),
    ],
)
def test_a_start_ends_when_the_ranks_of_another_node_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str, is_port_taken: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    engine = FakeEngine(tmp_path / "log")
    engine.log_path.touch()
    engine._others = [Namespace(check=Namespace(remote=lambda: None))]
    engine.process = Namespace(poll=lambda: None)
    monkeypatch.setattr(server_group.ray, "get", fail)
    with pytest.raises(EngineStartError, match=message) as caught:
        engine.check_alive()
    assert caught.value.port_taken == is_port_taken


def test_the_nodes_of_an_engine_get_the_same_arguments_but_for_where_they_are() -> None:
    args = Namespace(accelerator="cuda", seed=5, trust_remote_code=False, params_dtype="bfloat16")
    args.sglang_server_concurrency = 512
    args.update_weights_in_flight = args.use_rollout_routing_replay = args.freeze_vision_tower = False
    spec = EngineSpec(3, "/models/m", num_gpus=16, first_slot=8, settings={"pp_size": 2})
    ports = {"nccl_port": 2, "bootstrap_port": 3, "dist_init_port": 4, "num_nodes": 2}
    first = EnginePlace("fd00::1", 1, **ports)
    head = build_server_args(args, spec, first)
    other = build_server_args(args, spec, EnginePlace("h", 1, node_rank=1, meeting=first.dist_init_addr, **ports))
    assert head["dist_init_addr"] == "[fd00::1]:4"
    assert {name: (head[name], other[name]) for name in head if head[name] != other[name]} == {
        "host": ("fd00::1", "h"),
        "node_rank": (0, 1),
    }
    assert (head["tp_size"], head["nnodes"]) == (8, 2)


def test_each_rank_of_a_cpu_engine_has_its_share_of_the_cores() -> None:
    assert cores_of_ranks([0, 1, 4, 5], 2) == "0,1|4,5"
    assert cores_of_ranks([3], 2) == "3|3"
