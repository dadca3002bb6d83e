"""The router in front of the engines: a child process of whoever starts it, or one that runs already. And ports for
engines and routers, found so that no two processes of one node choose the same.

It does not start engines, and does not choose which requests are sent.

An engine needs several ports for many seconds before it binds the first of them. So ports are handed out in blocks,
and a block belongs to whoever has bound its first port (without listening, which leaves the server free to bind and
listen there itself: both sides set SO_REUSEADDR). The holder keeps the reservation until its server listens. Blocks
lie below the range from which the kernel takes ports for outgoing connections.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.config.args import Args
from slime.processes.directories import write_private
from slime.processes.registry import exit_text, log_tail, registry
from slime.processes.wait import WaitTimeout, wait
from slime.utils.errors import UsageError
from slime.utils.http.api_keys import protect_router
from slime.utils.misc import needed, url_host

logger = logging.getLogger(__name__)

ROUTER_DEADLINE_S = 120.0
ANSWER_TIMEOUT_S = 30.0
BREAK_S = 10  # an engine that failed ten times running gets no request for so long; shorter than the client retries
MAX_STARTS = 3
FIRST_PORT = 15000
LAST_PORT = 32000
BLOCK = 64


class RouterStartError(RuntimeError):
    """The router did not answer; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class RouterAddress:
    """Where requests go."""

    ip: str
    port: int

    @property
    def url(self) -> str:
        """`http://ip:port`."""
        return f"http://{url_host(self.ip)}:{self.port}"


class Router:
    """One router.

    Args:
        args: reads `sglang_router_ip`, `sglang_router_port`, `sglang_router_request_timeout_secs`, `router_overrides`.
        host: address to listen on.
        log_path: file for its output.
        is_first: the router of the run's first model: the one that --sglang-router-ip and -port are about.
        kind: "generate", "pd" where its engines prefill or decode, "classify" for a model that scores.
    """

    def __init__(
        self, args: Args, *, host: str, log_path: Path, is_first: bool = True, kind: str = "generate"
    ) -> None:
        self._args = args
        self._log_path = log_path
        self._kind = kind
        self.process: subprocess.Popen[bytes] | None = None
        self._block: PortBlock | None = None
        self._port: int | None = args.sglang_router_port if is_first else None
        self._is_first = is_first
        self.is_ours = not (is_first and args.sglang_router_ip)
        self.address = RouterAddress(host if self.is_ours else needed(args.sglang_router_ip), self._port or 0)
        if not self.is_ours:
            protect_router(self.address.url)

    def launch(self) -> None:
        """Start the process without waiting for it; a router that runs already needs nothing."""
        if not self.is_ours:
            return
        ip, port = self.address.ip, self._port
        if port and not is_free(ip, port):
            raise UsageError(f"port {port} on {ip} is taken: choose another --sglang-router-port, or leave it out")
        self._start_process()

    def _start_process(self) -> None:
        ip, port = self.address.ip, self._port
        # Its metrics port has a fixed default that two routers would fight over.
        self._block = reserve_block(ip, needed=(0, 1))
        self.address = RouterAddress(ip, port or self._block[0])
        protect_router(self.address.url)
        file = self._log_path.with_suffix(".json")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, json.dumps(self._values(self._block[1]), indent=2))  # there may be passwords in it
        self.process = registry().start(
            [sys.executable, "-m", "slime.backends.sglang_utils.launch_router", str(file), self._kind],
            name="router",
            log_path=self._log_path,
        )

    def _values(self, prometheus_port: int) -> dict[str, Any]:
        values = router_values(self._args, self.address, prometheus_port=prometheus_port, has_pd=self._kind == "pd")
        if not self._is_first:
            values["prometheus_port"] = prometheus_port  # that of --router-prometheus-port is taken
        return values

    def wait_ready(self) -> None:
        """Wait until the router answers; one whose free port was snatched away is started again on another.

        Raises:
            RouterStartError: it died (noticed at once) or did not answer in time.
        """
        for attempt in range(1, MAX_STARTS + 1):
            try:
                self._wait_answer()
            except (RouterStartError, WaitTimeout) as error:
                self.shutdown()
                if attempt == MAX_STARTS or isinstance(error, WaitTimeout) or not self._port_was_taken():
                    message = f"{error}; the last lines of its log {self._log_path}:\n{log_tail(self._log_path)}"
                    raise RouterStartError(message) from None
                logger.warning("the router's port %d was taken; starting it on another", self.address.port)
                self.launch()
            else:
                break
        if self._block is not None:
            self._block.release()

    def _wait_answer(self) -> None:
        begin = time.monotonic()
        what = f"the router {self.address.url} to answer"
        wait(what, ROUTER_DEADLINE_S, lambda: _answers(self.address.url), check=self._check_alive)
        logger.info("the router answers at %s after %.1f s", self.address.url, time.monotonic() - begin)

    def _check_alive(self) -> None:
        code = self.process.poll() if self.process is not None else None
        if code is not None:
            raise RouterStartError(f"the router ended with exit code {code} before it answered")

    def _port_was_taken(self) -> bool:
        return self.is_ours and not self._port and "in use" in log_tail(self._log_path)

    def what_is_wrong(self, *, asks: bool) -> str | None:
        """Why it cannot be counted on, as a sentence's end; None while it can.

        Args:
            asks: it is to answer, too.
        """
        code = self.process.poll() if self.process is not None else None
        if code is not None:
            return f"has ended ({exit_text(code)})"
        if asks and self.process is not None:
            try:
                server_control.list_workers_sync(self.address.url, timeout_s=ANSWER_TIMEOUT_S)
            except server_control.HttpError as error:
                return f"does not answer ({error})"
        return None

    def restart(self) -> None:
        """Start it again where it was, and wait until it answers.

        Connections of the old one that the kernel still holds do not keep a server from listening there.

        Raises:
            RouterStartError: it died or did not answer in time.
        """
        self.shutdown()
        self._port = self.address.port
        self._start_process()
        self.wait_ready()

    def shutdown(self) -> None:
        """End the process, if it is ours."""
        if self.process is not None:
            registry().end(self.process, grace_s=0.0)  # told to stop, it waits 180 s for requests to end
            self.process = None
        if self._block is not None:
            self._block.release()


def router_values(args: Args, address: RouterAddress, *, prometheus_port: int, has_pd: bool = False) -> dict[str, Any]:
    """What the router's command line would hold: ours, overridden by the `--router-*` flags, then the addresses.

    Args:
        args: reads `sglang_router_request_timeout_secs`, `router_overrides`.
        address: where it is to listen.
        prometheus_port: of its metrics.
        has_pd: its engines prefill or decode.
    """
    ours = {
        "log_level": "warn",
        "request_timeout_secs": args.sglang_router_request_timeout_secs,
        # Engines are watched by whoever started them, and a busy CPU engine may answer late.
        "disable_health_check": True,
        # The circuit breaker stays on: without it cache_aware sends the requests of an engine that died to it again.
        "cb_timeout_duration_secs": BREAK_S,
    }
    owned = {"host": address.ip, "port": address.port} | ({"pd_disaggregation": True} if has_pd else {})
    # The key is in the router's environment alone: this is written to a file.
    given = {name: value for name, value in args.router_overrides.items() if name != "api_key"}
    metrics = {"prometheus_host": address.ip, "prometheus_port": prometheus_port}
    return ours | metrics | given | owned


def _answers(url: str) -> bool:
    try:
        server_control.list_workers_sync(url)
    except server_control.HttpError:
        return False
    return True


@dataclass
class PortBlock:
    """`BLOCK` consecutive ports from `first` on, reserved until `release`."""

    first: int
    _holder: socket.socket = field(repr=False)

    def __getitem__(self, index: int) -> int:
        if index not in range(BLOCK):  # without it a loop over a block would not end
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
        RuntimeError: there is no such block.
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
    raise RuntimeError(f"no block of {BLOCK} free ports on {host} between {FIRST_PORT} and {LAST_PORT}")


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
