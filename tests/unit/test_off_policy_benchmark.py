"""The benchmark of stale tokens: which setting is corrected, what its table says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import off_policy
from benchmarks.off_policy import Line, Setting
from examples.tiny_cpu.make_data import eval_config

FRESH, SLOW, STALE, WILD = (Setting.parse(text) for text in ("1:2e-4", "8:2e-4", "32:2e-4", "32:1e-3"))


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(settings=[SLOW, STALE], at=None, seeds=[0, 1], steps=32, output=tmp_path)


def complete(line: Line, options: argparse.Namespace, accuracies: list[float]) -> Line:
    """Leave what a run leaves, for every seed."""
    for run in line.runs:
        folder = options.output / run.name
        folder.mkdir(parents=True)
        points = [{"eval/addition": a, "eval/step": 8 * i, "step_key": "eval/step"} for i, a in enumerate(accuracies)]
        gaps = [{off_policy.GAP: g, "train/step": i, "step_key": "train/step"} for i, g in enumerate((0.1, 0.7, 0.2))]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*points, *gaps]))
        (folder / "done.json").write_text(json.dumps({"recipe": run.recipe, "seconds": 1.0}))
    return line


def test_each_learning_rate_has_one_fresh_line_and_each_seed_one_run(options: argparse.Namespace):
    options.at = WILD
    lines = off_policy.uncorrected(options)
    assert [line.setting for line in lines] == [FRESH, WILD.fresh, SLOW, STALE, WILD]
    assert [run.name for run in lines[2].runs] == ["none-8-2e-4-0", "none-8-2e-4-1"]
    flags = lines[3].runs[1].flags
    assert flags[flags.index("--update-weights-interval") + 1] == "32" and flags[flags.index("--seed") + 1] == "1"
    mis = off_policy.make_line(STALE, "mis", options).runs[0]
    assert mis.flags[-2] == "--custom-config-path" and (off_policy.ROOT / mis.flags[-1]).is_file()


@pytest.mark.parametrize(
    ("slow", "stale", "chosen"),
    [
        ([0.4, 0.5, 0.6, 0.7], [0.4, 0.5, 0.6, 0.64], STALE),
        ([0.4, 0.5, 0.6, 0.64], [0.4, 0.5, 0.6, 0.7], SLOW),
        ([0.4, 0.6, 0.54, 0.7], [0.4, 0.5, 0.6, 0.7], SLOW),  # it recovers
        ([0.4, 0.38, 0.4, 0.66], [0.4, 0.5, 0.6, 0.7], STALE),  # nothing degrades: the last
    ],
)
def test_corrections_are_tried_where_the_uncorrected_run_first_degrades(options, slow, stale, chosen):
    lines = off_policy.uncorrected(options)
    assert off_policy.choose(lines, options) is None, "runs are missing"
    for line, accuracies in zip(lines, ([0.4, 0.5, 0.6, 0.7], slow, stale), strict=True):
        complete(line, options, accuracies)
    assert off_policy.choose(lines, options) == chosen


def test_the_report_shows_what_is_complete_and_names_the_rest(options: argparse.Namespace):
    lines = off_policy.uncorrected(options)
    complete(lines[0], options, [0.4, 0.5, 0.55, 0.7])
    complete(lines[1], options, [0.4, 0.6, 0.3, 0.5])
    problems = off_policy.report(lines, SLOW, options.output)
    assert problems == ["none-32-2e-4-0: not complete", "none-32-2e-4-1: not complete"]
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in (options.output / "table.md").open()]
    assert table[2:] == [
        ["fresh", "1", "2e-4", "2", "40.0%", "70.0%", "0.0%", "0.700"],
        ["none", "8", "2e-4", "2", "40.0%", "50.0%", "30.0%", "0.700"],
    ]
    assert (options.output / "settings.png").is_file() and (options.output / "corrections.png").is_file()


@pytest.mark.parametrize("text", ["8", "8:", "0:1e-4", "x:1e-4", "8:-1"])
def test_a_setting_that_is_none_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="is no setting; write INTERVAL:LR, as in 8:2e-4"):
        Setting.parse(text)


def test_every_correction_is_a_command_line_that_parses(options: argparse.Namespace, monkeypatch, tmp_path: Path):
    from slime.config.parse import CommandLine
    from tests.unit.argument_mutations import write_files

    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "label": "2"}
    Path("train.jsonl").write_text(json.dumps(row) + "\n")
    Path("eval.yaml").write_text(eval_config(tmp_path / "train.jsonl", 4))
    line = CommandLine()
    for name in off_policy.CORRECTIONS:
        run = off_policy.make_line(STALE, name, options).runs[0]
        where = {"{start}/sft/hf": "hf", "{start}/data/train.jsonl": "train.jsonl", "{eval}": "eval.yaml"}
        words = [str(off_policy.ROOT / w) if w.startswith("examples/") else where.get(w, w) for w in run.flags]
        problems = line.check(["--accelerator", "cpu", *words]).problems
        assert not problems.wrong and not problems.unsupported, (name, problems)
