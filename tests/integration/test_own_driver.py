"""Programs of a user's own: a driver on upstream's names (examples/own_driver), and `TrainingRun` as a library.

The driver's run also uses a row of each table that a package installed next to slime adds (examples/plugin_package).
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.plugin_package import install_example
from tests.integration.launch import (
    DEADLINE_S,
    ROOT,
    Run,
    environment,
    grpo_flags,
    log_tails,
    make_model,
    train,
    write_prompts,
)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts of the driver with the package's family, reward, estimator, transport and tracker."""
    work = tmp_path_factory.mktemp("own_driver")
    path = os.pathsep.join([str(ROOT), str(install_example(work / "site"))])
    tiny = [sys.executable, "tools/make_tiny_model.py", "--output", work / "model", "--layers", "2"]
    tiny += ["--init-std", "0.1", "--family", "mistral"]
    subprocess.run(tiny, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True, timeout=120)
    prompts = write_prompts(work / "prompts.jsonl")
    flags = grpo_flags(work / "model", prompts)
    place = flags.index("--custom-rm-path")
    return train(
        work / "out", *flags[:place], *flags[place + 2 :], "--colocate", "--num-rollout", 2,
        "--save", work / "save", "--save-interval", 1, "--compile-cache-dir", work / "kernels",
        "--eval-interval", 2, "--eval-prompt-data", "digits", prompts, "--eval-max-response-len", 4,
        "--rm-type", "digits", "--advantage-estimator", "median", "--tracker", "csv",
        "--update-weight-transport", "noted_files", "--update-weight-disk-dir", work / "weights",
        script="examples/own_driver/driver.py", PYTHONPATH=path,
    )  # fmt: skip


def test_a_run_makes_its_compile_cache_and_says_where(run: Run):
    (folder,) = (run.output_dir.parent / "kernels").iterdir()
    assert f"compiled kernels are kept in {folder}" in run.printed
    assert "--compile-cache-dir with --accelerator cpu, where no kernels are compiled" in run.printed


def test_a_driver_on_upstreams_names_trains_evaluates_and_saves(run: Run):
    assert run.column("train/step") == [0, 1] and all(norm > 0 for norm in run.column("train/grad_norm"))
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 2 and all(gap < 1e-4 for gap in gaps), "the engine has the weights of the step before"
    assert run.column("eval/step", "eval/step") == [0, 2]
    save = run.output_dir.parent / "save"
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    states = sorted(path.name for path in (save / "rollout").glob("*.pt"))
    assert states == ["global_dataset_state_dict_0.pt", "global_dataset_state_dict_1.pt"]
    assert (run.output_dir / "curves.png").is_file(), "the run was ended in order, at the exit of the process"


def test_a_run_uses_a_row_of_each_table_of_an_installed_package(run: Run):
    assert all(0 < reward < 1 for reward in run.column("rollout/raw_reward", "rollout/step"))
    assert (run.output_dir / "versions.txt").read_text().split() == ["1", "2", "3"]
    with (run.output_dir / "metrics.csv").open() as file:
        rows = list(csv.reader(file))
    assert {row[1] for row in rows if row[0] == "train/step" and row[2] == "train/loss"} == {"0", "1"}


def test_the_library_as_its_page_shows_it_ends_a_run_when_a_metric_says_so(tmp_path: Path):
    page = (ROOT / "docs" / "own_driver.md").read_text()
    [library] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    program = tmp_path / "program.py"
    inputs = grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    flags = [*map(str, inputs), "--colocate", "--num-rollout", "5", "--output-dir", str(tmp_path / "out")]
    program.write_text(
        f"{library}\n\nif __name__ == '__main__':\n    print('rollouts', train_until(0.0, {flags!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        timeout=DEADLINE_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + log_tails(tmp_path / "out")
    assert "rollouts 1\n" in done.stdout, "the first rollout's reward is 0 or more"
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["train/step"] for record in records if "train/loss" in record] == [0]
