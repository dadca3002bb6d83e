"""What a micro-batch's packed output says of its response tokens: log-probabilities, entropy, values.

It picks the rows that predict response tokens, puts together what context-parallel ranks have of them, and leaves the
arithmetic to slime.algorithms.log_probs.

With --recompute-loss-function the logits exist only a chunk at a time (`DeferredLogits`): of the model's output the
hidden states are kept; the output layer, the log-probs and the entropy of a chunk of rows are computed together, and
again in the backward pass. The logits of a micro-batch (tokens x vocabulary, in fp32) are often the largest tensor of
a train step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from torch.utils.checkpoint import checkpoint

from slime.algorithms.log_probs import Sampling, calculate_log_probs_and_entropy
from slime.backends.megatron_utils.cp_utils import gather_responses
from slime.backends.megatron_utils.data import Packing, response_rows
from slime.config.args import Args
from slime.utils.train_data import MicroBatch

DEFAULT_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class DeferredLogits:
    """What logits are made of: rows @ weight.T."""

    hidden: torch.Tensor
    """[T, H], the last hidden states, whole on every tensor-parallel rank."""
    weight: torch.Tensor
    """[V/tp, H], this rank's part of the output layer."""

    def map_rows(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]],
        rows: torch.Tensor,
        targets: torch.Tensor,
        *,
        chunk_size: int,
    ) -> list[torch.Tensor]:
        """Apply function(logits [n, V/tp], targets [n]) -> tensors [n] to chunks of rows; returns them joined.

        Args:
            rows: [N] indices into the T rows.
            targets: [N].
            chunk_size: rows of a chunk; -1 takes DEFAULT_CHUNK_ROWS.
        """
        size = chunk_size if chunk_size > 0 else DEFAULT_CHUNK_ROWS
        hidden = self.hidden.index_select(0, rows)

        def of_chunk(chunk: torch.Tensor, chunk_targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(torch.nn.functional.linear(chunk, self.weight), chunk_targets)

        parts = [
            # There is nothing random in it whose state would have to be restored.
            checkpoint(of_chunk, chunk, chunk_targets, use_reentrant=False, preserve_rng_state=False)
            for chunk, chunk_targets in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]


def get_log_probs_and_entropy(
    args: Args,
    batch: MicroBatch,
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
    entropy = {"with_entropy": with_entropy, "with_entropy_grad": with_entropy_grad}
    columns = get_token_columns(Sampling.of(args), batch, logits, **entropy)
    return columns["log_probs"], columns.get("entropy")


def get_token_columns(
    sampling: Sampling,
    batch: MicroBatch,
    logits: torch.Tensor | DeferredLogits,
    *,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
) -> dict[str, torch.Tensor]:
    """As `get_log_probs_and_entropy`, by name; with --rollout-top-p also `num_kept`, the size of each nucleus."""
    is_cut = sampling.top_p != 1.0
    names = ["log_probs", *["entropy"] * with_entropy, *["num_kept"] * is_cut]

    def of_rows(
        logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        num_kept = torch.empty(targets.shape, dtype=torch.float32, device=logits.device) if is_cut else None
        log_probs, entropy = calculate_log_probs_and_entropy(
            logits,
            targets,
            parallel_state.get_tensor_model_parallel_group(),
            with_entropy,
            sampling.chunk_size,
            with_entropy_grad=with_entropy_grad,
            temperature=sampling.temperature,
            vocab_size=sampling.vocab_size,
            rows=rows,
            top_p=sampling.top_p,
            num_kept=num_kept,
        )
        return tuple(column for column in (log_probs, entropy, num_kept) if column is not None)

    rows, targets = batch["response_rows"], batch["response_tokens"]
    if isinstance(logits, DeferredLogits):
        columns = logits.map_rows(of_rows, rows, targets, chunk_size=sampling.chunk_size)
    else:
        columns = list(of_rows(logits.squeeze(0), targets, rows))  # not logits[0], whose gradient is a copy
    return {name: whole_responses(batch, column) for name, column in zip(names, columns, strict=True)}


def get_prediction_log_probs(sampling: Sampling, batch: MicroBatch, layer: int) -> torch.Tensor:
    """Log-probs of response tokens by a layer that predicts further ones, before temperature and top-p, [sum of R]; 0
    for a token that has too few before it to be predicted from."""
    tp_group = parallel_state.get_tensor_model_parallel_group()

    def of_rows(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_probs, _ = calculate_log_probs_and_entropy(
            logits, targets, tp_group, False, sampling.chunk_size, vocab_size=sampling.vocab_size
        )
        return (log_probs,)

    rows, targets = batch["prediction_rows"][layer], batch["prediction_targets"][layer]
    (values,) = batch["predictions"][layer].map_rows(of_rows, rows, targets, chunk_size=sampling.chunk_size)
    places, length = batch["prediction_places"][layer], sum(batch["response_lengths"])
    if "response_places" not in batch:  # there is no context parallelism: they are all here
        return values.new_zeros(length).index_copy(0, places, values)
    return gather_responses(values, places, length, parallel_state.get_context_parallel_group())


def get_values(args: Args, batch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """The critic's value before each response token, [sum of R], float32, the samples' tokens in order.

    Args:
        args: unused; every function of this kind takes it.
        batch: a micro-batch of `data.MicroBatches`.
        values: [1, T, 1], the output of a model with a value head.
    """
    return whole_responses(batch, values[0, :, 0].float().index_select(0, batch["response_rows"]))


def get_responses(
    logits: torch.Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[torch.Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    apply_temperature: bool = True,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (logits [n, V/tp], tokens [n]) of each sample's response, as far as this context-parallel rank has it.

    Args:
        logits: [1, T, V/tp] of a micro-batch.
        args: `rollout_temperature`.
        unconcat_tokens: prompt and response of each sample.
        total_lengths, response_lengths: of each sample.
        apply_temperature: divide the logits by --rollout-temperature.
    """
    place = (parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())
    rows, places, counts = response_rows(total_lengths, response_lengths, Packing(1, *place))
    lengths = zip(unconcat_tokens, total_lengths, response_lengths, strict=True)
    tokens = torch.cat([sample[total - response : total] for sample, total, response in lengths])
    temperature = args.rollout_temperature if apply_temperature else 1.0
    for own_rows, own_places in zip(rows.split(counts), places.split(counts), strict=True):
        own = logits[0].index_select(0, own_rows.to(logits.device))
        yield own / temperature, tokens[own_places.to(tokens.device)]


def whole_responses(batch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Values of this rank's `response_rows` [n] -> values of all response tokens [sum of R] (see cp_utils)."""
    if "response_places" not in batch:  # there is no context parallelism: they are all here
        return values
    group = parallel_state.get_context_parallel_group()
    return gather_responses(values, batch["response_places"], sum(batch["response_lengths"]), group)
