"""One SGLang server of our own: started as a child process, asked over HTTP (`EngineClient`), ended with its children.

A plain class; `slime.ray` makes Ray actors of it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.engine_client import EngineClient, EngineContact
from slime.backends.sglang_utils.launch_server import write_launch_file
from slime.backends.sglang_utils.server_args import server_environment
from slime.processes.progress import killed_for_memory, memory_kills, too_few_addresses
from slime.processes.registry import exit_text, log_tail, registry
from slime.processes.wait import WaitTimeout, wait
from slime.utils.http.api_keys import ENGINE_ENV, protect

logger = logging.getLogger(__name__)

TAIL_LINES = 40
TAIL_BYTES = 4096
PORT_TAKEN = ("address already in use", "EADDRINUSE")
FLAG = "--sglang-mem-fraction-static"
MARGIN = 0.02
"""Of the device, on top of what was missing: the next allocations are of the same kind."""
CACHE_GB = 2.0
"""The smallest cache that is proposed."""

_NUMBER = r"([\d.]+)"
_TRIED = re.compile(rf"Tried to allocate {_NUMBER} ([MG])iB")
_CAPACITY = re.compile(rf"total capacity of {_NUMBER} GiB of which {_NUMBER} ([MG])iB is free")
_OTHERS = re.compile(rf"Process \d+ has {_NUMBER} GiB memory in use")
_FRACTION = re.compile(rf"mem_fraction_static={_NUMBER}")
_LOAD_BEGIN = re.compile(rf"Load weight begin\. avail mem={_NUMBER} GB")
_LOAD_END = re.compile(rf"Load weight end\..*?avail mem={_NUMBER} GB")
OUT_OF_MEMORY = "CUDA out of memory"
CONTEXT = "CUDA error: out of memory"
"""Not even the process's own context fitted: another one holds the GPU."""
NO_CACHE = (
    "Loaded weights leave no GPU memory for the KV cache",
    "Not enough memory. Please try to increase --mem-fraction-static",
)
"""Nothing is left of its share, or less than one page."""
FREE_IT = "free what else holds the GPU (with --colocate: give --offload-train)"
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?::.*)?$", re.MULTILINE)
_FOLLOWS = ("EOFError", "scheduler is dead", "scheduler died", "Initialization failed", "see the error messages above")
GRAPHS = "Capture cuda graph failed"


class EngineStartError(RuntimeError):
    """The server did not become healthy; the message ends with the last lines of its log.

    Attributes:
        port_taken: another process had one of its ports: other ports may work.
    """

    def __init__(self, message: str, port_taken: bool = False) -> None:
        super().__init__(message)
        self.port_taken = port_taken


class SGLangEngine(EngineClient):
    """A server that is started and ended here.

    Args:
        server_kwargs: fields of SGLang's `ServerArgs`; see `build_server_args`.
        rank: number of the engine in its run, for messages.
        log_path: where the server's output goes (appended). The launch file lies beside it.
        accelerator: "cpu" or "cuda".
        num_threads: OMP threads of a CPU server; None leaves the choice to the environment.
        keeps_embeddings: of images: the part of the model that makes them is never trained.
    """

    def __init__(
        self,
        server_kwargs: dict[str, Any],
        *,
        rank: int,
        log_path: str | Path,
        accelerator: str,
        num_threads: int | None = None,
        keeps_embeddings: bool = False,
    ) -> None:
        super().__init__(rank=rank)
        self._keeps_embeddings = keeps_embeddings
        self._server_kwargs = server_kwargs
        self.log_path = Path(log_path)
        self._accelerator = accelerator
        self._num_threads = num_threads
        self.process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0
        self._kills = memory_kills()

    @property
    def url(self) -> str:
        """`http://host:port` of the server."""
        host = self._server_kwargs["host"]
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self._server_kwargs['port']}"

    def contact(self) -> EngineContact:
        """How others reach this engine, and where its log is."""
        return EngineContact(self.rank, self.url, str(self.log_path))

    @property
    def pid(self) -> int | None:
        """Process id of the server; None when it is not running."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

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
                lambda: self.health() and self.pid is not None,
                check=self.check_alive,
            )
        except (EngineStartError, WaitTimeout) as error:
            reason = self._reason(self._log_of_this_start())  # of a process that shutdown forgets
            self.shutdown()
            raise self._start_error(error, reason) from None
        if not self._server_kwargs.get("encoder_only"):  # that server has few endpoints
            # On CPU a flush of the cache runs a full collection: half a second over SGLang's imports, else 6 ms.
            self._control("freeze_gc", {})
        logger.info("engine %d is healthy at %s after %.1f s", self.rank, self.url, time.monotonic() - begin)
        return self.url

    def _begin(self) -> None:
        """Start the server without waiting for it."""
        launch_file = self.log_path.with_suffix(".json")
        # The key is in the server's environment alone: files and command lines are read by others.
        shown = {name: value for name, value in self._server_kwargs.items() if name != "api_key"}
        key = self._server_kwargs.get("api_key") or os.environ.get(ENGINE_ENV)
        protect(self.url, key)
        write_launch_file(launch_file, accelerator=self._accelerator, server_args=shown)
        self._log_begin = self.log_path.stat().st_size if self.log_path.exists() else 0
        tp_size = self._server_kwargs.get("tp_size", 1)
        self._kills = memory_kills()
        self.process = registry().start(
            [sys.executable, "-m", "slime.backends.sglang_utils.launch_server", str(launch_file)],
            name=f"engine {self.rank}",
            log_path=self.log_path,
            env=server_environment(
                self._accelerator,
                num_threads=self._num_threads,
                tp_size=tp_size,
                keeps_embeddings=self._keeps_embeddings,
            )
            | ({ENGINE_ENV: key} if key else {}),
        )

    def check_alive(self) -> None:
        """Raise what ended the server; return while it runs."""
        code = self.process.poll() if self.process is not None else None
        if code is not None:
            raise EngineStartError(f"engine {self.rank} ended ({exit_text(code)}) before it was healthy")
        # SGLang's main process lives on for seconds after its scheduler has failed, to collect diagnostics.
        if "Received sigquit from a child process" in self._log_of_this_start(last=TAIL_BYTES):
            raise EngineStartError(f"engine {self.rank} failed before it was healthy")

    def _log_of_this_start(self, *, last: int | None = None) -> str:
        """The log without that of an engine that was in its place before; of that the last so many bytes."""
        with self.log_path.open("rb") as log:
            log.seek(0 if last is None else max(0, self.log_path.stat().st_size - last))
            log.seek(max(log.tell(), self._log_begin))
            return log.read().decode(errors="replace")

    def ending(self) -> str | None:
        """Return that its server has ended though nobody has told it to, and why; None while it runs."""
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return None
        reason = self._reason(self._log_of_this_start())
        return f"engine {self.rank} has ended ({exit_text(code)}){f': {reason}' if reason else ''} ({self.log_path})"

    def _reason(self, text: str) -> str | None:
        """Why its server failed.

        Args:
            text: of its log.
        """
        code = self.process.poll() if self.process is not None else None
        was_killed = killed_for_memory(self._kills) if code == -signal.SIGKILL else None
        known = was_killed or memory_advice(text, self._server_kwargs) or too_few_addresses(text)
        return known or last_error(text) or killed_for_memory(self._kills)

    def _start_error(self, error: Exception, reason: str | None) -> EngineStartError:
        text = self._log_of_this_start()
        port_taken = any(sign.lower() in text.lower() for sign in PORT_TAKEN)
        tail = log_tail(self.log_path, TAIL_LINES)
        model = self._server_kwargs["model_path"]
        return EngineStartError(
            f"{error}{f': {reason}' if reason else ''}\n"
            f"model {model}; the last lines of its log {self.log_path}:\n{tail}",
            port_taken,
        )

    def health(self) -> bool:
        """Whether the server runs and answers."""
        return self.pid is not None and super().health()

    def shutdown(self) -> None:
        """End the server and its children; nothing happens when it does not run."""
        if self.process is not None:
            # SGLang's own reaction to SIGTERM waits for requests and, when a child is gone first, sleeps five seconds.
            registry().end(self.process, grace_s=0.0)
            self.process = None


# ---- why an engine did not start, from the lines that SGLang and torch write
#
# SGLang gives `mem_fraction_static` of the memory that is free when it begins to weights and KV cache together. Too
# high a fraction leaves too little for CUDA graphs and activations (or does not fit beside another process: "CUDA out
# of memory"); too low a one leaves nothing for the cache.


def last_error(log: str) -> str | None:
    """Return the last exception in a log, without those that only follow from another; None where there is none.

    Example:
        >>> last_error("ValueError: no such model\\n[10:00] killing\\nRuntimeError: Rank 0 scheduler is dead")
        'ValueError: no such model'
    """
    found = _EXCEPTION.findall(log)
    causes = [line for line in found if not any(sign in line for sign in _FOLLOWS)]
    return next(reversed(causes or found), None)


def memory_advice(log: str, settings: Mapping[str, Any]) -> str | None:
    """A sentence with the flag to change and a value for it; None when the failure is another.

    Args:
        log: what the engine wrote from this start on.
        settings: the ServerArgs values that it was started with.
    """
    if any(line in log for line in NO_CACHE):
        return _too_little_for_the_cache(log, settings)
    if OUT_OF_MEMORY in log:
        return _out_of_memory(log, settings)
    if CONTEXT in log:
        return f"another process holds the GPU's memory; free it, or lower that process's {FLAG}"
    return None


def _too_little_for_the_cache(log: str, settings: Mapping[str, Any]) -> str:
    fraction = _fraction(log, settings)
    begin, end = _last(_LOAD_BEGIN, log), _last(_LOAD_END, log)
    what = f"the engine's weights leave no GPU memory for the KV cache in its {FLAG} {_shown(fraction)}"
    if begin is None or end is None:
        return f"{what}; raise it, or raise --rollout-num-gpus-per-engine."
    if begin < CACHE_GB:
        return f"another process holds the GPU: {begin:.1f} GB of it were free at the engine's start; {FREE_IT}."
    needed = math.ceil(100 * ((begin - end + CACHE_GB) / begin + MARGIN)) / 100
    found = f"{what}: of {begin:.1f} GB that were free at its start the weights took {begin - end:.1f} GB"
    if needed >= 1.0:
        return f"{found}; raise --rollout-num-gpus-per-engine, or {FREE_IT}."
    return f"{found}; raise it to {needed:.2f} or more."


def _out_of_memory(log: str, settings: Mapping[str, Any]) -> str:
    fraction, tried, capacity = _fraction(log, settings), _TRIED.findall(log), _CAPACITY.findall(log)
    what = f"the engine ran out of GPU memory at its start with {FLAG} {_shown(fraction)}"
    graphs = ", or lower --sglang-cuda-graph-max-bs-decode" if GRAPHS in log else ""
    if not tried or not capacity:
        return f"{what}; lower it{graphs}."
    wanted, (total, free, unit) = _gib(*tried[-1]), capacity[-1]
    missing, size = wanted - _gib(free, unit), float(total)
    found = f"{what}: {wanted:.2f} GiB were wanted and {_gib(free, unit):.2f} of {size:.1f} GiB were free"
    others = sum(map(float, _OTHERS.findall(log[log.rfind(OUT_OF_MEMORY) :])))
    if others:
        found += f" (other processes hold {others:.1f} GiB)"
    if fraction is None:
        return f"{found}; lower {FLAG}{graphs}."
    lower = math.floor(100 * (fraction - max(missing, 0.0) / size - MARGIN)) / 100
    if lower < 0.05:
        return f"{found}; no value of {FLAG} helps: free the GPU, or raise --rollout-num-gpus-per-engine."
    return f"{found}; lower it to {lower:.2f}{graphs}."


def _fraction(log: str, settings: Mapping[str, Any]) -> float | None:
    """As it was given, or as SGLang chose it: it prints its arguments."""
    given = settings.get("mem_fraction_static")
    return float(given) if given is not None else _last(_FRACTION, log)


def _last(pattern: re.Pattern[str], log: str) -> float | None:
    found = pattern.findall(log)
    return float(found[-1]) if found else None


def _gib(number: str, unit: str) -> float:
    return float(number) / (1024 if unit == "M" else 1)


def _shown(fraction: float | None) -> str:
    return "(as SGLang chose it)" if fraction is None else f"{fraction:g}"
