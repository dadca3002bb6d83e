"""Memory of log-probs and entropy above the given logits, in bytes of the allocator, vocabulary 30,000."""

from __future__ import annotations

import pytest
import torch

from benchmarks.log_prob_memory import above_the_logits, make_inputs, naive, ours, peak_bytes
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from tests.training.algorithms.loss_world import make_args

VOCAB, TOKENS, RESPONSES, CHUNK = 30_000, 48, 40, 4
CHUNK_BYTES = CHUNK * VOCAB * 4


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def inputs(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_inputs(TOKENS, RESPONSES, VOCAB, request.param)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_four_chunks_suffice_forward_and_one_gradient_more_in_training(inputs, with_entropy: bool):
    forward, training = above_the_logits(ours(0.7, CHUNK, with_entropy), inputs)
    assert CHUNK_BYTES < forward <= 4 * CHUNK_BYTES
    assert training <= inputs[0].nbytes + 4 * CHUNK_BYTES


def test_the_usual_way_needs_more(inputs):
    """So the bounds are none that anything keeps."""
    forward, training = above_the_logits(naive(0.7), inputs)
    assert forward > 4 * CHUNK_BYTES
    assert training > inputs[0].nbytes + 4 * CHUNK_BYTES


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_micro_batch_keeps_the_bounds_too(inputs, top_p: float):
    """The trainer's own path: the rows of the responses are not gathered as a whole."""
    logits, rows, targets = inputs
    batch = {"response_rows": rows, "response_tokens": targets}
    args = make_args(log_probs_chunk_size=CHUNK, vocab_size=VOCAB - 8, rollout_top_p=top_p)  # 8 columns of padding

    def train() -> None:
        log_probs, entropy = get_log_probs_and_entropy(args, batch, logits, with_entropy=True)
        (log_probs.sum() + entropy.sum()).backward()

    def look() -> None:
        with torch.no_grad():
            get_log_probs_and_entropy(args, batch, logits, with_entropy=True)

    assert peak_bytes(look) <= 4 * CHUNK_BYTES
    assert peak_bytes(train) <= logits.nbytes + 4 * CHUNK_BYTES
    padding, prompt = logits.grad[0, :, VOCAB - 8 :], logits.grad[0, : rows[0]]
    assert not padding.any() and not prompt.any() and logits.grad[0, rows].any(1).all()
