"""A run whose only engine ends, without --use-fault-tolerance, ends with what the engine has said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts


@pytest.mark.timeout(300)
def test_the_last_error_of_the_only_engine_is_that_of_the_run(tmp_path: Path) -> None:
    flags = grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    flags += ["--debug-rollout-only", "--rollout-num-gpus", 1, "--num-rollout", 3]
    flags += ["--custom-rm-path", f"{ROOT}/tests/integration/user_code.py:end_the_only_engine"]
    run = train(tmp_path / "out", *flags, check=False)
    (error,) = [line for line in run.printed.splitlines() if line.startswith("error: ")]
    why = "engine 0 has ended (killed by SIGKILL): torch.AcceleratorError: CUDA error: an illegal memory access"
    assert run.status == 1 and why in error and "No available workers" not in error, run.printed[-3000:]
