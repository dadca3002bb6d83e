"""A run whose trainer rounds its weights as its int4 engine does: both give the same log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config.megatron.precision.int4_plan import FLAG, GROUP_SIZE
from tests.integration.launch import grpo_flags, make_model, train, write_prompts
from tools import convert_hf_to_int4_direct

GAP = "train/train_rollout_logprob_abs_diff"


@pytest.mark.slow
def test_a_trainer_that_rounds_has_the_log_probs_of_its_int4_engine(tmp_path: Path) -> None:
    model = make_model(tmp_path / "hf")
    line = ["--model-dir", str(model), "--save-dir", str(tmp_path / "int4"), "--group-size", "16"]
    assert convert_hf_to_int4_direct.main(line) == 0
    flags = [
        *grpo_flags(tmp_path / "int4", write_prompts(tmp_path / "prompts.jsonl")),
        "--ref-load",
        model,
        "--num-rollout",
        2,
        "--colocate",
    ]
    plain = train(tmp_path / "plain", *flags)
    assert min(plain.column(GAP)) > 1e-2
    rounded = train(tmp_path / "rounded", *flags, **{FLAG: "1", GROUP_SIZE: "16"})
    assert len(rounded.column(GAP)) == len(plain.column(GAP)) > 1, "after an update and its sync, too"
    assert max(rounded.column(GAP)) < 1e-4
