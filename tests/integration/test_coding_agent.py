"""Agents in sandboxes, graded in clean ones, trained by train.py: a short run, and the example as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from examples.coding_agent_rl import make_data
from tests.integration.launch import ROOT, log_tails, make_model, train


@pytest.mark.timeout(300)
def test_a_rollout_of_agents_is_graded_and_trained(tmp_path: Path):
    model = make_model(tmp_path / "model", "--extra-tokens", *make_data.PIECES)
    make_data.write_data(
        make_data.build_parser().parse_args(["--output", str(tmp_path / "data"), "--num-demonstrations", "1"])
    )
    run = train(
        tmp_path / "run",
        *("--accelerator", "cpu", "--colocate", "--hf-checkpoint", model, "--model-args-from-hf"),
        *("--prompt-data", tmp_path / "data" / "train.jsonl", "--input-key", "prompt"),
        *("--custom-generate-function-path", "slime.agent.generate", "--agent-harness", "scripted"),
        *("--custom-config-path", tmp_path / "data" / "agent.yaml", "--sglang-tool-call-parser", "qwen25"),
        *("--num-rollout", 1, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--global-batch-size", 4),
        *("--rollout-max-response-len", 16, "--rollout-max-context-len", 512, "--max-turns", 2),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 1024, "--lr", 1e-4),
    )
    (record,) = run.records("rollout/step")
    assert record["rollout/raw_reward"] == 0.0, "a random model fixes nothing"
    assert record["agent/breaks"] == 0 and 1 <= record["agent/turns"] <= 2
    rows = parquet.read_table(run.output_dir / "rollouts" / "00000.parquet").to_pylist()
    assert len(rows) == 4 and all(row["reward_is_trusted"] and row["end_reason"] for row in rows)
    assert all("test_ops.py" in json.loads(row["metadata"])["agent_grade"] for row in rows), "pytest graded each"
    (step,) = run.records("train/step")
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_grpo_teaches_the_model_to_fix_repositories(tmp_path: Path):
    environment = {**os.environ, "OUTPUT": str(tmp_path), "SLIME_PYTHON": sys.executable}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        ["bash", "examples/coding_agent_rl/run-coding-agent-cpu.sh"],
        cwd=ROOT,
        env=environment,
        timeout=1700,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / "grpo")
    records = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    fixed = [record["eval/bugs"] for record in records if "eval/bugs" in record]
    assert fixed[-1] - fixed[0] >= 0.15, fixed
    assert sum(record.get("agent/breaks", 0) for record in records) == 0
    assert "GRPO alone:" in done.stdout
