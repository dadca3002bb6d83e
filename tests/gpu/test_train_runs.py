"""train.py on one GPU, trainer and engine on it in turn, with what keeps more than one set of weights or other bytes.

    python -m pytest -q tests/gpu/test_train_runs.py

A critic, a teacher and the weights that generated each sleep and wake beside the actor; an fp8 engine gets other bytes
than the trainer has. `--check-weight-update-equal` overwrites the engine's weights with noise first, so that a weight
which does not come is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.matrix import Row, run_row
from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts
from tests.integration.test_ppo import ROLES
from tools import convert_hf_to_fp8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SIZES = (
    *("--hidden-size", 512, "--ffn-size", 1024, "--heads", 4, "--kv-heads", 2, "--head-dim", 128),
    *("--init-std", 0.04),
)
CUDA = (
    *("--accelerator", "cuda", "--colocate", "--offload-train", "--sglang-mem-fraction-static", 0.1),
    *("--sglang-attention-backend", "triton", "--sglang-sampling-backend", "pytorch"),
    *("--sglang-cuda-graph-max-bs-decode", 16, "--sglang-disable-prefill-cuda-graph"),
)
GAP = "train/train_rollout_logprob_abs_diff"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "bf16", *SIZES)


def run(folder: Path, model: Path, *flags: Any) -> Run:
    given = grpo_flags(model, write_prompts(folder / "prompts.jsonl"))
    return train(folder / "out", *given, *CUDA, "--num-rollout", 3, *flags)


def test_a_critic_trains_in_turn_with_the_actor_and_the_engine(model: Path, tmp_path: Path) -> None:
    (tmp_path / "roles.yaml").write_text(ROLES)
    found = run(
        tmp_path, model, "--advantage-estimator", "ppo", "--normalize-advantages", "--num-critic-only-steps", 1,
        "--kl-coef", 0.1, "--ref-load", model, "--megatron-config-path", tmp_path / "roles.yaml",
    )  # fmt: skip
    assert ["train/pg_loss" in step for step in found.records("train/step")] == [False, True, True]
    values = found.column("rollout/values", "rollout/step")
    assert values[0] == 0.0 and len(set(values)) == 3, "a fresh critic says 0, then it learns"
    assert found.column("rollout/kl", "rollout/step")[:2] == pytest.approx([0, 0], abs=1e-4), "nothing was updated"
    assert max(found.column(GAP)) < 0.05


def test_a_teacher_and_every_bit_of_the_first_sync(model: Path, tmp_path: Path) -> None:
    teacher = make_model(tmp_path / "teacher", *SIZES, "--seed", 7)
    found = run(
        tmp_path, model, "--check-weight-update-equal", "--use-opd", "--opd-type", "megatron", "--opd-teacher-load",
        teacher,
    )  # fmt: skip
    assert all(value > 0.1 for value in found.column("rollout/opd_reverse_kl", "rollout/step")), "of another model"
    assert max(found.column(GAP)) < 0.05


def test_the_weights_that_generated_are_kept_and_the_nucleus_is_replayed(model: Path, tmp_path: Path) -> None:
    found = run(tmp_path, model, "--keep-old-actor", "--rollout-top-p", 0.9)
    assert len(found.records("train/step")) == 3
    assert all(abs(value) < 1e-2 for value in found.column("train/ppo_kl")), "those that generated are those trained"


def test_an_fp8_engine_follows_a_bf16_trainer(model: Path, tmp_path: Path) -> None:
    convert_hf_to_fp8.main(["--model-dir", str(model), "--save-dir", str(tmp_path / "fp8")])
    found = run(tmp_path, model, "--hf-checkpoint", tmp_path / "fp8", "--ref-load", model)
    gap = found.column(GAP)
    assert len(gap) == 3 and 0 < max(gap) < 0.3, f"{gap}; fp8 rounds, the trainer does not ({ROOT / 'docs/fp8.md'})"


@pytest.mark.parametrize("phase", ["generate", "train", "sync"])
def test_the_only_engine_of_a_gpu_is_replaced_and_the_run_goes_on(model: Path, tmp_path: Path, phase: str) -> None:
    """In "train" the engine that is killed, and the one in its place, have released their memory to the trainer."""
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    found = run_row(Row("lone-engine", phase, "SIGKILL"), tmp_path / "row", model=model, prompts=prompts, more=CUDA)
    assert found.outcome == "recovered", f"{found}; what it printed is in {tmp_path}/row/out/printed_0"
