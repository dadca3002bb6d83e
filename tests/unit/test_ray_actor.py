"""User code that exits inside a Ray actor's method is that method's error: the actor's process goes on."""

from __future__ import annotations

import inspect

import pytest

from slime.ray.rollout.manager import RolloutManager
from slime.ray.train_actor import TrainRayActor
from slime.ray.utils import RayActor


def a_loss_that_exits():
    raise SystemExit(3)  # W&B puts a function of its own in the place of sys.exit


class Trainer(RayActor):
    """Without Ray: the class is a plain one until `ray.remote` wraps it."""

    def train(self, step: int) -> int:
        if step:
            a_loss_that_exits()
        return step

    def ended_by_ray(self) -> None:
        error = SystemExit(1)
        error.ray_terminate_msg = "The process receives a SIGTERM."  # as Ray's own handler raises it
        raise error


def test_an_exit_is_an_error_with_its_place():
    assert Trainer().train(0) == 0
    with pytest.raises(RuntimeError, match=r"^a_loss_that_exits \(.*test_ray_actor.py:\d+\) raised SystemExit: 3$"):
        Trainer().train(1)


def test_ray_can_still_end_the_process():
    with pytest.raises(SystemExit):
        Trainer().ended_by_ray()


def test_methods_keep_their_signatures_and_rays_marks():
    assert list(inspect.signature(TrainRayActor.compute_values).parameters) == ["self", "rollout_id", "refs"]
    assert RolloutManager.eval.__ray_concurrency_group__ == "evaluation"
