"""Serve one environment of another framework over HTTP, from that framework's own virtual environment.

    VENV/bin/python slime_plugins/environments/server.py --framework reasoning_gym --environment chain_sum --port 0

This file runs with the venv's Python, and imports nothing of slime's: the standard library, and the framework. Bodies
are JSON, and so are errors: {"error": {"kind", "message"}} with a status from 400. Every request carries the key of
the environment variable SLIME_ENVIRONMENT_KEY as a bearer token, where that is set.

| request | body | answer |
|---|---|---|
| GET /health | | framework, version, environment, num_tasks (null: no end), drives_model, episodes, overdue |
| POST /tasks | start, count (at most 1000) | tasks: [{task, messages, tools}] |
| POST /start | task | episode, messages, tools |
| POST /step | episode, text, calls: [{name, arguments, problem}] | messages to append, done |
| POST /finish | episode | reward, metrics; the episode is forgotten |
| POST /run | task, run, base_url, api_key, model, sampling | reward, metrics, error (null: it went well) |
| POST /cancel | run | cancelled |

`/start`, `/step` and `/finish` are for environments that take the model's turns; `/run` is for those that ask the
model themselves (drives_model), through an OpenAI client. Limits: --max-episodes episodes and runs at a time (429),
MAX_BYTES of a body either way (413), --timeout seconds for a call of the environment (504; the episode is forgotten,
its thread is counted in `overdue` until it returns), --run-timeout seconds for a /run, --idle-timeout seconds until an
episode that nobody asks for is forgotten (410 from then on). A client that closes its connection during /start gives
the place back. Repeating a request is not safe: a step is a step.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import importlib
import json
import math
import numbers
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
MAX_TASKS = 1000
_SOCKET_S = 120.0  # a client that sends half a request is given up


class Problem(Exception):
    """An answer with a status from 400."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class Worker:
    """A thread that makes the calls of one episode, one after the other; environments may be tied to their thread."""

    overdue = 0  # calls that were given up and have not returned
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, function: Any, *given: Any, timeout_s: float) -> Any:
        """Return what the function returns.

        Raises:
            Problem: it raised an error (500), or takes longer than `timeout_s` (504).
        """
        result: Future[Any] = Future()
        self._jobs.put((function, given, result))
        try:
            return result.result(timeout_s)
        except Problem:
            raise
        except FutureTimeout as error:
            if result.done() and result.exception() is not None:
                raise _raised(error) from error
            with Worker._lock:
                Worker.overdue += 1
            result.add_done_callback(_returned)
            raise Problem(504, "timeout", f"the environment took more than {timeout_s:g} s") from error
        except BaseException as error:
            raise _raised(error) from error

    def end(self, last: Callable[[], Any] | None = None) -> None:
        """End the thread, once its last call has returned; `last` is called in it before."""
        if last is not None:
            self._jobs.put((last, (), Future()))
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, given, result = job
            try:
                result.set_result(function(*given))
            except BaseException as error:  # SystemExit of an environment, too
                result.set_exception(error)


def _returned(result: Future[Any]) -> None:
    with Worker._lock:
        Worker.overdue -= 1


def _raised(error: BaseException) -> Problem:
    traceback.print_exception(type(error), error, error.__traceback__)
    return Problem(500, "environment", f"the environment raised {type(error).__name__}: {error}"[:2000])


class Episodes:
    """The episodes that run, each with its worker; bounded in number, forgotten when nobody asks for them."""

    def __init__(
        self, environment: Any, *, limit: int, timeout_s: float, idle_s: float, run_s: float = 3600.0
    ) -> None:
        self.environment, self.limit = environment, limit
        self.timeout_s, self.idle_s, self.run_s = timeout_s, idle_s, run_s
        self._held: dict[str, tuple[Any, Worker, float]] = {}
        self._runs: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._reader = Worker()

    def __len__(self) -> int:
        return len(self._held) + len(self._runs)

    def tasks(self, start: int, count: int) -> dict[str, Any]:
        """The prompts of a range of tasks; fewer where the environment has no more."""
        if not 0 < count <= MAX_TASKS or start < 0:
            raise Problem(400, "body", f"start must be from 0, count from 1 to {MAX_TASKS}, not {start} and {count}")
        total = self.environment.num_tasks
        numbers = range(start, start + count if total is None else min(start + count, total))
        read = self.environment.prompt
        tasks = [{"task": number, **self._reader.call(read, number, timeout_s=self.timeout_s)} for number in numbers]
        return {"tasks": tasks}

    def start(self, task: int) -> dict[str, Any]:
        """Begin an episode of a task."""
        self._drives(False)
        self._check_task(task)
        key, worker = secrets.token_hex(8), Worker()
        with self._lock:
            self._check_room()
            self._held[key] = (None, worker, time.monotonic())
        try:
            episode = worker.call(self.environment.start, task, timeout_s=self.timeout_s)
        except Problem:
            self.forget(key)
            raise
        self._held[key] = (episode, worker, time.monotonic())
        return {"episode": key, "messages": episode.messages, "tools": episode.tools}

    def step(self, episode: str, text: str, calls: list[Any]) -> dict[str, Any]:
        """Give the model's turn to an episode."""
        return self._call(episode, "step", text, calls)

    def finish(self, episode: str) -> dict[str, Any]:
        """Score an episode and forget it."""
        result = self._call(episode, "finish")
        self.forget(episode)
        return _checked_reward(result)

    def run(self, task: int, run: str, **endpoint: Any) -> dict[str, Any]:
        """Have the environment play a whole episode with the model behind an endpoint."""
        self._drives(True)
        self._check_task(task)
        with self._lock:
            self._check_room()
            self._runs[run] = None
        try:
            self._runs[run] = played = self.environment.play(task, **endpoint)
            return _checked_reward(played.result(self.run_s))
        except Problem:
            raise
        except FutureTimeout as error:
            if not played.cancel():  # it has ended: the error is its own
                raise _raised(error) from error
            raise Problem(504, "timeout", f"the episode took more than {self.run_s:g} s") from error
        except Exception as error:
            raise _raised(error) from error
        finally:
            self._runs.pop(run, None)

    def cancel(self, run: str) -> dict[str, Any]:
        """End a run."""
        played = self._runs.get(run)
        return {"cancelled": played is not None and played.cancel()}

    def _call(self, key: str, verb: str, *given: Any) -> dict[str, Any]:
        held = self._held.get(key)
        if held is None or held[0] is None:
            raise Problem(410, "episode", f"there is no episode {key!r}: it was finished, forgotten, or never started")
        episode, worker, _ = held
        self._held[key] = (episode, worker, time.monotonic())
        try:
            answer: dict[str, Any] = worker.call(getattr(episode, verb), *given, timeout_s=self.timeout_s)
        except Problem:
            self.forget(key)
            raise
        return answer

    def forget(self, key: str) -> None:
        """Close an episode, if it is still there, and free its place."""
        held = self._held.pop(key, None)
        if held is not None:
            held[1].end(getattr(held[0], "close", None))

    def _check_room(self) -> None:
        now = time.monotonic()
        for key, (_, _, used) in list(self._held.items()):
            if now - used > self.idle_s:
                self.forget(key)
        if len(self) >= self.limit:
            raise Problem(429, "busy", f"{len(self)} episodes run, as many as --max-episodes allows")

    def _check_task(self, task: int) -> None:
        total = self.environment.num_tasks
        if task < 0 or (total is not None and task >= total):
            raise Problem(400, "task", f"there is no task {task}; there are {total}")

    def _drives(self, wanted: bool) -> None:
        if self.environment.drives_model is not wanted:
            verbs = "/run" if self.environment.drives_model else "/start, /step and /finish"
            raise Problem(400, "verb", f"this environment is used through {verbs}")


def _checked_reward(result: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(result, dict) or "reward" not in result:
        raise Problem(500, "reward", f"the environment gave {str(result)[:200]!r}, which has no entry reward")
    reward = result["reward"]
    if result.get("error") is not None:
        return result
    if not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise Problem(500, "reward", f"the environment gave the reward {reward!r}, which is no finite number")
    return {**result, "reward": _plain(reward)}


def _plain(value: Any) -> Any:
    """A number of numpy's, or another that JSON does not know, as Python's; anything else as text."""
    if isinstance(value, numbers.Real):
        return value if isinstance(value, (int, float)) else float(value)
    return str(value)


def _is_gone(connection: socket.socket) -> bool:
    """Whether the client has closed its side and waits for no answer."""
    try:
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        return bool(readable.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


FIELDS: dict[str, dict[str, type]] = {
    "/tasks": {"start": int, "count": int},
    "/start": {"task": int},
    "/step": {"episode": str, "text": str, "calls": list},
    "/finish": {"episode": str},
    "/run": {"task": int, "run": str, "base_url": str, "api_key": str, "model": str, "sampling": dict},
    "/cancel": {"run": str},
}


def read_body(path: str, text: bytes) -> dict[str, Any]:
    """A request's body, with all of its fields.

    Raises:
        Problem: the path is unknown (404), or the body is not what it takes (400).
    """
    fields = FIELDS.get(path)
    if fields is None:
        raise Problem(404, "path", f"there is no {path}; there is {', '.join(FIELDS)}")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Problem(400, "body", f"the body is no JSON: {error}") from error
    if not isinstance(body, dict) or set(body) != set(fields):
        raise Problem(400, "body", f"{path} takes an object with {', '.join(fields)}")
    for name, kind in fields.items():
        if not isinstance(body[name], kind) or isinstance(body[name], bool):
            raise Problem(400, "body", f"{name} must be of the type {kind.__name__}, not {str(body[name])[:80]!r}")
    return body


def handler_of(episodes: Episodes, info: dict[str, Any], key: str) -> type[BaseHTTPRequestHandler]:
    """The request handler of a server: its key, and the environment behind it."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SOCKET_S

        def do_GET(self) -> None:
            self._answer(self._health)

        def do_POST(self) -> None:
            self._answer(self._call)

        def _health(self) -> dict[str, Any]:
            if self.path != "/health":
                raise Problem(404, "path", f"there is no GET {self.path}; there is /health")
            return {**info, "episodes": len(episodes), "overdue": Worker.overdue}

        def _call(self) -> dict[str, Any]:
            length = self.headers.get("Content-Length", "")
            if not length.isdigit():
                raise Problem(411, "body", "the request has no Content-Length")
            if int(length) > MAX_BYTES:
                raise Problem(413, "body", f"the body has {length} bytes; at most {MAX_BYTES} are taken")
            body = read_body(self.path, self.rfile.read(int(length)))
            answer: dict[str, Any] = getattr(episodes, self.path[1:])(**body)
            if self.path == "/start" and _is_gone(self.connection):
                episodes.forget(answer["episode"])  # nobody knows its name, so nobody would finish it
            return answer

        def _answer(self, verb: Any) -> None:
            status, error = 200, None
            try:
                given = self.headers.get("Authorization", "")
                if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                    raise Problem(401, "key", "the key is missing or wrong")
                text = json.dumps(verb(), default=_plain).encode()
                if len(text) > MAX_BYTES:
                    raise Problem(500, "size", f"the answer has {len(text)} bytes; at most {MAX_BYTES} are sent")
            except Problem as problem:
                status, error = problem.status, {"kind": problem.kind, "message": str(problem)}
                text = json.dumps({"error": error}).encode()
            self.close_connection = status in (401, 411, 413)  # the body was not read
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a client that has given up is no error of ours
                self.wfile.write(text)

        def log_message(self, format: str, *values: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    """A thread for each connection, none of which keeps the process from ending."""

    daemon_threads = True
    request_queue_size = 1024


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="Serve one environment of another framework over HTTP.")
    made.add_argument("--framework", required=True, help="reasoning_gym, openenv, verifiers or python")
    made.add_argument("--environment", required=True, help="its name, as the framework knows it, or module:Class")
    made.add_argument("--arguments", type=json.loads, default={}, help="JSON object for the environment")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on")
    made.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    made.add_argument("--ready-file", help="file that gets one JSON object once it serves, or cannot")
    made.add_argument("--check", action="store_true", help="load the environment, write the ready file, and end")
    made.add_argument("--max-episodes", type=int, default=256, help="episodes that may run at a time")
    made.add_argument("--timeout", type=float, default=60.0, help="seconds of one call of the environment")
    made.add_argument("--run-timeout", type=float, default=3600.0, help="seconds of an episode of /run")
    made.add_argument("--idle-timeout", type=float, default=3600.0, help="seconds that an unused episode is kept")
    return made


def load(framework: str, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The environment, and what /health says about it."""
    here = str(Path(__file__).parent)
    sys.path.insert(0, here)
    frameworks = importlib.import_module("frameworks")
    sys.path.remove(here)  # an environment may have a module named like one of ours
    version = frameworks.installed_version(framework)
    environment = frameworks.FRAMEWORKS[framework](name, dict(arguments))
    info = {"framework": framework, "version": version, "environment": name, "num_tasks": environment.num_tasks}
    return environment, {**info, "drives_model": environment.drives_model}


def main() -> int:
    """Serve until SIGTERM."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

    def say(**found: Any) -> None:
        print(json.dumps(found), flush=True)
        if args.ready_file:
            partial = Path(args.ready_file + ".partial")
            partial.write_text(json.dumps(found))
            partial.rename(args.ready_file)

    try:
        environment, info = load(args.framework, args.environment, args.arguments)
    except BaseException as error:  # whatever an environment raises when it is imported and made
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    if args.check:
        say(**info)
        sys.stdout.flush()
        os._exit(0)  # threads of the environment may still run
    limit = min(args.max_episodes, getattr(environment, "max_episodes", args.max_episodes))
    episodes = Episodes(
        environment, limit=limit, timeout_s=args.timeout, idle_s=args.idle_timeout, run_s=args.run_timeout
    )
    key = os.environ.pop("SLIME_ENVIRONMENT_KEY", "")
    server = Server((args.host, args.port), handler_of(episodes, info, key))
    say(port=server.server_address[1], max_episodes=limit, **info)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
