"""A run whose prompts are a stream chosen by a curriculum, with rewards of several parts and of tokens, on a backend;
stopped and resumed it is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.rollout_files import load_dump
from tests.integration.launch import ROOT, Run, grpo_flags, make_model, tensors_in, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def parts(args: Any, sample: Any, **kwargs: Any) -> dict[str, float]:
    digits = sum(character.isdigit() for character in sample.response)
    return {"digits": digits / max(len(sample.response), 1), "short": float(sample.response_length < 8)}


def rate(args: Any, sample: Any) -> list[float]:
    """Every second token earns something."""
    return [0.1 * (place % 2) for place in range(sample.response_length)]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_resumed_run_of_a_curriculum_is_the_run_that_was_never_stopped(tmp_path: Path, backend: str) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name, start in (("a", 0), ("b", 100)):
        rows = [{"input": f"{i * 37 % 1000}+{i}=", "label": str(i % 10)} for i in range(start, start + 30)]
        (prompts / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = f"{ROOT}/tests/integration/test_data_and_rewards.py"
    flags = [
        *grpo_flags(make_model(tmp_path / "model"), prompts), "--colocate", "--rollout-shuffle", "--deterministic",
        "--train-backend", backend, "--stream-shuffle-rows", 16, "--advantage-estimator", "turn_grpo",
        "--data-source-path", "slime.rollout.sampling.curriculum:CurriculumDataSource",
        "--curriculum-pass-reward", 0.3,
        "--custom-rm-path", f"{here}:parts", "--reward-key", "digits=1,short=0.5",
        "--process-reward-path", f"{here}:rate",
    ]  # fmt: skip

    def launch(out: Path, num_rollouts: int) -> Run:
        return train(
            out, *flags, "--num-rollout", num_rollouts, "--save", out, "--resume", "auto", "--save-interval", 1,
            "--save-hf", out / "hf-{rollout_id}", "--dump-details", out / "dump",
        )  # fmt: skip

    whole = launch(tmp_path / "whole", 2)
    launch(tmp_path / "parts", 1)
    resumed = launch(tmp_path / "parts", 2)
    (record,) = [one for one in whole.records("rollout/step") if one["rollout/step"] == 1]
    assert record["rollout/reward_part/digits"] >= 0 and record["rollout/process_reward"] > 0
    assert record["rollout/curriculum/seen"] > 4 and record["rollout/curriculum/passed_by"] == 3 * 4
    assert record["rollout/raw_reward"] == pytest.approx(
        record["rollout/reward_part/digits"] + 0.5 * record["rollout/reward_part/short"], abs=1e-6
    )
    dumps = [run.output_dir / "dump" for run in (whole, resumed)]
    drawn = [[s["prompt"] for s in load_dump(dump / "rollout_data" / "1.pt")["samples"]] for dump in dumps]
    assert drawn[0] == drawn[1]
    trained, again = (load_dump(dump / "train_data" / "1.pt")["samples"] for dump in dumps)
    assert len(trained) == 16 and all(
        a["log_probs"].equal(b["log_probs"]) for a, b in zip(trained, again, strict=True)
    )
    assert max(float((s["log_probs"] - s["rollout_log_probs"]).abs().max()) for s in trained) < 1e-4
    first, second = (tensors_in(run.output_dir / "hf-1") for run in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
