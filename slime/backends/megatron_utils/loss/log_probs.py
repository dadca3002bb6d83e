"""Log-probabilities and entropy of a micro-batch's response tokens, out of the packed logits.

It picks the rows that predict response tokens, puts together what context-parallel ranks have of them, and leaves the
arithmetic to slime.algorithms; it knows nothing about masks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state

from slime.algorithms.log_probs import calculate_log_probs_and_entropy
from slime.backends.megatron_utils.cp_utils import gather_responses
from slime.backends.megatron_utils.loss.deferred_logits import DeferredLogits
from slime.config.args import Args


def get_log_probs_and_entropy(
    args: Args,
    batch: dict[str, Any],
    logits: torch.Tensor | DeferredLogits,
    *,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the policy, as it is sampled (temperature, top-p), gives each response token.

    Args:
        args: `rollout_temperature`, `rollout_top_p`, `loss_type`, `log_probs_chunk_size`, `vocab_size`.
        batch: a micro-batch of `data.MicroBatches`.
        logits: [1, T, V/tp], or what they are made of.
        with_entropy: also return the entropy.
        with_entropy_grad: ... as something that can be trained on.

    Returns:
        log_probs and entropy (or None), each [sum of R], float32, the samples' tokens in order: whole responses, on
        every context-parallel rank.
    """
    columns = get_token_columns(args, batch, logits, with_entropy=with_entropy, with_entropy_grad=with_entropy_grad)
    return columns["log_probs"], columns.get("entropy")


def get_token_columns(
    args: Args,
    batch: dict[str, Any],
    logits: torch.Tensor | DeferredLogits,
    *,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
) -> dict[str, torch.Tensor]:
    """As `get_log_probs_and_entropy`, by name; with --rollout-top-p also `num_kept`, the size of each nucleus."""
    # A supervised loss is of tokens that nobody sampled: of the model's own distribution.
    is_sampled = args.loss_type != "sft_loss"
    top_p, temperature = (args.rollout_top_p, args.rollout_temperature) if is_sampled else (1.0, 1.0)
    names = ["log_probs", *["entropy"] * with_entropy, *["num_kept"] * (top_p != 1.0)]

    def of_rows(
        logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        num_kept = torch.empty(targets.shape, dtype=torch.float32, device=logits.device) if top_p != 1.0 else None
        log_probs, entropy = calculate_log_probs_and_entropy(
            logits,
            targets,
            parallel_state.get_tensor_model_parallel_group(),
            with_entropy,
            args.log_probs_chunk_size,
            with_entropy_grad=with_entropy_grad,
            temperature=temperature,
            vocab_size=args.vocab_size,
            rows=rows,
            top_p=top_p,
            num_kept=num_kept,
        )
        return tuple(column for column in (log_probs, entropy, num_kept) if column is not None)

    rows, targets = batch["response_rows"], batch["response_tokens"]
    if isinstance(logits, DeferredLogits):
        columns = logits.map_rows(of_rows, rows, targets, chunk_size=args.log_probs_chunk_size)
    else:
        columns = list(of_rows(logits.squeeze(0), targets, rows))  # not logits[0], whose gradient is a copy
    return {name: whole_responses(batch, column) for name, column in zip(names, columns, strict=True)}


def whole_responses(batch: dict[str, Any], values: torch.Tensor) -> torch.Tensor:
    """Values of this rank's `response_rows` [n] -> values of all response tokens [sum of R] (see cp_utils)."""
    if "response_places" not in batch:  # there is no context parallelism: they are all here
        return values
    group = parallel_state.get_context_parallel_group()
    return gather_responses(values, batch["response_places"], sum(batch["response_lengths"]), group)
