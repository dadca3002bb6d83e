"""The slots of a lost node, on real Ray nodes: an engine's place says that they are gone, and when they are back."""

from __future__ import annotations

import time

import pytest
import ray
from ray.cluster_utils import Cluster

from slime.processes.wait import wait
from slime.ray.placement import Slot
from slime.ray.rollout.server_group import ServerGroup

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
pytestmark = pytest.mark.timeout(600)


def add_node(cluster: Cluster, address: str) -> object:
    return cluster.add_node(
        node_ip_address=address,
        resources={"slime_slot": 1},
        num_cpus=1,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        wait=False,
    )


def test_an_engines_slots_go_with_their_node_and_come_back_with_another() -> None:
    cluster = Cluster()
    try:
        add_node(cluster, FIRST)
        second = add_node(cluster, SECOND)
        cluster.wait_for_nodes(timeout=120)
        ray.init(address=cluster.address)
        placement = ray.util.placement_group([{"slime_slot": 1.0}] * 2, strategy="SPREAD")
        wait("the placement group", 60, lambda: placement.wait(timeout_seconds=1.0))
        group = ServerGroup.__new__(ServerGroup)  # no engine has to run
        group._seats = [(None, [Slot(placement, bundle, "")]) for bundle in range(2)]  # type: ignore[misc]
        assert [group.is_placed(0), group.is_placed(1)] == [True, True]
        cluster.remove_node(second, allow_graceful=False)
        wait("the loss to be seen", 60, lambda: [group.is_placed(0), group.is_placed(1)].count(False) == 1)
        time.sleep(2)
        assert [group.is_placed(0), group.is_placed(1)].count(True) == 1, "the other's stay"
        add_node(cluster, SECOND)
        wait("other slots", 60, lambda: group.is_placed(0) and group.is_placed(1))
    finally:
        ray.shutdown()
        cluster.shutdown()
