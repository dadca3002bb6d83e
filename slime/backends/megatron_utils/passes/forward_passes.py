"""The passes without gradients over a rollout, before training on it: which are needed, and whose weights each takes.

It adds columns to the rollout (`log_probs`, `ref_log_probs`, ...) and leaves the model as it was. How a pass is made
(slime.backends.megatron_utils.passes.forward_only) and what its numbers are for, it does not know.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils.data import MicroBatches
from slime.backends.megatron_utils.passes.forward_only import compute_log_probs, compute_values
from slime.backends.megatron_utils.passes.old_actor import swapped_old_actor
from slime.backends.megatron_utils.passes.routing_replay import free_routing, recorded_routing
from slime.config.args import Args
from slime.observability.timer import timer
from slime.utils.misc import needed
from slime.utils.tensor_backper import TensorBackuper

REFERENCE = "ref"
"""Tag of the reference's weights."""
TEACHER = "teacher"
"""Tag of the weights of --opd-teacher-load."""


def needs_reference(args: Args) -> bool:
    """Whether the run compares the policy with reference weights."""
    return args.use_kl_loss or args.kl_coef != 0


def needs_teacher(args: Args) -> bool:
    """Whether the trainer itself holds the weights of a teacher (--opd-type megatron)."""
    return args.use_opd and args.opd_type == "megatron"


def needs_old_log_probs(args: Args, num_updates: int) -> bool:
    """Whether they take a pass of their own: not where the loss's own forward pass gives the same numbers.

    Args:
        args: the flags that ask for them.
        num_updates: of the rollout; with one, nothing is updated before the loss's pass.
    """
    same_as_in_loss = num_updates == 1 and args.loss_type == "policy_loss" and args.kl_coef == 0
    is_asked_for = args.recompute_old_log_probs or args.use_rollout_logprobs or args.use_rollout_entropy
    is_asked_for = is_asked_for or args.use_critic or args.keep_old_actor  # the loss's pass is of newer weights
    is_asked_for = is_asked_for or args.use_opd  # the advantages depend on them
    is_asked_for = is_asked_for or args.ci_test or args.save_debug_train_data is not None  # for their readers
    return is_asked_for or not same_as_in_loss


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
