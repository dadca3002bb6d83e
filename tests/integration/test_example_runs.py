"""Examples trained by train.py: two of them for a step by a random model, all of them as they are (`slow`)."""

from __future__ import annotations

import json
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
from transformers import AutoTokenizer

from examples.coding_agent_rl import make_data
from examples.multi_agent import make_data as agents_data
from examples.tiny import data_parser
from tests.integration.launch import ROOT, Run, log_tails, make_model, train

# Script -> (evaluation, points that it must gain, GRPO steps where they are fewer than the script's)
RUNS = {
    "search-r1/run-tiny.sh": ("eval/two_hops", 0.15, ""),
    "retool/run-tiny.sh": ("eval/programs", 0.15, ""),
    "tau-bench/run-tiny.sh": ("eval/shop", 0.15, ""),
    "multi_agent/run-tiny.sh": ("eval/chosen", 0.15, ""),
    "multi_turn_calculator/run-multi-turn-calculator.sh": ("eval/products", 0.2, "12"),
    "self_play/run-tiny.sh": ("eval/backwards", 0.15, ""),
    "coding_agent_rl/run-coding-agent-cpu.sh": ("eval/bugs", 0.15, ""),
}


def one_step(tmp_path: Path, data: Any, *flags: Any) -> tuple[Run, list[dict[str, Any]]]:
    """A rollout of four executions by a random model, and a train step; (run, rows of its samples)."""
    model = tmp_path / "model"
    data.write_data(data_parser(None).parse_args(["--output", str(tmp_path / "data"), "--num-demonstrations", "1"]))
    run = train(
        tmp_path / "run",
        *("--accelerator", "cpu", "--colocate", "--hf-checkpoint", model, "--model-args-from-hf"),
        *("--prompt-data", tmp_path / "data" / "train.jsonl", "--input-key", "prompt"),
        *("--num-rollout", 1, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--global-batch-size", 4),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", 1024, "--lr", 1e-4),
        *flags,
    )
    (step,) = run.records("train/step")
    assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
    return run, parquet.read_table(run.output_dir / "rollouts" / "00000.parquet").to_pylist()


@pytest.mark.timeout(300)
def test_a_rollout_of_agents_is_graded_and_trained(tmp_path: Path):
    make_model(tmp_path / "model", "--extra-tokens", *make_data.PIECES)
    run, rows = one_step(
        tmp_path,
        make_data,
        *("--custom-generate-function-path", "slime.agent.generate", "--agent-harness", "scripted"),
        *("--custom-config-path", tmp_path / "data" / "agent.yaml", "--sglang-tool-call-parser", "qwen25"),
        *("--rollout-max-response-len", 16, "--rollout-max-context-len", 512, "--max-turns", 2),
    )
    (record,) = run.records("rollout/step")
    assert record["rollout/raw_reward"] == 0.0, "a random model fixes nothing"
    assert record["agent/breaks"] == 0 and 1 <= record["agent/turns"] <= 2
    assert len(rows) == 4 and all(row["reward_is_trusted"] and row["end_reason"] for row in rows)
    assert all(json.loads(row["metadata"])["agent_grade"] == "nothing was changed" for row in rows)


@pytest.mark.timeout(300)
def test_the_samples_of_several_agents_are_one_execution_and_trained(tmp_path: Path):
    make_model(tmp_path / "model", "--extra-tokens", *agents_data.PIECES)
    letters = AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids(list(string.ascii_letters))
    _, rows = one_step(
        tmp_path,
        agents_data,
        *("--label-key", "label", "--rm-type", "math", "--custom-config-path", tmp_path / "data" / "multi_agent.yaml"),
        "--custom-generate-function-path",
        "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents",
        *("--rollout-max-response-len", 64, "--rollout-stop-token-ids", *letters),
    )
    executions: dict[int, list[str]] = {}
    for row in rows:
        executions.setdefault(row["rollout_id"], []).append(json.loads(row["metadata"])["role"])
    assert list(executions.values()) == 4 * [["solver", "solver", "rewriter", "rewriter", "selector"]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", RUNS)
def test_grpo_teaches_the_tiny_model(tmp_path: Path, script: str):
    metric, points, steps = RUNS[script]
    environment = {**os.environ, "OUTPUT": str(tmp_path), "SLIME_PYTHON": sys.executable}
    environment |= {"GRPO_STEPS": steps} if steps else {}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        ["bash", f"examples/{script}"],
        cwd=ROOT,
        env=environment,
        timeout=1700,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / "grpo")
    records = [json.loads(line) for line in (tmp_path / "grpo" / "metrics.jsonl").read_text().splitlines()]
    right = [record[metric] for record in records if metric in record]
    assert right[-1] - right[0] >= points, right
    assert sum(record.get("agent/breaks", 0) for record in records) == 0
    assert f"{metric}: " in done.stdout and "log-probs of engine and trainer differ by" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "slots", "flags"),
    [
        ("fully_async/run-qwen2.5-0.5B-fully_async", 2, ""),
        ("on_policy_distillation/run-qwen3-8B-opd-megatron", 2, "--opd-teacher-load {output}/model"),
        (
            "delta_weight_sync/run-glm4.7-30B-A3B-delta",
            3,
            "--actor-num-gpus-per-node 2 --decoder-first-pipeline-num-layers 2 --sglang-dp-size 1",
        ),
    ],
)
def test_a_script_of_the_full_size_runs_whole_with_a_tiny_model(tmp_path: Path, script: str, slots: int, flags: str):
    environment = {**os.environ, "OUTPUT": str(tmp_path), "SLIME_PYTHON": sys.executable, "NUM_SLOTS": str(slots)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        ["bash", "examples/smoke.sh", f"{script}.sh", *flags.format(output=tmp_path).split()],
        cwd=ROOT,
        env=environment,
        timeout=390,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / "run")
    assert len(Run(tmp_path / "run", 0, "").records("train/step")) == 2
