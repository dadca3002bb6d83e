"""What every Ray actor of ours has in common: its place, and that user code cannot end its process."""

from __future__ import annotations

import functools
import inspect
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

from slime.ray.utils import node_address
from slime.utils.misc import listen_anywhere


class RayActor:
    """Base of the actors: where it runs, and a port of its own there.

    `sys.exit()` in user code that a method calls is an error of that method. Ray would end the process, and the driver
    would replace it as if its machine had failed.
    """

    _listener: socket.socket | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _exits_as_errors(method))

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


def _exits_as_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # Ray's marks on the method, too
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            if hasattr(error, "ray_terminate_msg"):  # Ray itself ends the process
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.name} ({place.filename}:{place.lineno})"
            raise RuntimeError(f"{where} raised {type(error).__name__}: {error}") from error

    return call
