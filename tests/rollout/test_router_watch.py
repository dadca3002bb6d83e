"""Real routers that are killed or stopped, and what is done about it."""

from __future__ import annotations

import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.backends.sglang_utils.server_control import Worker
from slime.config.sglang.topology import ModelPlan
from slime.processes.wait import wait
from slime.ray.rollout import router as router_module
from slime.ray.rollout import watches
from slime.ray.rollout.router import Router, is_free
from slime.ray.rollout.servers import ModelServers
from slime.ray.rollout.watches import RouterWatch
from slime.utils import http_utils
from tests.chaos.wounded_run import is_of_part
from tests.unit.test_server_control import Script

pytestmark = pytest.mark.timeout(120)
ARGS = Namespace(
    sglang_router_ip=None, sglang_router_port=None, sglang_router_request_timeout_secs=60, router_overrides={}
)

LOOPBACK_6 = "::1" if is_free("::1", 0) else "127.0.0.1"
"""Of a host without IPv6, its other loopback."""


def thread_state(process: psutil.Process, thread: int) -> str:
    """As the kernel says it; a process is stopped when all of its threads are."""
    return Path(f"/proc/{process.pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def process_of(router: Router) -> Any:
    return router.process


def test_a_router_that_ends_comes_back_on_its_port_with_its_engines_but_not_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(ARGS, host="127.0.0.1", log_path=tmp_path / "router.log")
    engine = Script()
    answers = ["/health", "/generate", "/server_info", "/get_server_info", "/model_info", "/get_model_info"]
    engine.answers = dict.fromkeys(answers, [(200, {})])
    model = ModelServers(ModelPlan("m", "/m", True, ()), router, [])
    watch = RouterWatch([model])
    try:
        router.launch()
        router.wait_ready()
        model.put_behind_router(Worker(engine.url))
        first, url = process_of(router), router.address.url
        watch.start()
        first.kill()
        http_utils.post_sync(f"{url}/generate", {"input_ids": [1]}, max_retries=60)
        assert process_of(router) is not first and router.address.url == url
        assert "has ended (killed by SIGKILL); it is started again" in caplog.text
        watch.stop()
        watch.look()
        assert process_of(router).poll() is None, "nothing is wrong with it"
        monkeypatch.setattr(watches, "MOST_RESTARTS", 1)
        one = RouterWatch([model])
        one._restarts.note()
        process_of(router).kill()
        process_of(router).wait()
        one.look()
        assert "it was started 1 times in an hour, no more" in caplog.text and process_of(router).poll() is not None
    finally:
        router.shutdown()
        engine.server.shutdown()
        engine.server.server_close()


def test_a_router_that_hangs_is_found_by_asking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    router = Router(ARGS, host=LOOPBACK_6, log_path=tmp_path / "router.log")
    try:
        router.launch()
        router.wait_ready()
        assert is_of_part(psutil.Process(process_of(router).pid), "router"), "or tests/chaos would not find it"
        assert router.what_is_wrong(asks=True) is None
        process_of(router).send_signal(signal.SIGSTOP)
        stopped = psutil.Process(process_of(router).pid)
        wait("the router to stop", 60.0, lambda: {thread_state(stopped, one.id) for one in stopped.threads()} == {"T"})
        assert router.what_is_wrong(asks=False) is None
        with monkeypatch.context() as impatient:
            impatient.setattr(router_module, "ANSWER_TIMEOUT_S", 0.5)
            assert "does not answer" in router.what_is_wrong(asks=True)
        router.restart()
        assert router.what_is_wrong(asks=True) is None
    finally:
        router.shutdown()
