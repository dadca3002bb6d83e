"""Log-probabilities of a rollout's responses under the weights that the model holds now, without gradients.

It does not know whose weights they are: the prefix of the result's name is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime.backends.megatron_utils.data import MicroBatches
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.misc import load_function


def run_model(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Logits [1, T, V/tp] of a packed micro-batch."""
    return model(batch["tokens"], batch["position_ids"], None, packed_seq_params=batch["packed_seq_params"])


@torch.no_grad()
def compute_log_probs(
    args: Any, model: list[torch.nn.Module], micro_batches: MicroBatches, *, store_prefix: str = ""
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of every response token of this rank's share.

    Args:
        args: what the log-probs read, and `custom_megatron_before_log_prob_hook_path`.
        model: chunks of a data-parallel model.
        micro_batches: the share; the same packing as in training, so that equal weights give equal bits.
        store_prefix: "" or "ref_"; becomes part of the name.

    Returns:
        {"<prefix>log_probs": [S][R]} in the order of the share.
    """
    if args.custom_megatron_before_log_prob_hook_path:
        load_function(args.custom_megatron_before_log_prob_hook_path)(args, model, store_prefix)
    for chunk in model:
        chunk.eval()

    def collect(batch: dict[str, Any], logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        log_probs, _ = get_log_probs_and_entropy(args, batch, logits)
        return log_probs.new_zeros(()), {"log_probs": log_probs.split(batch["response_lengths"])}

    def forward_step(batches: Iterator[dict[str, Any]], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return run_model(chunk, batch), partial(collect, batch)

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=micro_batches.all(),
        model=model,
        num_microbatches=len(micro_batches.indices),
        seq_length=args.seq_length,
        micro_batch_size=1,
        forward_only=True,
    )
    for chunk in model:
        chunk.train()
    return {f"{store_prefix}log_probs": micro_batches.scatter([result["log_probs"] for result in results])}
