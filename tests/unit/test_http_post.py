"""--use-distributed-post: a request whose actor dies is sent again from elsewhere; one that is back gets others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from slime.ray.rollout.engine_control import _Turn
from slime.utils import http_utils
from slime.utils.errors import HttpError


class Actor:
    """An actor as `_Turn` sees it; a real one that dies is in tests/rollout/test_topology.py."""

    def __init__(self, name: str) -> None:
        self.name, self.is_dead, self.asked = name, False, 0
        self.post = self

    async def remote(self, *request: Any) -> str:
        self.asked += 1
        if self.is_dead:
            raise ActorUnavailableError(f"{self.name} is unavailable", None)
        return self.name


class World:
    """Two actors and this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.actors = [Actor("a"), Actor("b")]
        self.turn = _Turn(self.actors)
        monkeypatch.setattr(http_utils, "post_body", self._post_here)

    async def _post_here(self, *request: Any) -> str:
        return "here"

    def send(self, count: int = 1, max_retries: int = 60) -> list[str]:
        async def all_of_them() -> list[str]:
            return await asyncio.gather(*(self.turn.send("http://x", b"", None, max_retries) for _ in range(count)))

        return asyncio.run(all_of_them())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_request_whose_actor_died_goes_to_another_one(world: World, caplog: pytest.LogCaptureFixture) -> None:
    assert sorted(world.send(4)) == ["a", "a", "b", "b"]
    world.actors[0].is_dead = True
    assert world.send(4) == ["b"] * 4
    assert len(caplog.records) == 1 and "a is unavailable" in caplog.text, "one warning an actor, not one a request"


def test_requests_leave_from_this_process_while_no_actor_lives(world: World) -> None:
    for actor in world.actors:
        actor.is_dead = True
    assert world.send(3) == ["here"] * 3


def test_an_actor_that_was_started_again_gets_requests_again(world: World) -> None:
    world.actors[0].is_dead = True
    assert world.send(2) == ["b", "b"]
    world.actors[0].is_dead = False
    assert sorted(world.send(2)) == ["a", "b"]


def test_a_request_that_may_not_be_repeated_fails_with_its_actor(world: World) -> None:
    world.actors[0].is_dead = world.actors[1].is_dead = True
    with pytest.raises(HttpError, match="POST http://x was lost with an actor of --use-distributed-post"):
        world.send(max_retries=0)
