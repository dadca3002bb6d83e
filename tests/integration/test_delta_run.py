"""A run whose weights reach the engine as deltas in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.launch import ROOT, grpo_flags, make_model, tensors_in, train, write_prompts


@pytest.mark.timeout(1200)
def test_an_engine_of_two_pipeline_stages_gets_deltas_and_is_on_policy_after_every_sync(tmp_path: Path) -> None:
    """The trainers are two ranks of tensor parallelism."""
    model, prompts = make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    run = train(
        tmp_path / "out", *grpo_flags(model, prompts), "--num-rollout", 2,
        "--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel",
        "--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 2, "--sglang-pp-size", 2,
        "--update-weight-buffer-size", 100_000, "--check-weight-update-equal",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path / "shared",
        "--save-hf", tmp_path / "out" / "hf-{rollout_id}", "--save-interval", 1,
        "--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", tmp_path / "local",
        "--update-weight-disk-keep-files", "--custom-update-weight-post-write-path",
        f"{ROOT}/tests/integration/user_code.py:sign_version",
    )  # fmt: skip
    # fp32 on both sides: what a stage did not load would show as other log-probs
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 2 and max(gaps) < 1e-5, gaps
    log = (run.output_dir / "logs" / "engine_0.log").read_text()
    assert " PP0]" in log and " PP1]" in log
    first, last = (load_file(run.output_dir / f"hf-{i}" / "model.safetensors") for i in range(2))
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert {name.split(".")[2] for name in moved if ".layers." in name} == {"0", "1"}, "of both stages"
    versions = sorted((tmp_path / "shared").glob("weight_*"))
    assert [path.name for path in versions] == [f"weight_v{i:06d}" for i in (1, 2, 3)]
    assert {(path / "signed_by").read_text() for path in versions} == {"2 ranks, 1 engine"}
    densities = run.column("perf/update_weights_density", "rollout/step")
    assert densities and all(0 < density <= 1 for density in densities)
    assert all(torch.equal(tensor, last[name]) for name, tensor in tensors_in(tmp_path / "local/checkpoint").items())
