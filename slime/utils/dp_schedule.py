"""Which sample goes to which data-parallel rank, micro-batch and train step: the schedule of one rollout. And how many
train steps a run has.

It sees lengths and rollout ids only: no tokens, no tensors, no process groups. Steps, in this order:

1. group samples by rollout id in first-seen order; `global_batch_size` rollouts make a train step (a trailing rest is
   dropped);
2. pack each step into micro-batches: dynamic = first-fit under `max_tokens_per_gpu * cp_size` tokens, or with
   `balance_by_flops` as many as these tokens need, of nearly equal FLOPs; static = `micro_batch_size` each;
3. round their number up to a multiple of the data-parallel size (times `vpp_group` with interleaved pipeline stages),
   by splitting the heaviest that holds several samples; where none does, ranks do their last one once more, of which
   then nothing is trained (`MicroBatches`): an execution may have several samples, so their number is any (losses
   and biases that balance experts count its tokens twice then);
4. deal them out: micro-batch k to rank k mod dp, or equally many by estimated FLOPs (`balance_data`), which the
   largest differencing method splits into lists of nearly equal weight (Karmarkar-Karp; ties are broken by position).

Invariants: every scheduled sample is in one partition, once; every rank has the same number of micro-batches in a step
(their collectives must match), with interleaved stages a multiple of `vpp_group`; all samples of a rollout are in the
same step; no micro-batch exceeds the cap unless it holds a single sample or FLOPs are balanced.

Example:
    lengths [100, 200, 300, 50, 60, 70, 80, 90], one rollout each, 2 ranks, cap 300, 4 rollouts a step:
    step 0 packs to [0, 1] [2] [3], split to [1] [2] [3] [0]; step 1 packs to [4, 5, 6, 7], split to [7, 4] [6, 5];
    partitions [[1, 3, 7, 4], [2, 0, 6, 5]], micro_batch_indices [[[0], [1], [2, 3]]] * 2, num_microbatches [2, 1].
"""

from __future__ import annotations

import bisect
import heapq
import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from slime.utils.flops_utils import calculate_fwd_flops
from slime.utils.misc import needed

if TYPE_CHECKING:
    from slime.config.args import Args


logger = logging.getLogger(__name__)


class DpSchedule(NamedTuple):
    """The schedule of one rollout; it unpacks in this order."""

    partitions: list[list[int]]
    """[dp][samples of the rank]: indices into the rollout's samples, in the order in which the rank trains them."""
    micro_batch_indices: list[list[list[int]]]
    """[dp][micro-batches of all steps][samples]: positions in the rank's own partition."""
    num_microbatches: list[int]
    """[steps]: micro-batches of each rank in each step."""
    global_batch_sizes: list[int]
    """[steps]: rollouts in each step over all ranks, the denominator of the per-rollout mean."""


def build_dp_schedule(
    args: Args,
    train_parallel_config: Mapping[str, int],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
) -> DpSchedule:
    """Schedule the samples of one rollout (see the module's docstring for the rules and an example).

    Args:
        args: `use_dynamic_batch_size`, `max_tokens_per_gpu`, `micro_batch_size`, `balance_data`, `balance_by_flops`;
            with the last two also the model's sizes.
        train_parallel_config: `dp_size` and `cp_size` of the trainer, and with interleaved pipeline stages
            `vpp_group`, the micro-batches that a stage takes at a time.
        total_lengths: tokens (prompt + response) of each sample.
        global_batch_size: rollouts in a train step.
        rollout_indices: rollout id of each sample; samples that share one are trained in the same step.

    Raises:
        AssertionError: fewer rollouts than a step needs, or micro-batches that cannot be dealt out equally; the
        sentence names the flags.
    """
    dp_size, cp_size = train_parallel_config["dp_size"], train_parallel_config["cp_size"]
    multiple = dp_size * train_parallel_config.get("vpp_group", 1)
    steps = group_into_steps(rollout_indices, global_batch_size)
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp_size)]
    num_microbatches = []
    for samples in steps:
        lengths = [total_lengths[i] for i in samples]
        bins = _packed(lengths, args, dp_size=dp_size, cp_size=cp_size, multiple=multiple)
        num_bins = -(-len(bins) // multiple) * multiple
        # Those that are done once more come last, so that every rank has one of its own before: not by weight.
        is_weighed = args.balance_data and num_bins == len(bins)
        weights = [calculate_fwd_flops([lengths[i] for i in b], args) for b in bins] if is_weighed else None
        for rank, mine in enumerate(deal_out(num_bins, dp_size, weights)):
            for b in mine:
                if b >= len(bins):
                    micro_batch_indices[rank].append(micro_batch_indices[rank][-1])
                    continue
                start = len(partitions[rank])
                partitions[rank] += [samples[i] for i in bins[b]]
                micro_batch_indices[rank].append(list(range(start, start + len(bins[b]))))
        num_microbatches.append(num_bins // dp_size)
    return DpSchedule(partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps))


def _packed(lengths: Sequence[int], args: Args, *, dp_size: int, cp_size: int, multiple: int) -> list[list[int]]:
    """Micro-batches of a train step: a multiple, or as many as samples, where none can be split any more."""
    if args.use_dynamic_batch_size:
        cap = needed(args.max_tokens_per_gpu) * cp_size
        bins = pack_by_flops(lengths, cap, args) if args.balance_by_flops else first_fit_pack(lengths, cap)
        bins = expand_bins_by_splitting(bins, lengths, -(-len(bins) // multiple) * multiple)
        assert len(bins) >= dp_size, (
            f"{len(lengths)} samples in a train step cannot fill {dp_size} micro-batches; make --global-batch-size a "
            "multiple of the number of data-parallel ranks"
        )
        return bins
    bins = consecutive_chunks(len(lengths), args.micro_batch_size)
    assert len(bins) % multiple == 0, (
        f"{len(lengths)} samples in micro-batches of {args.micro_batch_size} (--micro-batch-size) make {len(bins)}, "
        f"which {_sharers(dp_size, multiple)} cannot share equally; change --global-batch-size or use "
        "--use-dynamic-batch-size"
    )
    return bins


def packing_lengths(
    args: Args, total_lengths: Sequence[int], image_spans: Sequence[Sequence[Sequence[int]]] | None, *, cp_size: int
) -> list[int]:
    """Lengths of samples by which micro-batches with --max-image-tokens-per-gpu are filled.

    A sample whose images take a larger part of that limit than its tokens take of --max-tokens-per-gpu has the length
    that takes the same part: so neither limit is passed. Every context-parallel rank sees all images of a micro-batch.

    Example:
        limits of 100 tokens, 20 of images; a sample of 30 tokens, 10 of them of an image, takes half: its length is 50
    """
    if not (image_spans and args.max_image_tokens_per_gpu and args.use_dynamic_batch_size):
        return list(total_lengths)
    limit = args.max_image_tokens_per_gpu
    ratio = needed(args.max_tokens_per_gpu) * cp_size / limit
    return [
        max(total, math.ceil(ratio * sum(length for _, length in spans)))
        for total, spans in zip(total_lengths, image_spans, strict=True)
    ]


def group_into_steps(rollout_indices: Sequence[int], global_batch_size: int) -> list[list[int]]:
    """Sample indices of each train step (`global_batch_size` rollouts with all their samples); a rest is logged."""
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    rollouts = list(samples_of.values())
    num_steps = len(rollouts) // global_batch_size
    assert num_steps, (
        f"{len(rollouts)} rollouts were generated but a train step needs {global_batch_size}; "
        "lower --global-batch-size or generate more"
    )
    if dropped := len(rollouts) - num_steps * global_batch_size:
        message = "%d of %d rollouts fill no train step of %d and are dropped"
        logger.info(message, dropped, len(rollouts), global_batch_size)
    chunks = (rollouts[step * global_batch_size : (step + 1) * global_batch_size] for step in range(num_steps))
    return [[sample for rollout in chunk for sample in rollout] for chunk in chunks]


def first_fit_pack(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Put each item, in order, into the first bin that has room for it; one longer than `cap` gets its own bin."""
    bins: list[list[int]] = []
    most = min(len(lengths), 2 * sum(lengths) // cap + 1)  # of two bins that are half empty the later had none to fill
    first_leaf = 1 << max(most - 1, 0).bit_length()
    room = [cap] * (2 * first_leaf)  # a tree: each node has the most room of the bins below it, unused ones included
    for item, length in enumerate(lengths):
        node = first_leaf + len(bins) if length > cap else 1
        while node < first_leaf:
            node = 2 * node if length <= room[2 * node] else 2 * node + 1
        if node == first_leaf + len(bins):
            bins.append([])
        bins[node - first_leaf].append(item)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            if room[node] == (rest := left if left > right else right):
                break  # and so for every node above
            room[node] = rest
    return bins


def pack_by_flops(lengths: Sequence[int], cap: int, args: Args) -> list[list[int]]:
    """As many bins as `cap` tokens each would need, of nearly equal FLOPs; a bin may have more tokens than `cap`."""
    num_bins = min(-(-sum(lengths) // cap), len(lengths))
    flops = {length: calculate_fwd_flops([length], args) for length in set(lengths)}
    return get_seqlen_balanced_partitions([flops[length] for length in lengths], num_bins, equal_size=False)


def _sharers(dp_size: int, multiple: int) -> str:
    ranks = f"{dp_size} data-parallel ranks"
    return ranks if multiple == dp_size else f"{ranks} with interleaved groups of {multiple // dp_size}"


def expand_bins_by_splitting(bins: list[list[int]], lengths: Sequence[int], target: int) -> list[list[int]]:
    """Split the heaviest bin that holds several items into two even halves until there are `target` bins.

    There are fewer where no bin holds several any more. The heavier half (longest items first, each to the lighter
    side) takes the bin's place, the other goes to the end.
    """
    bins = [list(b) for b in bins]
    divisible = [(-sum(lengths[i] for i in items), b) for b, items in enumerate(bins) if len(items) > 1]
    heapq.heapify(divisible)
    while len(bins) < target and divisible:
        heaviest = heapq.heappop(divisible)[1]
        halves: tuple[list[int], list[int]] = ([], [])
        weight = [0, 0]
        for item in sorted(bins[heaviest], key=lambda i: (-lengths[i], i)):
            side = int(weight[1] < weight[0])
            halves[side].append(item)
            weight[side] += lengths[item]
        bins[heaviest] = halves[0]
        bins.append(halves[1])
        for side, b in enumerate((heaviest, len(bins) - 1)):
            if len(halves[side]) > 1:
                heapq.heappush(divisible, (-weight[side], b))
    return bins


def split_or_repeat(bins: list[list[int]], lengths: Sequence[int], target: int) -> list[list[int]]:
    """Split as `expand_bins_by_splitting` does; then repeat the last bin until there are `target`.

    For passes in which an item may be computed twice.
    """
    bins = expand_bins_by_splitting(bins, lengths, target)
    return bins + [bins[-1]] * (target - len(bins))


def consecutive_chunks(num_items: int, size: int) -> list[list[int]]:
    """0..num_items-1 in chunks of `size`; the last may be shorter."""
    return [list(range(start, min(start + size, num_items))) for start in range(0, num_items, size)]


def deal_out(num_bins: int, dp_size: int, weights: Sequence[float] | None) -> list[list[int]]:
    """Bins of each rank, equally many: strided, or balanced by `weights` when given."""
    if weights is None:
        return [list(range(rank, num_bins, dp_size)) for rank in range(dp_size)]
    return get_seqlen_balanced_partitions(weights, dp_size, equal_size=True)


def total_train_steps(args: Args) -> int | None:
    """Train steps of the whole run; None with an --num-epoch that only the data source can turn into a number."""
    if args.num_rollout is None:
        return None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return int(args.num_rollout * max(samples // args.global_batch_size, 1) * args.ppo_epochs)


def decay_steps(args: Args) -> int | None:
    """Train steps until the learning rate has decayed."""
    return args.lr_decay_iters or total_train_steps(args)


def warmup_steps(args: Args) -> float:
    """Train steps of the warm-up."""
    steps = decay_steps(args)
    if args.lr_warmup_fraction is not None and steps is not None:
        return float(args.lr_warmup_fraction * steps)
    return int(args.lr_warmup_iters)


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split the indices of `seqlen_list` into `k_partitions` lists with weights as equal as the method makes them.

    Args:
        seqlen_list: weight of each item.
        k_partitions: number of lists, at least 1 and at most the number of items.
        equal_size: every list gets the same number of items, which must then be a multiple of `k_partitions`.

    Returns:
        `k_partitions` lists of ascending indices that together hold every index once, ordered by their first index.

    Raises:
        ValueError: the items cannot be split so.
    """
    num_items = len(seqlen_list)
    if not 1 <= k_partitions <= num_items:
        raise ValueError(f"cannot split {num_items} items into {k_partitions} non-empty partitions")
    if equal_size and num_items % k_partitions:
        raise ValueError(f"cannot split {num_items} items into {k_partitions} partitions of equal size")
    items = sorted(range(num_items), key=lambda i: (seqlen_list[i], i))
    width = k_partitions if equal_size else 1
    groups: list[_Group] = [(-seqlen_list[i], i, [i]) for i in items]
    states = [sorted(groups[start : start + width]) for start in range(0, num_items, width)]
    heap = [(-_spread(state, k_partitions), order, state) for order, state in enumerate(states)]
    heapq.heapify(heap)
    for order in range(len(states), 2 * len(states) - 1):
        merged = _merged(heapq.heappop(heap)[2], heapq.heappop(heap)[2], k_partitions)
        heapq.heappush(heap, (-_spread(merged, k_partitions), order, merged))
    return sorted(sorted(members) for _, _, members in heap[0][2])


# (minus its weight, the item that names it, its items); of two groups of one weight the one with the smaller name is
# heavier
_Group = tuple[float, int, list[int]]
# k groups, the heaviest first, of which the empty ones are not stored: n states would otherwise take n x k
_State = list[_Group]


def _spread(state: _State, k: int) -> float:
    """Weight of the heaviest group minus that of the lightest."""
    return (state[-1][0] if len(state) == k else 0) - state[0][0]


def _merged(one: _State, other: _State, k: int) -> _State:
    """The heaviest group of one joins the lightest of the other; the state of fewer groups is taken apart."""
    is_larger, joined = len(one) >= len(other), []
    large, small = (one, other) if is_larger else (other, one)
    num_empty = k - len(large)
    for number, group in enumerate(small):
        if number >= num_empty:
            lightest = large.pop()
            more, fewer = sorted((lightest[2], group[2]), key=len, reverse=True)
            more += fewer
            group = (lightest[0] + group[0], (lightest if is_larger else group)[1], more)
        joined.append(group)
    for group in joined:
        bisect.insort(large, group)
    return large
