"""The buffer server's application, and how it finds generators."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from slime.utils.errors import UsageError
from slime_plugins.rollout_buffer import buffer as server
from slime_plugins.rollout_buffer.buffer import create_app
from slime_plugins.rollout_buffer.discovery import Generator, find_generators
from slime_plugins.rollout_buffer.store import GroupRules, RolloutBuffer

START = {
    **{"num_repeat_per_sample": 2, "remote_engine_url": "http://e", "remote_buffer_url": "http://b"},
    "my_own_field": 7,
}


def record(instance_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"instance_id": instance_id, "messages": [{"role": "assistant", "content": "4"}], "reward": 1.0, **fields}


class Scripted:
    """A generator that ends when the test lets it."""

    def __init__(self, task_type: str = "scripted", **rules: Any) -> None:
        self.data: dict[str, Any] = {}
        self.may_end = threading.Event()
        self.error: Exception | None = None
        self.generator = Generator(task_type, self.run, GroupRules(task_type=task_type, **rules), Path("x"))

    def run(self, data: dict[str, Any]) -> None:
        self.data = data
        assert self.may_end.wait(20)
        if self.error:
            raise self.error


@pytest.fixture
def scripted():
    made = Scripted()
    yield made
    made.may_end.set()


@pytest.fixture
def client(scripted: Scripted):
    other = Scripted("other")
    app = create_app({"scripted": scripted.generator, "other": other.generator}, RolloutBuffer(max_groups=3))
    yield TestClient(app)
    other.may_end.set()


def start(client: TestClient, task_type: str = "scripted", **changes: Any) -> Any:
    return client.post("/start_rollout", json={**START, "task_type": task_type, **changes})


def until_idle(client: TestClient) -> dict[str, Any]:
    end = time.monotonic() + 10
    while (status := client.get("/status").json())["running"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    return status


def fetch(client: TestClient, **body: Any) -> dict[str, Any]:
    return client.post("/get_rollout_data", json=body).json()


def write(client: TestClient, *args: Any, **fields: Any) -> int:
    return client.post("/buffer/write", json=record(*args, **fields)).status_code


def test_a_generator_gets_the_request_as_it_was_and_its_groups_are_handed_out_once_complete(client, scripted):
    assert start(client).json()["started"] is True
    assert write(client, "a", extra=1) == 200
    assert fetch(client)["success"] is False, "one record of two"
    assert write(client, "b") == write(client, "a") == write(client, "b") == 200
    first = fetch(client, max_groups=1)
    assert [item["instance_id"] for item in first["data"]["data"]] == ["a", "a"]
    assert first["data"]["data"][0]["extra"] == 1, "fields of the generator's own travel on"
    assert first["data"]["meta_info"] == {"total_groups": 1, "total_samples": 2, "avg_reward": 1.0}
    assert [item["instance_id"] for item in fetch(client)["data"]["data"]] == ["b", "b"]
    assert fetch(client)["data"]["data"] == []
    assert scripted.data["my_own_field"] == 7 and scripted.data["num_epoch"] == 1


def test_a_lost_answer_can_be_asked_for_again(client):
    start(client)
    write(client), write(client)
    first = fetch(client, request_id="r1")
    assert first["success"] and fetch(client, request_id="r1") == first
    assert not fetch(client, request_id="r2")["success"]


def test_a_record_that_is_sent_twice_counts_once(client):
    start(client)
    assert [write(client, uid="u1") for _ in range(3)] == [200] * 3
    assert fetch(client)["status"]["prompts"] == 1 and not fetch(client)["success"]
    write(client, uid="u2")
    assert len(fetch(client)["data"]["data"]) == 2


def test_a_full_buffer_makes_writers_wait_until_groups_are_taken(client):
    start(client)
    assert [write(client, name) for name in "abc"] == [200] * 3
    refused = client.post("/buffer/write", json=record("d"))
    assert refused.status_code == 429 and "holds 3 prompts (--max-groups)" in refused.text
    assert write(client, "a") == 200, "a group that is begun may be completed"
    assert fetch(client)["success"] and write(client, "d") == 200


def test_one_prompt_cannot_fill_the_memory():
    buffer = RolloutBuffer(max_groups=1, max_group_records=2)
    buffer.configure(GroupRules(is_valid_group=lambda group, size, task: False), 1)
    assert buffer.write({"instance_id": "a"}) and buffer.write({"instance_id": "a"})
    with pytest.raises(RuntimeError, match="not taken as a valid group"):
        buffer.write({"instance_id": "a"})


def test_a_body_that_is_too_large_is_refused_unread(client, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 100)
    assert write(client, text="x" * 200) == 413
    assert client.post("/buffer/write", content=iter([b"{}"])).status_code == 411


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"instance_id": ""}, "instance_id"),
        ({"messages": None}, "a record has messages or a sample"),
        ({"reward": "good"}, "reward"),
    ],
)
def test_a_record_that_cannot_be_used_is_refused_with_the_reason(client, wrong, said):
    answer = client.post("/buffer/write", json=record() | wrong)
    assert answer.status_code == 422 and said in answer.text


def test_a_reward_that_is_no_number_is_refused(client):
    text = '{"instance_id": "a", "messages": [{}], "reward": NaN}'
    answer = client.post("/buffer/write", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422


def test_a_second_start_finds_the_first_running_and_another_task_is_refused(client, scripted):
    start(client)
    assert start(client).json()["started"] is False
    refused = start(client, "other")
    assert refused.status_code == 409 and "task 'scripted' runs" in refused.json()["detail"]
    scripted.may_end.set()
    until_idle(client)
    assert start(client, "other").json()["started"] is True


def test_an_unknown_task_is_named_with_those_that_there_are(client):
    answer = start(client, "scriptd")
    assert answer.status_code == 404
    assert answer.json()["detail"] == (
        "no generator for task 'scriptd'; did you mean scripted? known: other, scripted"
    )


def test_a_generator_that_fails_says_why_and_can_be_started_again(client, scripted):
    scripted.error = ValueError("no data")
    scripted.may_end.set()
    start(client)
    assert until_idle(client)["error"] == "ValueError: no data"
    assert start(client).json()["started"] is True


def test_stopping_is_told_to_the_generator_and_what_is_buffered_may_be_forgotten(client, scripted):
    start(client)
    write(client)
    assert client.post("/stop_rollout", json={}).json()["stopping"] is True
    assert client.post("/buffer/write", json=record()).json()["stop"] is True
    scripted.may_end.set()
    until_idle(client)
    assert client.post("/stop_rollout", json={"clear": True}).json()["prompts"] == 0
    start(client)
    assert client.get("/status").json()["stopping"] is False


def test_incomplete_groups_of_a_run_that_ended_make_room_for_the_next(client, scripted):
    scripted.may_end.set()
    start(client)
    write(client, "half"), write(client, "whole"), write(client, "whole")
    until_idle(client)
    start(client)
    assert client.get("/status").json()["prompts"] == 1
    assert {item["instance_id"] for item in fetch(client)["data"]["data"]} == {"whole"}


def test_a_generator_s_own_rules_say_what_a_group_is():
    own = Scripted(
        is_valid_group=lambda group, size, task: len(group[1]) >= size - 1 and task == "scripted",
        transform_group=lambda group, task: (group[0], group[1][:1]),
        get_group_data_meta_info=lambda groups: {"solved": len(groups)},
    )
    client = TestClient(create_app({"scripted": own.generator}))
    start(client)
    write(client)
    answer = fetch(client)
    assert len(answer["data"]["data"]) == 1 and answer["data"]["meta_info"] == {"solved": 1}
    own.may_end.set()


# ---- finding generators


def test_the_package_has_generators_and_folders_add_more(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "TASK_TYPE = 'mine'\ndef run_rollout(data): ...\ndef transform_group(group, task_type): return group\n"
    )
    (tmp_path / "helper.py").write_text("x = 1\n")
    found = find_generators([tmp_path])
    assert {"math", "arithmetic", "mine"} == set(found)
    assert found["mine"].rules.transform_group(("a", []), "mine") == ("a", [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("TASK_TYPE = 'x'\n", "has no attribute 'run_rollout'"),
        ("TASK_TYPE = 3\ndef run_rollout(data): ...\n", "TASK_TYPE is 3; it must be a name"),
        ("TASK_TYPE = 'x'\ndef run_rollout(): ...\n", "run_rollout is called with 1 arguments"),
        ("TASK_TYPE = 'math'\ndef run_rollout(data): ...\n", "both have TASK_TYPE 'math'; rename one"),
        ("TASK_TYPE = 'x'\nimport nothing_like_it\ndef run_rollout(data): ...\n", "nothing_like_it"),
        (
            "TASK_TYPE = 'x'\ndef run_rollout(data): ...\ndef is_valid_group(group): ...\n",
            "is_valid_group is called with 3 arguments",
        ),
    ],
)
def test_a_file_that_is_no_generator_is_named(tmp_path: Path, text: str, said: str):
    (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(UsageError, match=r"wrong\.py.*" + said.replace("(", r"\(")):
        find_generators([tmp_path])


def test_the_server_refuses_a_folder_that_is_not_there(tmp_path: Path, capsys):
    assert server.main(["--generators", str(tmp_path / "none")]) == 2
    assert "there is no such directory" in capsys.readouterr().err
    assert server.main(["--max-groups", "0"]) == 2
