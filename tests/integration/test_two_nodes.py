"""Two Ray nodes with addresses of their own on one host: order, addresses, ports, and engines over both.

One slot on 127.0.0.2 and three on 127.0.0.3: of two engines of two ranks the first lies on both nodes, the second on
one. Ranks of an engine talk over gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from slime.backends.megatron_utils.update_weight import base
from slime.backends.megatron_utils.update_weight.from_distributed import DistributedWeightUpdater
from slime.backends.sglang_utils import server_control
from slime.ray.placement import Placement, connect_ray, create_placement
from slime.ray.rollout.servers import RolloutServers, start_rollout_servers
from slime.ray.utils import RayActor, actor_env, in_bundle, slot_options
from slime.utils.http.network import PREFER_IPV6, given_address
from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts
from tests.integration.test_distributed_sync import cut, leave
from tests.rollout.test_topology import PROMPTS, arguments, expected, greedy

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
pytestmark = pytest.mark.timeout(300)


@contextmanager
def started(slots: dict[str, int]) -> Iterator[str]:
    """Address of a Ray with a node at each address, with so many slots; the first is the head."""
    cluster = Cluster()
    for address, count in slots.items():
        cluster.add_node(
            node_ip_address=address,
            resources={"slime_slot": count},
            num_cpus=2,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            wait=False,
        )
    cluster.wait_for_nodes(timeout=120)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The head is the one that sorts last."""
    with started({SECOND: 3, FIRST: 1}) as address:
        yield address


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return tuple(make_model(root / name, "--layers", 2, "--init-std", 0.1, "--seed", name) for name in "01")


@pytest.fixture(scope="module")
def args(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    named = {"actor": models[0]}
    sizes = ["--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 2]
    return arguments(named, tmp_path_factory.mktemp("run"), "--debug-rollout-only", *sizes)


@pytest.fixture(scope="module")
def placement(two_nodes: str, args: Any) -> Iterator[Placement]:
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = two_nodes
    connect_ray(args)
    yield create_placement(args)
    ray.shutdown()
    os.environ.pop("RAY_ADDRESS") if before is None else os.environ.update(RAY_ADDRESS=before)


@pytest.fixture(scope="module")
def servers(args: Any, placement: Placement) -> Iterator[RolloutServers]:
    running = start_rollout_servers(args, slots=placement.engine_slots)
    yield running
    running.shutdown()


def urls_of(servers: RolloutServers) -> list[str]:
    return [contact.url for contact in ray.get([engine.contact.remote() for engine in servers.engines])]


def launch_files(args: Any) -> dict[str, dict[str, Any]]:
    """Name -> arguments of each server process."""
    files = Path(args.output_dir, "logs").glob("engine_*.json")
    return {file.stem: json.loads(file.read_text())["server_args"] for file in files}


def test_slots_are_in_the_order_of_the_nodes_addresses(placement: Placement) -> None:
    assert [slot.node for slot in placement.engine_slots] == [FIRST, SECOND, SECOND, SECOND]


def test_ranks_meet_at_a_port_that_was_taken_on_the_first_ones_node(placement: Placement) -> None:
    options: dict[str, Any] = {"runtime_env": {"env_vars": actor_env({"SLIME_TEST_NODES": "x y"})}}
    actors, addresses = [], []
    for slot in (placement.engine_slots[0], placement.engine_slots[-1]):
        strategy = in_bundle(slot.group, slot.bundle)
        actor_class = ray.remote(_Rank).options(scheduling_strategy=strategy, **slot_options("cpu", 0.1), **options)
        actors.append(actor_class.remote())
    for actor in actors:
        address, port = ray.get(actor.master_address.remote())
        process = psutil.Process(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
        listening = {connection.laddr.port for connection in process.net_connections("tcp")}
        assert port in listening, "the rank itself holds the port"
        assert ray.get(actor.variable.remote("SLIME_TEST_NODES")) == "x y"
        addresses.append(address)
    assert addresses == [FIRST, SECOND]


class _Rank(RayActor):
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


def test_of_an_engine_on_two_nodes_the_first_answers_and_each_listens_on_its_own_node(
    servers: RolloutServers, args: Any, models: tuple[Path, Path]
) -> None:
    urls = urls_of(servers)
    assert [url.split(":")[1].strip("/") for url in urls] == [FIRST, SECOND]
    router = servers.models[0].router.address.url
    assert sorted(server_control.list_workers_sync(router)) == sorted(urls), "one worker an engine"
    files = launch_files(args)
    assert sorted(files) == ["engine_0", "engine_0.node1", "engine_1"]
    head, other = files["engine_0"], files["engine_0.node1"]
    assert (other["host"], other["nnodes"], other["node_rank"]) == (SECOND, 2, 1)
    assert head["dist_init_addr"] == other["dist_init_addr"] == f"{FIRST}:{head['dist_init_addr'].split(':')[1]}"
    assert head["random_seed"] == other["random_seed"] != files["engine_1"]["random_seed"]
    assert "nnodes" not in files["engine_1"]
    for url in urls:
        assert [greedy(f"{url}/generate", prompt) for prompt in PROMPTS] == [expected(models[0], p) for p in PROMPTS]


def test_a_weight_sync_reaches_every_rank_of_engines_on_one_node_and_on_two(
    servers: RolloutServers, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "iter_hf_buckets", lambda args, model, *, buffer_size: iter(cut(models[1], 3)))
    updater = DistributedWeightUpdater(_sync_args(models[0]), model=[])
    engines, sizes = zip(*servers.updatable, strict=True)
    assert sizes == (2, 2)
    updater.connect(list(engines), engine_sizes=list(sizes))  # world of 1 + 4: engine 0 has ranks 1, 2; engine 1 3, 4
    updater.update()
    leave(updater)  # processes that later tests fork could not end the group that they inherit
    for url in urls_of(servers):
        assert [greedy(f"{url}/generate", prompt) for prompt in PROMPTS] == [expected(models[1], p) for p in PROMPTS]


def _sync_args(model: Path) -> Any:
    return SimpleNamespace(
        update_weights_in_flight=False,
        update_weight_buffer_size=1,
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(model),
        mtp_num_layers=None,
        check_weight_update_equal=False,
        train_backend="megatron",
        multimodal_keys=None,
        offload_train=False,
    )


@pytest.mark.slow
def test_an_engine_that_lost_a_node_is_started_again_on_both(
    servers: RolloutServers, args: Any, models: tuple[Path, Path]
) -> None:
    part = launch_files(args)["engine_0.node1"]
    holding = [c.pid for c in psutil.net_connections("tcp") if c.laddr[:2] == (SECOND, part["port"])]
    psutil.Process(next(pid for pid in holding if pid)).kill()
    group = servers.models[0].groups[0][1]
    worker = ray.get(group.replace(0))
    assert greedy(f"{worker.url}/generate", PROMPTS[0]) == expected(models[0], PROMPTS[0])


IPV6 = given_address({PREFER_IPV6: "1"})
NEEDS_IPV6 = pytest.mark.skipif(IPV6 is None, reason="this machine has no IPv6 address that others could know")


@pytest.mark.parametrize(
    "prefers_ipv6", [False, pytest.param(True, marks=[NEEDS_IPV6, pytest.mark.slow])], ids=["IPv4", "IPv6"]
)
def test_a_run_trains_on_one_node_and_generates_on_the_other(
    prefers_ipv6: bool, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself stays with the addresses of its nodes; of IPv6 this machine has one for both."""
    if prefers_ipv6:
        monkeypatch.setenv(PREFER_IPV6, "1")
    with started({SECOND: 1, FIRST: 1}) as address:
        flags = grpo_flags(models[0], write_prompts(tmp_path / "prompts.jsonl"))
        flags += ["--rollout-num-gpus", 1, "--num-rollout", 2]
        run = train(tmp_path / "out", *flags, RAY_ADDRESS=address)
    assert run.column("train/train_rollout_logprob_abs_diff")[1] < 1e-4, "the engine has the weights of the first step"
    server = launch_files(SimpleNamespace(output_dir=run.output_dir))["engine_0"]
    assert server["host"] == (IPV6 if prefers_ipv6 else SECOND), "so that the trainer has the other node's only slot"


LAUNCH = """
. scripts/common.sh
slime_env
slime_ray_start "$NUM_SLOTS" && slime_start_workers && slime_wait_nodes 2 || exit 9
slime_submit "$PYTHON" -c 'import ray; ray.init(); print([n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]])'
slime_ray_stop
for _ in $(seq 100); do pgrep -f "$OWN_MARK" >/dev/null || { echo "all ended"; break; }; sleep 0.3; done
"""


@pytest.mark.slow
def test_the_functions_of_the_run_scripts_make_two_machines_one_ray_and_end_both(tmp_path: Path) -> None:
    """What ssh would run on the other machine runs here."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/bash\nuntil [ "$1" = {SECOND} ]; do shift; done; shift\nexec bash -c "$*"\n')
    ssh.chmod(0o755)
    with socket.create_server((FIRST, 0)) as server:
        port = server.getsockname()[1]
    settings = {"NUM_NODES": "2", "NUM_SLOTS": "1", "MASTER_ADDR": FIRST, "MASTER_PORT": str(port), "WORKERS": SECOND}
    settings |= {"SLIME_PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": "/tmp"}
    settings["OWN_MARK"] = f"{FIRST}:{port}"  # in the command line of each process of this Ray
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | settings
    done = subprocess.run(
        ["bash", "-c", LAUNCH], cwd=ROOT, env=environment, timeout=200, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert any(FIRST in line and SECOND in line for line in done.stdout.splitlines()), done.stdout[-2000:]
    assert done.stdout.endswith("all ended\n")
