"""The environment's processes: their settings, starting and ending them, and asking them.

Wait graph: an episode waits for one of the places (`processes` x `max_episodes`), then for its process to serve
(`start_timeout_s`), then for each answer (a little more than `step_timeout_s`, or `episode_timeout_s` for an episode
that the environment plays itself). A process that does not answer is ended, and its episodes with it.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime.config.args import Args
from slime.processes.registry import exit_text, log_tail, registry
from slime.processes.wait import DaemonThreads, WaitTimeout, wait_async
from slime.utils.errors import UsageError
from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)
KEY = "environment"
SERVER = Path(__file__).with_name("server.py")
MAX_OVERDUE = 8  # calls that hang in threads of a process before it is replaced
_HEALTH_S = 5.0
MARGIN_S = 10.0
_GRACE_S = 1.0
_LOG_LINES = 15


class EnvironmentSettings(BaseModel):
    """The key `environment` in the file of --custom-config-path.

    Attributes:
        framework: whose environment it is; "python" is a class of one's own, as frameworks.py says.
        name: as the framework knows it, or "module:Class".
        python: of the virtual environment; tools/prepare_environment.py makes one.
        arguments: for the environment.
        paths: directories that are put on its module path.
        processes: how many serve it.
        max_episodes: of one process at a time.
        start_timeout_s, step_timeout_s, episode_timeout_s: seconds until it serves; of one call; of an episode that
            the environment plays itself.
        max_restarts: in all, of processes that ended or hung.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    framework: Literal["reasoning_gym", "openenv", "verifiers", "python"]
    name: str = Field(min_length=1)
    python: str = Field(min_length=1)
    arguments: dict[str, Any] = {}
    paths: list[str] = []
    processes: int = Field(default=1, ge=1, le=256)
    max_episodes: int = Field(default=256, ge=1, le=4096)
    start_timeout_s: float = Field(default=120.0, gt=0)
    step_timeout_s: float = Field(default=60.0, gt=0)
    episode_timeout_s: float = Field(default=1800.0, gt=0)
    max_restarts: int = Field(default=5, ge=0)


def read_settings(values: Any) -> EnvironmentSettings:
    """Return the settings of a mapping.

    Raises:
        UsageError: with a sentence for each key that is wrong.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            "slime_plugins.environments.generate needs the key environment in the file of --custom-config-path, a "
            "mapping with framework, name and python."
        )
    try:
        return EnvironmentSettings.model_validate(dict(values))
    except ValidationError as error:
        raise UsageError(
            [
                f"{KEY}.{'.'.join(map(str, one['loc']))} of --custom-config-path: {one['msg']}, "
                f"not {str(one['input'])[:80]!r}."
                for one in error.errors()
            ]
        ) from error


def check_args(args: Args) -> Iterator[str]:
    """Yield a sentence for each setting that is wrong, and for an environment that cannot be loaded."""
    try:
        settings = read_settings(vars(args).get(KEY))
        if not args.dry_run:
            probe(settings)
    except UsageError as error:
        yield from error.messages


def probe(settings: EnvironmentSettings) -> dict[str, Any]:
    """Load the environment once in a process of its own, and return what it says about itself.

    Raises:
        UsageError: its Python is missing, its framework is missing or has another version, or it cannot be loaded.
    """
    what = f"{KEY} {settings.framework}:{settings.name}"
    if shutil.which(settings.python) is None:
        raise UsageError(
            f"{what}: there is no program {settings.python}; tools/prepare_environment.py makes a virtual environment "
            "for a framework."
        )
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        try:
            run = subprocess.run(
                [*command(settings, ready), "--check"],
                env=child_env(settings),
                capture_output=True,
                text=True,
                timeout=settings.start_timeout_s,
            )
        except subprocess.TimeoutExpired:
            text = f"{what} was not loaded within start_timeout_s ({settings.start_timeout_s:g} s)."
            raise UsageError(text) from None
        found = json.loads(ready.read_text()) if ready.exists() else {"error": run.stderr[-500:].strip()}
    if "error" in found:
        raise UsageError(f"{what} cannot be loaded: {found['error']}")
    return dict(found)


def command(settings: EnvironmentSettings, ready: Path) -> list[str]:
    """The command line of a process that serves the environment."""
    return [
        *(settings.python, str(SERVER), "--framework", settings.framework, "--environment", settings.name),
        *("--arguments", json.dumps(settings.arguments), "--ready-file", str(ready)),
        *("--max-episodes", str(settings.max_episodes), "--timeout", str(settings.step_timeout_s)),
        *("--run-timeout", str(settings.episode_timeout_s)),
    ]


def child_env(settings: EnvironmentSettings) -> dict[str, str]:
    """This process's environment without its Python paths: the child has other packages."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "SLIME_ENVIRONMENT_KEY")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = os.pathsep.join(str(Path(path).resolve()) for path in settings.paths)
    return {**kept, "PYTHONPATH": paths, "PYTHONNOUSERSITE": "1"}


class EnvironmentFailure(Exception):
    """The environment failed an episode; that says nothing about the policy."""


class EnvironmentProcess:
    """One process that serves the environment; it is started at its first use, and again when it has ended.

    Args:
        settings: of the environment.
        number: among its processes.
        log_path: for its output.
        budget: restarts that are left, shared by the processes.
    """

    def __init__(self, settings: EnvironmentSettings, number: int, *, log_path: Path, budget: list[int]) -> None:
        self.settings, self.number, self.log_path, self._budget = settings, number, log_path, budget
        self.in_use = 0
        self.info: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._url = self._key = ""
        self._lock = asyncio.Lock()
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()

    @property
    def name(self) -> str:
        return f"environment {self.settings.framework}:{self.settings.name} {self.number}"

    async def ensure(self) -> None:
        """Start it where it does not run.

        Raises:
            RuntimeError: it cannot be started, or has ended more often than `max_restarts`.
        """
        async with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            if self._process is not None:
                text = f"{self.name} ended ({exit_text(self._process.returncode)})"
                if self._budget[0] <= 0:
                    raise RuntimeError(f"{text}, and max_restarts are used up. {self._log()}")
                self._budget[0] -= 1
                logger.warning("%s; it is started again, %d restarts are left", text, self._budget[0])
            await self._start()

    async def _start(self) -> None:
        settings, self._key = self.settings, secrets.token_hex(16)
        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder) / "ready.json"
            environment = {**child_env(settings), "SLIME_ENVIRONMENT_KEY": self._key}
            self._process = registry().start(
                command(settings, ready), name=self.name, log_path=self.log_path, env=environment
            )

            async def is_ready() -> bool:
                return ready.exists() or self._process is None or self._process.poll() is not None

            try:
                await wait_async(f"{self.name} to serve", settings.start_timeout_s, is_ready, interval_s=0.05)
            except WaitTimeout as error:
                await self.end()
                raise RuntimeError(f"{error}. {self._log()}") from error
            found = json.loads(ready.read_text()) if ready.exists() else {"error": "its process ended"}
        if "error" in found:
            await self.end()
            raise RuntimeError(f"{self.name} cannot be started: {found['error']}. {self._log()}")
        self.info, self._url = found, f"http://127.0.0.1:{found['port']}"

    def _log(self) -> str:
        return f"The end of {self.log_path}:\n{log_tail(self.log_path, _LOG_LINES)}"

    async def end(self) -> None:
        """End the process and what it has started; a later use starts another."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()
        if self._process is not None:
            await _threads.run(functools.partial(registry().end, grace_s=_GRACE_S), self._process)

    async def ask(self, verb: str, *, timeout_s: float | None = None, **body: Any) -> dict[str, Any]:
        """Send a request, and return the answer.

        Raises:
            EnvironmentFailure: the environment raised, took too long, or its process has ended. A process that does
                not answer any more, or in which many calls hang, is ended here.
        """
        limit_s = timeout_s or self.settings.step_timeout_s + MARGIN_S
        try:
            return await self._post(f"/{verb}", body, limit_s)
        except TimeoutError:
            await self._look(f"/{verb} was not answered within {limit_s:g} s")
            raise EnvironmentFailure(f"{self.name} did not answer /{verb} within {limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailure(f"{self.name} is gone: {type(error).__name__}: {error}") from error

    async def tell(self, verb: str, **body: Any) -> None:
        """Send a request whose answer changes nothing; a process that is gone has nothing to be told."""
        try:
            await self._post(f"/{verb}", body, _HEALTH_S)
        except (EnvironmentFailure, TimeoutError, aiohttp.ClientError, OSError) as error:
            logger.info("%s: %s", self.name, error)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        async with self._session().post(
            self._url + path, json=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
        ) as answer:
            value = await answer.json(content_type=None)
        if answer.status < 400:
            return dict(value)
        error = value.get("error", {})
        if answer.status == 504:
            await self._look("calls hang in it")
        raise EnvironmentFailure(f"{self.name}, {path}: {error.get('message', value)}")

    async def _look(self, why: str) -> None:
        """End the process where it does not answer, or too many of its calls hang."""
        try:
            async with self._session().get(
                self._url + "/health", timeout=aiohttp.ClientTimeout(total=_HEALTH_S)
            ) as answer:
                overdue = int((await answer.json())["overdue"])
        except (TimeoutError, aiohttp.ClientError, OSError):
            overdue = MAX_OVERDUE
        if overdue >= MAX_OVERDUE:
            logger.warning("%s is ended: %s", self.name, why)
            await self.end()

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.closed:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=_HEALTH_S)
            )
            self._sessions[loop] = session
        session.headers["Authorization"] = f"Bearer {self._key}"
        return session


class Environments(metaclass=SingletonMeta):
    """The processes of a run's environment, in this process; an episode gets a place in the one with the fewest.

    Args:
        settings: of the environment.
        log_dir: for the outputs of the processes.
    """

    def __init__(self, settings: EnvironmentSettings, log_dir: Path) -> None:
        self.settings, budget = settings, [settings.max_restarts]
        self.processes = [
            EnvironmentProcess(settings, number, log_path=log_dir / f"environment_{number}.log", budget=budget)
            for number in range(settings.processes)
        ]
        self._places = asyncio.Condition()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[EnvironmentProcess]:
        """Wait for a process with room, and hold a place in it while inside."""
        for each in self.processes:  # all of them: how many episodes one takes is known once it serves
            await each.ensure()
        async with self._places:
            while (process := self._room()) is None:
                await self._places.wait()
            process.in_use += 1
        try:
            yield process
        finally:
            async with self._places:
                process.in_use -= 1
                self._places.notify()

    def _room(self) -> EnvironmentProcess | None:
        process = min(self.processes, key=lambda one: one.in_use)
        limit = process.info.get("max_episodes", self.settings.max_episodes)
        return process if process.in_use < limit else None


_threads = DaemonThreads("environment", 4)
