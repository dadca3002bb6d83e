"""What every Ray actor of ours can tell about the process it runs in. It knows nothing about training or rollout."""

from __future__ import annotations

import os
import socket

from slime.ray.utils import node_address
from slime.utils.misc import listen_anywhere


class RayActor:
    """Base of the actors: where it runs, and a port of its own there."""

    _listener: socket.socket | None = None

    def node_address(self) -> str:
        """The address at which other nodes reach this actor's node."""
        return node_address()

    def master_address(self) -> tuple[str, int]:
        """(address, port) for a process group whose rank 0 is this actor.

        The actor listens there from now on, so nobody takes the port before the group is formed.
        """
        address = self.node_address()
        self._listener = listen_anywhere(address)
        return address, self._listener.getsockname()[1]

    def process_id(self) -> int:
        """Process id of this actor, for messages and tests."""
        return os.getpid()
