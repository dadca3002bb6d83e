"""A package with a row for each table (examples/plugin_package), installed next to slime: train.py uses all five."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.plugin_package import install, install_example
from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(600)


def test_a_run_uses_a_row_of_each_table(tmp_path: Path):
    path = os.pathsep.join([str(ROOT), str(install_example(tmp_path / "site"))])
    tiny = [
        sys.executable,
        "tools/make_tiny_model.py",
        "--output",
        tmp_path / "model",
        "--layers",
        "2",
        "--init-std",
        "0.1",
    ]
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([*tiny, "--family", "mistral"], cwd=ROOT, env=environment, check=True, timeout=120)
    flags = grpo_flags(tmp_path / "model", write_prompts(tmp_path / "prompts.jsonl"))
    place = flags.index("--custom-rm-path")
    run = train(
        tmp_path / "out", *flags[:place], *flags[place + 2 :], "--colocate", "--num-rollout", 2,
        "--rm-type", "digits", "--advantage-estimator", "median", "--tracker", "csv",
        "--update-weight-transport", "noted_files", "--update-weight-disk-dir", tmp_path / "weights",
        PYTHONPATH=path,
    )  # fmt: skip
    assert all(gap < 1e-4 for gap in run.column("train/train_rollout_logprob_abs_diff")), "engine and trainer agree"
    assert len(run.column("train/train_rollout_logprob_abs_diff")) == 2
    assert all(0 < reward < 1 for reward in run.column("rollout/raw_reward", "rollout/step"))
    assert (run.output_dir / "versions.txt").read_text().split() == ["1", "2", "3"]
    with (run.output_dir / "metrics.csv").open() as file:
        rows = list(csv.reader(file))
    assert {row[1] for row in rows if row[0] == "train/step" and row[2] == "train/loss"} == {"0", "1"}


def test_a_plan_shows_the_transport_and_a_broken_package_is_one_sentence(tmp_path: Path):
    site = install_example(tmp_path / "site")
    install(site, "broken", {"slime.trackers": {"bad": "no_such_module:Tracker"}})
    path = os.pathsep.join([str(ROOT), str(site)])
    flags = grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    place = flags.index("--custom-rm-path")
    line = [*flags[:place], *flags[place + 2 :], "--rm-type", "digits", "--colocate", "--num-rollout", 1, "--dry-run"]
    line += ["--update-weight-transport", "noted_files", "--update-weight-disk-dir", tmp_path / "weights"]
    planned = train(tmp_path / "out", *line, check=False, PYTHONPATH=path)
    assert planned.status == 0 and "files, each version noted" in planned.printed, planned.printed
    refused = train(tmp_path / "out", *line, "--tracker", "bad", check=False, PYTHONPATH=path)
    assert refused.status == 2
    assert "slime.trackers: bad of package broken: cannot load 'no_such_module:Tracker'" in refused.printed
