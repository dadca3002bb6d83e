"""What a host's network cannot do is said before anything waits: interfaces, its address, others out of reach."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.ray import placement, utils
from slime.ray.rollout.server_group import EngineActor
from slime.ray.train_actor import TrainRayActor
from slime.utils import misc
from slime.utils.errors import UsageError
from slime.utils.http import network
from tests.unit.test_server_group import FakeEngine

INTERFACES = ["eth0", "ib0", "ib1", "lo"]


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {name: [Namespace(address=f"10.0.0.{number}")] for number, name in enumerate(INTERFACES)}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(
    ("environment", "is_right"),
    [
        ({}, True),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, True),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib1"}, True),
        ({"GLOO_SOCKET_IFNAME": "eth0,ib2"}, False),  # gloo opens all of them
        ({"GLOO_SOCKET_IFNAME": "eth"}, False),
        ({"NCCL_SOCKET_IFNAME": "ib"}, True),  # NCCL takes what names begin with
        ({"NCCL_SOCKET_IFNAME": "bond,ib"}, True),
        ({"NCCL_SOCKET_IFNAME": "=ib"}, False),
        ({"NCCL_SOCKET_IFNAME": "=ib0"}, True),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, True),
        ({"NCCL_SOCKET_IFNAME": "bond"}, False),
    ],
)
def test_an_interface_that_the_host_lacks_is_named_with_those_that_it_has(
    environment: dict[str, str], is_right: bool, interfaces: None
) -> None:
    sentence = network.interface_problem(environment, uses_nccl=True)
    if is_right:
        assert sentence is None
    else:
        ((name, value),) = environment.items()
        assert sentence is not None and sentence.startswith(f"{name}={value} names no network interface of ")
        assert "which has eth0, ib0, ib1, lo; name one of those" in sentence


def test_the_interface_of_nccl_does_not_matter_to_a_process_that_does_not_use_it(interfaces: None) -> None:
    assert network.interface_problem({"NCCL_SOCKET_IFNAME": "bond"}, uses_nccl=False) is None


def test_trainer_and_engine_say_which_of_them_has_a_wrong_interface_before_they_import_or_start_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(UsageError, match="^trainer 3: GLOO_SOCKET_IFNAME=eth77 names no network interface"):
        trainer(rank=3).load()
    engine = FakeEngine(tmp_path / "log", None)
    for begin in (lambda: engine.launch(10), lambda: engine.join("10.0.0.1:5", 1, 2, [])):
        with pytest.raises(UsageError, match="^engine 0: GLOO_SOCKET_IFNAME=eth77"):
            begin()
    assert not engine.ports


def trainer(*, rank: int) -> TrainRayActor:
    actor = TrainRayActor.__new__(TrainRayActor)
    actor.args, actor.rank, actor._name = Namespace(accelerator="cpu"), rank, f"trainer {rank}"
    return actor


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_a_trainer_that_cannot_reach_the_first_one_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    monkeypatch.setattr(TrainRayActor, "load", lambda self: None)
    with pytest.raises(UsageError, match=f"trainer 2 cannot reach rank 0: .* cannot connect to 127.0.0.1:{port}: .*"):
        trainer(rank=2).init("127.0.0.1", port)


def test_a_ray_that_does_not_answer_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = closed_port()
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    monkeypatch.setattr(placement, "slot_layout", lambda args: Namespace(total=1))
    with pytest.raises(UsageError, match=f"RAY_ADDRESS=127.0.0.1:{port}: no Ray answers there .*; unset it or start"):
        placement.connect_ray(Namespace(accelerator="cpu"))


def test_a_ray_of_our_own_that_does_not_start_is_one_error_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a busy machine Ray gives its own parts up after 30 s, by an exception of no kind."""

    def timed_out(**options: Any) -> None:
        raise Exception("The current node timed out during startup.")

    folder = tmp_path / "slime-ray-1"
    folder.mkdir()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement, "slot_layout", lambda args: Namespace(total=1))
    monkeypatch.setattr(placement, "private_folder", lambda: folder)
    monkeypatch.setattr(placement, "init_ray", timed_out)
    monkeypatch.setattr(placement.ray, "shutdown", lambda: None)
    with pytest.raises(RuntimeError, match="Ray did not start; is this machine very busy. Ray says: The current node"):
        placement.connect_ray(Namespace(accelerator="cpu"))
    assert not folder.exists()


@pytest.mark.parametrize(("of_machine", "given"), [(64, 6), (6, None)])
def test_a_ray_of_our_own_has_the_cores_that_the_run_may_use(
    of_machine: int, given: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would start a worker for every core of the machine; where all are ours, it counts by itself."""
    seen: list[Any] = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placement, "slot_layout", lambda args: Namespace(total=1))
    monkeypatch.setattr(placement, "private_folder", lambda: tmp_path)
    monkeypatch.setattr(placement, "init_ray", lambda **options: seen.append(options.get("num_cpus")))
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"slime_slot": 1})
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr(placement.os, "cpu_count", lambda: of_machine)
    placement.connect_ray(Namespace(accelerator="cpu"))
    assert seen == [given]


@pytest.mark.parametrize(("asks", "warnings"), [(True, 0), (False, 1)])
def test_a_ray_that_asks_for_no_token_is_warned_of(
    asks: bool, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-ins are of a Ray that runs already; what matters is whether there is a token for it."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(placement, "slot_layout", lambda args: Namespace(total=1))
    monkeypatch.setattr(placement, "init_ray", lambda **options: None)
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"slime_slot": 1})
    monkeypatch.setattr(placement, "is_token_auth_enabled", lambda: asks)
    assert placement.connect_ray(Namespace(accelerator="cpu")) is None
    assert caplog.text.count("the Ray at auto asks for no token") == warnings


@pytest.mark.parametrize("address", ["auto", "local", "ray://10.0.0.1:10001"])
def test_addresses_that_only_ray_understands_are_left_to_it(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "out_of_reach", lambda host, port: pytest.fail("it was tried"))
    assert placement._unreachable(address) is None


def test_the_address_that_the_environment_gives_is_where_others_meet_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(network.SLIME_HOST_IP_ENV, "127.0.0.9")
    monkeypatch.setattr(utils.ray.util, "get_node_ip_address", lambda: pytest.fail("Ray was asked"))
    assert misc.get_current_node_ip() == utils.RayActor().node_address() == "127.0.0.9"
    engine: Any = FakeEngine(tmp_path / "log", None)
    engine._given_host = None
    assert EngineActor.launch(engine, 10).url.startswith("http://127.0.0.9:")


def test_an_address_that_the_host_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch, interfaces: None) -> None:
    assert network.given_address({network.SLIME_HOST_IP_ENV: "10.0.0.2"}) == "10.0.0.2"
    with pytest.raises(UsageError, match="SLIME_HOST_IP=10.9.9.9 is no address of .*; set it in the environment of"):
        network.given_address({network.SLIME_HOST_IP_ENV: "10.9.9.9"})


def test_an_ipv6_address_is_preferred_where_one_is_asked_for_and_others_can_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(*addresses: str) -> None:
        found = {"eth0": [Namespace(address=one) for one in addresses]}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)

    prefer = {network.PREFER_IPV6: "1"}
    of("02:fc:00:00:00:01", "::1", "fe80::1%eth0", "10.0.0.2", "fd00::2", "fd00::3")
    assert network.given_address(prefer) == "fd00::2"
    assert network.given_address({network.PREFER_IPV6: "0"}) is None is network.given_address({})
    assert network.given_address({**prefer, network.SLIME_HOST_IP_ENV: "10.0.0.2"}) == "10.0.0.2"
    of("::1", "fe80::1%eth0", "10.0.0.2")
    assert network.given_address(prefer) is None
    with pytest.raises(UsageError, match="SLIME_PREFER_IPV6=maybe: write true or 1, false or 0"):
        network.given_address({network.PREFER_IPV6: "maybe"})
