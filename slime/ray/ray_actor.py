"""What every Ray actor of ours can tell about the process it runs in. It knows nothing about training or rollout."""

from __future__ import annotations

import os
import socket

import ray


class RayActor:
    """Base of the actors: where it runs, and a port that is free there."""

    def node_address(self) -> str:
        """The address at which other nodes reach this actor's node."""
        return ray.util.get_node_ip_address()

    def master_address(self) -> tuple[str, int]:
        """(address, free port) for a process group whose rank 0 is this actor.

        The port is not held: it is used within seconds, and init_process_group reports a clash.
        """
        with socket.socket() as probe:
            probe.bind(("", 0))
            return self.node_address(), probe.getsockname()[1]

    def process_id(self) -> int:
        """Process id of this actor, for messages and tests."""
        return os.getpid()
