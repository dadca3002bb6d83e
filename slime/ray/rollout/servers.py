"""Everything that generates: one router and the engines behind it, started together and ended together.

It does not know what is generated; requests go to `router`, weight updates to `engines`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from slime.backends.sglang_utils import server_control
from slime.ray.rollout.router import Router, RouterAddress
from slime.ray.rollout.server_group import ServerGroup

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class RolloutServers:
    """A running router with its engines."""

    def __init__(self, router: Router, group: ServerGroup, *, num_gpus_per_engine: int) -> None:
        self._router = router
        self._group = group
        self.num_gpus_per_engine = num_gpus_per_engine

    @property
    def router(self) -> RouterAddress:
        """Where requests go."""
        return self._router.address

    @property
    def engines(self) -> list[Any]:
        """Ray actor handles of the engines, with the methods of `SGLangEngine`."""
        return list(self._group.engines)

    def shutdown(self) -> None:
        """End the router and the engines."""
        self._router.shutdown()
        self._group.shutdown()


def start_rollout_servers(args: Any, *, engine_placements: Sequence[tuple[Any, int]]) -> RolloutServers:
    """Start the engines, and the router unless one is given; returns when every engine takes requests.

    Args:
        args: the run's flags.
        engine_placements: (placement group or None, index of its first bundle) of each engine.

    Raises:
        ActorFailure: an engine did not start; quotes the end of its log.
        RouterStartError: the router did not.
    """
    begin, log_dir = time.monotonic(), Path(args.output_dir).absolute() / "logs"
    host = LOOPBACK if _is_one_node() and args.sglang_router_ip in (None, LOOPBACK, "localhost") else None
    router = Router(args, host=host or ray.util.get_node_ip_address(), log_path=log_dir / "router.log")
    group = ServerGroup(args, engine_placements, host=host, log_dir=log_dir)
    servers = RolloutServers(router, group, num_gpus_per_engine=args.rollout_num_gpus_per_engine)
    try:
        router.launch()
        urls = group.start()
        router.wait_ready()
        for url in urls:
            server_control.register_worker_sync(router.address.url, url)
    except BaseException:
        servers.shutdown()
        raise
    logger.info("%d engine(s) behind %s after %.1f s", len(urls), router.address.url, time.monotonic() - begin)
    return servers


def _is_one_node() -> bool:
    return sum(bool(node["Alive"]) for node in ray.nodes()) == 1
