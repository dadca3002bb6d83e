"""A server in a thread of its own: its real port, its errors, its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import urllib.request

import pytest
from aiohttp import web

from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread


def app_of(handler):
    app = web.Application()
    app.router.add_get("/", handler)
    return app


async def thread_name(_request):
    return web.Response(text=threading.current_thread().name)


def read(handle):
    with urllib.request.urlopen(f"http://127.0.0.1:{handle.port}/", timeout=5) as answer:
        return answer.read().decode()


def test_it_listens_when_the_call_returns_and_no_longer_after_stop():
    handle = run_app_in_thread(app_of(thread_name), host="127.0.0.1", thread_name="agents")
    assert handle.port > 0 and read(handle) == "agents"
    handle.stop()
    assert not handle.thread.is_alive() and handle.loop.is_closed()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", handle.port), timeout=1).close()
    handle.stop()  # a second time does nothing


def test_a_taken_port_is_an_error_of_the_caller():
    handle = run_app_in_thread(app_of(thread_name), host="127.0.0.1")
    try:
        with pytest.raises(OSError, match="address already in use|in use"):
            run_app_in_thread(app_of(thread_name), host="127.0.0.1", port=handle.port)
    finally:
        handle.stop()


def test_what_a_startup_hook_raises_is_an_error_of_the_caller():
    async def fail(_app):
        raise KeyError("no tokenizer")

    app = app_of(thread_name)
    app.on_startup.append(fail)
    with pytest.raises(KeyError, match="no tokenizer"):
        run_app_in_thread(app, host="127.0.0.1")


def test_a_client_that_hangs_up_cancels_its_handler_where_that_is_asked_for():
    cancelled = threading.Event()

    async def wait(_request):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    handle = run_app_in_thread(app_of(wait), host="127.0.0.1", runner_kwargs={"handler_cancellation": True})
    try:
        with socket.create_connection(("127.0.0.1", handle.port), timeout=5) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            time.sleep(0.2)
        assert cancelled.wait(5)
    finally:
        handle.stop()


def test_only_failed_and_slow_requests_are_logged(caplog):
    class Request:
        method, path = "POST", "/v1/messages"

    class Response:
        status = 200

    logger = FilteredAccessLogger(logging.getLogger("access"), "")
    with caplog.at_level(logging.INFO):
        logger.log(Request(), Response(), 1.0)
        assert not caplog.records
        logger.log(Request(), Response(), 121.0)
        Response.status = 503
        logger.log(Request(), Response(), 0.1)
        Request.method = "HEAD"
        logger.log(Request(), Response(), 0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "POST /v1/messages: 200 in 121.0 s",
        "POST /v1/messages: 503 in 0.1 s",
    ]


def test_a_server_that_does_not_come_up_in_time_is_an_error_of_the_caller():
    async def hang(_app):
        await asyncio.sleep(60)

    app = app_of(thread_name)
    app.on_startup.append(hang)
    with pytest.raises(TimeoutError, match=r"did not listen within 0\.2 s"):
        run_app_in_thread(app, host="127.0.0.1", start_timeout_sec=0.2)
