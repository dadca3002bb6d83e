"""Losses by `--loss-type`, each `fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`, and their weight.

The arithmetic is slime.algorithms', in terms of values; here are Megatron's part of it (rows of logits, groups of
ranks), and the public functions that take `args`, which hooks call, too. A loss sums over its micro-batch;
`loss_function` scales the sum so that gradients accumulated over micro-batches and averaged over data-parallel ranks
(as Megatron does) are those of the mean over the whole train step, however it is split.

Of a micro-batch's packed output the rows that predict response tokens are picked, and what context-parallel ranks have
of them is put together. With --recompute-loss-function the logits exist only a chunk at a time (`DeferredLogits`): of
the model's output the hidden states are kept; the output layer, the log-probs and the entropy of a chunk of rows are
computed together, and again in the backward pass. The logits of a micro-batch (tokens x vocabulary, in fp32) are often
the largest tensor of a train step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from torch.utils.checkpoint import checkpoint

from slime.algorithms.advantages import Advantages, subtract_teacher
from slime.algorithms.log_probs import Sampling, calculate_log_probs_and_entropy
from slime.algorithms.losses import Aggregation, Reducer, clipped_value_loss, zero_masked
from slime.algorithms.policy import Bounds, Corrected, LossAndMetrics, PolicyLoss
from slime.backends.megatron_utils.cp_utils import gather_responses, response_rows, whole_micro_batch
from slime.config.args import Args
from slime.training.reports import pack_report
from slime.utils.misc import hook_args, load_function
from slime.utils.train_data import MicroBatch, RolloutBatch

DEFAULT_CHUNK_ROWS = 1024


@dataclass(frozen=True)
class ResponseLogits:
    """Logits of the rows alone that predict response tokens: what comes before them in a prompt trains nothing."""

    rows: torch.Tensor
    """[N, V/tp], in the order of the micro-batch's `response_rows`."""


@dataclass(frozen=True)
class DeferredLogits:
    """Logits that are not computed yet: rows @ weight.T, plus the part of an output layer's LoRA adapter."""

    hidden: torch.Tensor
    """[T, H], the last hidden states, whole on every tensor-parallel rank."""
    weight: torch.Tensor
    """[V/tp, H], this rank's part of the output layer."""
    adapter: tuple[torch.Tensor, torch.Tensor] | None = None
    """Scale A h, [T, rank], whole on every tensor-parallel rank, and this rank's part of B, [V/tp, rank]."""

    def of_rows(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The logits [N, V/tp] of some of the T rows; None stands for all."""
        return self._of(*(part if rows is None else part.index_select(0, rows) for part in self._inputs))

    @property
    def _inputs(self) -> list[torch.Tensor]:
        return [self.hidden, *(self.adapter or ())[:1]]

    def _of(self, hidden: torch.Tensor, low: torch.Tensor | None = None) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight)
        return logits if self.adapter is None or low is None else logits.addmm_(low, self.adapter[1].t())

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
        inputs = [part.index_select(0, rows).split(size) for part in self._inputs]

        def of_chunk(chunk_targets: torch.Tensor, *chunk: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return function(self._of(*chunk), chunk_targets)

        parts = [
            # There is nothing random in it whose state would have to be restored.
            checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(targets.split(size), *inputs, strict=True)
        ]
        return [torch.cat(column) for column in zip(*parts, strict=True)]


Logits: TypeAlias = torch.Tensor | ResponseLogits | DeferredLogits
"""The logits of a micro-batch: all rows [1, T, V/tp], the rows of responses, or hidden states and the weight."""


def get_log_probs_and_entropy(
    args: Args,
    batch: MicroBatch,
    logits: Logits,
    *,
    with_entropy: bool = False,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the policy, as it is sampled (temperature, top-p), gives each response token.

    Args:
        args: `rollout_temperature`, `rollout_top_p`, `loss_type`, `log_probs_chunk_size`, `vocab_size`.
        batch: a micro-batch of `data.MicroBatches`.
        logits: of the micro-batch.
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
    logits: Logits,
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
    elif isinstance(logits, ResponseLogits):
        columns = list(of_rows(logits.rows, targets))
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
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    rows, places, counts = response_rows(total_lengths, response_lengths, cp_rank=rank, cp_size=size)
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


__all__ = [
    "apply_opd_kl_to_advantages",
    "compute_advantages_and_returns",
    "get_log_probs_and_entropy",
    "get_responses",
    "get_values",
    "icepop_function",
    "loss_function",
    "policy_loss_function",
    "sft_loss_function",
    "value_loss_function",
    "vanilla_tis_function",
]


# ---- before training on a rollout


def compute_advantages_and_returns(args: Args, rollout_data: RolloutBatch, kl_coef: float | None = None) -> None:
    """Fill `kl`, `advantages` and `returns` of a share in place (slime.algorithms.advantages).

    Args:
        args: what `Advantages.of` reads.
        rollout_data: the share.
        kl_coef: weight of the KL in the rewards, where a controller changes it; default: the flag's.
    """
    group = parallel_state.get_data_parallel_group() if args.normalize_advantages else None
    Advantages.of(args, kl_coef)(rollout_data, group)


def apply_opd_kl_to_advantages(
    args: Args,
    rollout_data: RolloutBatch,
    advantages: Sequence[torch.Tensor],
    student_log_probs: Sequence[torch.Tensor] | None,
) -> list[torch.Tensor]:
    """A - `--opd-kl-coef` * (log p_student - log p_teacher): see `slime.algorithms.advantages.subtract_teacher`."""
    return subtract_teacher(rollout_data, advantages, student_log_probs, args.opd_kl_coef)


# ---- losses of a micro-batch


def policy_loss_function(args: Args, batch: MicroBatch, logits: Logits, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Loss and metrics of one micro-batch, each a sum over it (slime.algorithms.policy).

    Args:
        args: what `PolicyLoss.of` and `Sampling.of` read.
        batch: a micro-batch with `advantages`; `log_probs`, `rollout_log_probs` and `ref_log_probs` where they exist.
        logits: [1, T, V/tp].
        sum_of_sample_mean: [sum of R] -> scalar, of --loss-agg-mode; what is only reported is always a mean.
    """
    policy_loss = PolicyLoss.of(args)
    trains_entropy = policy_loss.entropy_coef != 0
    columns = get_token_columns(Sampling.of(args), batch, logits, with_entropy=True, with_entropy_grad=trains_entropy)
    _note_first_pass(batch, columns)
    return policy_loss(batch, columns, sum_of_sample_mean)


def sft_loss_function(args: Args, batch: MicroBatch, logits: Logits, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Minus the log-probability of each trained token: loss and metrics of one micro-batch, both summed by
    `sum_of_sample_mean` (logits [1, T, V/tp])."""
    log_probs, _ = get_log_probs_and_entropy(args, batch, logits)
    _note_first_pass(batch, {"log_probs": log_probs})
    loss = -sum_of_sample_mean(log_probs)
    return loss, {"loss": loss}


def _note_first_pass(batch: MicroBatch, columns: Mapping[str, torch.Tensor]) -> None:
    """Keep what the policy gives each token before its first update with this micro-batch, for records of rollouts."""
    noted = batch.get("first_pass")
    if noted is not None and "log_probs" not in noted:
        noted.update({name: columns[name].detach() for name in ("log_probs", "entropy") if name in columns})


def value_loss_function(
    args: Args, batch: MicroBatch, logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> LossAndMetrics:
    """The critic's loss and metrics of one micro-batch, each a sum over it.

    Args:
        args: `value_clip`, and what the reducer of metrics reads.
        batch: a micro-batch with `values`, those before the rollout's first update, and `returns`.
        logits: [1, T, 1], the critic's output.
        sum_of_sample_mean: [sum of R] -> scalar, of --loss-agg-mode.

    Returns:
        the loss; `value_loss` and `value_clipfrac`, the share of tokens whose clipped error is the larger one.
    """
    values, masks = get_values(args, batch, logits), batch["loss_masks"]
    before, returns = (zero_masked(masks, torch.cat(column)) for column in (batch["values"], batch["returns"]))
    losses, is_clipped = clipped_value_loss(values, before, returns, args.value_clip)
    loss = sum_of_sample_mean(losses)
    mean = Aggregation.of(args).of_metrics(batch, masks)
    return loss, {"value_loss": loss, "value_clipfrac": mean(is_clipped)}


LOSS_FUNCTIONS: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_loss": policy_loss_function,
    "sft_loss": sft_loss_function,
    "value_loss": value_loss_function,
}


def loss_function(
    args: Args,
    batch: MicroBatch,
    logits: Logits,
    *,
    num_microbatches: int,
    global_batch_size: int,
    dp_size: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The loss of one micro-batch in the form that Megatron's schedules take.

    Args:
        args: `loss_type`, `custom_loss_function_path`, `calculate_per_token_loss`, `recompute_loss_function` and what
            the loss reads.
        batch: a micro-batch of `data.MicroBatches`.
        logits: of the micro-batch.
        num_microbatches: of this rank in the train step; Megatron divides by it.
        global_batch_size: rollouts of the train step over all ranks.
        dp_size: data- times context-parallel ranks; Megatron averages gradients over them.

    Returns:
        the scaled loss; the tokens that Megatron divides the step by (1 unless the loss is per token); the report that
        `slime.training.reports.reduce_reports` takes.
    """
    whole_sum = Aggregation.of(args).of_loss(batch, batch["loss_masks"])

    def sum_of_sample_mean(values: torch.Tensor) -> torch.Tensor:
        # a loss of the user's own may have this rank's part of each response alone
        return whole_sum(whole_micro_batch(values, batch["total_lengths"], batch["response_lengths"]))

    if args.loss_type == "custom_loss":
        function = functools.partial(load_function(args.custom_loss_function_path), hook_args(args))
    else:
        function = functools.partial(LOSS_FUNCTIONS[args.loss_type], args)
    if args.recompute_loss_function and args.loss_type == "custom_loss":
        # Which tensors a loss of the user's own keeps is not known: it is run again as a whole.
        function = functools.partial(checkpoint, function, use_reentrant=False)
    loss, metrics = function(batch, logits, sum_of_sample_mean)
    objective = loss
    if batch.get("predictions"):
        of_predictions, more_metrics = prediction_loss(Sampling.of(args), batch, sum_of_sample_mean)
        objective, metrics = loss + args.mtp_loss_scaling_factor * of_predictions, metrics | more_metrics
    # Megatron sums over data- and context-parallel ranks, a report is summed over the former alone
    num_tokens = batch["full_loss_masks"].sum(dtype=torch.int32)
    report = pack_report({"loss": loss, **metrics}, torch.cat(batch["loss_masks"]).sum(dtype=torch.int32))
    if args.calculate_per_token_loss:
        return objective, num_tokens, report
    # 1 token: Megatron's division by tokens is then none, and only its division by micro-batches has to be undone
    scaled = objective * (num_microbatches * dp_size / global_batch_size)
    return scaled, torch.ones_like(num_tokens), report


def prediction_loss(sampling: Sampling, batch: MicroBatch, sum_of_sample_mean: Reducer) -> LossAndMetrics:
    """Minus log-probs by layers that predict further tokens (--enable-mtp-training), averaged as the policy's loss.

    Returns:
        the mean over layers; the metrics `mtp_loss`, the same, and each layer's.
    """
    layers = range(len(batch["predictions"]))
    losses = [-sum_of_sample_mean(get_prediction_log_probs(sampling, batch, layer)) for layer in layers]
    mean = torch.stack(losses).mean()
    return mean, {"mtp_loss": mean} | {f"mtp_{i + 1}_loss": loss for i, loss in enumerate(losses)}


# ---- corrections that can be given with --custom-tis-function-path


def vanilla_tis_function(
    args: Args,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> Corrected:
    """`Bounds.truncate` between --tis-clip-low and --tis-clip, which is the default: truncated importance sampling."""
    batch: MicroBatch = {"rollout_log_probs": rollout_log_probs, "loss_masks": loss_masks}
    return Bounds.of(args).truncate(batch, pg_loss, train_log_probs)


def icepop_function(
    args: Args,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **kwargs: Any,
) -> Corrected:
    """`Bounds.drop` between --tis-clip-low and --tis-clip: IcePop."""
    batch: MicroBatch = {"rollout_log_probs": rollout_log_probs, "loss_masks": loss_masks}
    return Bounds.of(args).drop(batch, pg_loss, train_log_probs)
