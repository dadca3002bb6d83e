"""A run of train.py whose policy FSDP2 trains with Muon, over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launch import grpo_flags, make_model, train, write_prompts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engines_have_the_weights_that_muon_made(tmp_path: Path) -> None:
    flags = grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    one = flags.index("--actor-num-gpus-per-node")
    flags[one : one + 2] = ["--actor-num-gpus-per-node", 2, "--colocate", "--train-backend", "fsdp"]
    muon = ["--optimizer", "muon", "--muon-extra-scale-factor", 0.2, "--num-rollout", 3]
    saved = ["--save", tmp_path / "saved", "--save-interval", 2]
    flags.remove("--model-args-from-hf")
    run = train(tmp_path / "out", *flags, *muon, *saved)
    assert max(run.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert min(run.column("train/grad_norm")) > 0
    again = train(tmp_path / "again", *flags, *muon[:-1], 4, "--save", tmp_path / "saved", "--resume", "auto")
    assert len(again.records("train/step")) == 1 and again.column("train/train_rollout_logprob_abs_diff")[0] < 1e-4
