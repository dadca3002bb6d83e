"""Serve the torch store of an engine's ranks at the engine's address alone; torch serves it on every interface.

Whoever reaches that store can read the addresses of the ranks, and write others in their place.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from typing import Any


def install() -> None:
    """Change how this process meets its group at a `tcp://` address."""
    rendezvous: Any = importlib.import_module(
        "torch.distributed.rendezvous"
    )  # the package has a function of this name
    make_store = rendezvous.TCPStore

    def make_store_at_its_address(host_name: str, port: int, *, is_master: bool, **options: Any) -> Any:
        # A host whose address is translated on the way has no interface of that address: there, torch's own way.
        with contextlib.suppress(OSError):
            if is_master:
                family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
                listener = socket.create_server((host_name, port), family=family)
                options |= {"master_listen_fd": listener.detach(), "multi_tenant": False}
        return make_store(host_name, port, is_master=is_master, **options)

    rendezvous.TCPStore = make_store_at_its_address
