"""Runs of train.py whose model, checkpoints and exports lie in an S3 (a local server), on a machine that is lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch import grpo_flags, make_model, train, write_prompts
from tests.unit.s3_server import s3 as s3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_from_an_object_store_as_if_it_had_never_ended(s3: Any, tmp_path: Path) -> None:
    s3.put(str(make_model(tmp_path / "model")), "bucket/model", recursive=True)
    flags = grpo_flags(Path("model"), write_prompts(tmp_path / "prompts.jsonl"))
    flags[flags.index("--hf-checkpoint") + 1] = "s3://bucket/model"
    flags += ["--colocate", "--sglang-enable-deterministic-inference"]
    to = ["--save", "s3://bucket/run", "--save-interval", 1, "--keep-checkpoints", 1]
    whole = train(tmp_path / "whole", *flags, "--num-rollout", 3)
    exports = ["--save-hf", "s3://bucket/hf/{rollout_id}"]
    train(tmp_path / "first", *flags, *to, *exports, "--async-save", "--num-rollout", 2)
    assert s3.cat("bucket/run/latest_checkpointed_iteration.txt") == b"1"
    assert sorted(path.rpartition("/")[2] for path in s3.ls("bucket/run")) == [
        "iter_0000001", "latest_checkpointed_iteration.txt", "rollout"
    ]  # fmt: skip
    assert s3.exists("bucket/hf/1/model.safetensors") and s3.exists("bucket/hf/1/config.json")
    shutil.rmtree(tmp_path / "first")
    rest = train(tmp_path / "rest", *flags, *to, "--resume", "auto", "--num-rollout", 3)
    for name in ("train/loss", "train/grad_norm"):
        assert rest.column(name) == whole.column(name)[2:], name
    refused = train(tmp_path / "again", *flags, *to, "--num-rollout", 3, check=False)
    assert refused.status == 2
    assert "error: --save s3://bucket/run holds a run (iteration 2): give --resume auto" in refused.printed
