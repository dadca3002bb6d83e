"""One SGLang server of our own: started as a child process, asked over HTTP (`EngineClient`), ended with its children.

A plain class; `slime.ray` makes Ray actors of it. It does not know about Ray, samples, the router, or where its
arguments come from (`server_args`).
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.engine_client import EngineClient, EngineContact
from slime.backends.sglang_utils.launch_server import write_launch_file
from slime.backends.sglang_utils.server_args import server_environment
from slime.backends.sglang_utils.start_failures import last_error, memory_advice
from slime.utils.api_keys import ENGINE_ENV, protect
from slime.utils.host_memory import OutOfMemoryKills, killed_for_memory, too_few_addresses
from slime.utils.processes import exit_text, log_tail, registry
from slime.utils.wait import WaitTimeout, wait

logger = logging.getLogger(__name__)

TAIL_LINES = 40
TAIL_BYTES = 4096
PORT_TAKEN = ("address already in use", "EADDRINUSE")


class EngineStartError(RuntimeError):
    """The server did not become healthy; the message ends with the last lines of its log.

    Attributes:
        port_taken: another process had one of its ports: other ports may work.
    """

    def __init__(self, message: str, port_taken: bool = False) -> None:
        super().__init__(message, port_taken)
        self.port_taken = port_taken

    def __str__(self) -> str:
        return str(self.args[0])


class SGLangEngine(EngineClient):
    """A server that is started and ended here.

    Args:
        server_kwargs: fields of SGLang's `ServerArgs`; see `build_server_args`.
        rank: number of the engine in its run, for messages.
        log_path: where the server's output goes (appended). The launch file lies beside it.
        accelerator: "cpu" or "cuda".
        num_threads: OMP threads of a CPU server; None leaves the choice to the environment.
    """

    def __init__(
        self,
        server_kwargs: dict[str, Any],
        *,
        rank: int,
        log_path: str | Path,
        accelerator: str,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(rank=rank)
        self._server_kwargs = server_kwargs
        self._log_path = Path(log_path)
        self._accelerator = accelerator
        self._num_threads = num_threads
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0
        self._kills = OutOfMemoryKills()

    @property
    def url(self) -> str:
        """`http://host:port` of the server."""
        host = self._server_kwargs["host"]
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self._server_kwargs['port']}"

    def contact(self) -> EngineContact:
        """How others reach this engine, and where its log is."""
        return EngineContact(self.rank, self.url, str(self._log_path))

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, deadline_s: float) -> str:
        """Start the server and wait until it is healthy.

        Returns:
            its address.

        Raises:
            EngineStartError: it died (noticed at once), or was not healthy in time; quotes the end of its log.
        """
        begin = time.monotonic()
        self._begin()
        try:
            wait(
                f"engine {self.rank} at {self.url} to be healthy",
                deadline_s,
                lambda: server_control.is_healthy_sync(self.url) and self.pid is not None,
                check=self._check_alive,
            )
        except (EngineStartError, WaitTimeout) as error:
            reason = self._reason(self._log_of_this_start())  # of a process that shutdown forgets
            self.shutdown()
            raise self._start_error(error, reason) from None
        if not self._server_kwargs.get("encoder_only"):  # that server has few endpoints
            server_control.freeze_gc_sync(self.url)
        logger.info("engine %d is healthy at %s after %.1f s", self.rank, self.url, time.monotonic() - begin)
        return self.url

    def _begin(self) -> None:
        """Start the server without waiting for it."""
        launch_file = self._log_path.with_suffix(".json")
        # The key is in the server's environment alone: files and command lines are read by others.
        shown = {name: value for name, value in self._server_kwargs.items() if name != "api_key"}
        key = self._server_kwargs.get("api_key") or os.environ.get(ENGINE_ENV)
        protect(self.url, key)
        write_launch_file(launch_file, accelerator=self._accelerator, server_args=shown)
        self._log_begin = self._log_path.stat().st_size if self._log_path.exists() else 0
        tp_size = self._server_kwargs.get("tp_size", 1)
        self._kills = OutOfMemoryKills()
        self._process = registry().start(
            [sys.executable, "-m", "slime.backends.sglang_utils.launch_server", str(launch_file)],
            name=f"engine {self.rank}",
            log_path=self._log_path,
            env=server_environment(self._accelerator, num_threads=self._num_threads, tp_size=tp_size)
            | ({ENGINE_ENV: key} if key else {}),
        )

    def _check_alive(self) -> None:
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise EngineStartError(f"engine {self.rank} ended ({exit_text(code)}) before it was healthy")
        # SGLang's main process lives on for seconds after its scheduler has failed, to collect diagnostics.
        if "Received sigquit from a child process" in self._log_of_this_start(last=TAIL_BYTES):
            raise EngineStartError(f"engine {self.rank} failed before it was healthy")

    def _log_of_this_start(self, *, last: int | None = None) -> str:
        """The log without that of an engine that was in its place before; of that the last so many bytes."""
        with self._log_path.open("rb") as log:
            log.seek(0 if last is None else max(0, self._log_path.stat().st_size - last))
            log.seek(max(log.tell(), self._log_begin))
            return log.read().decode(errors="replace")

    def ending(self) -> str | None:
        """Return that its server has ended though nobody has told it to, and why; None while it runs."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        reason = self._reason(self._log_of_this_start())
        return f"engine {self.rank} has ended ({exit_text(code)}){f': {reason}' if reason else ''} ({self._log_path})"

    def _reason(self, text: str) -> str | None:
        """Why its server failed.

        Args:
            text: of its log.
        """
        code = self._process.poll() if self._process is not None else None
        was_killed = killed_for_memory(self._kills) if code == -signal.SIGKILL else None
        known = was_killed or memory_advice(text, self._server_kwargs) or too_few_addresses(text)
        return known or last_error(text) or killed_for_memory(self._kills)

    def _start_error(self, error: Exception, reason: str | None) -> EngineStartError:
        text = self._log_of_this_start()
        port_taken = any(sign.lower() in text.lower() for sign in PORT_TAKEN)
        tail = log_tail(self._log_path, TAIL_LINES)
        model = self._server_kwargs["model_path"]
        return EngineStartError(
            f"{error}{f': {reason}' if reason else ''}\n"
            f"model {model}; the last lines of its log {self._log_path}:\n{tail}",
            port_taken,
        )

    def health(self) -> bool:
        """Whether the server runs and answers."""
        return self.pid is not None and super().health()

    def shutdown(self) -> None:
        """End the server and its children; nothing happens when it does not run."""
        if self._process is not None:
            # SGLang's own reaction to SIGTERM waits for requests and, when a child is gone first, sleeps five seconds.
            registry().end(self._process, grace_s=0.0)
            self._process = None
