"""Sandboxes: where programs that a model writes or steers run. One Protocol, four backends.

`make_sandbox("local")` isolates on this host, "docker" uses a Docker daemon, "e2b" the service of that name, "http" a
`python -m slime.agent.sandbox_server` on another host. docs/sandbox.md says what is contained, and what stops it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from slime.agent.sandbox.access import GatewayAccess
from slime.agent.sandbox.results import TMP, ExecResult, SandboxError, SandboxTimeout

if TYPE_CHECKING:
    from slime.agent.sandbox.docker import DockerSandbox
    from slime.agent.sandbox.e2b import E2BSandbox
    from slime.agent.sandbox.http import HttpSandbox
    from slime.agent.sandbox.local import LocalSandbox

__all__ = [
    "BACKENDS",
    "EXIT_KILLED",
    "EXIT_TIME_BUDGET_EXCEEDED",
    "DockerSandbox",
    "E2BSandbox",
    "GatewayAccess",
    "HttpSandbox",
    "LocalSandbox",
    "Sandbox",
    "SandboxError",
    "SandboxTimeout",
    "ensure_agent_user",
    "exec_and_wait",
    "make_sandbox",
]
logger = logging.getLogger(__name__)

EXIT_TIME_BUDGET_EXCEEDED = -1
EXIT_KILLED = 137
# backend -> (module, class). Loaded when asked for: their clients are large, and no run needs all.
BACKENDS = {
    "local": ("slime.agent.sandbox.local", "LocalSandbox"),
    "docker": ("slime.agent.sandbox.docker", "DockerSandbox"),
    "e2b": ("slime.agent.sandbox.e2b", "E2BSandbox"),
    "http": ("slime.agent.sandbox.http", "HttpSandbox"),
}
_LONGEST_POLL_S = 5.0
_LOOK_S = 0.2
_BEGUN_S = 10.0


@runtime_checkable
class Sandbox(Protocol):
    """A place where commands run, with files of its own; it ends with its `async with` block."""

    @property
    def sandbox_id(self) -> str:
        """Name of the sandbox, for messages."""

    async def __aenter__(self) -> Self:
        """Make it."""

    async def __aexit__(self, *exc: object) -> None:
        """End it with all its processes; never raises."""

    async def exec(
        self,
        cmd: str,
        *,
        user: str = "root",
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        check: bool = False,
        idempotent: bool = True,
    ) -> ExecResult:
        """Run a command line with bash; return its exit code, stdout and stderr."""

    async def write_file(self, path: str, data: str | bytes | Path, *, user: str = "root") -> None:
        """Write a text, bytes, or a file of this host."""

    async def read_file(self, path: str, *, user: str = "root") -> str:
        """The text of a regular file; an error where there is none."""


def __getattr__(name: str) -> Any:
    for module, class_name in BACKENDS.values():
        if class_name == name:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def make_sandbox(backend: str, *, image: str = "", **options: Any) -> Sandbox:
    """Make a sandbox of a backend; it begins with `async with`.

    Args:
        image: for backends that have images.
        options: of the backend's class.

    Raises:
        ValueError: there is no such backend, or an option has a value that it does not take.
        TypeError: the backend has no such option.
    """
    if backend not in BACKENDS:
        raise ValueError(f"no sandbox backend is called {backend!r}; there are {', '.join(BACKENDS)}")
    module, class_name = BACKENDS[backend]
    kind = getattr(importlib.import_module(module), class_name)
    if backend == "local":
        if image:
            logger.warning("image %r has no effect: local sandboxes show this host's own programs", image)
        return kind(**options)
    return kind(image, **options)


async def exec_and_wait(
    sb: Sandbox,
    *,
    cmd: str,
    time_budget_sec: float,
    tag: str,
    user: str = "root",
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    out_file: str | None = None,
    want_output: bool = False,
) -> tuple[int, str]:
    """Run a long command detached and look for its end, so that no stream stays open for as long as it runs.

    Args:
        time_budget_sec: seconds, after which it is killed.
        tag: of its files below /tmp; a later call with the same tag runs anew.
        out_file: for its output.
        want_output: return all of its output, not only the end of a failed one's.

    Returns:
        Its exit code, EXIT_KILLED where the sandbox has killed it (memory), EXIT_TIME_BUDGET_EXCEEDED where the budget
        was over, and output.
    """
    script, lock, done = f"{TMP}/.{tag}.sh", f"{TMP}/.{tag}.spawned", f"{TMP}/.{tag}.done"
    leader, out = f"{TMP}/.{tag}.pid", out_file or f"{TMP}/.{tag}.out"
    lines = ["#!/bin/bash", f"echo $$ > {leader}"]
    if workdir:
        lines += [f"cd {shlex.quote(workdir)}", f"export HOME=/home/{user}"]
    # In parentheses: an `exit` in the command ends the command, not the script.
    await sb.write_file(script, "\n".join([*lines, "(", cmd, ")", f"echo $? > {done}", ""]), user=user)
    # The lock goes in a request of its own: one that is sent twice must not start the command twice.
    await sb.exec(f"rm -rf {lock}; rm -f {shlex.quote(out)} {done} {leader}", user=user, check=True)
    spawn = f"mkdir {lock} 2>/dev/null || exit 0; setsid bash {script} < /dev/null > {shlex.quote(out)} 2>&1 &"
    await sb.exec(f"chmod +x {script}; {spawn}", user=user, env=env)
    code = await _exit_code(sb, done, leader, time_budget_sec, user=user)
    if code is None:
        # `setsid` made it the leader of a group: what it has started ends with it. A small budget may end before it
        # has begun, so its pid is waited for.
        begun = f"timeout {_BEGUN_S} bash -c 'until test -s {leader}; do sleep 0.02; done'"
        await sb.exec(f"{begun}; kill -KILL -- -$(cat {leader})", user=user)
        code = EXIT_TIME_BUDGET_EXCEEDED
    if want_output:
        return code, await sb.read_file(out, user=user)
    return code, "" if code == 0 else (await sb.exec(f"tail -c 512 {shlex.quote(out)}", user=user))[1]


async def _exit_code(sb: Sandbox, done: str, leader: str, budget_s: float, *, user: str) -> int | None:
    """The exit code that the command has left, None when the budget is over."""
    end, pause = time.monotonic() + budget_s, 0.02
    alive = f"! test -s {leader} || kill -0 $(cat {leader}) 2> /dev/null || test -f {done}"
    while (left := end - time.monotonic()) > 0:
        await asyncio.sleep(min(pause, left))
        pause = min(1.25 * pause, _LONGEST_POLL_S)  # a fifth of the time that it has run
        found, text, _ = await sb.exec(f"test -f {done} && cat {done}", user=user)
        if found == 0 and text.strip():
            return int(text)
        if pause > _LOOK_S and (await sb.exec(alive, user=user))[0]:
            return EXIT_KILLED  # It would leave no exit code for the rest of the budget.
    return None


async def ensure_agent_user(sb: Sandbox, workdir: str) -> None:
    """Make the user `agent` where there is none, and `workdir` its own.

    Raises:
        SandboxError: that failed.
    """
    make = "id agent > /dev/null 2>&1 || useradd -m -s /bin/bash agent"
    own = f"chown -R agent:agent /home/agent {shlex.quote(workdir)}"
    # git refuses to work in a directory of another user's.
    trust = "git config --system --add safe.directory '*'"
    await sb.exec(f"({make}) && {own} && (! command -v git > /dev/null || {trust})", user="root", check=True)
