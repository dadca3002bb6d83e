"""Log-probabilities and entropy of a micro-batch's response tokens, out of the packed logits.

It picks the rows that predict response tokens and leaves the arithmetic to slime.utils.ppo_utils; it knows nothing
about masks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from slime.utils.ppo_utils import calculate_log_probs_and_entropy


def get_log_probs_and_entropy(
    args: Any,
    batch: dict[str, Any],
    logits: torch.Tensor,
    *,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the policy, at the temperature it is sampled with, gives each response token.

    Args:
        args: `rollout_temperature`, `log_probs_chunk_size`, `vocab_size`.
        batch: a micro-batch of `data.MicroBatches`.
        logits: [1, T, V/tp].
        with_entropy: also return the entropy.
        with_entropy_grad: ... as something that can be trained on.

    Returns:
        log_probs and entropy (or None), each [sum of R], float32, the samples' tokens in order.
    """
    return calculate_log_probs_and_entropy(
        logits[0].index_select(0, batch["response_rows"]),
        batch["response_tokens"],
        parallel_state.get_tensor_model_parallel_group(),
        with_entropy,
        args.log_probs_chunk_size,
        with_entropy_grad,
        temperature=args.rollout_temperature,
        vocab_size=args.vocab_size,
    )
