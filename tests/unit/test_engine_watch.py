"""The watch over engines: who is asked, when it is quiet, and what it says of one that does not answer."""

from __future__ import annotations

import http.server
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.server_control import Probe
from slime.processes.wait import wait
from slime.ray.rollout import watches
from slime.ray.rollout.watches import EngineLoads, EngineWatch, engine_state, load_metrics
from slime.utils.errors import HttpError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Probe]]:
    """What was asked; the engine at "dead" never answers. No server: only who is asked and when counts here."""
    found: list[tuple[str, Probe]] = []

    def answer(url: str, *, timeout_s: float, probe: Probe) -> str | None:
        found.append((url, probe))
        return "connection refused" if url == "dead" else None

    monkeypatch.setattr(server_control, "why_unhealthy_sync", answer)
    return found


def watch(lost: list[tuple[int, str]], *urls: str, interval_s: float = 0.02, first_wait_s: float = 0.0) -> EngineWatch:
    there = dict(enumerate(urls))

    def lose(number: int, url: str, why: str) -> None:
        lost.append((number, why))
        del there[number]

    return EngineWatch(lambda: dict(there), lose, interval_s=interval_s, timeout_s=1.0, first_wait_s=first_wait_s)


def test_an_engine_that_does_not_answer_is_lost_once(asked: list[tuple[str, Probe]]) -> None:
    """It is asked every --rollout-health-check-interval seconds until then."""
    lost: list[tuple[int, str]] = []
    one = watch(lost, "fine", "dead")
    one.start()
    wait("three looks", 60, lambda: asked.count(("fine", Probe.GENERATES)) > 2, interval_s=0.01)
    one.stop()
    assert lost == [(1, "connection refused")]
    assert asked.count(("dead", Probe.GENERATES)) == 1


def test_nobody_is_asked_while_the_watch_is_paused(
    asked: list[tuple[str, Probe]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in the --rollout-health-check-first-wait after that."""
    times, answer = list[float](), server_control.why_unhealthy_sync

    def answer_and_note(url: str, **how: Any) -> str | None:
        times.append(time.monotonic())
        return answer(url, **how)

    monkeypatch.setattr(server_control, "why_unhealthy_sync", answer_and_note)
    one = watch([], "fine", interval_s=0.1, first_wait_s=0.1)
    one.pause()
    one.start()
    time.sleep(0.45)  # it would have looked three times
    assert not asked
    one.look(Probe.SCHEDULES)
    assert asked == [("fine", Probe.SCHEDULES)], "unless it is told to"
    resumed = time.monotonic()
    one.resume()
    wait("three looks", 60, lambda: len(asked) > 3, interval_s=0.01)
    one.stop()
    assert times[1] - resumed >= 0.1 + 0.1, "not before the first wait and an interval are over"


def test_a_look_that_is_due_just_when_the_watch_goes_on_waits_first_as_well(asked: list[tuple[str, Probe]]) -> None:
    one = watch([], "fine", first_wait_s=3600.0)
    one.tick()
    assert len(asked) == 1, "it is due"
    one.pause()
    one.resume()
    one.tick()
    assert len(asked) == 1


def test_a_failed_request_has_the_engines_looked_at_without_waiting_for_the_interval(
    asked: list[tuple[str, Probe]],
) -> None:
    lost: list[tuple[int, str]] = []
    one = watch(lost, "dead", interval_s=3600.0)
    one.start()
    for _ in range(100):  # requests that fail together ask for one look
        one.suspect()
    wait("a look", 60, lambda: bool(lost), interval_s=0.01)
    one.stop()
    assert asked == [("dead", Probe.GENERATES)]


def test_a_failed_request_has_nothing_looked_at_that_is_not_to_be_looked_at_yet(
    asked: list[tuple[str, Probe]],
) -> None:
    """In the --rollout-health-check-first-wait an engine may be slow, and while the watch is paused silent."""
    one = watch([], "fine", interval_s=3600.0, first_wait_s=3600.0)
    one.start()
    one.suspect()
    one.tick()
    one.stop()
    other = watch([], "fine", interval_s=3600.0)
    other.resume()
    other.pause()
    other.suspect()
    other.tick()
    assert not asked
    other.resume()
    other.suspect()
    other.tick()
    assert asked == [("fine", Probe.GENERATES)]


class _Hung(http.server.BaseHTTPRequestHandler):
    """A server whose scheduler is stopped: what its HTTP process knows by itself is answered, as SGLang 0.5 does."""

    def do_GET(self) -> None:  # noqa: N802
        if self.path not in ("/health", "/v1/loads?include=core", "/model_info"):
            self.server.ended.wait(30)  # type: ignore[attr-defined]
        with suppress(OSError):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"loads": [{"num_running_reqs": 3}]}')

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_whose_scheduler_hangs_listens_but_does_not_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hung) as server:
        server.ended = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = {probe: server_control.why_unhealthy_sync(url, timeout_s=1, probe=probe) for probe in Probe}
        monkeypatch.setattr(watches, "ASK_S", 1)
        state = engine_state([], [url])[f"engine {url}"]
        server.ended.set()  # type: ignore[attr-defined]
        server.shutdown()
    assert found[Probe.LISTENS] is None
    assert state.startswith("its scheduler does not answer"), "the stall report says so, too"
    assert "not answered within" in (found[Probe.SCHEDULES] or "") and "not answered" in (found[Probe.GENERATES] or "")


class _Slow(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802
        time.sleep(0.4)
        with suppress(OSError):  # who asked has gone
            self.send_response(200 if self.path == "/health_generate" else 404)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_an_answer_that_comes_too_late_is_none() -> None:
    """--rollout-health-check-timeout says how late."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert server_control.why_unhealthy_sync(url, timeout_s=5.0) is None
        late = server_control.why_unhealthy_sync(url, timeout_s=0.1)
        assert late is not None and "health_generate" in late
        refused = server_control.why_unhealthy_sync(url, timeout_s=5.0, probe=Probe.LISTENS)
        assert refused is not None and "404" in refused
        server.shutdown()


def test_engines_that_end_during_a_look_after_the_watch_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is over ends its engines while one of them is being asked."""
    is_asked, has_ended = threading.Event(), threading.Event()

    def answer(url: str, *, timeout_s: float, probe: Probe) -> str:
        is_asked.set()
        has_ended.wait(10)
        return "connection reset by peer"

    monkeypatch.setattr(server_control, "why_unhealthy_sync", answer)
    lost: list[tuple[int, str]] = []
    one = watch(lost, "ended")
    one.start()
    assert is_asked.wait(10)
    one.stop()
    has_ended.set()
    one.pause()  # returns when the look is over
    assert lost == []


def load(running: int, speed: float, *, queued: int = 0, kv_use: float = 0.5) -> dict[str, float]:
    return {"running": running, "queued": queued, "tokens_per_s": running * speed, "kv_use": kv_use}


def test_loads_say_which_engine_is_slow_and_whether_requests_wait_for_cache() -> None:
    full = load(8, 10.0, queued=3, kv_use=0.95)
    looks = [{"a": load(8, 30.0), "b": load(8, 30.0), "c": full}, {"a": load(1, 90.0), "c": load(8, 20.0)}]
    found = load_metrics({"router": looks})
    prefix = "rollout/engine_loads/"
    assert found[f"{prefix}running"] == (8 + 8 + 8 + 1 + 8) / 5 and found[f"{prefix}queued"] == 3 / 5
    assert found[f"{prefix}full_ratio"] == 1 / 2, "one of the two looks at c"
    assert found[f"{prefix}slowest_ratio"] == 30.0 / ((10.0 + 20.0) / 2), "one request alone is no comparison"
    assert load_metrics({}) == {} and f"{prefix}slowest_ratio" not in load_metrics({"r": [{"a": load(8, 30.0)}]})


def test_engines_are_asked_for_their_loads_while_they_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"num_running_reqs": 3, "num_waiting_reqs": 2, "gen_throughput": 40.0, "token_usage": 0.97}] * 2
    ranks = [{**rank, "cache_hit_rate": hits} for rank, hits in zip(ranks, (0.2, 0.6), strict=True)]
    answers: dict[str, Any] = {"a": ranks, "silent": HttpError("no answer")}

    def loads(url: str, *, timeout_s: float) -> list[dict[str, Any]]:
        if isinstance(answers[url], HttpError):
            raise answers[url]
        return list(answers[url])

    monkeypatch.setattr(server_control, "list_workers_sync", lambda url, timeout_s: list(answers))
    monkeypatch.setattr(server_control, "loads_sync", loads)
    watch = EngineLoads(lambda: ["router"])
    watch.tick()
    answers["a"] = [{"num_running_reqs": 0}]
    watch.tick()  # it is idle
    found = watch.take()
    assert found["rollout/engine_loads/running"] == 6 and found["rollout/engine_loads/kv_use"] == 0.97
    assert found["rollout/engine_loads/full_ratio"] == 1 and found["rollout/engine_loads/tokens_per_s"] == 80
    assert found["rollout/engine_loads/cache_hits"] == (0.2 + 0.6) / 2
    assert watch.take() == {}


def test_only_engines_of_one_model_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge of another size beside the policy is no slow engine."""
    speeds = {"policy-1": 40.0, "policy-2": 80.0, "judge": 4.0}

    def loads(url: str, *, timeout_s: float) -> list[dict[str, Any]]:
        return [{"num_running_reqs": 1, "gen_throughput": speeds[url]}]

    def workers(router: str, *, timeout_s: float) -> list[str]:
        return [url for url in speeds if url.startswith(router)]

    monkeypatch.setattr(server_control, "list_workers_sync", workers)
    monkeypatch.setattr(server_control, "loads_sync", loads)
    watch = EngineLoads(lambda: ["policy", "judge"])
    watch.tick()
    found = watch.take()
    assert found["rollout/engine_loads/slowest_ratio"] == 80.0 / 40.0
    assert found["rollout/engine_loads/tokens_per_s"] == (40.0 + 80.0 + 4.0) / 3
