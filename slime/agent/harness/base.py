"""What a harness is, and the pieces that harnesses share: finding and installing a program, starting it.

A harness's program comes from one of three places, looked for in this order: the sandbox has it (an image, or a part
of this host that every local sandbox shows); this host has it on its PATH, and the sandbox shows it (`shown_paths`);
or a tarball of this host is installed. Where none has it, one error says what to do.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import lzma
import os
import shlex
import shutil
import tempfile
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slime.agent.sandbox import Sandbox, SandboxError, ensure_agent_user, exec_and_wait
from slime.utils.errors import UsageError
from slime.utils.misc import SingletonMeta

AGENT = "agent"
HOME = "/home/agent"
NODE_TARBALL_ENV = "SLIME_AGENT_NODE_TARBALL"
_LINKS = f"{HOME}/.local/bin"
_WITH_LINKS = f'export PATH="{_LINKS}:$PATH"'
_ARGUMENT_BYTES = 128 << 10
_INSTALL_S = 300.0
_TRIES = 3
_BACK_OFF_S = 2.0


@dataclass(frozen=True)
class HarnessContext:
    """What a harness is started with.

    Attributes:
        workdir: the sandbox's directory with the task.
        session_id: key of the session, which is also the API key.
        adapter_url: of our server as the sandbox reaches it, without `/v1`.
        model_label: name of the model for the program; our server takes any.
        offers_tools: there are tools at `mcp_url`, under the session's key.
    """

    workdir: str
    session_id: str
    adapter_url: str
    model_label: str = "slime-actor"
    offers_tools: bool = False

    @property
    def mcp_url(self) -> str:
        """Address of the run's tools for a client of MCP over HTTP."""
        return f"{self.adapter_url}/mcp"


class _SingletonAbc(SingletonMeta, ABCMeta):
    pass


class BaseHarness(ABC, metaclass=_SingletonAbc):
    """A program that works on a task in a sandbox; one instance per class, without state of a run.

    Attributes:
        name: in HARNESSES and messages.
        command: the program that it starts.
        env_prefix: of the environment variables that set it up.
        takes_tools: it can use tools of MCP servers.
    """

    name: ClassVar[str]
    command: ClassVar[str]
    env_prefix: ClassVar[str]
    takes_tools: ClassVar[bool] = True

    @abstractmethod
    async def install_cli(self, sb: Sandbox) -> None:
        """Give the sandbox the program, once in its life.

        Raises:
            RuntimeError: there is none to give, or it cannot be installed.
        """

    @abstractmethod
    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the files that the program reads at its start."""

    @abstractmethod
    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start the program and return its exit code, EXIT_TIME_BUDGET_EXCEEDED where it was killed."""

    async def run(
        self,
        sb: Sandbox,
        *,
        workdir: str,
        session_id: str,
        adapter_url: str,
        time_budget_sec: float,
        prompt: str,
        offers_tools: bool = False,
    ) -> int:
        """Work on a task; `install_cli` has been called.

        Args:
            workdir: the sandbox's directory with the task; its user `agent` becomes the owner.
            session_id: key of the session.
            adapter_url: of our server as the sandbox reaches it, without `/v1`.
            time_budget_sec: seconds after which the program is killed.
            prompt: the task.
            offers_tools: the run has MCP servers for agents.

        Returns:
            The program's exit code, EXIT_TIME_BUDGET_EXCEEDED where it was killed.
        """
        ctx = HarnessContext(workdir, session_id, adapter_url.rstrip("/"), offers_tools=offers_tools)
        await ensure_agent_user(sb, workdir)
        await self.write_config(sb, ctx)
        return await self.launch_and_wait(sb, ctx, prompt, time_budget_sec)

    def shown_paths(self) -> tuple[str, ...]:
        """Paths of this host that a local sandbox must show (its `show=`) for the program to run there."""
        return host_paths(self.command)

    def extra_args(self) -> str:
        """The end of the command line: the environment's `{env_prefix}_EXTRA_ARGS`."""
        extra = os.environ.get(f"{self.env_prefix}_EXTRA_ARGS", "").strip()
        return f" {extra}" if extra else ""

    def with_extra_envs(self, env: dict[str, str]) -> dict[str, str]:
        """Return `env` with what `{env_prefix}_EXTRA_ENVS`, a JSON object, adds or replaces.

        Raises:
            UsageError: it is not a JSON object of texts.
        """
        name = f"{self.env_prefix}_EXTRA_ENVS"
        text = os.environ.get(name) or "{}"
        try:
            extra = json.loads(text)
        except ValueError:
            extra = None
        if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
            raise UsageError(f'{name}={text!r}: a JSON object of texts is needed, such as {{"NAME": "value"}}')
        return env | extra


def prompt_argument(prompt: str) -> str:
    """Return the prompt as one quoted word of a command line, never taken for an option.

    Raises:
        ValueError: it is longer than Linux lets an argument be.
    """
    text = f"\n{prompt}" if prompt.startswith("-") else prompt
    if len(text.encode()) >= _ARGUMENT_BYTES:
        raise ValueError(
            f"a prompt of {len(text.encode())} bytes is too long for a command line ({_ARGUMENT_BYTES}): write the"
            " task to a file of the sandbox, and have the prompt name it"
        )
    return shlex.quote(text)


async def run_agent(
    sb: Sandbox, *, workdir: str, start_cmd: str, env: Mapping[str, str], time_budget_sec: float
) -> int:
    """Run a program as the user `agent`; its output goes to `.harness/trajectory.jsonl` below `workdir`.

    Args:
        start_cmd: a command line for bash.
        env: passed on unchanged.
        time_budget_sec: seconds after which it is killed.

    Returns:
        Its exit code, EXIT_TIME_BUDGET_EXCEEDED where it was killed.
    """
    folder = shlex.quote(f"{workdir}/.harness")
    # git leaves the output out of the task's diff.
    make = f"mkdir -p {folder} && echo '*' > {folder}/.gitignore && chown -R {AGENT}:{AGENT} {folder}"
    await sb.exec(make, user="root", check=True)
    code, _ = await exec_and_wait(
        sb,
        cmd=f"{_WITH_LINKS}\n{start_cmd}",
        time_budget_sec=time_budget_sec,
        tag="run",
        user=AGENT,
        env=env,
        workdir=workdir,
        out_file=f"{workdir}/.harness/trajectory.jsonl",
    )
    return code


# ---- where programs come from ----


async def provide(sb: Sandbox, command: str, *, tarball_env: str = "", remedy: str) -> None:
    """Make `command` a program of the sandbox.

    Args:
        tarball_env: names an environment variable with the path of an npm package; "": it is no npm package.
        remedy: how the program gets onto a host.

    Raises:
        RuntimeError: no place has it.
    """
    find = f"{_WITH_LINKS}; command -v {command} > /dev/null"
    if (await sb.exec(find))[0] == 0 or await _link_shown(sb, command):
        return
    package = os.environ.get(tarball_env) if tarball_env else None
    if package:
        node = _tarball(NODE_TARBALL_ENV)
        check = f"{command} --version"
        await install_npm_cli(sb, node_runtime=node, npm_package=_tarball(tarball_env), check_cmd=check)
        return
    tarballs = f"set {tarball_env} and {NODE_TARBALL_ENV} to tarballs of this host, " if tarball_env else ""
    raise RuntimeError(
        f"the sandbox {sb.sandbox_id} has no program {command!r}: {tarballs}put it into the image, or, for a local"
        f" sandbox, onto this host's PATH ({remedy}) with show=harness.shown_paths()"
    )


async def _link_shown(sb: Sandbox, command: str) -> bool:
    """Link this host's program, and its interpreter, in the sandbox; False where the sandbox does not show it."""
    if (entry := shutil.which(command)) is None:
        return False
    real = os.path.realpath(entry)
    links = {command: real}
    if (name := _env_interpreter(real)) and (interpreter := shutil.which(name)):
        links[name] = os.path.realpath(interpreter)
    parts = [f"mkdir -p {_LINKS}"]
    for name, target in links.items():
        parts += [f"test -x {shlex.quote(target)}", f"ln -sf {shlex.quote(target)} {_LINKS}/{name}"]
    return (await sb.exec(" && ".join(parts)))[0] == 0


def host_paths(command: str) -> tuple[str, ...]:
    """Paths that a program of this host's PATH consists of: its npm packages or its virtual environment, or itself.

    Returns:
        The paths, interpreters of scripts included; none where there is no such program.
    """
    if (entry := shutil.which(command)) is None:
        return ()
    real = Path(os.path.realpath(entry))
    if "node_modules" in real.parts:
        root = Path(*real.parts[: real.parts.index("node_modules") + 1])
    elif real.name.startswith("python") or (real.parent.parent / "pyvenv.cfg").is_file():
        root = real.parent.parent
    else:
        root = real
    if name := _env_interpreter(str(real)):
        return (str(root), *host_paths(name))
    python = root / "bin" / "python"  # of a virtual environment, which needs the Python that it was made of
    made_of = [str(Path(os.path.realpath(python)).parent.parent)] if python.exists() else []
    return tuple(dict.fromkeys((str(root), *made_of)))


def _env_interpreter(path: str) -> str | None:
    """NAME of a script's first line `#!/usr/bin/env NAME`."""
    with open(path, "rb") as file:
        words = file.read(256).partition(b"\n")[0].split()
    is_script = len(words) > 1 and words[0] in (b"#!/usr/bin/env", b"#!/bin/env")
    return words[1].decode() if is_script else None


def _tarball(name: str) -> Path:
    """The file that an environment variable names.

    Raises:
        RuntimeError: it is not set, or there is no such file.
    """
    path = os.environ.get(name)
    if not path or not Path(path).is_file():
        raise RuntimeError(f"{name}={path or ''}: the path of a tarball on this host is needed")
    return Path(path)


async def install_npm_cli(sb: Sandbox, *, node_runtime: Path, npm_package: Path, check_cmd: str) -> None:
    """Install Node and an npm package in a sandbox whose /usr/local can be written.

    Args:
        node_runtime: tarball of Node on this host.
        npm_package: tarball of the package, as `npm pack` makes it.
        check_cmd: succeeds when the program is there.

    Raises:
        RuntimeError: it failed three times, or /usr/local is read-only.
    """
    if (await sb.exec("test -w /usr/local"))[0]:
        raise RuntimeError(
            f"/usr/local of the sandbox {sb.sandbox_id} is read-only, {npm_package.name} cannot be installed: install"
            " the program on this host, and show it to local sandboxes (docs/agent_harness.md)"
        )
    await install_node22(sb, node_runtime)
    package = "/tmp/harness-cli.tgz"  # nosec B108: of the sandbox
    await sb.write_file(package, npm_package)
    install = f"npm install -g --prefix=/usr/local --no-audit --no-fund {package} && {check_cmd}"
    said = ""
    for attempt in range(1, _TRIES + 1):
        try:
            code, stdout, stderr = await sb.exec(install, timeout=_INSTALL_S)
        except SandboxError as error:
            code, stdout, stderr = -1, "", str(error)
        if code == 0:
            return
        said = (stderr or stdout)[-1000:]
        if attempt < _TRIES:
            await asyncio.sleep(_BACK_OFF_S * attempt)
    raise RuntimeError(f"{npm_package.name} was not installed in the sandbox in {_TRIES} tries: {said}")


async def install_node22(sb: Sandbox, tarball: str | Path) -> None:
    """Unpack Node to /opt/node22, with links in /usr/local/bin.

    Args:
        tarball: of this host; one that ends in `.xz` is decompressed here, once: images rarely have xz.

    Raises:
        SandboxError: that failed.
    """
    source = Path(tarball)
    if source.suffix == ".xz":
        source = await asyncio.to_thread(_decompressed, source)
    packed = "/tmp/node.tar"  # nosec B108: of the sandbox
    await sb.write_file(packed, source)
    unpack = f"mkdir -p /opt/node22 && tar -xf {packed} -C /opt/node22 --strip-components=1 && rm {packed}"
    link = "mkdir -p /usr/local/bin && for name in node npm npx; do ln -sf /opt/node22/bin/$name /usr/local/bin/; done"
    await sb.exec(f"{unpack} && {link}", timeout=_INSTALL_S, check=True)


def _decompressed(tarball: Path) -> Path:
    """The tar of a `.tar.xz`, kept in the directory for temporary files for other sandboxes and processes."""
    status = tarball.stat()
    version = hashlib.sha256(f"{tarball.resolve()} {status.st_mtime_ns} {status.st_size}".encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"slime-{os.getuid()}-{version}-{tarball.stem}"
    if not (target.is_file() and target.stat().st_uid == os.getuid()):
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file, lzma.open(tarball) as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
        os.replace(file.name, target)
    return target
