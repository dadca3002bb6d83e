"""The passes of one rollout on one rank: which are needed, whose weights each takes, which samples each step has.

1. Passes without gradients come before training. They add columns to the rollout (`log_probs`, `ref_log_probs`, ...)
   and leave the model as it was: other weights than the policy's are swapped in from copies in host memory.
2. With --keep-old-actor the old log-probs are of the weights that generated the rollout, which says at which version
   (`weight_version`) that was. When it is trained, the trainer has moved on, and engines may have newer weights too
   (train_async.py); so a copy of each version that engines got is kept as long as a rollout may still come with it.
3. Passes of training (--ppo-epochs): without --shuffle-mini-batches every pass has the same train steps. With it,
   every pass after the first schedules the rollout again with its executions (samples of one `rollout_id`) in
   another order: steps, micro-batches and ranks of a sample change, the rules of slime.utils.dp_schedule hold as
   before. For that, every data-parallel rank gets the columns of the whole rollout once, in host memory, so that old
   log-probs and advantages, which are those of the first pass, go with their sample. The order follows from --seed,
   the rollout and the pass: it is equal on all ranks and in a resumed run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist

from slime.config.args import Args
from slime.training.micro_batches import MicroBatches
from slime.utils import accelerator
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.misc import num_weight_versions
from slime.utils.train_data import RolloutBatch

REFERENCE = "ref"
"""Tag of the reference's weights."""
TEACHER = "teacher"
"""Tag of the weights of --opd-teacher-load."""
_OLD_ACTOR = "old_actor/"
"""What the tags of versions of the weights begin with (--keep-old-actor)."""


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
    draws_masks = bool(args.lora_dropout or args.hidden_dropout)  # in the loss's pass alone
    same_as_in_loss = num_updates == 1 and args.loss_type == "policy_loss" and args.kl_coef == 0 and not draws_masks
    return not same_as_in_loss or any(
        (
            args.recompute_old_log_probs or args.use_rollout_logprobs or args.use_rollout_entropy,
            args.use_critic or args.keep_old_actor,  # the loss's pass is of newer weights
            args.use_opd,  # the advantages depend on them
            args.ci_test or args.save_debug_train_data is not None,  # for their readers
        )
    )


# ---- the weights that generated a rollout


def keep_version(args: Args, weights: TensorBackuper, version: int) -> None:
    """Copy the model's weights, which engines have now, and drop what no rollout can come with any more.

    Args:
        args: `async_buffer_size` and `update_weights_interval` say how many versions that leaves.
        weights: of the model.
        version: number of the weight sync.
    """
    _drop_before(weights, version + 1 - num_weight_versions(args.async_buffer_size, args.update_weights_interval))
    weights.backup(f"{_OLD_ACTOR}{version}")


def swapped_old_actor(weights: TensorBackuper, rollout_data: RolloutBatch) -> AbstractContextManager[None]:
    """The model holds the weights that generated this rollout inside the block; older copies are dropped for good.

    Rollouts are trained in the order in which they were generated, so no later one needs those. A rollout of no known
    version (nothing was synced: --debug-train-only) leaves the model as it is.
    """
    version = rollout_data.get("weight_version")
    if version is None:
        return nullcontext()
    _drop_before(weights, version)
    return weights.swapped(f"{_OLD_ACTOR}{version}")


def _drop_before(weights: TensorBackuper, version: int) -> None:
    for tag in weights.tags:
        if tag.startswith(_OLD_ACTOR) and int(tag.removeprefix(_OLD_ACTOR)) < version:
            weights.drop(tag)


# ---- passes of training


def passes_over(
    args: Args,
    micro_batches: MicroBatches,
    rollout_id: int,
    *,
    layout: Mapping[str, int],
    dp_group: dist.ProcessGroup | None,
) -> Iterator[MicroBatches]:
    """Yield the micro-batches of each pass; every rank goes through all of them.

    Args:
        args: `ppo_epochs`, `shuffle_mini_batches`, `seed`; with the second also what `build_dp_schedule` reads.
        micro_batches: those of the first pass, with every column that training needs.
        rollout_id: part of the seed.
        layout: the trainer's `dp_size` and `cp_size`, and this rank's `dp_rank`.
        dp_group: a gloo group of the data-parallel ranks, in their order; None = there is one.
    """
    if not args.shuffle_mini_batches:
        for _ in range(args.ppo_epochs):
            yield micro_batches
        return
    yield micro_batches
    rollout = _whole_rollout(micro_batches, dp_group) if args.ppo_epochs > 1 else {}
    for number in range(1, args.ppo_epochs):
        order = random.Random(f"{args.seed}/{rollout_id}/{number}")  # a text: seeded by all of it
        share = _share_in_new_order(args, rollout, order, layout=layout, steps=micro_batches.global_batch_sizes)
        yield micro_batches.of_data(cast(RolloutBatch, micro_batches.rollout_data | share))


def _whole_rollout(micro_batches: MicroBatches, dp_group: dist.ProcessGroup | None) -> dict[str, list[Any]]:
    """The per-sample columns of all ranks, tensors in host memory, in the order in which the rollout was made."""
    data = micro_batches.rollout_data
    mine = {
        name: [_on(torch.device("cpu"), value) for value in micro_batches.column(name)]
        for name in micro_batches.columns()
    }
    mine["partition"] = list(data["partition"])
    shares: list[Any] = [mine]
    if dp_group is not None and dp_group.size() > 1:
        shares = [None] * dp_group.size()
        dist.all_gather_object(shares, mine, group=dp_group)
    places = [place for share in shares for place in share["partition"]]
    order = sorted(range(len(places)), key=places.__getitem__)
    joined = {name: [value for share in shares for value in share[name]] for name in mine}
    return {name: [column[i] for i in order] for name, column in joined.items()}


def _share_in_new_order(
    args: Args, rollout: dict[str, list[Any]], order: random.Random, *, layout: Mapping[str, int], steps: list[int]
) -> dict[str, Any]:
    """This rank's columns and schedule of a pass."""
    executions = list(dict.fromkeys(rollout["rollout_ids"]))
    order.shuffle(executions)
    rank_of = {execution: i for i, execution in enumerate(executions)}
    # stable: samples of one execution stay together, in their order
    samples = sorted(range(len(rollout["rollout_ids"])), key=lambda i: rank_of[rollout["rollout_ids"][i]])
    schedule = build_dp_schedule(
        args,
        layout,
        [rollout["total_lengths"][i] for i in samples],
        global_batch_size=steps[0],
        rollout_indices=[rollout["rollout_ids"][i] for i in samples],
    )
    mine = [samples[i] for i in schedule.partitions[layout["dp_rank"]]]
    device = accelerator.current_device()
    return {
        **{name: [_on(device, column[i]) for i in mine] for name, column in rollout.items()},
        "micro_batch_indices": schedule.micro_batch_indices[layout["dp_rank"]],
        "num_microbatches": schedule.num_microbatches,
        "global_batch_sizes": schedule.global_batch_sizes,
    }


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
