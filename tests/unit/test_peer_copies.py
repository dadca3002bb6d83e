"""Copies of trainers' states: which count, what becomes of older ones, what a lost holder costs. On one local Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from slime.ray.peer_copies import CopyHolder, PeerCopies, owners_of, send_state, take_state
from slime.ray.utils import ActorFailure
from tests.own_ray import own_ray
from tests.unit.test_ray_runtime import cluster_args

pytestmark = pytest.mark.processes

ALL = owners_of("actor", 2)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with own_ray(cluster_args()):
        yield


class Trainer:
    """A rank's state of one number, as an array of a piece."""

    def __init__(self, value: int) -> None:
        self.value = value

    def give(self, rollout_id: int, owner: str, holders: list[Any], *, dies: bool = False) -> None:
        """As `send_state` does, without torch; a rank that dies on the way does not complete its copy."""
        for holder in holders:
            ray.get(holder.begin.remote(rollout_id, owner), timeout=60)
            ray.get(holder.keep.remote(rollout_id, owner, {"x": np.full(4, self.value)}), timeout=60)
            if not dies:
                ray.get(holder.complete.remote(rollout_id, owner, {"step": self.value}), timeout=60)

    def restore_state(self, pieces: Any, values: dict[str, Any]) -> None:
        (piece,) = pieces
        assert set(piece["x"]) == {values["step"]}
        self.value = values["step"]


class Group:
    """Two ranks on the node of this test, in place of `RayTrainGroup`."""

    role, world_size = "actor", 2

    def __init__(self) -> None:
        self.trainers = [Trainer(0), Trainer(0)]
        self.dies = False

    def node_ids(self) -> list[str]:
        return [ray.get_runtime_context().get_node_id()] * 2

    def copy_state(self, rollout_id: int, holders: list[list[Any]]) -> int:
        for rank, (trainer, owner) in enumerate(zip(self.trainers, ALL, strict=True)):
            trainer.give(rollout_id, owner, holders[rank], dies=self.dies and rank == 1)
        return 2 * 32

    def restore_state(self, rollout_id: int, holders: list[list[Any]]) -> None:
        for rank, (trainer, owner) in enumerate(zip(self.trainers, ALL, strict=True)):
            take_state(trainer, rollout_id, owner, holders[rank])


TURNS: Any = SimpleNamespace(to_trainer=lambda group: None)


def lose(holder: Any) -> None:
    """Kill a holder and see it gone: Ray kills in the background, and a call made meanwhile may still be answered."""
    ray.kill(holder)
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(600):
            ray.get(holder.whole.remote(), timeout=60)
            time.sleep(0.1)


def test_only_every_so_many_rollouts_states_are_copied():
    assert [number for number in range(6) if PeerCopies(2).is_due(number)] == [1, 3, 5]
    assert not any(PeerCopies(None).is_due(number) for number in range(6))


def test_a_loss_in_the_middle_of_a_copy_leaves_the_one_before(local_ray):
    copies, group = PeerCopies(1), Group()
    for rollout_id in (0, 1):
        for rank, trainer in enumerate(group.trainers):
            trainer.value = 10 * rollout_id + rank
        metrics = copies.keep(rollout_id, [group], TURNS)
        assert metrics["perf/peer_copy_bytes"] == 64 and metrics["perf/peer_copy_time"] > 0
    assert copies.newest(ALL) == 1
    (holder,) = copies.holders.values()
    assert list(ray.get(holder.whole.remote(), timeout=60)) == [1], "an older one costs memory, and is given up"
    group.dies = True
    copies.keep(2, [group], TURNS)
    assert copies.newest(ALL) == 1
    assert copies.newest(owners_of("actor", 1)) is None, "on fewer ranks each holds another part"
    assert copies.newest([*ALL, *owners_of("critic", 2)]) is None, "actor and critic go on from the same rollout"
    again = Group()
    copies.restore(1, [again], TURNS)
    assert [trainer.value for trainer in again.trainers] == [10, 11]
    copies.end()


def test_a_lost_holder_costs_its_copies_and_another_takes_its_place(local_ray):
    copies, group = PeerCopies(1), Group()
    copies.keep(0, [group], TURNS)
    (holder,) = copies.holders.values()
    lose(holder)
    assert copies.newest(ALL) is None
    group.trainers[0].value = 5
    copies.keep(1, [group], TURNS)
    assert copies.newest(ALL) == 1
    copies.end()


def test_with_a_holder_lost_the_other_ones_copy_is_sent_and_taken(local_ray):
    lost, kept = (ray.remote(CopyHolder).options(num_cpus=0).remote() for _ in range(2))
    trainer: Any = SimpleNamespace(state_tensors=lambda: iter(()), state_values=lambda: {"step": 3})
    lose(lost)
    assert send_state(trainer, 4, "actor 0 of 1", [lost, kept]) == 0
    taken: list[Any] = []
    trainer.restore_state = lambda pieces, values: taken.append((list(pieces), values))
    take_state(trainer, 4, "actor 0 of 1", [lost, kept])
    assert taken == [([], {"step": 3})]
    with pytest.raises(ActorFailure, match=r"Ray actor CopyHolder \(.*\) died"):
        take_state(trainer, 4, "actor 0 of 1", [lost])


def test_on_several_nodes_a_copy_is_on_its_own_node_and_on_the_next(monkeypatch):
    copies = PeerCopies(1)
    monkeypatch.setattr(copies, "_holder", lambda node: f"holder of {node}")
    a, b, c = (f"holder of {node}" for node in "abc")
    assert copies.places(list("aabbcc")) == [[a, b], [a, b], [b, c], [b, c], [c, a], [c, a]]
    assert copies.places(list("aa")) == [[a], [a]]
