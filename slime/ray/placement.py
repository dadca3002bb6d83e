"""Connecting to Ray and reserving the slots of a run: one placement group, and who sits in which of its bundles.

A slot is a GPU on CUDA and one unit of the custom resource `slime_slot` on CPU.

Layout of the bundles (sorted by node address, then GPU id):
    train only      trainers 0 .. actor-1
    separate        trainers 0 .. actor-1, then the engines
    --colocate      trainers and engines share the bundles from 0 on
A managed reward model (--reward-model-path) comes last, with bundles of its own.

After a loss (`usable`) Ray gives a slot of a lost node another place as soon as the cluster has one. Where that does
not happen in time, whole copies of the model are left out (--elastic-dp): fewer data-parallel ranks share the same
global batch.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._private.utils import estimate_available_memory, resolve_object_store_memory
from ray._raylet import AuthenticationTokenLoader, Config
from ray.exceptions import AuthenticationError

from slime.config.args import Args
from slime.config.rules.batch import check_micro_batches
from slime.plan.layout import slot_layout
from slime.processes.progress import address_limit
from slime.processes.sweeper import RAY_PREFIX
from slime.processes.wait import WaitTimeout, wait
from slime.ray.utils import SLOT_RESOURCE, ActorFailure, get, in_bundle, slot_options
from slime.utils.errors import UsageError
from slime.utils.http.network import out_of_reach

logger = logging.getLogger(__name__)

PLACEMENT_DEADLINE_S = 600.0
TRAINER_SHARE = 0.4
ENGINE_SHARE = 0.2
# Of address space that processes take at least: with a tiny model on CPU 2.6 GB are too little for a trainer.
BESIDE_STORE = 3 * 10**9
# Of the folder of a Ray: the path of a socket has 107 bytes, and Ray's own part of it takes the rest.
LONGEST_PARENT = 20


class Slot(NamedTuple):
    """One reserved slot.

    Attributes:
        group: the placement group.
        bundle: index in it.
        node: address of the node on which it is.
    """

    group: Any
    bundle: int
    node: str


@dataclass(frozen=True)
class Placement:
    """The reserved slots: trainer rank r in `trainer_bundles[r]`, engines in `engine_bundles`.

    Which engine takes which of them, the plan of the engines says (`slime.config.sglang.topology`).
    """

    group: Any
    trainer_bundles: list[int]
    engine_bundles: list[int]
    nodes: dict[int, str]  # Bundle -> address of its node.

    @property
    def engine_slots(self) -> list[Slot]:
        """Each slot that engines take."""
        return [Slot(self.group, bundle, self.nodes[bundle]) for bundle in self.engine_bundles]


def connect_ray(args: Args) -> Path | None:
    """Join the Ray that RAY_ADDRESS names (`ray job submit` sets it), or start a local one with the slots asked for.

    Returns:
        the folder of a Ray that this process has started, and so has to stop; None where it has joined one.

    Raises:
        UsageError: Ray has fewer slots than asked for, or the address does not answer.
        RuntimeError: a Ray of our own does not start.
    """
    asked, resource = slot_layout(args).total, SLOT_RESOURCE[args.accelerator]
    address, folder = os.environ.get("RAY_ADDRESS"), None
    # Ray otherwise warns once for every actor that takes no GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray runs workers at nice 15 by default: on a busy machine trainers and engines would starve.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with ExitStack() as connecting:
        if address:
            _join(address)
        else:
            check_address_space(address_limit(), resolve_object_store_memory(estimate_available_memory()))
            folder = private_folder()
            connecting.callback(shutil.rmtree, folder, ignore_errors=True)  # nobody else knows of it yet
            connecting.callback(ray.shutdown)
            # A Ray of our own finds the machine's GPUs by itself; slots have to be given.
            options: dict[str, Any] = {"resources": {resource: float(asked)}} if args.accelerator == "cpu" else {}
            cores = len(os.sched_getaffinity(0))
            if cores < (os.cpu_count() or 1):
                options["num_cpus"] = cores  # Ray starts a worker for each core, also for those that are not ours
            with _on_this_machine():
                try:
                    init_ray(address="local", include_dashboard=False, _temp_dir=str(folder / "ray"), **options)
                except Exception as error:
                    if type(error) is not Exception:
                        raise
                    # Ray waits 30 s for its own parts, and no setting of it changes that
                    raise RuntimeError(f"Ray did not start; is this machine very busy? Ray says: {error}") from error
        available = int(ray.cluster_resources().get(resource, 0))
        if available < asked:
            raise UsageError(slot_shortage(asked, available, resource, started_here=not address))
        connecting.pop_all()
    return folder


def _join(address: str) -> None:
    if refusal := _unreachable(address):
        raise UsageError(f"RAY_ADDRESS={address}: no Ray answers there ({refusal}); unset it or start one")
    try:
        init_ray(address=address)
    except AuthenticationError:
        raise UsageError(
            f"RAY_ADDRESS={address}: this Ray asks for a token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH "
            "to the file that holds it, as where that Ray was started"
        ) from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"RAY_ADDRESS={address}: no Ray answers there ({error}); unset it or start one") from None
    if not is_token_auth_enabled():
        logger.warning(
            "the Ray at %s asks for no token: whoever reaches it has your rights; start it with "
            "RAY_AUTH_MODE=token (docs/security.md)",
            address,
        )


def check_address_space(limit: int | None, store: int) -> None:
    """Refuse a limit of the address space with which processes of Ray abort, or wait for others that have.

    Args:
        limit: of each process (`ulimit -v`) in bytes; None: there is none.
        store: size of Ray's object store, which each process maps.

    Raises:
        UsageError: it is too low.
    """
    if limit is not None and limit < store + BESIDE_STORE:
        raise UsageError(
            f"`ulimit -v` lets each process map {limit / 1e9:.1f} GB only, but every process of a run maps Ray's "
            f"object store of {store / 1e9:.1f} GB, and {BESIDE_STORE / 1e9:.1f} GB more; lift it: ulimit -v unlimited"
        )


def _unreachable(address: str) -> str | None:
    """Why nothing can be connected to `host:port`, at once; Ray itself tries for minutes. Others Ray looks up."""
    host, _, port = address.rpartition(":")
    return out_of_reach(host.strip("[]"), int(port)) if host and port.isdigit() and "/" not in host else None


def private_folder() -> Path:
    """Make the folder of a Ray of our own, which nobody else can enter, and have that Ray ask for a token kept there.

    Otherwise any user of the machine could connect to it, read its files, and so become the user of the run. Ray opens
    the folder that it is given to everybody: it gets one within this one.
    """
    parent = Path(get_default_system_temp_dir()).absolute()
    if len(str(parent)) > LONGEST_PARENT or not parent.is_dir():
        logger.warning("the folder of Ray is made in /tmp: %s is too long for its sockets, or does not exist", parent)
        parent = Path("/tmp")  # nosec B108
    folder = Path(tempfile.mkdtemp(prefix=RAY_PREFIX, dir=parent))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    read_auth()
    return folder


def read_auth() -> None:
    """Have Ray read RAY_AUTH_MODE and the token again, as it did when it was imported."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _on_this_machine() -> Iterator[None]:
    """Have a Ray that is started in here listen on the loopback alone; otherwise it listens on every interface.

    Ray does so by itself where it makes no clusters (Windows, macOS), and it has no option for it. The variable is
    for its processes; this one has read it already. A start takes 7 s instead of 11 s with it, seen on two cores.
    """
    name, before = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        del os.environ[name]
        ray_constants.ENABLE_RAY_CLUSTER = before


def init_ray(**options: Any) -> None:
    """ray.init, which takes SIGTERM for itself, without that: ending a run is the driver's business."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(logging_level=logging.ERROR, log_to_driver=True, **options)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def slot_shortage(asked: int, available: int, resource: str, *, started_here: bool) -> str:
    """The sentence for a Ray that is too small."""
    where = "this machine" if started_here else "the running Ray"
    unit = "GPUs" if resource == "GPU" else f"{resource} units"
    remedy = "ask for fewer (--actor-num-gpus-per-node, --rollout-num-gpus) or share them (--colocate)"
    if not started_here and resource != "GPU":
        remedy += f", or start Ray with --resources '{{\"{resource}\": {asked}}}'"
    return f"{asked} {unit} asked / {available} available on {where}; {remedy}"


def create_placement(args: Args) -> Placement:
    """Reserve the run's slots.

    Raises:
        WaitTimeout: other jobs hold the slots until the deadline.
    """
    layout, resource = slot_layout(args), SLOT_RESOURCE[args.accelerator]
    group = ray.util.placement_group([{resource: 1.0}] * layout.total, strategy="PACK")
    what = f"a placement group of {layout.total} x {resource} (are other jobs of this Ray holding them?)"
    wait(what, PLACEMENT_DEADLINE_S, lambda: group.wait(timeout_seconds=1.0))
    nodes = _nodes_of(group)
    order = _sorted_bundles(group, nodes, args.accelerator)
    return Placement(group, order[: layout.num_trainers], [order[slot] for slot in layout.engine_slots], nodes)


def _nodes_of(group: Any) -> dict[int, str]:
    """Bundle -> address of its node."""
    nodes: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {bundle: addresses[node] for bundle, node in nodes.items()}


def _sorted_bundles(group: Any, nodes: Mapping[int, str], accelerator: str) -> list[int]:
    """Bundle indices by (node address, GPU id): neighbouring ranks share a node, a TP engine has neighbouring GPUs."""
    # Asking a bundle takes a process of its own, which takes seconds to start; a single one needs no order.
    asks = accelerator == "cuda" and len(nodes) > 1
    gpu_ids = _gpu_ids(group, len(nodes)) if asks else [0] * len(nodes)
    return sorted(nodes, key=lambda i: (address_key(nodes[i]), gpu_ids[i], i))


def address_key(address: str) -> tuple[int, int, str]:
    """Sort key of a node address: as a number, so that 10.0.0.9 comes before 10.0.0.10; host names come last."""
    try:
        return (0, int(ipaddress.ip_address(address)), "")
    except ValueError:
        return (1, 0, address)


def _gpu_ids(group: Any, num_bundles: int) -> list[int]:
    probe = ray.remote(_first_gpu_id)
    refs = [
        probe.options(max_retries=0, scheduling_strategy=in_bundle(group, i), **slot_options("cuda", 0.01)).remote()
        for i in range(num_bundles)
    ]
    return get(refs, "the GPU id of every placement bundle", PLACEMENT_DEADLINE_S)


def _first_gpu_id() -> int:
    return int(ray.get_gpu_ids()[0])


RETURN_S = 30.0  # How long slots may take to come back before a run shrinks.


def usable(placement: Placement, args: Args) -> tuple[Placement, Any]:
    """The slots that trainers can take now, and the flags with their number.

    Args:
        placement: that of the whole run.
        args: of the attempt; reads `elastic_dp`, the parallel sizes and the batch.

    Raises:
        ActorFailure: there are too few.
    """
    bundles = placement.trainer_bundles
    deadline_s = RETURN_S if args.elastic_dp else PLACEMENT_DEADLINE_S
    try:
        wait("the slots of the trainers", deadline_s, lambda: len(_placed(placement)) == len(bundles))
    except WaitTimeout:
        num_missing = len(bundles) - len(_placed(placement))
        logger.warning("%d of %d trainer slots did not come back in %.0f s", num_missing, len(bundles), deadline_s)
    left = _placed(placement)
    size = len(left) if len(left) == len(bundles) else 0
    if not size and args.elastic_dp:
        size = largest_world(args, len(left))
    if not size:
        remedy = "no smaller layout has room in them" if args.elastic_dp else "--elastic-dp goes on with fewer"
        raise ActorFailure(f"{len(left)} of {len(bundles)} trainer slots are left ({remedy}); start the run again")
    if size < len(bundles):
        logger.warning("the run goes on with %d of %d trainer ranks (--elastic-dp)", size, len(bundles))
    return dataclasses.replace(placement, trainer_bundles=left[:size]), sized(args, size)


def largest_world(args: Args, slots: int) -> int:
    """The most ranks, `slots` or fewer, that are whole copies of the model and can share a train step; 0 if none."""
    copy = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    experts = args.expert_model_parallel_size * expert_tensor * args.pipeline_model_parallel_size
    for size in range(slots, 0, -1):
        if size % copy == 0 and size % experts == 0 and not list(check_micro_batches(sized(args, size))):
            return size
    return 0


def sized(args: Args, size: int) -> Any:
    """The flags with so many trainer ranks."""
    copy = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if size == args.actor_num_nodes * args.actor_num_gpus_per_node:
        return args
    return args.replace(
        actor_num_nodes=1, actor_num_gpus_per_node=size, world_size=size, data_parallel_size=size // copy
    )


def _placed(placement: Placement) -> list[int]:
    """The trainers' bundles that are on nodes which live, in order."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    nodes: dict[int, str] = ray.util.placement_group_table(placement.group)["bundles_to_node_id"]
    return [bundle for bundle in placement.trainer_bundles if nodes[bundle] in alive]
