"""A run whose engine hangs is ended by the watchdog, with a report of every process, and nothing of it is left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(600)
LEFT_S = 60.0  # a safety net, as in leftovers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work = tmp_path_factory.mktemp("stall")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    return train(
        work / "out", *grpo_flags(model, prompts), "--rollout-num-gpus", 1, "--num-rollout", 2,
        "--stall-timeout", 8, "--custom-rollout-log-function-path",
        f"{ROOT}/tests/integration/user_code.py:stop_an_engine_after_rollout_0", check=False,
    )  # fmt: skip


def test_the_run_ends_and_says_which_phase_stalled(run: Run) -> None:
    assert run.status == 1, run.printed[-3000:]
    assert "error: nothing has gone on in the phase 'sync' for" in run.printed
    assert str(run.output_dir / "stall_report.txt") in run.printed


def test_the_report_tells_what_every_part_of_the_run_is_doing(run: Run) -> None:
    report = (run.output_dir / "stall_report.txt").read_text()
    assert "rollout manager" in report and "16 samples" in report
    assert "/v1/loads?include=core was not answered within" in report, "the engine is asked, and silent"
    assert "GiB are free" in report
    parts = {part.split("\n")[0].split(": ")[1]: part for part in report.split("--- process ")[1:]}
    assert "state stopped" in parts["sglang::scheduler"] and "event_loop" in parts["sglang::scheduler"]
    trainer = next(part for title, part in parts.items() if title.startswith("ray::TrainRayActor"))
    assert "update_weights" in trainer, "the trainer waits for the engine that is to take its weights"
    assert "sync_weights" in parts["python train.py"]
    assert "--hf-checkpoint" not in report, "arguments may hold secrets"


def test_routers_and_engines_answer_only_who_has_the_key_of_the_run(run: Run) -> None:
    found = json.loads((run.output_dir.parent / "doors.json").read_text())
    assert len(found["doors"]) == 2, "a router and an engine"
    assert set(map(tuple, found["doors"].values())) == {(401, 401, 200)}


def test_no_server_of_the_run_listens_on_every_interface(run: Run) -> None:
    bound = json.loads((run.output_dir.parent / "doors.json").read_text())["bound"]
    assert len(bound) > 8, "Ray's, the router's, the engine's"
    assert [one for one in bound if one[1] in ("0.0.0.0", "::")] == []
    assert "sglang::scheduler" in {name for name, _ in bound}, "the store of the engine's ranks"


def test_the_key_of_the_run_is_nowhere_to_be_read(run: Run) -> None:
    found = json.loads((run.output_dir.parent / "doors.json").read_text())
    assert len(found["key"]) >= 32 and found["shown"] == [], "no process has it in its arguments"
    assert found["key"] not in run.printed
    files = [path for path in run.output_dir.rglob("*") if path.is_file()]
    assert run.output_dir / "logs" / "engine_0.json" in files and (run.output_dir / "logs" / "ray").is_dir()
    assert not [path for path in files if found["key"].encode() in path.read_bytes()]


def test_nothing_of_the_run_is_left(run: Run) -> None:
    end, found = time.monotonic() + LEFT_S, ["not looked"]
    while found and time.monotonic() < end:
        found = leftovers(run.output_dir)
        time.sleep(0.2)
    assert not found


def leftovers(output_dir: Path) -> list[str]:
    """Processes that name the run's directory, and what lies around of its Ray."""
    mark, found = str(output_dir), []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(mark in word for word in process.info["cmdline"] or []):
            found.append(f"{process.pid} {process.info['cmdline']}")
    return found
