"""Images through train.py: engine and trainer agree on them, also once a train step has changed the tower."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny import write_jsonl
from examples.tiny_vlm.make_data import problems
from tests.integration.launch import make_model, train


@pytest.mark.timeout(300)
def test_engine_and_trainer_agree_on_images_after_a_sync_of_a_trained_tower(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    model = make_model(tmp_path / "model", "--family", "qwen3_vl", "--hidden-size", 64, "--vision-hidden-size", 32)
    rows = list(problems(random.Random(0), 2))
    # every rollout has the same images: an engine that kept what the old tower made of them would be far off
    text = {"prompt": [{"role": "user", "content": "no image"}], "images": [], "label": "0"}
    two = {**rows[0], "prompt": [{"role": "user", "content": "<image>or<image>"}], "images": rows[0]["images"] * 2}
    write_jsonl(tmp_path / "train.jsonl", [*rows, text, two])
    run = train(
        tmp_path / "run",
        *("--accelerator", "cpu", "--colocate", "--train-backend", "fsdp", "--hf-checkpoint", model),
        *("--model-args-from-hf", "--prompt-data", tmp_path / "train.jsonl", "--input-key", "prompt"),
        *("--apply-chat-template", "--multimodal-keys", '{"image": "images"}', "--rm-type", "random"),
        *("--num-rollout", 2, "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--global-batch-size", 16),
        *("--rollout-max-response-len", 6, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512, "--lr", 1e-2),
        *("--save-hf", tmp_path / "hf", "--save-interval", 2),
    )
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 2 and max(gaps) < 1e-4
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "hf"))
    moved = {name: (after[name] - before[name]).abs().max() for name in before}
    assert set(after) == set(before) and all(moved[name] > 1e-3 for name in before if name.startswith("model.visual."))
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
