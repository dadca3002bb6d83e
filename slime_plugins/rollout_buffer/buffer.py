"""The buffer server: runs a generator in a thread, takes its records, and hands out complete groups.

    python -m slime_plugins.rollout_buffer.buffer --host 0.0.0.0 --port 8889 --generators my/generators

POST /start_rollout, /buffer/write, /get_rollout_data, /stop_rollout; GET /status. The bodies are in protocol.py, what
a generator is in discovery.py. One generator runs at a time.

Waits: no request waits for anything. A generator whose record finds the buffer full is answered 429 and tries again;
groups leave by /get_rollout_data. A generator ends by itself, also when /status tells it to stop; a thread cannot be
ended from outside, so one that ignores that stays "running", and whoever waits for it has the deadline.
There is no login: let only trusted machines reach the port.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from slime.utils.errors import UsageError, nearest
from slime.utils.http.api_keys import SERVICE_ENV, is_refused
from slime_plugins.rollout_buffer.discovery import Generator, find_generators
from slime_plugins.rollout_buffer.protocol import GetRolloutData, Record, StartRollout, StopRollout
from slime_plugins.rollout_buffer.store import BufferFull, RolloutBuffer

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 64 * 2**20


class GeneratorRun:
    """The generator that runs, or the one that ran last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.task_type: str | None = None
        self.error: str | None = None
        self.is_stopping = False

    @property
    def is_running(self) -> bool:
        """Whether its thread lives."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, generator: Generator, data: dict[str, Any]) -> bool:
        """Start it in a thread; False when one runs already.

        Raises:
            ValueError: one for another task runs.
        """
        with self._lock:
            if self.is_running:
                if self.task_type != generator.task_type:
                    raise ValueError(f"a rollout of task {self.task_type!r} runs; stop it first (/stop_rollout)")
                return False
            self.task_type, self.error, self.is_stopping = generator.task_type, None, False
            arguments = (generator, data)
            self._thread = threading.Thread(target=self._run, args=arguments, name="generator", daemon=True)
            self._thread.start()
            return True

    def _run(self, generator: Generator, data: dict[str, Any]) -> None:
        try:
            generator.run_rollout(data)
        except BaseException as error:  # a thread's end: the client reads it from /status, SystemExit too
            logger.exception("the generator of task %s failed", generator.task_type)
            self.error = f"{type(error).__name__}: {error}"[:2000]

    def status(self) -> dict[str, Any]:
        """For the client and the generator."""
        return {
            "running": self.is_running,
            "stopping": self.is_stopping,
            "task_type": self.task_type,
            "error": self.error,
        }


async def _check_key(request: Request) -> None:
    """Refuse whoever does not send the key, where there is one: every user of a machine reaches its loopback."""
    if is_refused(request.headers.get("authorization")):
        raise HTTPException(401, f"this server asks for a key: Authorization: Bearer ${SERVICE_ENV}")


async def _check_length(request: Request) -> None:
    """Refuse a body that would fill the memory before it is read."""
    if request.method == "GET":
        return
    length = request.headers.get("content-length", "")
    if not length.isdigit():
        raise HTTPException(411, "the request has no content-length")
    if int(length) > MAX_BODY_BYTES:
        raise HTTPException(413, f"the body has {length} bytes; at most {MAX_BODY_BYTES} are taken")


async def _refuse(request: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong with a body, without the body: that may be large, or hold a NaN, which JSON has not."""
    wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return JSONResponse({"detail": "; ".join(wrong)}, status_code=422)


class _Handlers:
    """What the paths do; each method runs in a thread of the server."""

    def __init__(self, generators: dict[str, Generator], buffer: RolloutBuffer) -> None:
        self.generators, self.buffer, self.run = generators, buffer, GeneratorRun()
        self._lock = threading.Lock()
        self._last: tuple[str, dict[str, Any]] | None = None

    def write(self, record: Record) -> dict[str, Any]:
        try:
            is_new = self.buffer.write(record.model_dump())
        except BufferFull as error:
            raise HTTPException(429, str(error)) from error
        return {"success": True, "message": "written" if is_new else "known", "stop": self.run.is_stopping}

    def get_rollout_data(self, asked: GetRolloutData) -> dict[str, Any]:
        with self._lock:
            if self._last is not None and asked.request_id == self._last[0]:
                return self._last[1]
            # First whether it runs: what it writes afterwards, the next request finds.
            status = self.run.status()
            groups, info = self.buffer.take(asked.max_groups)
            items = [item for _, group in groups for item in group]
            answer = {
                "success": bool(groups),
                "message": f"{len(groups)} groups" if groups else "no group is complete yet",
                "data": {"data": items, "meta_info": info},
                "status": status | self.buffer.counts(),
            }
            if asked.request_id is not None:
                self._last = (asked.request_id, answer)
            return answer

    def start_rollout(self, asked: StartRollout) -> dict[str, Any]:
        generator = self.generators.get(asked.task_type)
        if generator is None:
            known = ", ".join(sorted(self.generators))
            near = nearest(asked.task_type, self.generators)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise HTTPException(404, f"no generator for task {asked.task_type!r}; {hint}known: {known}")
        with self._lock:
            if not self.run.is_running:
                self.buffer.configure(generator.rules, asked.num_repeat_per_sample)
            try:
                started = self.run.start(generator, asked.model_dump())
            except ValueError as error:
                raise HTTPException(409, str(error)) from error
        return {"success": True, "started": started, "message": "started" if started else "runs already"}

    def stop_rollout(self, asked: StopRollout) -> dict[str, Any]:
        self.run.is_stopping = self.run.is_running
        if asked.clear:
            self.buffer.clear()
        return self.status()

    def status(self) -> dict[str, Any]:
        return self.run.status() | self.buffer.counts()


def create_app(generators: dict[str, Generator], buffer: RolloutBuffer | None = None) -> FastAPI:
    """The server as an application."""
    app = FastAPI(title="slime rollout buffer", dependencies=[Depends(_check_key), Depends(_check_length)])
    app.add_exception_handler(RequestValidationError, _refuse)  # type: ignore[arg-type]
    handlers = _Handlers(generators, buffer or RolloutBuffer())
    app.post("/buffer/write")(handlers.write)
    app.post("/get_rollout_data")(handlers.get_rollout_data)
    app.post("/start_rollout")(handlers.start_rollout)
    app.post("/stop_rollout")(handlers.stop_rollout)
    app.get("/status")(handlers.status)
    return app


def __getattr__(name: str) -> Any:
    """Make `app`, the server of this package's generators: `uvicorn slime_plugins.rollout_buffer.buffer:app`.

    Not at import: that would load every generator.
    """
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()["app"] = create_app(find_generators())
    return globals()["app"]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=8889)
    parser.add_argument("--generators", type=Path, action="append", default=[], help="one more folder of generators")
    parser.add_argument("--max-groups", type=int, default=4096, help="prompts held before writers have to wait")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        generators = find_generators(args.generators)
        if args.max_groups < 1:
            raise UsageError(f"--max-groups {args.max_groups}: at least 1")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    logger.info("tasks: %s", ", ".join(sorted(generators)))
    app = create_app(generators, RolloutBuffer(max_groups=args.max_groups))
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
