"""The benchmark of learning: which runs are repeated, what a table line says, what is judged."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

import pytest

from benchmarks import learning, tiny_runs
from benchmarks.tiny_runs import TinyRun

# Stands for train.py, which takes half a minute: it counts its calls, and logs one evaluation, or fails.
SCRIPT = """
import json, pathlib, sys
flags = sys.argv[1:]
folder = pathlib.Path(flags[flags.index("--output-dir") + 1])
with (folder.parent / "calls").open("a") as calls: calls.write(folder.name + "\\n")
record = {"eval/addition": 0.5, "eval/step": 0, "step_key": "eval/step"}
(folder / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
sys.exit("--fail" in flags)
"""


def options(output: Path, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    tiny_runs.add_options(parser, "unused")
    (output / "start/sft/hf").mkdir(parents=True, exist_ok=True)
    (output / "start/sft/hf/config.json").write_text("{}")
    return parser.parse_args(["--output", str(output / "out"), "--start", str(output / "start"), *flags])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # No Ray: the script does not use it, and each start takes seconds.
    monkeypatch.setattr(tiny_runs, "ray_head", lambda slots, accelerator: contextlib.nullcontext("127.0.0.1:1"))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def called(output: Path) -> list[str]:
    return sorted((output / "out/calls").read_text().split())


def test_only_what_is_not_complete_with_the_same_flags_is_run_again(tmp_path: Path, script: str):
    first = [TinyRun("a", ("--x", "1"), script), TinyRun("b", ("--fail",), script), TinyRun("c", ("--x", "1"), script)]
    problems = tiny_runs.run_all(first, options(tmp_path, "--jobs", "2"))
    assert len(problems) == 1 and problems[0].startswith("b: exit status 1"), problems
    second = [
        TinyRun("a", ("--x", "1"), script),
        TinyRun("b", ("--x", "1"), script),
        TinyRun("c", ("--x", "2"), script),
    ]
    assert tiny_runs.run_all(second, options(tmp_path)) == []
    assert called(tmp_path) == ["a", "b", "b", "c", "c"]
    assert tiny_runs.read_curve(tmp_path / "out/a") == {0: 0.5}


def test_no_run_begins_when_the_time_is_over(tmp_path: Path, script: str):
    problems = tiny_runs.run_all([TinyRun("a", (), script)], options(tmp_path, "--stop-after", "0"))
    assert problems == ["a: not run, the time was over"]
    assert not (tmp_path / "out/calls").exists()


def test_an_estimator_has_to_gain_fifteen_points_in_the_mean_of_its_seeds():
    # starts 0.30 and 0.32, ends 0.40 and 0.52: 0.46 - 0.31 = 0.15
    enough = [{0: 0.30, 10: 0.40}, {0: 0.32, 10: 0.52}]
    assert learning.judge({"rloo": enough}) == []
    less = [{0: 0.30, 10: 0.40}, {0: 0.32, 10: 0.50}]
    assert learning.judge({"rloo": less}) == ["rloo: gained 14.0 points, must gain 15"]


def test_a_control_must_not_rise_and_all_runs_start_alike():
    assert learning.judge({"random": [{0: 0.30, 10: 0.01}], "flipped": [{0: 0.30, 10: 0.34}]}) == []
    assert learning.judge({"flipped": [{0: 0.30, 10: 0.36}]}) == ["flipped: must not learn, and rose by 6.0 points"]
    elsewhere = {"grpo": [{0: 0.30, 10: 0.60}], "random": [{0: 0.34, 10: 0.01}]}
    assert learning.judge(elsewhere) == ["the runs started between 30.0% and 34.0%: not from one model"]
    assert learning.judge({"trl_grpo": [{0: 0.90, 10: 0.10}]}) == []


def test_a_line_of_the_table_says_when_each_seed_reached_the_level():
    curves = [{0: 0.3, 5: 0.85, 10: 0.9}, {0: 0.3, 5: 0.6, 10: 0.7}]
    assert learning.table_row("gspo", curves) == ["gspo", "2", "30.0%", "80.0%", "90.0%, 70.0%", "5, -", "+50.0"]


def test_the_report_names_the_runs_that_are_missing_and_draws_the_others(tmp_path: Path):
    runs = {"grpo": [TinyRun("grpo-0", ()), TinyRun("grpo-1", ())], "trl_grpo": [TinyRun("trl_grpo-0", ())]}
    folder = tmp_path / "grpo-0"
    folder.mkdir()
    records = [
        {"eval/addition": value, "eval/step": step, "step_key": "eval/step"} for step, value in ((0, 0.3), (5, 0.5))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "done.json").write_text(json.dumps({"recipe": runs["grpo"][0].recipe}))
    assert learning.report(runs, tmp_path) == ["grpo-1: not complete"]
    assert "30.0%" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "learning.png").stat().st_size > 5_000


def test_every_run_has_a_folder_of_its_own_and_the_flags_that_make_it_what_it_is():
    asked = argparse.Namespace(only=learning.NAMES, seeds=[3, 4], steps=7)
    runs = learning.make_runs(asked)
    folders = [run.name for of_name in runs.values() for run in of_name]
    assert len(set(folders)) == len(folders) == 2 * len(learning.ESTIMATORS) + 3
    assert "--disable-grpo-std-normalization" in runs["dr_grpo"][0].flags
    assert "benchmarks.learning:opposite_of_exact_match" in runs["flipped"][0].flags
    assert ("random" in runs["random"][0].flags) and ("3" in runs["random"][0].flags)
