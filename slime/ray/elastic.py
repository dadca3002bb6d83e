"""Where the trainers of another attempt sit: in the same slots, or in those that are left (--elastic-dp).

Ray gives a slot of a lost node another place as soon as the cluster has one. Where that does not happen in time, whole
copies of the model are left out: fewer data-parallel ranks share the same global batch. It starts and ends nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import ray

from slime.config.args import Args
from slime.config.rules.batch import check_micro_batches
from slime.ray.placement_group import PLACEMENT_DEADLINE_S, Placement
from slime.ray.utils import ActorFailure
from slime.utils.wait import WaitTimeout, wait

logger = logging.getLogger(__name__)

RETURN_S = 30.0
"""How long slots may take to come back before a run shrinks."""


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
        logger.warning("%d of %d trainer slots did not come back in %.0f s", *_missing(placement), deadline_s)
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


def _missing(placement: Placement) -> tuple[int, int]:
    total = len(placement.trainer_bundles)
    return total - len(_placed(placement)), total
