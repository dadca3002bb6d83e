"""Programs of a user's own: a driver on upstream's names (examples/own_driver), and `TrainingRun` as a library."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import DEADLINE_S, ROOT, grpo_flags, log_tails, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    work = tmp_path_factory.mktemp("own_driver")
    return [*grpo_flags(make_model(work / "model"), write_prompts(work / "prompts.jsonl")), "--colocate"]


def test_a_driver_on_upstreams_names_trains_evaluates_and_saves(inputs: list[object], tmp_path: Path):
    prompts = inputs[inputs.index("--prompt-data") + 1]
    run = train(
        tmp_path / "out", *inputs, "--num-rollout", 2, "--save", tmp_path / "save", "--save-interval", 1,
        "--eval-interval", 2, "--eval-prompt-data", "digits", prompts, "--eval-max-response-len", 4,
        script="examples/own_driver/driver.py", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    assert run.column("train/step") == [0, 1] and all(norm > 0 for norm in run.column("train/grad_norm"))
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert all(gap < 1e-4 for gap in gaps), "the engine has the weights of the step before"
    assert run.column("eval/step", "eval/step") == [0, 2]
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"
    states = sorted(path.name for path in (tmp_path / "save" / "rollout").glob("*.pt"))
    assert states == ["global_dataset_state_dict_0.pt", "global_dataset_state_dict_1.pt"]
    assert (run.output_dir / "curves.png").is_file(), "the run was ended in order, at the exit of the process"


def test_the_library_as_its_page_shows_it_ends_a_run_when_a_metric_says_so(inputs: list[object], tmp_path: Path):
    page = (ROOT / "docs" / "own_driver.md").read_text()
    [library] = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    program = tmp_path / "program.py"
    flags = [*map(str, inputs), "--num-rollout", "5", "--output-dir", str(tmp_path / "out")]
    program.write_text(
        f"{library}\n\nif __name__ == '__main__':\n    print('rollouts', train_until(0.0, {flags!r}))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        timeout=DEADLINE_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + log_tails(tmp_path / "out")
    assert "rollouts 1\n" in done.stdout, "the first rollout's reward is 0 or more"
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [record["train/step"] for record in records if "train/loss" in record] == [0]
