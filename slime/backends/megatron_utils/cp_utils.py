"""Context parallelism, all of it: which tokens of a sample a rank has, and how its values become the sample's again.

A sample of `total` tokens is padded to 2 x CP chunks of ceil(total / (2 CP)) tokens; rank r has the chunks r and
2 CP - 1 - r ("zigzag"), so that every rank has as much causal attention to compute. Row p of the logits predicts token
p + 1, so the rank that has token p has the log-prob of the token behind it.

Only tokens, positions and rows of logits and hidden states are cut. What is one value per response token (log-probs,
advantages, masks, values) is whole on every rank: `gather_responses` puts the rows' values together, with a gradient
for the rank's own rows. So losses know nothing of all this; they come out equal on the ranks of a sample, and the sum
of the ranks' gradients is the loss's. How attention reaches the other ranks' keys is model.varlen_attention's.

`get_sum_of_sample_mean` is here because hooks look for it here: the reduction of per-token values to one number. It
knows nothing about what the values mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from slime.algorithms.losses import token_weights, weighted_sum
from slime.algorithms.policy import keeps_whole
from slime.utils.accelerator import to_device

Span = tuple[int, int]
"""[first, end) of consecutive positions."""


class CpOffsets(NamedTuple):
    """Where a rank's two chunks of a sample lie, in positions of the sample; it unpacks in this order."""

    chunk_size: int
    chunks: tuple[Span, Span]
    """Tokens of the two chunks; the last ones may lie in the padding."""
    logits: tuple[Span, Span]
    """Of these, the positions whose logits predict a response token; (0, 0) where there are none."""
    tokens: tuple[Span, Span]
    """The response tokens that they predict: one further on."""


def _place(cp_rank: int | None, cp_size: int | None) -> tuple[int, int]:
    """This process's (rank, size) where they are not given."""
    if cp_rank is not None and cp_size is not None:
        return cp_rank, cp_size
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()


def chunk_size_of(total_length: int, cp_size: int) -> int:
    """Tokens of one of the 2 x CP chunks of a sample."""
    return -(-total_length // (2 * cp_size))


def get_logits_and_tokens_offset_with_cp(
    total_length: int, response_length: int, *, cp_rank: int | None = None, cp_size: int | None = None
) -> CpOffsets:
    """The chunks of a rank, and which response tokens their logits predict.

    Args:
        total_length: prompt + R.
        response_length: R.
        cp_rank, cp_size: default: this process's.

    Example:
        7 tokens, the last 4 a response, over 2 ranks make chunks of 2. Rank 0 has the tokens 0, 1, 6 and one of
        padding, none of whose logits predicts a response token; rank 1 has 2, 3, 4 and 5, which predict 3, 4, 5 and 6.
    """
    rank, size = _place(cp_rank, cp_size)
    chunk = chunk_size_of(total_length, size)
    chunks = tuple((index * chunk, (index + 1) * chunk) for index in (rank, 2 * size - 1 - rank))
    first, end = total_length - response_length - 1, total_length - 1
    logits = tuple((max(start, first), min(stop, end)) for start, stop in chunks)
    logits = tuple((start, stop) if start < stop else (0, 0) for start, stop in logits)
    tokens = tuple((start + 1, stop + 1) if start < stop else (0, 0) for start, stop in logits)
    return CpOffsets(chunk, chunks, logits, tokens)  # type: ignore[arg-type]


def response_rows(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    ahead: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Which rows of a rank's packed logits predict response tokens: row p predicts the token at p + 1 + `ahead`.

    A response token that has fewer than 1 + `ahead` tokens before it is predicted nowhere.

    Args:
        total_lengths: [S] prompt + R.
        response_lengths: [S] R.
        cp_rank, cp_size: whose rows.
        ahead: tokens further on, of a layer that predicts these.

    Returns:
        [n] rows; [n] which token of the responses, one after the other, each predicts; [S] how many are each sample's.
        Without context parallelism and `ahead` n is the sum of R, and the second is 0, 1, 2 ...
    """
    if cp_size == 1 and not ahead:
        # numpy: torch wakes up a thread for each core to repeat a few numbers
        totals, responses = np.asarray(total_lengths, np.int64), np.asarray(response_lengths, np.int64)
        place = np.arange(responses.sum())
        first_rows, first_places = totals.cumsum() - responses - 1, responses.cumsum() - responses
        row = place + (first_rows - first_places).repeat(responses)
        return torch.from_numpy(row), torch.from_numpy(place), list(response_lengths)
    rows, places = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    counts = [0] * len(total_lengths)
    first_row = first_place = 0
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        chunk = total if cp_size == 1 else chunk_size_of(total, cp_size)
        owned = (0,) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)
        first, end = max(total - response - 1 - ahead, 0), total - 1 - ahead
        for number, index in enumerate(owned):
            start, stop = max(first, index * chunk), min(end, (index + 1) * chunk)
            positions = torch.arange(start, max(start, stop))
            rows.append(first_row + (number - index) * chunk + positions)
            places.append(first_place + positions + 1 + ahead - (total - response))
            counts[i] += len(positions)
        first_row += len(owned) * chunk
        first_place += response
    return torch.cat(rows), torch.cat(places), counts


def slice_with_cp(
    tokens: torch.Tensor, pad_value: float, *, cp_rank: int | None = None, cp_size: int | None = None
) -> torch.Tensor:
    """This rank's two chunks of a sample: [total, ...] -> [2 x chunk, ...], padding included.

    With one rank the sample comes back as it is, without padding.
    """
    rank, size = _place(cp_rank, cp_size)
    if size == 1:
        return tokens
    chunk = chunk_size_of(len(tokens), size)
    padding = tokens.new_full((2 * size * chunk - len(tokens), *tokens.shape[1:]), pad_value)
    chunks = torch.cat([tokens, padding]).split(chunk)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


def slice_log_prob_with_cp(
    log_prob: torch.Tensor | Sequence[float],
    total_length: int,
    response_length: int,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> torch.Tensor | Sequence[float]:
    """Return those values of a whole response [R] whose logits this rank has, in the order of its chunks.

    This rank's part of a response comes back as it is; inside `whole_columns` so does a whole response.

    Raises:
        ValueError: the values are neither.
    """
    rank, size = _place(cp_rank, cp_size)
    if size == 1 and len(log_prob) == response_length:  # called for each sample of a step
        return log_prob
    own = response_rows([total_length], [response_length], cp_rank=rank, cp_size=size)[1]
    if len(log_prob) != response_length and (size == 1 or len(log_prob) != len(own)):
        part = "" if size == 1 else f"; this rank's part of it has {len(own)}"
        raise ValueError(f"a response of {response_length} tokens has {len(log_prob)} values{part}")
    if len(log_prob) == len(own) or (cp_rank is None and keeps_whole.get()):
        return log_prob
    if isinstance(log_prob, torch.Tensor):
        return log_prob[own.to(log_prob.device)]
    return [log_prob[place] for place in own.tolist()]


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The whole response [R] from each rank's part of it (as `slice_log_prob_with_cp` cuts it); differentiable.

    A tensor that is whole already, as columns of a rollout are here, comes back equal. Collective over the
    context-parallel group.

    Raises:
        ValueError: the tensor is neither this rank's part nor whole.
    """
    rank, size = _place(None, None)
    if size == 1:
        return tensor
    mine = response_rows([total_length], [response_length], cp_rank=rank, cp_size=size)[1].to(tensor.device)
    if len(tensor) == response_length != len(mine):
        tensor = tensor[mine]
    if len(tensor) != len(mine):
        raise ValueError(
            f"{len(tensor)} values are neither this rank's part ({len(mine)}) of a response nor all of its "
            f"{response_length}"
        )
    return gather_responses(tensor, mine, response_length, context_parallel_group())


class _GatherResponses(torch.autograd.Function):
    """Values at their places, summed over ranks; each place belongs to one rank. Back: the gradient of the own ones.

    The loss is computed on every rank, so a gradient that were summed over ranks would count CP times.
    """

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, positions: torch.Tensor, length: int, group: Any) -> torch.Tensor:
        ctx.save_for_backward(positions)
        whole = mine.new_zeros(length).index_copy(0, positions, mine)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return grads[0].index_select(0, positions), None, None, None


def gather_responses(mine: torch.Tensor, positions: torch.Tensor, length: int, group: Any) -> torch.Tensor:
    """Put the ranks' values of a micro-batch's response tokens together.

    Args:
        mine: [n] values of the tokens that this rank has the logits of.
        positions: [n] where they belong; the ranks' positions together are 0 ... length - 1, each once.
        length: sum of R of the micro-batch.
        group: the context-parallel ranks.

    Returns:
        [length], the same on every rank.
    """
    return cast(torch.Tensor, _GatherResponses.apply(mine, positions, length, group))


def zigzag_positions(cu_seqlens: torch.Tensor, num_tokens: int, *, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Position of each of this rank's packed tokens in its own sequence.

    Args:
        cu_seqlens: [num_sequences + 1] cumulative lengths of the whole sequences, each a multiple of 2 x CP.
        num_tokens: T, cu_seqlens[-1] / CP: those of this rank.
        cp_rank, cp_size: whose.

    Returns:
        int64 [T], for example for cu_seqlens [0, 8, 12] and two ranks [0, 1, 6, 7, 0, 3] and [2, 3, 4, 5, 1, 2].
    """
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long() // cp_size
    starts = torch.repeat_interleave(cu_seqlens[:-1].long() // cp_size, lengths, output_size=num_tokens)
    local = torch.arange(num_tokens, device=cu_seqlens.device) - starts
    if cp_size == 1:
        return local
    chunk = torch.repeat_interleave(lengths // 2, lengths, output_size=num_tokens)
    return torch.where(local < chunk, cp_rank * chunk + local, (2 * cp_size - 2 - cp_rank) * chunk + local)


def gathered_places(cu_seqlens: Sequence[int], cp_size: int) -> torch.Tensor:
    """Where in the whole pack each row belongs once the ranks' rows are gathered rank after rank.

    Args:
        cu_seqlens: as in `zigzag_positions`.
        cp_size: ranks.

    Returns:
        int64 [cu_seqlens[-1]], a permutation; for [0, 4, 8] and two ranks [0, 3, 4, 7, 1, 2, 5, 6].
    """
    ends = torch.tensor(cu_seqlens)
    local = int(ends[-1]) // cp_size
    starts = torch.repeat_interleave(ends[:-1], (ends[1:] - ends[:-1]) // cp_size, output_size=local)
    ranks = range(cp_size)
    return torch.cat([starts + zigzag_positions(ends, local, cp_rank=rank, cp_size=cp_size) for rank in ranks])


def gather_pack(rows: torch.Tensor, places: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole pack [T x CP, ...] from each rank's rows [T, ...]; back, the ranks' gradients are summed.

    Args:
        rows: this rank's.
        places: of all ranks' rows, as `gathered_places` says them.
        group: the context-parallel ranks.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(rows, group=group)
    return torch.empty_like(gathered).index_copy(0, places, gathered)


def own_rows(pack: torch.Tensor, places: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's rows of a whole pack, as `gather_pack` took them."""
    return pack.index_select(0, places.chunk(group.size())[group.rank()])


class KeyChunks(NamedTuple):
    """Which keys the queries of a rank see, with keys and values of all ranks gathered rank after rank.

    Sequence by sequence, first the rank's early chunk, then its late one: a chunk with index j sees the j + 1 first
    chunks of its sequence.
    """

    rows: torch.Tensor
    """[keys] rows of the gathered keys, in the order in which queries see them."""
    cu_queries: list[int]
    cu_keys: list[int]


def context_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share each sample; None where a rank has whole ones."""
    from megatron.core import parallel_state

    found: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return found if found.size() > 1 else None


def key_chunks(cu_seqlens: Sequence[int], *, cp_rank: int, cp_size: int) -> KeyChunks:
    """See KeyChunks; `cu_seqlens` as in `zigzag_positions`."""
    num_tokens = cu_seqlens[-1] // cp_size
    rows, cu_queries, cu_keys = [], [0], [0]
    for first, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        chunk, local = (end - first) // (2 * cp_size), first // cp_size
        starts = [owner * num_tokens + local for owner in range(cp_size)]
        starts += [(2 * cp_size - 1 - j) * num_tokens + local + chunk for j in range(cp_size, 2 * cp_size)]
        for j in (cp_rank, 2 * cp_size - 1 - cp_rank):
            rows += [torch.arange(start, start + chunk) for start in starts[: j + 1]]
            cu_queries.append(cu_queries[-1] + chunk)
            cu_keys.append(cu_keys[-1] + chunk * (j + 1))
    return KeyChunks(torch.cat(rows), cu_queries, cu_keys)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[float] | None = None,
    calculate_per_token_loss: bool = False,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums a per-token tensor over the micro-batch, weighted so that steps do not depend on its split.

    Args:
        total_lengths: [S] prompt + R.
        response_lengths: [S] R.
        loss_masks: [S][R], 1 = counts.
        sample_denoms: [S] what each sample's masked sum is divided by: the trained tokens of its whole rollout, so
            that samples of one rollout together count as one. Default: the sample's own. Less than 1 counts as 1.
        calculate_per_token_loss: plain masked sum, to be divided by the trained tokens of the whole step.

    Returns:
        x [sum of R] (the samples' tokens in order) -> scalar, the same on every context-parallel rank. With context
        parallelism x may also be this rank's part of each response, on all ranks (collective).

    Raises:
        ValueError: a mask that is not as long as its response, or longer than its sample.
    """
    lengths = (total_lengths, response_lengths)
    weights = token_weights(*lengths, loss_masks, sample_denoms, per_token=calculate_per_token_loss)
    return lambda x: weighted_sum(weights, whole_micro_batch(x, *lengths))


def whole_micro_batch(x: torch.Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int]) -> torch.Tensor:
    """[sum of R] from that, or from this rank's part of each response.

    Raises:
        ValueError: x is neither.
    """
    if len(x) == sum(response_lengths):
        return x
    rank, size = _place(None, None)
    whole, lengths = sum(response_lengths), (total_lengths, response_lengths)
    positions = [response_rows(*lengths, cp_rank=owner, cp_size=size)[1] for owner in range(size)]
    if size == 1 or len(x) != len(positions[rank]):
        parts = "" if size == 1 else f", of which this rank has {len(positions[rank])}"
        raise ValueError(f"{len(x)} values for responses of {whole} tokens{parts}")
    if max(map(len, positions)) == whole:
        # One rank has all tokens. It cannot tell its part from the whole, so it does not gather, and nobody may: the
        # gradient is right, the value is 0 on ranks without a token.
        return x.new_zeros(whole) + x.sum()
    return gather_responses(x, to_device(positions[rank], x.device), whole, context_parallel_group())


def prepare_routed_experts_for_routing_replay(
    experts: Any, num_tokens: int, *, num_layers: int, layers: Sequence[int], topk: int
) -> torch.Tensor:
    """One sample's choices by the engine as this context-parallel rank replays them.

    Args:
        experts: [num_tokens - 1, num_layers, topk]: the engine's last token was never an input.
        num_tokens: prompt and response.
        num_layers: of the model, dense ones included.
        layers: which of them have experts on this rank, from 0.
        topk: experts of a token.

    Returns:
        [rows of this rank, len(layers), topk] int16; the last token takes the first experts.

    Raises:
        ValueError: another shape, or a layer in which every choice is expert 0.
    """
    found, expected = np.shape(experts), (num_tokens - 1, num_layers, topk)
    if found != expected:
        raise ValueError(
            f"rollout_routed_experts of a sample of {num_tokens} tokens has the shape {found}, not {expected}"
        )
    chosen = torch.from_numpy(np.asarray(experts).astype(np.int16))[:, list(layers)]
    if topk > 1 and chosen.numel() and not bool(chosen.flatten(2).amax(dim=(0, 2)).all()):
        raise ValueError(
            "rollout_routed_experts has a layer of experts in which the engine recorded nothing but zeros"
        )
    last = torch.arange(topk, dtype=torch.int16).expand(1, len(layers), topk)
    return slice_with_cp(torch.cat([chosen, last]), 0)
