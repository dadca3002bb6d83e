"""--use-distributed-post: requests leave from a Ray actor on every node instead of from the rollout manager alone.

One process sends and parses a few thousand requests a second; with many engines that is the limit. Here `post` of the
process that calls `use_distributed_post` hands each request to the next actor in turn.

Wait graph of a request: it waits for its actor, which waits for the server with the deadline and the retries of
`http_utils.post`; the answer, or the same HttpError, unblocks the caller. When the actor dies, the request is sent
again from another one, and from the calling process where no other is left. A caller that is cancelled cancels the
request in the actor, which closes the connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.config.args import Args
from slime.ray.utils import actor_env, get
from slime.utils import http_utils
from slime.utils.errors import HttpError

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
MAX_REQUESTS_PER_ACTOR = 10_000
MAX_RESTARTS = 10  # Starts of one actor in place of one that died; then its requests leave from elsewhere.
# How long a dead actor is left out of the turn: at first about as long as it takes to start again, doubled each time
# that it is still dead (its node may be gone for good).
REST_S, MAX_REST_S = 5.0, 320.0


class PostActor:
    """Sends what it is given, from the node that it is on."""

    def __init__(self, args: Args) -> None:
        http_utils.init_http_client(args)

    async def post(self, url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        """`http_utils.post` of a payload that is JSON already."""
        return await http_utils.post_body(url, body, headers, max_retries)

    async def node(self) -> str:
        """Id of the node that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())


def use_distributed_post(args: Args) -> list[Any]:
    """Start an actor on every node and have `http_utils.post` of this process go through them.

    Args:
        args: reads what `init_http_client` does.

    Returns:
        the actors, which live as long as this process keeps them.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [_start(args, node) for node in nodes]
    get([actor.node.remote() for actor in actors], "the actors of --use-distributed-post", START_DEADLINE_S)
    http_utils.set_post_transport(_Turn(actors).send)
    logger.info("requests are sent by %d actor(s), one on every node", len(actors))
    return actors


def _start(args: Args, node_id: str) -> Any:
    return (
        ray.remote(PostActor)
        .options(
            num_cpus=0,
            max_restarts=MAX_RESTARTS,
            max_concurrency=MAX_REQUESTS_PER_ACTOR,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": actor_env()},
        )
        .remote(args)
    )


class _Turn:
    """Hands requests to actors in turn, without those that died just now."""

    def __init__(self, actors: list[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._actors = actors
        self._clock = clock
        self._begun = 0
        self._rests: dict[int, tuple[float, float]] = {}  # dead actor -> until when it rests, and for how long

    async def send(self, url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        """Do what `http_utils.post_body` does, from an actor.

        Raises:
            HttpError: as `post_body` raises it, or the actor died and `max_retries` is 0.
        """
        for number in self._in_turn():
            try:
                answer = await _result(self._actors[number].post.remote(url, body, headers, max_retries))
            except RayActorError as error:
                self._let_rest(number, error)
                if not max_retries:  # nobody knows whether the server has had the request
                    raise HttpError(f"POST {url} was lost with an actor of --use-distributed-post ({error})") from None
            else:
                self._rests.pop(number, None)
                return answer
        return await http_utils.post_body(url, body, headers, max_retries)

    def _in_turn(self) -> list[int]:
        """Return the actors to try, from the next in turn on."""
        self._begun += 1
        count, now = len(self._actors), self._clock()
        order = [(self._begun + step) % count for step in range(count)]
        return [number for number in order if number not in self._rests or self._rests[number][0] <= now]

    def _let_rest(self, number: int, error: RayActorError) -> None:
        now = self._clock()
        until, rest_s = self._rests.get(number, (0.0, REST_S / 2))
        if until > now:  # another of its requests has reported it already
            return
        self._rests[number] = (now + 2 * rest_s, min(2 * rest_s, MAX_REST_S / 2))
        first_line = str(error).partition("\n")[0]
        logger.warning("an actor of --use-distributed-post died; others send its requests (%s)", first_line)


async def _result(ref: ray.ObjectRef) -> Any:
    """The answer to a request that an actor sends."""
    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, HttpError) else error from None
