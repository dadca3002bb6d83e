"""Ports for engines and routers, found so that no two processes of one node choose the same.

An engine needs several ports for many seconds before it binds the first of them. So ports are handed out in blocks,
and a block belongs to whoever has bound its first port (without listening, which leaves the server free to bind and
listen there itself: both sides set SO_REUSEADDR). The holder keeps the reservation until its server listens. Blocks
lie below the range from which the kernel takes ports for outgoing connections.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

FIRST_PORT = 15000
LAST_PORT = 32000
BLOCK = 64


class NoFreePort(RuntimeError):
    """Every block is taken."""


@dataclass
class PortBlock:
    """`BLOCK` consecutive ports from `first` on, reserved until `release`."""

    first: int
    _holder: socket.socket = field(repr=False)

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < BLOCK:
            raise IndexError(f"a block has {BLOCK} ports, there is no {index}")
        return self.first + index

    def release(self) -> None:
        """Give the block back (a server that listens in it goes on listening)."""
        self._holder.close()


def reserve_block(host: str, *, needed: Iterable[int] = (0,), avoid: Iterable[int] = ()) -> PortBlock:
    """Reserve a block whose `needed` ports are all free.

    Args:
        host: address that will be bound.
        needed: offsets in the block that will be used.
        avoid: first ports of blocks not to take again (one of their ports turned out to be taken).

    Raises:
        NoFreePort: there is no such block.
    """
    firsts = range(FIRST_PORT, LAST_PORT - BLOCK, BLOCK)
    start, avoided, offsets = secrets.randbelow(len(firsts)), set(avoid), list(needed)
    for step in range(len(firsts)):
        first = firsts[(start + step) % len(firsts)]
        if first in avoided:
            continue
        holder = _hold(host, first)
        if holder is None:
            continue
        if all(is_free(host, first + offset) for offset in offsets if offset):
            return PortBlock(first, holder)
        holder.close()
    raise NoFreePort(f"no block of {BLOCK} free ports on {host} between {FIRST_PORT} and {LAST_PORT}")


def is_free(host: str, port: int) -> bool:
    """Whether a socket can be bound there now."""
    with socket.socket(_family(host)) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _hold(host: str, port: int) -> socket.socket | None:
    """Bind exclusively first, so that two holders never succeed; then allow the server to bind there, too."""
    holder = socket.socket(_family(host))
    try:
        holder.bind((host, port))
    except OSError:
        holder.close()
        return None
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
