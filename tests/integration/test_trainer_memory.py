"""Flags that trade time for memory in the trainer: smaller passes without gradients, logits a chunk at a time."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integration.test_trainer import save
from tests.integration.trainer_world import train, trainer_args
from tests.unit.megatron_fakes import make_hf_model

LONGEST_SAMPLE = 21  # make_train_data: a prompt of at most 9 tokens and a response of at most 12


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path)
    return path


def compare(left: Any, right: Any) -> None:
    """Weights and records of two runs agree; an update moves a weight by about the learning rate of 1e-2."""
    atol = 1e-4
    for name in left[0]:
        torch.testing.assert_close(left[0][name], right[0][name], atol=atol, rtol=0)
    for (a, key), (b, other_key) in zip(left[1], right[1], strict=True):
        assert key == other_key
        assert a == pytest.approx(b, abs=atol)


# ---- --log-probs-max-tokens-per-gpu


def note_forward_batches(args: Any, check: Any, out: Path, **changes: Any) -> None:
    """Train, and save what `save` does and the tokens of each micro-batch of each pass without gradients."""
    from slime.backends.megatron_utils.passes import forward

    seen: list[int] = []
    real = forward.run_model

    def run_model(model: Any, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            seen.append(sum(batch["total_lengths"]))
        return real(model, batch)

    with mock.patch.object(forward, "run_model", run_model):  # the ranks are forked from this process
        train(args, check, out, seen, **changes)


def save_with_passes(actor: Any, records: list[Any], out: Path, seen: list[int]) -> None:
    save(actor, records, out)
    torch.save(seen, out.with_suffix(".passes"))


def test_log_prob_passes_have_a_token_budget_of_their_own_and_the_same_results(hf_path: Path, tmp_path: Path):
    reference = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(hf_path), "recompute_old_log_probs": True}
    for name, budget in (("same", {}), ("small", {"log_probs_max_tokens_per_gpu": LONGEST_SAMPLE})):
        args = trainer_args(hf_path, lr=1e-2, max_tokens_per_gpu=60, **budget, **reference)
        note_forward_batches(args, save_with_passes, tmp_path / name)
    same, small = (torch.load(tmp_path / f"{name}.passes") for name in ("same", "small"))
    assert max(small) <= LONGEST_SAMPLE < max(same) <= 60
    assert sum(small) == sum(same), "both passes, of the reference and of the actor, saw every token"
    compare(torch.load(tmp_path / "same"), torch.load(tmp_path / "small"))


# ---- --recompute-loss-function


def save_with_kept_bytes(actor: Any, records: list[Any], out: Path, kept: dict[str, int]) -> None:
    save_on_rank_0(actor, records, out)
    torch.save(kept, out.with_suffix(".kept"))


def train_and_measure(args: Any, out: Path, **changes: Any) -> dict[str, int]:
    """Train, saving weights and records; returns the most bytes that a loss's log-probs kept for the backward pass,
    and the most rows of logits that were ever softmaxed at a time."""
    from slime.backends.megatron_utils import loss
    from slime.backends.megatron_utils import loss as log_probs_module

    kept = {"bytes": 0, "rows": 0}
    real_loss, real_log_probs = loss.LOSS_FUNCTIONS["policy_loss"], log_probs_module.calculate_log_probs_and_entropy

    def measured_loss(*values: Any) -> Any:
        sizes: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = real_loss(*values)
        kept["bytes"] = max(kept["bytes"], sum(sizes))
        return result

    @functools.wraps(real_log_probs)
    def noted_log_probs(logits: torch.Tensor, *values: Any, **keywords: Any) -> Any:
        kept["rows"] = max(kept["rows"], len(logits))
        return real_log_probs(logits, *values, **keywords)

    with (
        mock.patch.dict(loss.LOSS_FUNCTIONS, policy_loss=measured_loss),
        mock.patch.object(log_probs_module, "calculate_log_probs_and_entropy", noted_log_probs),
    ):
        train(args, save_with_kept_bytes, out, kept, **changes)
    return torch.load(out.with_suffix(".kept"))


@pytest.mark.parametrize(
    ("layout", "top_p"),
    [
        ("", 1.0),
        ("--tensor-model-parallel-size 2", 0.7),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 1.0),
    ],
)
def test_recomputed_logits_give_the_same_training_and_are_never_all_in_memory(
    hf_path: Path, tmp_path: Path, layout: str, top_p: float
):
    changes = {"lr": 1e-2, "entropy_coef": 0.1, "rollout_top_p": top_p}
    plain = train_and_measure(trainer_args(hf_path, layout, **changes), tmp_path / "plain", num_rollouts=2)
    flags = {"recompute_loss_function": True, "log_probs_chunk_size": 7}
    less = train_and_measure(trainer_args(hf_path, layout, **changes, **flags), tmp_path / "less", num_rollouts=2)
    assert plain["rows"] > 7 and less["rows"] == 7
    tp_size = 2 if layout else 1
    logits = plain["rows"] * 128 * 4 // tp_size  # fp32, the vocabulary is padded to 128
    hidden = plain["rows"] * 32 * 4
    assert plain["bytes"] >= logits
    assert less["bytes"] < plain["bytes"] - logits + 2 * hidden
    compare(torch.load(tmp_path / "plain"), torch.load(tmp_path / "less"))


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2", "--context-parallel-size 2"])
def test_prompts_get_no_logits_and_the_training_is_that_with_all_of_them(hf_path: Path, tmp_path: Path, layout: str):
    from slime.backends.megatron_utils.passes import forward

    args = trainer_args(hf_path, layout, lr=1e-2, entropy_coef=0.1)
    with mock.patch.object(forward, "run_model_on_responses", forward.run_model):
        whole = train_and_measure(args, tmp_path / "whole", num_rollouts=2)
    fewer = train_and_measure(args, tmp_path / "fewer", num_rollouts=2)
    assert fewer["rows"] < whole["rows"] and fewer["bytes"] < whole["bytes"]
    compare(torch.load(tmp_path / "whole"), torch.load(tmp_path / "fewer"))


def test_recomputed_logits_wait_for_weights_that_are_still_gathered(hf_path: Path, tmp_path: Path):
    """With --overlap-param-gather the second step's forward pass gathers what the first step's update left."""
    flags = "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1000"
    for name, changes in (("plain", {}), ("less", {"recompute_loss_function": True})):
        args = trainer_args(hf_path, flags, lr=1e-2, global_batch_size=6, dp_size=2, **changes)
        train(args, save_on_rank_0, tmp_path / name, num_rollouts=2, dp_size=2)
    compare(torch.load(tmp_path / "plain"), torch.load(tmp_path / "less"))


def save_on_rank_0(actor: Any, records: list[Any], out: Path) -> None:
    if torch.distributed.get_rank() == 0:
        save(actor, records, out)
