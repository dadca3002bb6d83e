"""The HTTP calls to engines and router, against a scripted server that refuses and becomes ready as real ones do."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import pytest

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.engine_client import DirectEngine, EngineContact
from slime.backends.sglang_utils.server_control import Worker
from slime.processes.wait import WaitTimeout
from slime.utils import http_utils

T = TypeVar("T")


class Script:
    """A server that answers each path with its next scripted (status, body), the last one for ever."""

    def __init__(self) -> None:
        self.answers: dict[str, list[tuple[int, Any]]] = {}
        self.requests: list[tuple[str, Any]] = []
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                script.requests.append((self.path, json.loads(self.rfile.read(length) or b"null")))
                queue = script.answers[self.path]
                status, body = queue.pop(0) if len(queue) > 1 else queue[0]
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def script() -> Iterator[Script]:
    running = Script()
    yield running
    running.server.shutdown()
    running.server.server_close()


def run(request: Coroutine[Any, Any, T]) -> T:
    async def and_close() -> T:
        try:
            return await request
        finally:
            await http_utils.close_http_client()

    return asyncio.run(and_close())


def engine_at(url: str) -> DirectEngine:
    return DirectEngine(EngineContact(0, url))


def workers(*healthy: bool) -> dict[str, Any]:
    return {"workers": [{"url": f"http://w{i}", "is_healthy": state} for i, state in enumerate(healthy)]}


def test_only_healthy_workers_are_listed(script: Script) -> None:
    script.answers["/workers"] = [(200, workers(True, False, True))]
    assert run(server_control.list_workers(script.url)) == ["http://w0", "http://w2"]
    assert server_control.list_workers_sync(script.url) == ["http://w0", "http://w2"]


def test_registering_waits_until_the_router_uses_the_worker(script: Script) -> None:
    script.answers["/workers"] = [(202, {}), (200, workers()), (200, workers(False)), (200, workers(True))]
    server_control.register_worker_sync(script.url, Worker("http://w0"), deadline_s=10)
    assert script.requests[0] == ("/workers", {"url": "http://w0", "worker_type": "regular"})
    assert len(script.requests) == 4


def test_a_worker_the_router_never_accepts_is_named(script: Script) -> None:
    script.answers["/workers"] = [(202, {}), (200, workers(False))]
    with pytest.raises(WaitTimeout, match="to accept http://w0"):
        server_control.register_worker_sync(script.url, Worker("http://w0"), deadline_s=0.05)


def test_a_refused_flush_is_tried_again(script: Script) -> None:
    script.answers["/flush_cache"] = [(400, "busy"), (400, "busy"), (200, "flushed")]
    engine_at(script.url).flush_cache(10)
    assert len(script.requests) == 3


def test_a_flush_that_fails_otherwise_is_an_error_at_once(script: Script) -> None:
    script.answers["/flush_cache"] = [(404, "no such path")]
    with pytest.raises(http_utils.HttpError, match="404"):
        engine_at(script.url).flush_cache(10)


def test_pause_abort_and_resume_send_what_sglang_expects(script: Script) -> None:
    for path in ("/pause_generation", "/abort_request", "/continue_generation"):
        script.answers[path] = [(200, {})]
    engine = engine_at(script.url)
    engine.pause("retract")
    engine.abort_all()
    engine.continue_generation()
    run(server_control.abort_all(script.url))
    expected = [("/pause_generation", {"mode": "retract"}), ("/abort_request", {"abort_all": True})]
    expected += [("/continue_generation", {}), ("/abort_request", {"abort_all": True})]
    assert script.requests == expected


def test_memory_is_released_once_no_request_is_in_flight_and_taken_again_by_kind(script: Script) -> None:
    script.answers["/flush_cache"] = [(400, "busy"), (200, "flushed")]
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        script.answers[path] = [(200, None)]
    engine = engine_at(script.url)
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    assert script.requests[-4:] == [
        *[("/flush_cache", {}), ("/flush_cache", {})],
        ("/release_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]}),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
    ]
    script.answers["/resume_memory_occupation"] = [(500, "out of memory")]
    with pytest.raises(http_utils.HttpError, match="500"):
        engine.resume_memory_occupation(["kv_cache"])


def test_the_loads_of_all_data_parallel_ranks_are_returned(script: Script) -> None:
    loads = [{"num_running_reqs": 2, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 4}]
    script.answers["/v1/loads?include=core"] = [(200, {"loads": loads})]
    assert server_control.loads_sync(script.url) == loads


def test_a_server_that_is_not_there_is_not_healthy(script: Script) -> None:
    script.answers["/health"] = [(503, "starting"), (200, "")]
    assert [engine_at(script.url).health() for _ in range(2)] == [False, True]
    assert not engine_at("http://127.0.0.1:1").health()


def test_the_module_needs_neither_sglang_nor_torch() -> None:
    code = (
        "import sys; import slime.backends.sglang_utils.server_control; "
        "assert not {'torch', 'sglang', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
