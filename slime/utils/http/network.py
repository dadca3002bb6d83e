"""What a run over several hosts asks of a host's network: its address, the interfaces it names, whom it can reach.

Every answer is a sentence that can be acted on, given before a collective times out.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from slime.utils.errors import UsageError, env_flag

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
