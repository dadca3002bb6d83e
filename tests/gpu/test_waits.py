"""Packing a micro-batch and computing its loss, forward and back, or taking the norm of gradients, the host waits for
nothing, so that it goes ahead of the GPU; needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import loss as log_probs_module
from slime.backends.megatron_utils import loss as losses
from slime.backends.megatron_utils.data import Packing
from slime.backends.megatron_utils.megatron_patch import without_apex
from slime.training.micro_batches import MicroBatches, to_tensors
from tests.training.algorithms import loss_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
VOCAB = 64


def make_data(args: SimpleNamespace) -> dict[str, object]:
    lengths, prompt = [5, 9, 2], 3
    columns: dict[str, object] = {
        "tokens": [list(range(prompt + length)) for length in lengths],
        "response_lengths": lengths,
        "loss_masks": [[1] * length for length in lengths],
        "rewards": [1.0, -2.0, 0.5],
        "rollout_log_probs": [[-1.0] * length for length in lengths],
        "rollout_mask_sums": lengths,
        "micro_batch_indices": [[0, 1, 2]],
        "num_microbatches": [1],
        "global_batch_sizes": [3],
    }
    data = to_tensors(columns, torch.device("cuda"))
    losses.compute_advantages_and_returns(args, data)
    return data


@pytest.mark.parametrize("per_token", [False, True])
def test_a_micro_batch_and_its_loss_wait_for_nothing(per_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(get_tensor_model_parallel_group=lambda: None)
    monkeypatch.setattr(log_probs_module, "parallel_state", parallel)
    args = loss_world.make_args(vocab_size=VOCAB, calculate_per_token_loss=per_token, entropy_coef=0.01)

    def step(mode: str) -> None:
        data = make_data(args)
        logits = torch.randn(1, 25, VOCAB, device="cuda", requires_grad=True)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(mode)
        batch = next(iter(MicroBatches(data, Packing()).of_step(None)))
        losses.loss_function(args, batch, logits, num_microbatches=1, global_batch_size=3, dp_size=1)[0].backward()

    try:
        for mode in ("default", "error"):  # what is compiled may wait
            step(mode)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_norm_and_scaling_of_many_gradients_wait_for_nothing() -> None:
    grads = [torch.full((3, 5), 2.0, device="cuda") for _ in range(60)]
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm, _ = without_apex.norm_of(65536, overflow, [grads], False)
        without_apex.scale(65536, overflow, (grads, grads), 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.item() == pytest.approx(60.0, rel=1e-6), "sqrt(60 * 15 * 4), in fp32"
    assert all(grad.eq(1.0).all() for grad in grads)
