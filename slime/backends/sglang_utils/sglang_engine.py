"""One SGLang server: started as a child process, asked over HTTP, ended with its children.

A plain class; `slime.ray` makes Ray actors of it. It does not know about Ray, samples, the router, or where its
arguments come from (`server_args`).
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.launch_server import write_launch_file
from slime.backends.sglang_utils.server_args import server_environment
from slime.utils import http_utils
from slime.utils.processes import log_tail, registry
from slime.utils.wait import WaitTimeout, wait

logger = logging.getLogger(__name__)

UPDATE_TIMEOUT_S = 600.0
FLUSH_DEADLINE_S = 60.0
TAIL_LINES = 40
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


class SGLangEngine:
    """One server and what a run asks of it.

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
        self.rank = rank
        self._server_kwargs = server_kwargs
        self._log_path = Path(log_path)
        self._accelerator = accelerator
        self._num_threads = num_threads
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """`http://host:port` of the server."""
        host = self._server_kwargs["host"]
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self._server_kwargs['port']}"

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
        launch_file = self._log_path.with_suffix(".json")
        write_launch_file(launch_file, accelerator=self._accelerator, server_args=self._server_kwargs)
        begin, log_begin = time.monotonic(), self._log_path.stat().st_size if self._log_path.exists() else 0
        self._process = registry().start(
            [sys.executable, "-m", "slime.backends.sglang_utils.launch_server", str(launch_file)],
            name=f"engine {self.rank}",
            log_path=self._log_path,
            env=server_environment(self._accelerator, num_threads=self._num_threads),
        )
        try:
            wait(
                f"engine {self.rank} at {self.url} to be healthy",
                deadline_s,
                lambda: server_control.is_healthy_sync(self.url) and self.pid is not None,
                check=self._check_alive,
            )
        except (EngineStartError, WaitTimeout) as error:
            self.shutdown()
            raise self._start_error(error, log_begin) from None
        server_control.freeze_gc_sync(self.url)
        logger.info("engine %d is healthy at %s after %.1f s", self.rank, self.url, time.monotonic() - begin)
        return self.url

    def _check_alive(self) -> None:
        code = self._process.poll() if self._process is not None else None
        if code is not None:
            raise EngineStartError(f"engine {self.rank} ended with exit code {code} before it was healthy")
        # SGLang's main process lives on for seconds after its scheduler has failed, to collect diagnostics.
        if "Received sigquit from a child process" in log_tail(self._log_path, lines=5):
            raise EngineStartError(f"engine {self.rank} failed before it was healthy")

    def _start_error(self, error: Exception, log_begin: int) -> EngineStartError:
        with self._log_path.open("rb") as log:
            log.seek(log_begin)
            text = log.read().decode(errors="replace").lower()
        port_taken = any(sign.lower() in text for sign in PORT_TAKEN)
        tail = log_tail(self._log_path, TAIL_LINES)
        model = self._server_kwargs["model_path"]
        return EngineStartError(
            f"{error}\nmodel {model}; the last lines of its log {self._log_path}:\n{tail}", port_taken
        )

    def health(self) -> bool:
        """Whether the server runs and answers."""
        return self.pid is not None and server_control.is_healthy_sync(self.url, timeout_s=5.0)

    def pause(self, mode: str = "abort") -> None:
        """Stop generating; "abort" ends the requests in flight."""
        server_control.pause_sync(self.url, mode)

    def flush_cache(self, deadline_s: float = FLUSH_DEADLINE_S) -> None:
        """Forget the prefix cache, waiting for requests in flight."""
        server_control.flush_cache_sync(self.url, deadline_s)

    def continue_generation(self) -> None:
        """Generate again after `pause`."""
        server_control.resume_sync(self.url)

    def abort_all(self) -> None:
        """End every request in flight."""
        server_control.abort_all_sync(self.url)

    def get_weight_version(self) -> str:
        """The version given with the last weight update."""
        return server_control.weight_version_sync(self.url)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Load tensors out of shared memory.

        Args:
            serialized_named_tensors: one handle a TP rank, of `weight_transfer.serialize_bucket_for`.
            load_format: "flattened_bucket" for those.
            flush_cache: forget the prefix cache afterwards.
            weight_version: the server's version from now on; None leaves it.
        """
        self._update(
            "update_weights_from_tensor",
            serialized_named_tensors=list(serialized_named_tensors),
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group with the trainer; returns when every member has joined.

        Args:
            master_address: of rank 0, the trainer.
            master_port: of rank 0.
            rank_offset: rank in the group of this engine's TP rank 0.
            world_size: trainer ranks plus TP ranks of all engines.
            group_name: the same as the trainer's.
            backend: "gloo" or "nccl".
        """
        self._update(
            "init_weights_update_group",
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Receive tensors that rank 0 of the group broadcasts, in the order of `names`, and load them.

        Args:
            names: HF names.
            dtypes: "float32", "bfloat16", ...; gloo does not notice when they differ from what is sent.
            shapes: of each tensor.
            group_name: of `init_weights_update_group`.
            flush_cache: forget the prefix cache afterwards.
            weight_version: the server's version from now on; None leaves it.
        """
        self._update(
            "update_weights_from_distributed",
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            flush_cache=flush_cache,
            weight_version=weight_version,
        )

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave a process group."""
        self._update("destroy_weights_update_group", group_name=group_name)

    def _update(self, endpoint: str, **payload: Any) -> None:
        answer = http_utils.post_sync(f"{self.url}/{endpoint}", payload, timeout_s=UPDATE_TIMEOUT_S)
        if not answer.get("success"):
            raise RuntimeError(f"engine {self.rank} refused {endpoint}: {answer.get('message')}")

    def shutdown(self) -> None:
        """End the server and its children; nothing happens when it does not run."""
        if self._process is not None:
            # SGLang's own reaction to SIGTERM waits for requests and, when a child is gone first, sleeps five seconds.
            registry().end(self._process, grace_s=0.0)
            self._process = None
