"""The server of environments over real HTTP: keys, bodies, bounds; it answers errors as JSON."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest

from slime.processes.wait import wait
from slime_plugins.environments import frameworks, server


class Episode:
    messages, tools = [{"role": "user", "content": "go"}], None
    num_closed = 0

    def close(self) -> None:
        Episode.num_closed += 1

    def step(self, text: str, calls: list[Any]) -> dict[str, Any]:
        if text == "slow":
            time.sleep(0.5)
        if text == "late":
            raise TimeoutError("of its own")
        return {"messages": [], "done": True, "thread": threading.get_ident(), "long": "x" * 2 * len(text)}

    def finish(self) -> dict[str, Any]:
        return {"reward": 1, "metrics": {}}


class Environment:
    drives_model, num_tasks = False, 2
    start_s = 0.0

    def prompt(self, task: int) -> dict[str, Any]:
        return {"messages": Episode.messages, "tools": None}

    def start(self, task: int) -> Episode:
        time.sleep(Environment.start_s)
        return Episode()


@pytest.fixture
def ask():
    """ask(path, body, key) -> (status, answer), of a server with room for two episodes."""
    episodes = server.Episodes(Environment(), limit=2, timeout_s=0.2, idle_s=100.0, run_s=1.0)
    running = server.Server(("127.0.0.1", 0), server.handler_of(episodes, {"framework": "python"}, "secret"))
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()

    def asked(path: str, body: Any = None, *, key: str = "secret", raw: bytes | None = None) -> tuple[int, Any]:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{running.server_address[1]}{path}"
        request = urllib.request.Request(url, data=data, headers={"Authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]

    asked.episodes, asked.port = episodes, running.server_address[1]
    yield asked
    running.shutdown()
    running.server_close()


def start(ask) -> str:
    return ask("/start", {"task": 0})[1]["episode"]


def test_an_episode_is_started_stepped_and_finished_once(ask):
    key = start(ask)
    assert ask("/step", {"episode": key, "text": "a", "calls": []})[1]["done"]
    assert ask("/finish", {"episode": key}) == (200, {"reward": 1, "metrics": {}})
    status, message = ask("/finish", {"episode": key})
    assert (status, message) == (410, f"there is no episode '{key}': it was finished, forgotten, or never started")


@pytest.mark.parametrize("result", [{"metrics": {}}, None, {"reward": "much"}, {"reward": numpy.float32("nan")}])
def test_a_score_without_a_finite_reward_is_an_error_with_an_answer(ask, monkeypatch, result):
    monkeypatch.setattr(Episode, "finish", lambda self: result)
    status, message = ask("/finish", {"episode": start(ask)})
    assert status == 500 and "reward" in message


def test_numbers_of_numpy_arrive_as_numbers(ask, monkeypatch):
    result = {"reward": numpy.float32(0.5), "metrics": {"steps": numpy.int64(3)}}
    monkeypatch.setattr(Episode, "finish", lambda self: result)
    assert ask("/finish", {"episode": start(ask)}) == (200, {"reward": 0.5, "metrics": {"steps": 3}})


def test_a_start_whose_client_is_gone_gives_its_place_back(ask, monkeypatch):
    monkeypatch.setattr(Environment, "start_s", 0.1)
    closed = Episode.num_closed
    body = json.dumps({"task": 0}).encode()
    head = f"POST /start HTTP/1.1\r\nAuthorization: Bearer secret\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", ask.port)) as connection:
        connection.sendall(head.encode() + body)
        wait("the start to begin", 5.0, lambda: len(ask.episodes) == 1 or None, interval_s=0.01)
    wait("its place to be free", 5.0, lambda: len(ask.episodes) == 0 or None, interval_s=0.01)
    wait("it to be closed", 5.0, lambda: Episode.num_closed == closed + 1 or None, interval_s=0.01)


def test_the_calls_of_an_episode_are_made_in_one_thread_of_its_own(ask):
    first, second = start(ask), start(ask)
    threads = [ask("/step", {"episode": key, "text": "", "calls": []})[1]["thread"] for key in (first, first, second)]
    assert threads[0] == threads[1] != threads[2]


def test_tasks_end_where_the_environment_does(ask):
    tasks = ask("/tasks", {"start": 1, "count": 5})[1]["tasks"]
    assert tasks == [{"task": 1, "messages": Episode.messages, "tools": None}]
    assert ask("/tasks", {"start": 0, "count": 1001})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/start", {"task": 2}, 400, "there is no task 2; there are 2"),
        ("/start", {"task": True}, 400, "task must be of the type int, not 'True'"),
        ("/start", {}, 400, "/start takes an object with task"),
        ("/start", [], 400, "/start takes an object with task"),
        ("/stop", {}, 404, "there is no /stop; there is /tasks, /start"),
        ("/nothing", None, 404, "there is no GET /nothing; there is /health"),
    ],
)
def test_a_request_that_cannot_be_understood_is_told_why(ask, path, body, status, message):
    found, said = ask(path, body)
    assert found == status
    assert said.startswith(message)


def test_a_body_that_is_no_json_or_too_large_is_refused(ask, monkeypatch):
    assert ask("/start", raw=b"{")[0] == 400
    monkeypatch.setattr(server, "MAX_BYTES", 300)
    key = start(ask)
    status, message = ask("/step", {"episode": key, "text": "a" * 300, "calls": []})
    assert (status, message.endswith("at most 300 are taken")) == (413, True)
    status, message = ask("/step", {"episode": key, "text": "a" * 220, "calls": []})
    assert (status, message.endswith("at most 300 are sent")) == (500, True)


def test_every_request_needs_the_key(ask):
    assert ask("/health", key="other") == (401, "the key is missing or wrong")
    assert ask("/start", {"task": 0}, key="other")[0] == 401
    assert ask("/health")[1] == {"framework": "python", "episodes": 0, "overdue": 0}


def test_a_call_that_takes_too_long_is_given_up_and_counted_until_it_returns(ask):
    key = start(ask)
    assert ask("/step", {"episode": key, "text": "slow", "calls": []}) == (
        504,
        "the environment took more than 0.2 s",
    )
    assert ask("/step", {"episode": key, "text": "", "calls": []})[0] == 410
    assert ask("/health")[1]["overdue"] == 1
    end = time.monotonic() + 5
    while ask("/health")[1]["overdue"] and time.monotonic() < end:
        time.sleep(0.05)
    assert ask("/health")[1] == {"framework": "python", "episodes": 0, "overdue": 0}


def test_a_time_out_of_the_environments_own_is_its_error(ask):
    status, message = ask("/step", {"episode": start(ask), "text": "late", "calls": []})
    assert (status, message) == (500, "the environment raised TimeoutError: of its own")


def test_episodes_are_bounded_and_forgotten_when_nobody_asks_for_them(ask):
    old = start(ask)
    start(ask)
    assert ask("/start", {"task": 0})[0] == 429
    ask.episodes.idle_s = 0.0
    time.sleep(0.01)
    assert ask("/start", {"task": 0})[0] == 200
    assert ask("/step", {"episode": old, "text": "", "calls": []})[0] == 410


def test_an_episode_that_failed_is_closed_as_one_that_was_finished(ask):
    before = Episode.num_closed
    for verb, more in (("/finish", {}), ("/step", {"text": "late", "calls": []})):
        _, started = ask("/start", {"task": 0})
        ask(verb, {"episode": started["episode"], **more})
    wait("both to be closed", 10, lambda: Episode.num_closed == before + 2, interval_s=0.01)


class OneEnvironment:
    """An environment as OpenEnv's, whose reset may fail."""

    closed: ClassVar[list[int]] = []

    def reset(self, seed: int) -> Any:
        if seed == 1:
            raise RuntimeError("no such seed")
        return SimpleNamespace(done=False, error="nothing to see")

    def close(self) -> None:
        self.closed.append(1)


def test_an_environment_of_openenv_is_closed_once_whatever_happens():
    owner: Any = SimpleNamespace(
        make=OneEnvironment, arguments={}, split=None, system=None, tools=None, kind="sum", field=None
    )
    episode = frameworks.OpenEnvEpisode(owner, 0)
    episode.finish()
    episode.close()
    assert OneEnvironment.closed == [1]
    with pytest.raises(RuntimeError, match="no such seed"):
        frameworks.OpenEnvEpisode(owner, 1)
    assert OneEnvironment.closed == [1, 1]


def test_the_server_starts_without_slime_and_says_where_it_serves(tmp_path: Path):
    (tmp_path / "own.py").write_text("import sys\nclass Own:\n    num_tasks, drives_model = len(sys.argv), False\n")
    ready = tmp_path / "ready.json"
    options = ["--framework", "python", "--environment", "own:Own", "--ready-file", str(ready), "--check"]
    script = (
        "import runpy, sys; sys.modules['slime'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, server.__file__, *options]
    subprocess.run(command, check=True, timeout=60, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert json.loads(ready.read_text())["environment"] == "own:Own"


def test_another_version_of_a_framework_is_refused(monkeypatch):
    monkeypatch.setattr(frameworks.importlib.metadata, "version", lambda name: "0.3.9")
    with pytest.raises(ValueError, match=r"has verifiers 0\.3\.9, and 0\.4\.\* is needed"):
        frameworks.installed_version("verifiers")
