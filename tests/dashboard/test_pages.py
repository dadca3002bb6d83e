"""What the pages Time, Evaluation and Compare show of files."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.viewer import sample_rows
from slime.checkpoints.rollout_files import samples_path, write_tables
from slime.observability.rollout_records.schema import PLAIN, SAMPLES
from tests.dashboard.run_files import client_of, only_run, write_lines, write_run


def events(*pairs: tuple[str, float, str]) -> list[dict[str, Any]]:
    return [{"event": kind, "time": time, "phase": phase, "rollout": 0} for kind, time, phase in pairs]


def write_evaluation(directory: Path, step: int, rewards: list[float]) -> None:
    """An evaluation with one answer to each of some problems."""
    rows = sample_rows(0, len(rewards), tokens=8, random_=random.Random(0))
    changed = [
        row | {"dataset": "set", "prompt_preview": f"problem {number}", "label": "x", "reward": reward}
        for number, (row, reward) in enumerate(zip(rows, rewards, strict=True))
    ]
    path = samples_path(directory / "rollouts", step, evaluation=True)
    write_tables(path, SAMPLES, [pa.Table.from_pylist(changed, schema=SAMPLES)], plain=PLAIN)


def page_of(directory: Path, rest: str, **asked: str) -> Any:
    client = client_of(directory)
    answer = client.get(f"/api/runs/{only_run(client)}/{rest}", params=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_phases_nest_and_the_one_that_goes_on_has_no_end(tmp_path: Path) -> None:
    write_run(tmp_path, 1, flags={})
    (tmp_path / "run_events.jsonl").unlink()
    written = events(("begin", 1.0, "train"), ("begin", 2.0, "save"), ("end", 3.0, "save"), ("end", 4.0, "train"))
    write_lines(
        tmp_path / "run_events.jsonl", [{"event": "start", "time": 0.0}, *written, *events(("begin", 5.0, "eval"))]
    )
    driver = page_of(tmp_path, "time")["lanes"]["driver"]
    spans = [(span["name"], span["begin"], span.get("end")) for span in driver]
    assert spans == [("save", 2.0, 3.0), ("train", 1.0, 4.0), ("eval", 5.0, None)]


def test_phases_of_a_process_that_was_lost_end_where_the_next_one_starts(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    start = [{"event": "start", "time": 9.0}]
    write_lines(tmp_path / "run_events.jsonl", [*events(("begin", 1.0, "train")), *start])
    [span] = page_of(tmp_path, "time")["lanes"]["driver"]
    assert (span["begin"], span["end"]) == (1.0, 9.0)


def test_without_events_engines_and_trainer_are_drawn_from_metrics(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    page = page_of(tmp_path, "time")
    assert page["lanes"]["driver"] == []
    for lane, seconds in (("engines", 0.6 * 20), ("trainer", 0.3 * 20)):
        assert [span["end"] - span["begin"] for span in page["lanes"][lane]] == pytest.approx([seconds] * 3)
    # Three generations of 12 s in two times 20 s and one generation.
    assert page["idle"]["engines"] == pytest.approx(1 - 3 * 12 / (2 * 20 + 12))
    assert page["steps"]["actor_train"]["y"] == pytest.approx([6.0] * 3)


def test_lanes_say_how_many_gpus_they_are_of(tmp_path: Path) -> None:
    flags = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 4}
    client = client_of(write_run(tmp_path, 2, flags=flags))
    assert client.get(f"/api/runs/{only_run(client)}/time").json()["gpus"] == {"trainer": 2 * 8, "engines": 4}


def test_samples_have_lanes_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    rows = sample_rows(0, 3, tokens=8, random_=random.Random(0))
    times = [
        '{"begin": 5, "end": 9, "spans": [["tool", 6, 7.5]]}',
        '{"begin": 2, "end": 3}',
        "nonsense",
    ]
    rows = [row | {"times": text} for row, text in zip(rows, times, strict=True)]
    write_tables(
        samples_path(tmp_path / "rollouts", 0), SAMPLES, [pa.Table.from_pylist(rows, schema=SAMPLES)], plain=PLAIN
    )
    found = page_of(tmp_path, "rollouts/00000/times")
    assert [(lane["row"], lane["begin"]) for lane in found["lanes"]] == [(1, 2), (0, 5)]
    assert (found["lanes"][1]["spans"], found["of"]) == ([["tool", 6, 7.5]], 3)


def test_evaluations_have_errors_over_problems_and_marks_of_each(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    for step, rewards in ((0, [0.0, 0.0, 1.0, 1.0]), (5, [1.0, 1.0, 1.0, 0.0])):
        write_evaluation(tmp_path, step, rewards)
    write_lines(tmp_path / "metrics.jsonl", [{"step_key": "eval/step", "time": 1.0, "eval/step": 5, "eval/set": 0.75}])
    page = page_of(tmp_path, "evaluation")
    assert (page["set"], page["steps"]) == ("set", [0, 5])
    line = page["sets"]["set"]
    assert (line["x"], line["y"]) == ([0, 5], [0.5, 0.75])
    # The standard deviation of 0, 0, 1, 1 is sqrt(4 * 0.25 / 3); the error of a mean of four is half of it.
    assert line["error"][0] == pytest.approx((4 * 0.25 / 3) ** 0.5 / 2)
    marks = {problem["prompt"]: [mark["reward"] for mark in problem["marks"]] for problem in page["problems"]}
    assert marks == {f"problem {n}": [a, b] for n, (a, b) in enumerate(zip([0, 0, 1, 1], [1, 1, 1, 0], strict=True))}
    assert page["problems"][2]["marks"][1] | {"reward": 0} == {"reward": 0, "count": 1, "file": "eval_00005", "row": 2}


def test_answers_that_an_older_run_wrote_down_are_problems_too(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    answer = {"data_set": "set", "prompt": "p", "label": "l", "response": "r", "truncated": False}
    lines = [{"eval/step": step, "reward": reward, **answer} for step, reward in ((0, 0.0), (5, 1.0))]
    write_lines(tmp_path / "eval_samples.jsonl", lines)
    [problem] = page_of(tmp_path, "evaluation", set="set")["problems"]
    assert [mark["reward"] for mark in problem["marks"]] == [0.0, 1.0]


def test_pages_of_a_run_without_anything_are_empty_and_no_errors(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert page_of(tmp_path, "evaluation")["sets"] == {}
    assert page_of(tmp_path, "time")["lanes"] == {"driver": [], "engines": [], "trainer": []}
    assert page_of(tmp_path, "rollouts") == []
    assert page_of(tmp_path, "metrics")["metrics"] == {}


def test_runs_are_compared_by_flags_metrics_and_problems(tmp_path: Path) -> None:
    for name, rate, rewards in (("a", 1e-6, [0.0, 1.0]), ("b", 2e-6, [0.0, 0.0])):
        directory = write_run(tmp_path / name, 2, flags={"lr": rate, "seed": 1})
        write_evaluation(directory, 0, rewards)
    client = client_of(tmp_path)
    ids = [run["id"] for run in client.get("/api/runs").json()["runs"]]
    page = client.get("/api/compare", params={"runs": ",".join([*ids, "no-such-run"])}).json()
    assert [run["id"] for run in page["runs"]] == ids
    assert page["flags"] == {"lr": [1e-6, 2e-6]}
    assert page["metrics"]["perf/step_time"] == [20.0, 20.0]
    assert [problem["prompt"] for problem in page["problems"]] == ["problem 1", "problem 0"]  # most different first
    assert client.get("/api/compare").json()["runs"] == []


def test_a_set_with_a_hyphen_is_shown_and_what_is_known_of_a_set_is_none(tmp_path: Path) -> None:
    values = {"eval/aime-2024": 0.5, "eval/aime-2024-truncated_ratio": 0.1, "eval/aime-2024-pass@4": 0.6}
    values |= {"eval/aime-2024-failed_samples": 1.0, "eval/aime-2024/response_len/mean": 7.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step_key": "eval/step", "time": 1.0, "eval/step": 1, **values}])
    assert list(page_of(tmp_path, "evaluation")["sets"]) == ["aime-2024"]


ODD = (None, True, -1, 1e308, math.nan, math.inf, 10**400, "x", [], {}, {"a": 1}, "\u202e\0", -5.5)


def changed(value: Any, random_: random.Random) -> Any:
    """A value with odd ones in the place of some of its parts."""
    if random_.random() < 0.15:
        return random_.choice(ODD)
    if isinstance(value, dict):
        return {name: changed(part, random_) for name, part in value.items()}
    return [changed(part, random_) for part in value] if isinstance(value, list) else value


def test_runs_that_hold_anything_are_shown_and_hide_no_other(tmp_path: Path) -> None:
    flags = {"num_rollout": 8, "rollout_batch_size": 4, "n_samples_per_prompt": 2, "actor_num_nodes": 1}
    alarm = {"name": "truncated", "since": 1, "state": "begun", "flags": ["--lr"], "evidence": {"a": 1}}
    answer = {"eval/step": 2, "prompt": "p", "response": "r", "reward": 1.0, "data_set": "a", "label": "1"}
    for seed in range(40):
        directory, random_ = write_run(tmp_path / f"{seed:02}", 4, flags=flags), random.Random(seed)
        place = {"step_key": "rollout/step", "time": 1.0, "rollout/step": 3}
        write_lines(directory / "metrics.jsonl", [place | {"alarm": alarm}])
        write_lines(directory / "eval_samples.jsonl", [answer] * 2)
        for file in ("metrics.jsonl", "run_events.jsonl", "eval_samples.jsonl"):
            lines = [json.loads(line) for line in (directory / file).read_text().splitlines()]
            (directory / file).write_text("".join(json.dumps(changed(line, random_)) + "\n" for line in lines))
    client = client_of(tmp_path)
    runs = client.get("/api/runs").json()["runs"]
    assert len(runs) == 40
    for run in runs:
        for page in (
            "",
            "/metrics",
            "/time",
            "/evaluation",
            "/rollouts",
            "/series?name=rollout/raw_reward&axis=tokens",
        ):
            assert client.get(f"/api/runs/{run['id']}{page}").status_code == 200
    assert client.get("/api/compare", params={"runs": ",".join(run["id"] for run in runs[:12])}).status_code == 200


def test_a_number_that_is_too_large_is_none(tmp_path: Path) -> None:
    record = {"step_key": "train/step", "time": 1.0, "train/step": 1, "train/huge": 10**400, "train/loss": 2.0}
    write_lines(tmp_path / "metrics.jsonl", [record, record | {"train/step": 10**400}])
    metrics = page_of(tmp_path, "metrics")["metrics"]
    assert list(metrics) == ["train/loss"] and metrics["train/loss"]["points"] == 1
