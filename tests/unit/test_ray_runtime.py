"""Waiting on Ray and placing actors, on one local Ray with three slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from slime.config.args import Args
from slime.config.rules.devices import OWNED_ENV_VARS
from slime.plan.layout import slot_layout
from slime.ray import actor_group, placement
from slime.ray.actor_group import RayTrainGroup, trainer_env
from slime.ray.run import TrainingRun
from slime.ray.utils import ActorFailure, ActorLost, actor_env, get, in_bundle, slot_options
from slime.utils.errors import UsageError
from tests.own_ray import own_ray

pytestmark = pytest.mark.processes


class Worker:
    def value(self):
        return 7

    def sleep(self, seconds):
        time.sleep(seconds)

    def fail(self):
        raise ValueError("the weights are crooked")

    def refuse(self):
        raise UsageError(["first sentence", "second sentence"])

    def die(self):
        os._exit(3)

    def die_after(self, seconds):
        time.sleep(seconds)
        os._exit(3)

    def slots(self):
        return ray.get_runtime_context().get_assigned_resources()


def cluster_args(**changes):
    defaults = {
        "accelerator": "cpu",
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 1,
        "rollout_num_gpus": 2,
        "rollout_num_gpus_per_engine": 1,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "offload_train": False,
        "megatron_role_values": {"actor": {}, "critic": {}},
        "rollout_external_engine_addrs": None,
        "reward_model_num_gpus": None,
        "exit_signal_handler": False,
        "exit_duration_in_mins": None,
    }
    return Args(**(defaults | changes))


@pytest.fixture(scope="module")
def local_ray():
    with own_ray(cluster_args()):
        yield


STRANGER = """
import os, sys, warnings
import ray
from ray._raylet import Config, GcsClient
session = os.path.realpath(sys.argv[2])
if len(sys.argv) > 3:  # it has a token, of another Ray
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": sys.argv[3]}
    Config.initialize("")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    os.listdir(session)
    print("entered")
except PermissionError:
    print("shut")
try:
    print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"fun", timeout=5))
except ray.exceptions.AuthenticationError:
    print("refused")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("token", [(), ("0" * 64,)])
def test_another_user_can_neither_ask_the_ray_of_a_run_nor_enter_its_folder(local_ray, token) -> None:
    """Through the GCS, whoever is answered can read and overwrite the pickled classes of actors."""
    context = ray.get_runtime_context()
    session = ray._private.worker._global_node.get_session_dir_path()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment["RAY_gcs_server_request_timeout_seconds"] = "2"
    command = [sys.executable, "-c", STRANGER, context.gcs_address, session, *token]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["shut", "refused"], done.stderr[-2000:]
    assert Path(os.environ["RAY_AUTH_TOKEN_PATH"]).stat().st_mode & 0o077 == 0


def start_worker(**options):
    return ray.remote(Worker).options(num_cpus=0, max_restarts=0, **options).remote()


def test_get_returns_one_value_or_a_list(local_ray):
    worker = start_worker()
    assert get(worker.value.remote(), "a value", 60) == 7
    assert get([worker.value.remote(), worker.value.remote()], "values", 60) == [7, 7]


def test_the_first_failure_surfaces_while_others_still_run(local_ray):
    slow, broken = start_worker(), start_worker()
    get([slow.value.remote(), broken.value.remote()], "the start of two workers", 60)
    start = time.monotonic()
    with pytest.raises(ActorFailure, match="the train step failed: ValueError: the weights are crooked") as caught:
        get([slow.sleep.remote(30), broken.fail.remote()], "the train step", 60)
    assert time.monotonic() - start < 10
    assert (
        "Traceback" in caught.value.details or "def fail" in caught.value.details or "fail()" in caught.value.details
    )
    ray.kill(slow)


def test_what_is_under_way_beside_a_wait_ends_it_by_failing_and_by_nothing_else(local_ray):
    slow, other = start_worker(), start_worker()
    get([slow.value.remote(), other.value.remote()], "the start of two workers", 60)
    done, asleep = other.value.remote(), slow.sleep.remote(30)
    assert get(other.value.remote(), "a value", 60, beside={done: "a value before", asleep: "a nap"}) == 7
    start = time.monotonic()
    with pytest.raises(ActorFailure, match="the start of the engines failed: ValueError: the weights are crooked"):
        get(asleep, "the imports", 60, beside={other.fail.remote(): "the start of the engines"})
    assert time.monotonic() - start < 10
    ray.kill(slow)


def test_a_usage_error_of_an_actor_stays_one(local_ray):
    with pytest.raises(UsageError) as caught:
        get(start_worker().refuse.remote(), "the start", 60)
    assert caught.value.messages == ["first sentence", "second sentence"]


def test_an_actor_that_dies_is_an_error_and_no_hang(local_ray):
    with pytest.raises(ActorFailure, match=r"the start failed: the Ray actor Worker \(process \d+ on [\d.]+\) died"):
        get(start_worker().die.remote(), "the start", 60)


def test_the_lost_rank_is_named_though_another_fails_first_of_it(local_ray):
    class Group(RayTrainGroup):
        def __init__(self):
            self._name, self.world_size = "trainer", 2

    ranks = [start_worker(), start_worker()]
    get([rank.value.remote() for rank in ranks], "the start", 60)
    first, last = ranks[0].fail.remote(), ranks[1].die_after.remote(1.0)
    with pytest.raises(ActorLost, match=r"step failed: trainer rank 1 of 2 is lost; another said first: .*crooked"):
        Group()._get([first, last], "the step", 60)
    with pytest.raises(ActorFailure, match="crooked") as caught:
        Group()._get([ranks[0].fail.remote(), ranks[0].value.remote()], "the step", 60)
    assert not isinstance(caught.value, ActorLost), "every process is there"


def test_trainers_take_the_slots_that_are_left_only_where_they_may(monkeypatch):
    """Two ranks a copy of the model and 12 samples a step: of 5 slots that are left, 4 hold two copies; of 1, none."""
    args = cluster_args(
        actor_num_gpus_per_node=6, elastic_dp=True, tensor_model_parallel_size=2, pipeline_model_parallel_size=1,
        context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None,
        virtual_pipeline_model_parallel_size=None, microbatch_group_size_per_vp_stage=None, log_probs_chunk_size=-1,
        use_dynamic_batch_size=False, max_tokens_per_gpu=None, eval_only=False, global_batch_size=12,
        micro_batch_size=1,
    )  # fmt: skip
    whole = placement.Placement(None, trainer_bundles=[0, 1, 2, 3, 4, 5], engine_bundles=[6], nodes={})
    monkeypatch.setattr(placement, "RETURN_S", 0.0)
    monkeypatch.setattr(placement, "PLACEMENT_DEADLINE_S", 0.0)
    there = [0, 1, 2, 3, 4, 5]
    monkeypatch.setattr(placement, "_placed", lambda placed: list(there))
    assert placement.usable(whole, args) == (whole, args)
    del there[1]
    left, smaller = placement.usable(whole, args)
    assert left.trainer_bundles == [0, 2, 3, 4] and left.engine_bundles == [6]
    assert (smaller.world_size, smaller.data_parallel_size, smaller.global_batch_size) == (4, 2, 12)
    with pytest.raises(ActorFailure, match="5 of 6 trainer slots are left .--elastic-dp goes on with fewer."):
        placement.usable(whole, args.replace(elastic_dp=False))
    # 12 samples divide among 3 copies, and among 2, not among 5
    del there[:]
    there += range(5)
    assert placement.usable(whole, args.replace(tensor_model_parallel_size=1))[1].world_size == 4
    del there[1:]
    with pytest.raises(ActorFailure, match="1 of 6 trainer slots are left .no smaller layout has room in them"):
        placement.usable(whole, args)


def test_a_wait_that_is_too_long_names_what_it_waited_for(local_ray):
    worker = start_worker()
    get(worker.value.remote(), "the worker", 60)
    with pytest.raises(TimeoutError, match="waited 0 s for the long nap"):
        get(worker.sleep.remote(20), "the long nap", 0.3)
    ray.kill(worker)


def test_more_slots_than_the_running_ray_has_are_refused_with_both_numbers(local_ray, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **kwargs: None)  # joined already
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(UsageError, match=r"9 slime_slot units asked / 3 available on the running Ray; .*slime_slot"):
        placement.connect_ray(cluster_args(actor_num_gpus_per_node=7))


def test_separate_engines_sit_behind_the_trainers_and_colocated_ones_with_them(local_ray):
    separate = placement.create_placement(cluster_args())
    assert set(separate.trainer_bundles) | set(separate.engine_bundles) == {0, 1, 2}
    assert len(separate.trainer_bundles) == 1 and len(separate.engine_bundles) == 2
    ray.util.remove_placement_group(separate.group)
    shared = placement.create_placement(cluster_args(colocate=True))
    assert shared.trainer_bundles[0] == shared.engine_bundles[0] and len(shared.engine_bundles) == 2
    bundle = shared.engine_bundles[0]
    trainer, engine = (
        start_worker(scheduling_strategy=in_bundle(shared.group, bundle), **slots)
        for slots in (
            {"resources": slot_options("cpu", placement.TRAINER_SHARE)["resources"]},
            {"resources": slot_options("cpu", placement.ENGINE_SHARE)["resources"]},
        )
    )
    assert get([trainer.value.remote(), engine.value.remote()], "a trainer and an engine in one slot", 60) == [7, 7]
    ray.util.remove_placement_group(shared.group)


class EnvironmentReader:
    """In the place of a trainer rank."""

    def __init__(self, args, rank, world_size, log_path, role):
        pass

    def train(self, rollout_id, refs, columns):
        names = ("MY_SETTING", "OMP_WAIT_POLICY", "PYTHONUNBUFFERED")
        return [({name: os.environ.get(name) for name in names}, "train/step")], {}

    def call(self, verb, *values):
        return f"{verb} {values}"

    def update_weights(self):
        return {"perf/mine": 0.5}

    def shutdown(self):
        pass


def test_trainer_processes_get_more_variables_and_the_timeline_shows_their_calls(local_ray, tmp_path):
    path = tmp_path / "new" / "timeline.json"
    more = {"MY_SETTING": "1", "OMP_WAIT_POLICY": "ACTIVE"}
    unsaved = {
        "save": None,
        "save_hf": None,
        "async_save": False,
        "release_train": False,
        "peer_checkpoint_interval": None,
        "use_fault_tolerance": False,
        "elastic_rollout": False,
    }
    args = cluster_args(output_dir=str(tmp_path), train_env_vars=more, ray_timeline_path=str(path), **unsaved)
    placed = placement.create_placement(args)
    group = RayTrainGroup(args, placed, actor_cls=EnvironmentReader)
    assert group.train(0, [])[0] == [({**more, "PYTHONUNBUFFERED": "1"}, "train/step")]
    assert group.save_model(3) == "save_model (3,)"
    assert group.update_weights() == {"perf/mine": 0.5}, "a verb that the class has itself is its own"
    TrainingRun(args)._write_timeline()
    group.shutdown()
    ray.util.remove_placement_group(placed.group)
    calls = {event["cat"].removeprefix("task::EnvironmentReader.") for event in json.loads(path.read_text())}
    assert {"train", "save_model"} <= calls, "each verb has its name there, whichever method carries it"


def test_a_trainer_that_leaves_its_gpu_is_started_under_the_memory_saver(monkeypatch):
    saver = {"LD_PRELOAD": "hook.so", "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    seen = []
    monkeypatch.setattr(actor_group.memory_saver, "environment", lambda inherited: seen.append(inherited) or saver)
    awake = trainer_env("cuda", 1, {"LD_PRELOAD": "mine.so"})
    assert awake["LD_PRELOAD"] == "mine.so" and not seen
    assert trainer_env("cuda", 1, {"LD_PRELOAD": "mine.so"}, sleeps=True) == awake | saver
    assert seen[0]["LD_PRELOAD"] == "mine.so", "the saver's own comes before what is preloaded anyway"
    assert set(saver) - set(OWNED_ENV_VARS) == {"LD_PRELOAD"}


def test_every_variable_that_a_trainer_rank_gets_is_refused_or_a_default_that_may_be_replaced():
    given = {name for accelerator in ("cpu", "cuda") for name in trainer_env(accelerator, 2, {})}
    assert given - set(OWNED_ENV_VARS) == {"OMP_NUM_THREADS", "OMP_WAIT_POLICY"}


def test_a_run_counts_the_cores_that_it_may_use_and_not_those_of_the_machine(monkeypatch):
    """`taskset` and Slurm give a run some cores of many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert [trainer_env("cpu", ranks, {})["OMP_NUM_THREADS"] for ranks in (1, 2, 12)] == ["6", "3", "1"]


@pytest.mark.parametrize(
    ("changes", "total", "offset"),
    [
        ({"debug_train_only": True, "actor_num_gpus_per_node": 4}, 4, 0),
        ({"actor_num_gpus_per_node": 4}, 6, 4),
        ({"actor_num_nodes": 3, "actor_num_gpus_per_node": 4}, 3 * 4 + 2, 3 * 4),
        ({"actor_num_gpus_per_node": 4, "colocate": True}, 4, 0),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 16, "colocate": True}, 16, 0),
    ],
)
def test_the_layout_counts_slots_as_the_flags_say(changes, total, offset):
    layout = slot_layout(cluster_args(**changes))
    assert (layout.total, layout.engine_offset) == (total, offset)


def test_an_address_space_without_room_for_the_object_store_is_refused() -> None:
    """Ray aborts with a stack of C++ calls, or hangs."""
    store = 7 * 10**9
    placement.check_address_space(None, store)
    placement.check_address_space(store + placement.BESIDE_STORE, store)
    with pytest.raises(UsageError, match="`ulimit -v` lets each process map 8.0 GB only, .* store of 7.0 GB, and 3.0"):
        placement.check_address_space(8 * 10**9, store)


def test_node_addresses_sort_as_numbers():
    addresses = ["10.0.0.10", "node-b", "10.0.0.9"]
    assert sorted(addresses, key=placement.address_key) == ["10.0.0.9", "10.0.0.10", "node-b"]


def test_actors_import_what_the_driver_imports(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) in actor_env()["PYTHONPATH"].split(":")
