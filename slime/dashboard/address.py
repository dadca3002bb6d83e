"""Where a dashboard listens, the token that opens it, and the lines that tell a user.

A driver opens the socket itself and hands it to the dashboard's process: the printed port is taken at once.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from slime.processes.registry import MARK, registry

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SLIME_DASHBOARD_TOKEN"  # nosec B105 - a name
LOOPBACK = "127.0.0.1"
# What a dashboard next to a run gets of the environment: a key of the run's is none of its business.
PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH", MARK)
OFF = -1


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: name or address.
        port: 0 takes a free one.

    Raises:
        OSError: the address cannot be used.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # such as a..b
        raise OSError(f"{host!r} is no name of a host") from error
    is_every = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=is_every)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host's name or address.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def lines_for_user(host: str, port: int, token: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the URL, and the `ssh -L` command where the browser may be on another machine.

    Args:
        host: that the server listens on; of a wildcard this machine's name is shown.
        port: likewise.
        token: opens the page.
        environment: says whether this is a session over ssh or a job of a cluster.
    """
    is_local = is_loopback(host)
    shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else host  # nosec B104 - compared, not bound
    shown = f"[{shown}]" if ":" in shown else shown
    lines = [f"dashboard: http://{shown}:{port}/?token={token}"]
    if not is_local or environment.keys() & {"SSH_CONNECTION", "SLURM_JOB_ID"}:
        target = LOOPBACK if is_local or shown == socket.gethostname() else shown
        user = f"{_user()}@{socket.gethostname()}"
        lines.append(f"from another machine: ssh -L {port}:{target}:{port} {user}")
        lines.append(f"    and open http://{LOOPBACK}:{port}/?token={token}")
    return lines


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not be in /etc/passwd
        return str(os.getuid())


def start_beside_run(directory: Path, host: str, port: int) -> None:
    """Start a dashboard in a process of its own, which ends with this one, and log its URL; a failure is a warning.

    Args:
        directory: --output-dir.
        host: --dashboard-host.
        port: --dashboard-port; 0 takes a free one, -1 starts nothing.
    """
    if port == OFF:
        return
    token, root = new_token(), str(Path(__file__).resolve().parent.parent.parent)
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {TOKEN_VARIABLE: token, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        with contextlib.closing(listen(host, port)) as listening:
            descriptor = listening.fileno()
            command = [sys.executable, "-m", "slime.dashboard", str(directory), host, "--fd", str(descriptor)]
            log = directory / "logs" / "dashboard.log"
            registry().start(command, name="dashboard", log_path=log, env=environment, pass_fds=(descriptor,))
            for line in lines_for_user(host, listening.getsockname()[1], token):
                logger.info("%s", line)
    except OSError as error:
        logger.warning("no dashboard (--dashboard-host %s --dashboard-port %d): %s", host, port, error)
