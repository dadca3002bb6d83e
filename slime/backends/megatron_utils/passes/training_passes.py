"""The passes of training over one rollout (--ppo-epochs): which samples each train step of a pass has.

Without --shuffle-mini-batches every pass has the same train steps. With it, every pass after the first schedules the
rollout again with its executions (samples of one `rollout_id`) in another order: steps, micro-batches and ranks of a
sample change, the rules of slime.utils.dp_schedule hold as before. For that, every data-parallel rank gets the columns
of the whole rollout once, in host memory, so that old log-probs and advantages, which are those of the first pass, go
with their sample. The order follows from --seed, the rollout and the pass: it is equal on all ranks and in a resumed
run. It knows nothing about losses or what a column means.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.data import MicroBatches
from slime.config.args import Args
from slime.utils import accelerator
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.train_data import RolloutBatch


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
