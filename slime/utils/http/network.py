"""What a run over several hosts asks of its network: addresses, interfaces, who can be reached and who cannot.

Answers about the network are sentences that can be acted on, given before a collective times out.

Servers behind which nothing answers for a while (outages): requests to them wait, in place of failing again and again.
Whoever replaces what is lost says when the outage of a server begins, ends, or will not end; whoever sends requests
asks (`slime.utils.http_utils`). Servers are known by scheme, host and port.

Wait graph: `over` waits until the outage ends or is given up, `DEADLINE_S` at most.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import psutil

from slime.utils.errors import HttpError, UsageError, env_flag

SLIME_HOST_IP_ENV = "SLIME_HOST_IP"  # Environment variable: the address at which other hosts reach this one.
# Environment variable: "1" where this host is reached at its IPv6 address, if it has one.
PREFER_IPV6 = "SLIME_PREFER_IPV6"
CONNECT_TIMEOUT_S = 10.0
REMEDY = "in the environment of `ray start` on that host, or with --train-env-vars for trainers"


def given_address(environment: Mapping[str, str]) -> str | None:
    """The address of this host that the environment chooses: SLIME_HOST_IP, else with SLIME_PREFER_IPV6=1 the host's
    first IPv6 address that other hosts can know. None where it chooses nothing, or the host has no such address.

    Raises:
        UsageError: no interface of this host has SLIME_HOST_IP, or SLIME_PREFER_IPV6 says neither yes nor no.
    """
    if address := environment.get(SLIME_HOST_IP_ENV):
        # the kernel takes all of 127.0.0.0/8 for the loopback
        if address not in _own_addresses() and not address.startswith("127."):
            raise UsageError(
                f"{SLIME_HOST_IP_ENV}={address} is no address of {socket.gethostname()}; set it {REMEDY}, to an "
                "address of that host which the others reach, or leave it out."
            )
        return address
    return next(filter(_is_ipv6_of_others, _own_addresses()), None) if env_flag(environment, PREFER_IPV6) else None


def is_of_this_host(address: str) -> bool:
    """Whether an address, or the name `localhost`, is this host's own."""
    return address in ("localhost", "::1") or address.startswith("127.") or address in _own_addresses()


def _own_addresses() -> list[str]:
    """What the interfaces are called: addresses of IPv4 and IPv6, and of the hardware."""
    return [one.address.partition("%")[0] for found in psutil.net_if_addrs().values() for one in found]


def _is_ipv6_of_others(address: str) -> bool:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:  # of the hardware
        return False
    return known.version == 6 and not known.is_loopback and not known.is_link_local


def interface_problem(environment: Mapping[str, str], *, uses_nccl: bool) -> str | None:
    """A sentence for an interface that is chosen by the environment and that this host lacks; None if there is none.

    Args:
        environment: of the process; reads GLOO_SOCKET_IFNAME, and with `uses_nccl` NCCL_SOCKET_IFNAME.
        uses_nccl: whether the process forms groups of NCCL, too.
    """
    known = sorted(psutil.net_if_addrs())
    names = {"GLOO_SOCKET_IFNAME": _lacks_gloo, "NCCL_SOCKET_IFNAME": _lacks_nccl}
    for name, lacks in names.items():
        value = environment.get(name)
        if value and (uses_nccl or name.startswith("GLOO")) and lacks(value, known):
            return (
                f"{name}={value} names no network interface of {socket.gethostname()}, which has {', '.join(known)}; "
                f"name one of those {REMEDY}."
            )
    return None


def _lacks_gloo(value: str, known: list[str]) -> bool:
    """gloo takes a list of names, and all of them."""
    return any(name not in known for name in value.split(","))


def _lacks_nccl(value: str, known: list[str]) -> bool:
    """NCCL takes a list of what names begin with; "=" in front: of names; "^": of those not to take."""
    if value.startswith("^"):
        return False
    wanted = value.removeprefix("=").split(",")
    is_exact = value.startswith("=")
    return not any(name == one if is_exact else name.startswith(one) for one in wanted for name in known)


def out_of_reach(address: str, port: int, *, timeout_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """Why nothing can be connected to an address from this host; None where it can."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError as error:
        return f"{socket.gethostname()} cannot connect to {address}:{port}: {error}"
    return None


logger = logging.getLogger(__name__)

# As long as a rollout may take: an engine may be lost while the trainer, whose weights another needs, works.
DEADLINE_S = 24 * 3600.0


class Outages:
    """The outages that this process knows of."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[str, Future[str | None]] = {}
        self._ended_at: dict[str, float] = {}
        self._listener: Callable[[str], None] | None = None

    def begin(self, url: str) -> None:
        """Have requests to this server wait; nothing changes where they wait already."""
        with self._lock:
            if (end := self._ends.get(origin(url))) is None or end.done():
                self._ends[origin(url)] = Future()

    def end(self, url: str) -> None:
        """Have them go on."""
        self._finish(url, None)

    def give_up(self, url: str, why: str) -> None:
        """Have them fail, those that come later, too."""
        self._finish(url, why)

    def _finish(self, url: str, why: str | None) -> None:
        with self._lock:
            end = self._ends.get(origin(url))
            if why is None and self._ends.pop(origin(url), None) is not None:
                self._ended_at[origin(url)] = time.monotonic()
        if end is not None and not end.done():
            end.set_result(why)

    def is_on(self, url: str) -> bool:
        """Whether requests to this server wait, or fail at once."""
        return bool(self._ends) and origin(url) in self._ends

    def may_end(self, url: str) -> bool:
        """Whether requests to this server wait."""
        return bool(self._ends) and (end := self._ends.get(origin(url))) is not None and not end.done()

    def has_hit(self, url: str, since: float) -> bool:
        """Whether a request that was sent `since` (of `time.monotonic`) fell into an outage, so that `over` has more
        to say than its own failure."""
        return self.is_on(url) or self._ended_at.get(origin(url), -1.0) >= since

    async def over(self, url: str) -> bool:
        """Wait for the end of an outage; returns whether there was one.

        Raises:
            HttpError: it will not end.
        """
        if not self._ends or (end := self._ends.get(origin(url))) is None:
            return False
        # shielded: one request that is cancelled must not end the wait of the others
        why = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(end)), DEADLINE_S)
        if why is not None:
            raise HttpError(f"{url} has no engine any more: {why}")
        return True

    def listen(self, listener: Callable[[str], None] | None) -> None:
        """Have this called with the address of each request that has failed; it must not block."""
        self._listener = listener

    def suspect(self, url: str) -> None:
        """Say that a request was not answered as it should be."""
        if self._listener is not None:
            self._listener(url)


def origin(url: str) -> str:
    """Scheme, host and port of an address.

    Example:
        >>> origin("http://10.0.0.1:30000/generate")
        'http://10.0.0.1:30000'
    """
    return "/".join(url.split("/", 3)[:3])


OUTAGES = Outages()  # Of this process.
