"""--use-distributed-post: requests leave from a Ray actor on every node instead of from the rollout manager alone.

One process sends and parses a few thousand requests a second; with many engines that is the limit. Here `post` of the
process that calls `use_distributed_post` hands each request to the next actor in turn. It does not know what is sent.

Wait graph of a request: it waits for its actor, which waits for the server with the deadline and the retries of
`http_utils.post`; the answer, or the same HttpError, unblocks the caller. A caller that is cancelled cancels the
request in the actor, which closes the connection.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.ray.utils import actor_env, get
from slime.utils import http_utils
from slime.utils.errors import HttpError

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
MAX_REQUESTS_PER_ACTOR = 10_000


class PostActor:
    """Sends what it is given, from the node that it is on."""

    def __init__(self, args: Any) -> None:
        http_utils.init_http_client(args)

    async def post(self, url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        """`http_utils.post` of a payload that is JSON already."""
        return await http_utils.post_body(url, body, headers, max_retries)

    async def node(self) -> str:
        """Id of the node that this actor is on."""
        return str(ray.get_runtime_context().get_node_id())


def use_distributed_post(args: Any) -> list[Any]:
    """Start an actor on every node and have `http_utils.post` of this process go through them.

    Args:
        args: reads what `init_http_client` does.

    Returns:
        the actors, which live as long as this process keeps them.
    """
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [_start(args, node) for node in nodes]
    get([actor.node.remote() for actor in actors], "the actors of --use-distributed-post", START_DEADLINE_S)
    turn = itertools.cycle(actors)

    async def send(url: str, body: bytes, headers: dict[str, str] | None, max_retries: int) -> Any:
        return await _result(next(turn).post.remote(url, body, headers, max_retries), url)

    http_utils.set_post_transport(send)
    logger.info("requests are sent by %d actor(s), one on every node", len(actors))
    return actors


def _start(args: Any, node_id: str) -> Any:
    return (
        ray.remote(PostActor)
        .options(
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=MAX_REQUESTS_PER_ACTOR,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": actor_env()},
        )
        .remote(args)
    )


async def _result(ref: ray.ObjectRef, url: str) -> Any:
    """The answer to a request that an actor sends.

    Raises:
        HttpError: as `http_utils.post` raises it, or the actor died.
    """
    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, HttpError) else error from None
    except RayActorError as error:
        raise HttpError(f"POST {url} was lost: an actor of --use-distributed-post died ({error})") from None
