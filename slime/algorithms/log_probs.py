"""Log-probability and entropy of a softmax whose vocabulary may be split over tensor-parallel ranks.

The logits are read, never changed, and are all that is kept for the backward pass (the softmax is made again there);
the rows that are asked for are gathered a chunk at a time. Above the given logits that costs two float32 chunks
forward, and the logits' gradient in their type and two chunks backward, one more where the distribution is cut
(a nucleus or a mask); on CUDA the chunk is never written, the arithmetic being fused. One row of logits, one target.

A cut is either a bool mask [n, V/tp] or one bound per row [n]: the smallest logit that is kept, in the logits' type.
The bound is found by bisection, without sorting: a row is read once per bit of its type (16 times for bf16, 32 for
fp32), nothing of its size is kept, and a vocabulary that is split over ranks needs only sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from slime.utils.accelerator.fusion import fused_on_cuda

if TYPE_CHECKING:
    from slime.config.args import Args

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sampling:
    """The distribution that response tokens were drawn from."""

    temperature: float = 1.0
    top_p: float = 1.0
    vocab_size: int | None = None
    chunk_size: int = -1
    """Rows that are worked on at a time; -1 = all."""

    @classmethod
    def of(cls, args: Args) -> Sampling:
        """Read the flags: the engine's sampling, but the model's own distribution for --loss-type sft_loss, whose
        tokens nobody sampled."""
        is_sampled = args.loss_type != "sft_loss"
        top_p, temperature = (args.rollout_top_p, args.rollout_temperature) if is_sampled else (1.0, 1.0)
        return cls(temperature, top_p, args.vocab_size, args.log_probs_chunk_size)


@dataclass(frozen=True)
class _Shard:
    """This rank's columns of the vocabulary: how the rows are scaled, where they start, how many are real."""

    group: dist.ProcessGroup | None
    start: int
    num_real: int
    scale: float
    chunk_size: int

    def chunks(self, num_rows: int) -> list[slice]:
        size = self.chunk_size if self.chunk_size > 0 else max(num_rows, 1)
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]

    def local_targets(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Column of each target in this shard (0 where it is elsewhere), and whether it is here."""
        local = targets - self.start
        is_here = (local >= 0) & (local < self.num_real)
        return torch.where(is_here, local, 0), is_here

    def all_reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(value, op=op, group=self.group)
        return value


class _LogProbAndEntropy(torch.autograd.Function):
    """(logits [T, V/tp], rows [n] or None = all, targets [n]) -> (log_probs [n], entropy [n]), both float32.

    `cut`: None, a bool mask [n, V/tp], or top-p. `num_kept`: None, or [n] to write to.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor | None,
        targets: torch.Tensor,
        shard: _Shard,
        with_entropy_grad: bool,
        cut: torch.Tensor | float | None,
        num_kept: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy, log_normaliser = (
            torch.empty(targets.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        cuts: torch.Tensor | None = logits.new_empty(targets.shape[0]) if isinstance(cut, float) else cut
        log_kept = log_normaliser if cuts is None else torch.empty_like(log_normaliser)
        for chunk in shard.chunks(targets.shape[0]):
            picked = _rows_of(chunk, rows, logits)
            at_target, entropy[chunk], log_mass, top = _forward_chunk(logits, picked, targets[chunk], shard)
            log_normaliser[chunk] = log_mass + top
            if cuts is not None:
                if isinstance(cut, float):
                    cuts[chunk] = _bounds(logits, picked, top, cut * log_mass.exp(), shard)
                log_mass, kept = _cut_chunk(logits, picked, targets[chunk], cuts[chunk], top, shard)
                log_kept[chunk] = log_mass + top
                if num_kept is not None:
                    num_kept[chunk] = kept
            log_probs[chunk] = at_target - log_mass
        ctx.shard, ctx.with_entropy_grad = shard, with_entropy_grad
        ctx.save_for_backward(logits, rows, targets, log_normaliser, entropy, cuts, log_kept)
        if not with_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, log_prob_grad: torch.Tensor, entropy_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, rows, targets, log_normaliser, entropy, cuts, log_kept = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad = torch.zeros_like(logits)
        # a rank that holds nothing but padding columns has no gradient
        for chunk in shard.chunks(targets.shape[0]) if shard.num_real else ():
            picked = _rows_of(chunk, rows, logits)
            column, is_here = shard.local_targets(targets[chunk])
            of_rows = (log_normaliser[chunk], entropy[chunk], log_prob_grad[chunk])
            of_entropy = entropy_grad[chunk] if ctx.with_entropy_grad else None
            of_cut = (None if cuts is None else cuts[chunk], log_kept[chunk])
            sizes = (shard.scale, shard.num_real)
            _write_gradient(grad, logits, picked, column, is_here, *of_rows, of_entropy, *of_cut, *sizes)
        return grad, None, None, None, None, None, None


def _rows_of(chunk: slice, rows: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    if rows is None:
        return torch.arange(chunk.start, chunk.stop, device=logits.device)
    return rows[chunk]


def _forward_chunk(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, shard: _Shard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `rows` [n], with x = scaled logits - top: x of the target, entropy, log of the sum of exp(x), top."""
    if shard.num_real:
        top = _largest(logits, rows, shard.scale, shard.num_real)
    else:  # this rank holds nothing but padding columns
        top = torch.full(rows.shape, float("-inf"), device=logits.device)
    top = shard.all_reduce(top, dist.ReduceOp.MAX)
    if shard.num_real:
        sums = _sums(logits, rows, *shard.local_targets(targets), top, shard.scale, shard.num_real)
    else:
        sums = top.new_zeros((3, len(rows)))
    total, weighted, at_target = shard.all_reduce(sums, dist.ReduceOp.SUM)
    log_total = total.log()
    return at_target, log_total - weighted / total, log_total, top


def _bounds(
    logits: torch.Tensor, rows: torch.Tensor, top: torch.Tensor, limit: torch.Tensor, shard: _Shard
) -> torch.Tensor:
    """The smallest logit of each row that belongs to its nucleus; `limit` [n]: p times the sum of exp(x - top)."""

    def above(bound: torch.Tensor) -> torch.Tensor:
        if not shard.num_real:
            return shard.all_reduce(torch.zeros_like(top), dist.ReduceOp.SUM)
        mass = _mass_above(logits, rows, bound, top, shard.scale, shard.num_real)
        return shard.all_reduce(mass, dist.ReduceOp.SUM)

    return nucleus_bounds(above, limit, logits.dtype)


def _cut_chunk(
    logits: torch.Tensor,
    rows: torch.Tensor,
    targets: torch.Tensor,
    cut: torch.Tensor,
    top: torch.Tensor,
    shard: _Shard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the sum of exp(x - top) over what is kept of `rows`, with the target, and how many these are, [n]."""
    if shard.num_real:
        sums = _kept_sums(logits, rows, *shard.local_targets(targets), cut, top, shard.scale, shard.num_real)
    else:
        sums = top.new_zeros((2, len(rows)))
    mass, kept = shard.all_reduce(sums, dist.ReduceOp.SUM)
    return mass.log(), kept


def _scaled(logits: torch.Tensor, rows: torch.Tensor, scale: float, num_real: int) -> torch.Tensor:
    """A float32 copy of `rows` without the padding columns, scaled."""
    return logits[:, :num_real][rows].float().mul_(scale)


@fused_on_cuda
def _largest(logits: torch.Tensor, rows: torch.Tensor, scale: float, num_real: int) -> torch.Tensor:
    """The largest logit of each row, scaled, [n] float32."""
    return logits[:, :num_real][rows].amax(dim=-1).float() * scale


@fused_on_cuda
def _sums(
    logits: torch.Tensor,
    rows: torch.Tensor,
    column: torch.Tensor,
    is_here: torch.Tensor,
    top: torch.Tensor,
    scale: float,
    num_real: int,
) -> torch.Tensor:
    """With x = scaled logits - top: the sums of exp(x) and of exp(x) x over the row, and x of the target, [3, n]."""
    at_target = torch.where(is_here, logits[rows, column].float() * scale - top, 0)
    x = _scaled(logits, rows, scale, num_real).sub_(top[:, None])
    e = x.exp()
    return torch.stack([e.sum(dim=-1), e.mul_(x).sum(dim=-1), at_target])


@fused_on_cuda
def _write_gradient(
    grad: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    column: torch.Tensor,
    is_here: torch.Tensor,
    log_normaliser: torch.Tensor,
    entropy: torch.Tensor,
    log_prob_grad: torch.Tensor,
    entropy_grad: torch.Tensor | None,
    cut: torch.Tensor | None,
    log_kept: torch.Tensor,
    scale: float,
    num_real: int,
) -> None:
    """Write the rows [n] of the logits' gradient [T, V/tp].

    d log q_t / dx_i = [i = t] - q_i ;  dH / dx_i = -p_i (log p_i + H) ;  q is p, or what a cut leaves of it
    """
    of_distribution = (log_normaliser, entropy, log_prob_grad, entropy_grad)
    of_row = _rows_gradient(logits, rows, *of_distribution, cut, log_kept, scale, num_real)
    grad[:, :num_real][rows] = of_row.mul_(scale).to(grad.dtype)
    # Once more for the target's column, with its [i = t]: a scatter into the row would have to keep it in float32.
    at_column = logits[rows, column]
    log_p_t, log_q_t = at_column.float() * scale - log_normaliser, at_column.float() * scale - log_kept
    q_t = log_q_t.exp()
    if cut is not None:
        q_t = torch.where(is_here | _is_kept_at(at_column, column, cut), q_t, 0)
    of_target = torch.where(is_here, log_prob_grad, 0) - q_t * log_prob_grad
    if entropy_grad is not None:
        of_target = of_target - log_p_t.exp() * entropy_grad * (log_p_t + entropy)
    grad[rows, column] = (of_target * scale).to(grad.dtype)


def _rows_gradient(
    logits: torch.Tensor,
    rows: torch.Tensor,
    log_normaliser: torch.Tensor,
    entropy: torch.Tensor,
    log_prob_grad: torch.Tensor,
    entropy_grad: torch.Tensor | None,
    cut: torch.Tensor | None,
    log_kept: torch.Tensor,
    scale: float,
    num_real: int,
) -> torch.Tensor:
    """The gradient [n, V/tp] of what is not the target, float32, before the temperature."""
    if cut is None:
        log_p = _scaled(logits, rows, scale, num_real).sub_(log_normaliser[:, None])
        if entropy_grad is None:
            return log_p.exp_().mul_(-log_prob_grad[:, None])
        p = log_p.exp()
        log_p.add_(entropy[:, None]).mul_(-entropy_grad[:, None]).sub_(log_prob_grad[:, None])
        return p.mul_(log_p)
    of_row = _kept_probabilities(logits, rows, cut, log_kept, scale, num_real).mul_(-log_prob_grad[:, None])
    if entropy_grad is not None:
        log_p = _scaled(logits, rows, scale, num_real).sub_(log_normaliser[:, None])
        p = log_p.exp()
        of_row.add_(p.mul_(log_p.add_(entropy[:, None]).mul_(-entropy_grad[:, None])))
    return of_row


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
    top_p: float = 1.0,
    num_kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and, if asked for, the entropy of each row.

    The distribution of the log-probabilities can be cut, by a mask or to its nucleus: they are then those of what is
    left, which always includes the target, normalised again. The entropy stays that of the whole distribution.

    Args:
        logits: [T, V/tp], any float type; this rank's columns.
        tokens: [n], the target of each row, as global token ids.
        tp_group: the ranks that share the vocabulary; None = all of it is here.
        with_entropy: also return the entropy in nats.
        chunk_size: rows worked on at a time (bounds the float32 copies); -1 = all.
        log_prob_keep_mask: bool [n, V/tp], the tokens that log-probabilities count; None = all.
        with_entropy_grad: the entropy is differentiable; False saves its part of the backward pass.
        temperature: divides the logits, as the engine does when it samples.
        vocab_size: real tokens over all ranks; columns beyond are padding, which no engine has. None = no padding.
        rows: [n], which of the T rows belong to the targets, each at most once; None = all, in order (n = T). Gathered
            before, they would be a second copy of the logits, and of their gradient.
        top_p: keep of each row its nucleus, as engines do when they sample (see `nucleus_bounds`); 1 = all.
        num_kept: [n] float32; where there is a cut, the tokens that each row keeps are written to it.

    Returns:
        log_probs [n] and entropy [n] (None unless asked for), float32, the same on every rank of the group.

    Raises:
        ValueError: there are both a mask and a nucleus.
    """
    if log_prob_keep_mask is not None and top_p != 1.0:
        raise ValueError(f"log_prob_keep_mask and top_p {top_p} exclude each other: give one cut")
    cut = float(top_p) if top_p != 1.0 else log_prob_keep_mask
    start, num_real = _real_columns(logits.shape[-1], tp_group, vocab_size)
    shard = _Shard(tp_group, start, num_real, 1.0 / temperature, chunk_size)
    trains_entropy = with_entropy and with_entropy_grad
    log_probs, entropy = _LogProbAndEntropy.apply(logits, rows, tokens, shard, trains_entropy, cut, num_kept)
    return log_probs, entropy if with_entropy else None


def _real_columns(width: int, tp_group: dist.ProcessGroup | None, vocab_size: int | None) -> tuple[int, int]:
    """(the first token id of this rank's columns, how many of the columns are no padding)."""
    tp_size, tp_rank = (tp_group.size(), tp_group.rank()) if tp_group is not None else (1, 0)
    real = width * tp_size if vocab_size is None else vocab_size
    start = tp_rank * width
    return start, min(max(real - start, 0), width)


# ---- what a cut keeps


def nucleus_bounds(
    mass_above: Callable[[torch.Tensor], torch.Tensor], limit: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The smallest logit that top-p keeps in each row: more likely tokens have together at most `limit`.

    So, as in SGLang's samplers, the token that crosses p is kept. Equal logits are kept or dropped together, as
    flashinfer does; the PyTorch sampler keeps of those at the edge as many as it needs, in the order of its sort.

    Args:
        mass_above: bounds [n] -> what the tokens of each row with larger logits weigh, over all ranks.
        limit: [n], p times what the whole row weighs.
        dtype: of the logits.

    Returns:
        [n] of `dtype`. It is exact: it lies between the last logit that is dropped and the first that is kept.
    """
    integer = _INTEGERS[dtype.itemsize]
    # Integers in the order of the numbers whose bits they are; at +inf, nothing is above.
    ends = torch.tensor([float("-inf"), float("inf")], dtype=dtype, device=limit.device)
    low, high = (end.expand_as(limit).clone() for end in _ordered(ends.view(integer).long(), integer))
    for _ in range(8 * dtype.itemsize):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # their sum may be too large for an integer
        fits = mass_above(_ordered(middle, integer).to(integer).view(dtype)) <= limit
        low, high = torch.where(fits, low, torch.minimum(middle + 1, high)), torch.where(fits, middle, high)
    return _ordered(high, integer).to(integer).view(dtype)


def _ordered(bits: torch.Tensor, integer: torch.dtype) -> torch.Tensor:
    """Bits of floats as signed integers <-> integers that rise with the float; its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)


def _is_kept(logits: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Which of the logits [n, V] a cut keeps."""
    return cut[:, : logits.shape[1]] if cut.dtype == torch.bool else logits >= cut[:, None]


def _is_kept_at(logits: torch.Tensor, column: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Whether a cut keeps one logit [n] of each row, of column [n]."""
    return cut.gather(1, column[:, None])[:, 0] if cut.dtype == torch.bool else logits >= cut


@fused_on_cuda
def _mass_above(
    logits: torch.Tensor, rows: torch.Tensor, bound: torch.Tensor, top: torch.Tensor, scale: float, num_real: int
) -> torch.Tensor:
    """Sum of exp(scaled logit - top) over the logits of each row that are larger than bound [n]."""
    raw = logits[:, :num_real][rows]
    dropped = raw <= bound[:, None]
    return raw.float().mul_(scale).sub_(top[:, None]).exp_().masked_fill_(dropped, 0).sum(dim=-1)


@fused_on_cuda
def _kept_sums(
    logits: torch.Tensor,
    rows: torch.Tensor,
    column: torch.Tensor,
    is_here: torch.Tensor,
    cut: torch.Tensor,
    top: torch.Tensor,
    scale: float,
    num_real: int,
) -> torch.Tensor:
    """Of what is kept, and the target: the sum of exp(scaled logit - top), and how many they are, [2, n]."""
    at_target = logits[rows, column]
    target_only = is_here & ~_is_kept_at(at_target, column, cut)
    raw = logits[:, :num_real][rows]
    kept = _is_kept(raw, cut)
    mass = raw.float().mul_(scale).sub_(top[:, None]).exp_().masked_fill_(~kept, 0).sum(dim=-1)
    mass = mass + torch.where(target_only, (at_target.float() * scale - top).exp(), 0)
    return torch.stack([mass, kept.sum(dim=-1).float() + target_only])


def _kept_probabilities(
    logits: torch.Tensor,
    rows: torch.Tensor,
    cut: torch.Tensor,
    log_normaliser: torch.Tensor,
    scale: float,
    num_real: int,
) -> torch.Tensor:
    """What a row's tokens have once it is cut, [n, V/tp] float32; of a target that was dropped, 0."""
    raw = logits[:, :num_real][rows]
    kept = _is_kept(raw, cut)
    return raw.float().mul_(scale).sub_(log_normaliser[:, None]).exp_().masked_fill_(~kept, 0)
