"""An aiohttp application in a thread and an event loop of its own, inside a process that does something else."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from slime.utils.async_utils import cancel_all
from slime.utils.http_utils import close_http_client

_SLOW_S = 120.0
_KEY = re.compile(r"^/s/[^/]+")  # a session's key is a secret
_CLEANUP_S = 10.0
_JOIN_S = 5.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs only requests that failed or were slow, and no HEAD: an agent makes thousands of others."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log one request that took `time` seconds."""
        if request.method != "HEAD" and (response.status != 200 or time > _SLOW_S):
            path = _KEY.sub("/s/...", request.path)
            self.logger.info("%s %s: %d in %.1f s", request.method, path, response.status, time)


@dataclass
class AppHandle:
    """A server that runs."""

    host: str
    port: int
    """The real one, also where 0 was asked for."""
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    runner: web.AppRunner

    def stop(self) -> None:
        """End the server and its thread; what still runs after 10 s is cancelled with the loop."""
        if self.thread.is_alive():
            cleanup = asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop)
            with contextlib.suppress(TimeoutError):
                cleanup.result(timeout=_CLEANUP_S)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join(timeout=_JOIN_S)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "0.0.0.0",  # nosec B104: sandboxes on other hosts call it; docs/agents.md says how to bind it closer
    port: int = 0,
    thread_name: str = "aiohttp-app",
    start_timeout_sec: float = 15.0,
    runner_kwargs: dict[str, Any] | None = None,
) -> AppHandle:
    """Serve an application from a daemon thread; return when it listens.

    Args:
        app: not used by another loop.
        host: address to bind.
        port: 0 takes a free one.
        thread_name: shown by debuggers.
        start_timeout_sec: longest time until it listens.
        runner_kwargs: of `web.AppRunner`: `handler_cancellation=True` cancels the handler of a client that hangs up,
            `access_log_class=FilteredAccessLogger` keeps the log short.

    Raises:
        OSError: the port is taken, or the address is not of this host.
        TimeoutError: it does not listen in time.
    """
    started: Future[AppHandle] = Future()

    def serve() -> None:
        import uvloop  # where it is used: the package is imported without it

        loop = uvloop.new_event_loop()
        asyncio.set_event_loop(loop)
        runner = web.AppRunner(app, **(runner_kwargs or {}))
        listening = loop.create_task(_listen(runner, host, port))
        loop.run_until_complete(asyncio.wait([listening], timeout=start_timeout_sec))
        if not listening.done():
            started.set_exception(TimeoutError(f"{host}:{port} did not listen within {start_timeout_sec:g} s"))
        elif (error := listening.exception()) is not None:
            started.set_exception(error)
        else:
            bound = int(runner.addresses[0][1])
            started.set_result(AppHandle(host, bound, threading.current_thread(), loop, runner))
            loop.run_forever()
        _end(loop)

    threading.Thread(target=serve, name=thread_name, daemon=True).start()
    return started.result(timeout=start_timeout_sec + _CLEANUP_S)


async def _listen(runner: web.AppRunner, host: str, port: int) -> None:
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise


def _end(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what still runs on a stopped loop, and close it."""
    with contextlib.suppress(RuntimeError):  # a task may have closed the loop
        loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
        loop.run_until_complete(close_http_client())
        loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
