"""Passes through the model: micro-batches over pipeline stages, a share without gradients, and one optimizer update.

Losses and log-probs are made on the last stage; downstream of a pass every rank has the same data, so whoever reads
columns or metrics need not know of stages. Passes take the weights that the model holds; the caller knows whose they
are, and gives the prefix of the result's name.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from slime.backends.megatron_utils.layers.gathered_weights import wait_for_weights
from slime.backends.megatron_utils.layers.mtp import PredictionClip, as_predicting, lend_embedding
from slime.backends.megatron_utils.layers.routing import load_balancing_metrics
from slime.backends.megatron_utils.loss import (
    DeferredLogits,
    Logits,
    ResponseLogits,
    get_log_probs_and_entropy,
    get_values,
    loss_function,
)
from slime.backends.megatron_utils.megatron_patch.known_shapes import known_shapes
from slime.backends.megatron_utils.model.model_weights import ADAPTER
from slime.backends.megatron_utils.model.setup import TrainState
from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.passes.routing_replay import tell_routers
from slime.config.args import Args
from slime.training.micro_batches import MicroBatches
from slime.training.reports import reduce_reports
from slime.utils import accelerator
from slime.utils.errors import UsageError
from slime.utils.misc import hook_args, load_function
from slime.utils.train_data import MicroBatch, RolloutBatch

T = TypeVar("T")


# ---- a pass of micro-batches over pipeline stages


def run_pass(
    model: Sequence[torch.nn.Module],
    micro_batches: MicroBatches,
    forward_step: Callable[..., tuple[Any, Any]],
    *,
    step_id: int | None,
    seq_length: int,
    comes_from_flags: bool,
) -> list[dict[str, Any]]:
    """Run the micro-batches of a train step with gradients, or those of the whole rollout without.

    Args:
        model: this rank's chunks.
        micro_batches: this rank's share of the rollout.
        forward_step: (iterator of micro-batches, chunk) -> (output, loss function), as Megatron calls it.
        step_id: the train step; None: the rollout.
        seq_length: Megatron's.
        comes_from_flags: the model is the one of the flags, whose stages send each other hidden states [T, 1, H].

    Returns:
        what the loss functions report; nothing on stages before the last.
    """
    lengths = micro_batches.row_lengths(step_id)
    has_stages = parallel_state.get_pipeline_model_parallel_world_size() > 1
    with _shapes_between_stages(model, lengths) if has_stages and comes_from_flags else contextlib.nullcontext():
        reports: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[micro_batches.of_step(step_id) for _ in model],
            model=model,
            num_microbatches=len(lengths),
            seq_length=seq_length,
            micro_batch_size=1,
            forward_only=step_id is None,
        )
    return reports


def _shapes_between_stages(
    model: Sequence[torch.nn.Module], lengths: Sequence[int]
) -> contextlib.AbstractContextManager[None]:
    config = unwrap(model[0]).config
    sharers = config.tensor_model_parallel_size if config.sequence_parallel else 1
    shapes = [(length // sharers, 1, config.hidden_size) for length in lengths]
    return known_shapes(shapes, num_chunks=len(model), group_size=config.microbatch_group_size_per_vp_stage)


def from_last_stage(value: T) -> T:
    """The last stage's `value` (small, picklable), whatever the other stages give."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    held: list[Any] = [value if parallel_state.is_pipeline_last_stage() else None]
    dist.broadcast_object_list(
        held,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return cast(T, held[0])


def columns_from_last_stage(
    columns: Mapping[str, Sequence[torch.Tensor]], names: Sequence[str], lengths: Sequence[int]
) -> dict[str, list[torch.Tensor]]:
    """The last stage's float32 columns, in one broadcast.

    Args:
        columns: [S][R] by name on the last stage; not looked at elsewhere.
        names: of the columns, the same on every stage.
        lengths: [S] R.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {name: list(columns[name]) for name in names}
    total, device = sum(lengths), accelerator.current_device()
    if parallel_state.is_pipeline_last_stage():
        flat = torch.cat([value.float() for name in names for value in columns[name]])
    else:
        flat = torch.empty(len(names) * total, dtype=torch.float32, device=device)
    dist.broadcast(
        flat,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return {name: list(column.split(list(lengths))) for name, column in zip(names, flat.split(total), strict=True)}


# ---- a micro-batch through the model


def run_model(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Logits [1, T, V/tp] of a packed micro-batch; before the last pipeline stage hidden states [T, 1, H]."""
    tell_routers(model, batch)
    if (see := getattr(unwrap(model), "see", None)) is not None:
        see(batch)
    # Layers keep with it what others of the same pass need, some of it large: the micro-batch outlives the pass.
    packed_seq_params = copy.copy(batch["packed_seq_params"])
    return model(batch["tokens"], batch["position_ids"], None, packed_seq_params=packed_seq_params)


def run_model_on_responses(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor | ResponseLogits:
    """As `run_model`; the output layer of a GPTModel gets only the rows that predict response tokens.

    Cut over ranks (--sequence-parallel), the rows of a sequence are not all here, and all go through it.
    """
    gpt = unwrap(model)
    if not isinstance(gpt, GPTModel) or not gpt.post_process or gpt.config.sequence_parallel:
        return run_model(model, batch)
    rows = batch["response_rows"]
    select = gpt.output_layer.register_forward_pre_hook(
        lambda layer, hidden: (hidden[0].index_select(0, rows), *hidden[1:])
    )
    try:
        logits = run_model(model, batch).squeeze(0)
    finally:
        select.remove()
    assert len(logits) == len(rows), "the model makes its logits by its output layer"
    return ResponseLogits(logits)


def run_model_to_hidden(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor | DeferredLogits:
    """As `run_model`, but stop before the output layer of the last pipeline stage.

    Raises:
        UsageError: the model of a --custom-model-provider-path is no GPTModel.
    """
    gpt = unwrap(model)
    if not isinstance(gpt, GPTModel):
        raise UsageError(
            f"--recompute-loss-function needs a GPTModel, not {type(gpt).__name__} of --custom-model-provider-path; "
            "leave it out."
        )
    if not gpt.post_process:
        return run_model(model, batch)
    gpt.post_process = False
    try:
        hidden = run_model(model, batch)
    finally:
        gpt.post_process = True
    return deferred_logits(gpt, hidden)


def run_model_with_predictions(
    run: Callable[[torch.nn.Module, MicroBatch], Any], model: torch.nn.Module, batch: MicroBatch
) -> Any:
    """As `run`; on the last pipeline stage the logits of prediction layers become the batch's `predictions`.

    Raises:
        UsageError: the model of a --custom-model-provider-path has no such layers.
    """
    gpt = as_predicting(unwrap(model))
    gpt.further_tokens = batch["further_tokens"]
    try:
        output = run(model, batch)
    finally:
        gpt.further_tokens = None
    batch["predictions"] = [deferred_logits(gpt, hidden, is_trained=False) for hidden in gpt.predicted]
    gpt.predicted = ()
    return output


def deferred_logits(gpt: Any, hidden: torch.Tensor, *, is_trained: bool = True) -> DeferredLogits:
    """What the output layer makes of hidden states [T, 1, H]; its weight gets a gradient if `is_trained`."""
    wait_for_weights(*gpt.output_layer.modules())
    tied = gpt.share_embeddings_and_output_weights
    weight = gpt.shared_embedding_or_output_weight() if tied else gpt.output_layer.weight
    lora = getattr(gpt.output_layer, ADAPTER, None)
    adapter = None if lora is None else (lora.low(hidden)[:, 0], lora.lora_B[0])
    hidden = (
        gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        if gpt.config.sequence_parallel
        else copy_to_tensor_model_parallel_region(hidden)
    )
    return DeferredLogits(hidden[:, 0].to(weight.dtype), weight if is_trained else weight.detach(), adapter)


# ---- a share without gradients


def compute_log_probs(
    args: Args,
    model: list[torch.nn.Module],
    micro_batches: MicroBatches,
    *,
    store_prefix: str = "",
    with_entropy: bool = False,
) -> RolloutBatch:
    """Log-probs of every response token of this rank's share.

    Args:
        args: what the log-probs read, and `custom_megatron_before_log_prob_hook_path`.
        model: chunks of a data-parallel model.
        micro_batches: the share; with the same packing as in training, equal weights give equal bits.
        store_prefix: "", "ref_" or "teacher_"; becomes part of the name.
        with_entropy: also the entropy of the distribution of each response token.

    Returns:
        {"<prefix>log_probs": [S][R]} and, if asked for, {"<prefix>entropy": [S][R]}, in the order of the share.
    """

    def read(batch: MicroBatch, logits: Logits) -> dict[str, torch.Tensor]:
        log_probs, entropy = get_log_probs_and_entropy(args, batch, logits, with_entropy=with_entropy)
        return {"log_probs": log_probs} if entropy is None else {"log_probs": log_probs, "entropy": entropy}

    names = ("log_probs", "entropy") if with_entropy else ("log_probs",)
    how = {"names": names, "store_prefix": store_prefix, "run": run_model_on_responses}
    return compute_columns(args, model, micro_batches, read, **how)


def compute_values(args: Args, model: list[torch.nn.Module], micro_batches: MicroBatches) -> RolloutBatch:
    """{"values": [S][R]}: what a model with a value head says before every response token, as `compute_log_probs`."""
    return compute_columns(args, model, micro_batches, lambda *of: {"values": get_values(args, *of)}, names=["values"])


@torch.no_grad()
def compute_columns(
    args: Args,
    model: list[torch.nn.Module],
    micro_batches: MicroBatches,
    read: Callable[[MicroBatch, Any], dict[str, torch.Tensor]],
    *,
    names: Sequence[str],
    store_prefix: str = "",
    run: Callable[..., Any] = run_model,
) -> RolloutBatch:
    """Run the model over a share, without gradients.

    Args:
        args: `custom_megatron_before_log_prob_hook_path`.
        model: chunks of a data-parallel model.
        micro_batches: the share.
        read: (micro-batch, the model's output) -> one value per response token, [sum of R] each, by name.
        names: those that `read` gives.
        store_prefix: for the hook, and before each name.
        run: a micro-batch through the model.

    Returns:
        {"<prefix><name>": [S][R]}, in the order of the share.
    """
    if args.custom_megatron_before_log_prob_hook_path:
        load_function(args.custom_megatron_before_log_prob_hook_path)(hook_args(args), model, store_prefix)
    for chunk in model:
        chunk.eval()

    def collect(batch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        columns = {name: column.split(batch["response_lengths"]) for name, column in read(batch, output).items()}
        return torch.zeros((), device=accelerator.current_device()), columns

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return run(chunk, batch), partial(collect, batch)

    results = run_pass(
        model,
        micro_batches,
        forward_step,
        step_id=None,
        seq_length=args.seq_length,
        comes_from_flags=not args.custom_model_provider_path,
    )
    for chunk in model:
        chunk.train()
    found = {name: micro_batches.scatter([result[name] for result in results]) for name in names if results}
    columns = columns_from_last_stage(found, names, micro_batches.rollout_data["response_lengths"])
    return cast(RolloutBatch, {f"{store_prefix}{name}": column for name, column in columns.items()})


def train_one_step(
    args: Args, state: TrainState, micro_batches: MicroBatches, *, rollout_id: int, step_id: int
) -> dict[str, float]:
    """Accumulate gradients over this rank's micro-batches, reduce them over ranks, and step optimizer and schedule.

    Args:
        args: what the loss reads, and `custom_megatron_before_train_step_hook_path`.
        state: model, optimizer, schedule; changed.
        micro_batches: this rank's share of the rollout.
        rollout_id: given to the hook.
        step_id: which of the rollout's train steps.

    Returns:
        metrics of the step over all ranks, the same on each: what the loss reports, `grad_norm` (before clipping),
        `mtp_grad_norm` likewise (with --enable-mtp-training, whose layers are not in the first),
        `num_zeros_in_grad` (with --log-num-zeros-in-grad), the learning rate of each parameter group in this update
        (`lr-pg_<i>`) and `global_batch_size`.
    """
    for chunk in state.model:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    if args.custom_megatron_before_train_step_hook_path:
        hook = load_function(args.custom_megatron_before_train_step_hook_path)
        hook(hook_args(args), rollout_id, step_id, state.model, state.optimizer, state.scheduler)

    global_batch_size = micro_batches.global_batch_sizes[step_id]
    reports = _forward_backward(args, state.model, micro_batches, step_id)
    rates = [group["lr"] for group in state.optimizer.param_groups]
    clip = state.optimizer.get_grad_norm
    if isinstance(clip, PredictionClip):
        clip.norm = None
    updated, grad_norm, num_zeros = state.optimizer.step()
    if updated:  # not when a 16-bit gradient overflowed: Megatron then only lowers the loss scale
        state.scheduler.step(increment=global_batch_size)
    denominator = None if args.calculate_per_token_loss else global_batch_size
    # Only the last pipeline stage has reports; context-parallel ranks have the same ones.
    group = parallel_state.get_data_parallel_group()
    metrics = from_last_stage(reduce_reports(reports, denominator, group) if reports else {})
    if args.num_moe_experts:
        metrics |= load_balancing_metrics(args, micro_batches.num_microbatches[step_id])
    if grad_norm is not None:  # an overflowed gradient has none
        metrics["grad_norm"] = float(grad_norm)
    if isinstance(clip, PredictionClip) and clip.norm is not None:
        metrics["mtp_grad_norm"] = clip.norm
    if args.log_num_zeros_in_grad and num_zeros is not None:
        metrics["num_zeros_in_grad"] = float(num_zeros)
    metrics |= {f"lr-pg_{i}": rate for i, rate in enumerate(rates)}
    return metrics | {"global_batch_size": global_batch_size}


def _forward_backward(
    args: Args, model: list[torch.nn.Module], micro_batches: MicroBatches, step_id: int
) -> list[dict[str, Any]]:
    num_microbatches = micro_batches.num_microbatches[step_id]
    scale = {
        "num_microbatches": num_microbatches,
        "global_batch_size": micro_batches.global_batch_sizes[step_id],
        "dp_size": parallel_state.get_data_parallel_world_size(with_context_parallel=True),
    }

    run: Callable[..., Any] = run_model
    if args.loss_type != "custom_loss" and args.recompute_loss_function:
        run = run_model_to_hidden
    elif args.loss_type not in ("custom_loss", "value_loss"):  # a loss of the user's own is promised all logits
        run = run_model_on_responses

    if args.enable_mtp_training:
        lend_embedding([unwrap(chunk) for chunk in model])
        run = partial(run_model_with_predictions, run)

    def forward_step(batches: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(batches)
        return run(chunk, batch), partial(loss_function, args, batch, **scale)

    return run_pass(
        model,
        micro_batches,
        forward_step,
        step_id=step_id,
        seq_length=args.seq_length,
        comes_from_flags=not args.custom_model_provider_path,
    )
