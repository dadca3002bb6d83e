"""Images through train.py: engine and trainer agree on them, also once a train step has changed the tower."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.tiny import write_jsonl
from examples.tiny_vlm.make_data import problems
from slime.checkpoints.rollout_files import load_samples
from slime.weights.names import TOWER
from tests.integration.launch import ROOT, make_model, train


def model_of(family: str, path: Path) -> Path:
    pytest.importorskip("torchvision")
    return make_model(path / "model", "--family", family, "--hidden-size", 64, "--vision-hidden-size", 32)


def flags_of_run(model: Path, backend: str, data: Path, *, response_len: int, ranks: int = 1) -> list[Any]:
    """A run on prompts with one image, two, and none; responses are rewarded for their digits.

    Every rollout has the same images: an engine that kept what the old tower made of them would be far off.
    """
    rows = list(problems(random.Random(0), 2))
    text = {"prompt": [{"role": "user", "content": "no image"}], "images": [], "label": "0"}
    two = {**rows[0], "prompt": [{"role": "user", "content": "<image>or<image>"}], "images": rows[0]["images"] * 2}
    write_jsonl(data, [*rows, text, two])
    return [
        *("--accelerator", "cpu", "--colocate", "--train-backend", backend, "--hf-checkpoint", model),
        *("--model-args-from-hf", "--actor-num-gpus-per-node", ranks, "--prompt-data", data, "--input-key", "prompt"),
        *("--apply-chat-template", "--multimodal-keys", '{"image": "images"}'),
        *("--custom-rm-path", f"{ROOT}/tests/integration/user_code.py:share_of_digits"),
        *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--global-batch-size", 16, "--lr", 1e-2),
        *("--rollout-max-response-len", response_len, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512),
    ]


def assert_trained(model: Path, export: Path) -> None:
    """Every tensor of the tower has moved, and the export has all that the model has."""
    before, after = (load_file(path / "model.safetensors") for path in (model, export))
    moved = {name: (after[name] - before[name]).abs().max() for name in before}
    assert set(after) == set(before) and all(moved[name] > 1e-3 for name in before if name.startswith(TOWER))
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_engine_and_trainer_agree_on_images_after_a_sync_of_a_trained_tower(tmp_path: Path, backend: str) -> None:
    model = model_of("qwen3_vl", tmp_path)
    run = train(
        tmp_path / "run",
        *flags_of_run(model, backend, tmp_path / "train.jsonl", response_len=24),
        *("--num-rollout", 2, "--save-hf", tmp_path / "hf", "--save-interval", 2),
    )
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert min(run.column("rollout/raw_reward", "rollout/step")) > 0 and min(run.column("train/grad_norm")) > 0
    assert_trained(model, tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "family"), [("fsdp", "qwen3_vl"), ("megatron", "qwen2_5_vl")])
def test_two_ranks_resume_half_done_responses_to_images(tmp_path: Path, backend: str, family: str) -> None:
    """The first run leaves responses that it began; a run that saves elsewhere ends them, with the same tokens."""
    model = model_of(family, tmp_path)
    line = [
        *flags_of_run(model, backend, tmp_path / "train.jsonl", response_len=200, ranks=2),
        *("--partial-rollout", "--mask-offpolicy-in-partial-rollout", "--over-sampling-batch-size", 8),
        *("--rollout-stop", "7", "--save-interval", 1),
    ]
    train(tmp_path / "one", *line, "--num-rollout", 1, "--save", tmp_path / "first")
    saved = torch.load(tmp_path / "first" / "rollout" / "global_dataset_state_dict_0.pt", weights_only=True)
    begun = [sample for group in saved["buffer"] for sample in group if sample["response_length"]]
    assert begun and any(sample["image_spans"] for sample in begun)
    run = train(
        tmp_path / "two",
        *(*line, "--num-rollout", 3, "--load", tmp_path / "first", "--save", tmp_path / "second"),
        *("--save-hf", tmp_path / "hf"),
    )
    assert run.column("rollout/partial_rollout/resumed_samples", "rollout/step")[0] > 0
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert_trained(model, tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_half_done_conversations_keep_the_images_of_their_tools(tmp_path: Path) -> None:
    """Every turn is answered with an image; rollouts end in the middle of turns, and the next ones go on with them."""
    code = ROOT / "tests/integration/test_image_engine.py"
    (tmp_path / "camera.yaml").write_text(f"tool_function_path: {code}:camera\n")
    flags = flags_of_run(model_of("qwen3_vl", tmp_path), "fsdp", tmp_path / "train.jsonl", response_len=300)
    flags.remove("--apply-chat-template")  # a conversation's prompt is its messages
    run = train(
        tmp_path / "run",
        *(*flags, "--custom-generate-function-path", f"{code}:photograph", "--max-turns", 3),
        *("--custom-config-path", tmp_path / "camera.yaml", "--partial-rollout", "--over-sampling-batch-size", 8),
        *("--mask-offpolicy-in-partial-rollout", "--num-rollout", 4),
        *("--save-debug-rollout-data", tmp_path / "rollouts" / "{rollout_id}.pt"),
    )
    assert max(run.column("rollout/partial_rollout/resumed_samples", "rollout/step")) > 0
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 4 and max(gaps) < 1e-4
    samples = [s for path in (tmp_path / "rollouts").glob("*.pt") for s in load_samples(path, option="the dump")]
    resumed = [sample for sample in samples if len(set(sample.weight_versions)) > 1]
    own = [[start for start, _ in s.image_spans or () if start >= len(s.tokens) - s.response_length] for s in resumed]
    assert max(map(len, own), default=0) > 0, "one that was resumed has images of its tool"
    for sample, starts in zip(resumed, own, strict=True):
        words = sample.response.removesuffix("<|image_pad|>")  # the model may have ended with one
        assert words.count("<|image_pad|>") == len(starts)
