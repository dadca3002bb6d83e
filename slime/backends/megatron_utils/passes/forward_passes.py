"""The passes without gradients over a rollout, before training on it; the model holds the same weights afterwards."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils.passes.forward_only import compute_log_probs, compute_values
from slime.backends.megatron_utils.passes.routing_replay import free_routing, recorded_routing
from slime.config.args import Args
from slime.observability.timer import timer
from slime.training.micro_batches import MicroBatches
from slime.training.passes import (
    REFERENCE,
    TEACHER,
    needs_old_log_probs,
    needs_reference,
    needs_teacher,
    swapped_old_actor,
)
from slime.utils.misc import needed
from slime.utils.tensor_backper import TensorBackuper


def add_log_probs(
    args: Args, model: list[torch.nn.Module], weights: TensorBackuper, micro_batches: MicroBatches
) -> None:
    """Add the log-prob columns that this rollout's training needs.

    Args:
        args: the flags.
        model: chunks of a data-parallel model, holding the policy's weights.
        weights: the other sets of weights of that model, by tag.
        micro_batches: this rank's share of the rollout; its columns grow.
    """
    with_reference, with_teacher = needs_reference(args), needs_teacher(args)
    with_old = needs_old_log_probs(args, micro_batches.num_steps * args.ppo_epochs)
    if not (with_reference or with_teacher or with_old):
        return
    data, batches = micro_batches.rollout_data, _without_gradients(args, micro_batches)
    if with_reference:
        with timer("ref_log_probs"), weights.swapped(REFERENCE), free_routing():
            data.update(compute_log_probs(args, model, batches, store_prefix="ref_"))
    if with_teacher:
        with timer("teacher_log_probs"), weights.swapped(TEACHER), free_routing():
            data.update(compute_log_probs(args, model, batches, store_prefix="teacher_"))
    if with_old:
        records = args.use_routing_replay and not args.use_rollout_routing_replay
        weights_of_old = swapped_old_actor(weights, data) if args.keep_old_actor else nullcontext()
        recording = recorded_routing(model, batches, data) if records else nullcontext()
        with timer("log_probs"), weights_of_old, recording:
            data.update(compute_log_probs(args, model, batches, with_entropy=args.use_rollout_entropy))


def add_values(args: Args, model: list[torch.nn.Module], micro_batches: MicroBatches) -> None:
    """Add the column `values` of a critic's model."""
    with timer("critic_values"):
        micro_batches.rollout_data.update(compute_values(args, model, _without_gradients(args, micro_batches)))


def _without_gradients(args: Args, micro_batches: MicroBatches) -> MicroBatches:
    """The micro-batches of a pass without gradients, which may hold more tokens."""
    budget = args.log_probs_max_tokens_per_gpu
    if not args.use_dynamic_batch_size or budget == args.max_tokens_per_gpu:
        return micro_batches
    exchange = parallel_state.get_data_parallel_group() if args.expert_model_parallel_size > 1 else None
    return micro_batches.repacked(needed(budget), as_many_over=exchange)
