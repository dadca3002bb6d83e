"""One optimizer update from the micro-batches of one train step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils.layers.mtp import lend_embedding
from slime.backends.megatron_utils.layers.routing import load_balancing_metrics
from slime.backends.megatron_utils.loss import loss_function
from slime.backends.megatron_utils.model.setup import TrainState
from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.passes.forward import (
    from_last_stage,
    run_model,
    run_model_to_hidden,
    run_model_with_predictions,
    run_pass,
)
from slime.config.args import Args
from slime.training.micro_batches import MicroBatches
from slime.training.reports import reduce_reports
from slime.utils.misc import hook_args, load_function
from slime.utils.train_data import MicroBatch


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

    defers_logits = args.recompute_loss_function and args.loss_type != "custom_loss"
    run: Callable[..., Any] = run_model_to_hidden if defers_logits else run_model

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
