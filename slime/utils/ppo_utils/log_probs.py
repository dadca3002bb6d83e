"""Log-probability and entropy of a softmax whose vocabulary may be split over tensor-parallel ranks.

The logits are read, never changed, and are all that is kept for the backward pass (the softmax is made again there);
the rows that are asked for are gathered a chunk at a time. Above the given logits that costs two float32 chunks
forward, and the logits' gradient in their type and two chunks backward; on CUDA the chunk is never written, the
arithmetic being fused. It knows nothing about samples, packing or masks: one row of logits, one target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slime.utils.fusion import fused_on_cuda


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
    """(logits [T, V/tp], rows [n] or None = all, targets [n]) -> (log_probs [n], entropy [n]), both float32."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        rows: torch.Tensor | None,
        targets: torch.Tensor,
        shard: _Shard,
        with_entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy, log_normaliser = (
            torch.empty(targets.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3)
        )
        for chunk in shard.chunks(targets.shape[0]):
            values = _forward_chunk(logits, _rows_of(chunk, rows, logits), targets[chunk], shard)
            log_probs[chunk], entropy[chunk], log_normaliser[chunk] = values
        ctx.shard, ctx.with_entropy_grad = shard, with_entropy_grad
        ctx.save_for_backward(logits, rows, targets, log_normaliser, entropy)
        if not with_entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, log_prob_grad: torch.Tensor, entropy_grad: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None]:
        logits, rows, targets, log_normaliser, entropy = ctx.saved_tensors
        shard: _Shard = ctx.shard
        grad = torch.zeros_like(logits)
        # a rank that holds nothing but padding columns has no gradient
        for chunk in shard.chunks(targets.shape[0]) if shard.num_real else ():
            picked = _rows_of(chunk, rows, logits)
            column, is_here = shard.local_targets(targets[chunk])
            of_rows = (log_normaliser[chunk], entropy[chunk], log_prob_grad[chunk])
            of_entropy = entropy_grad[chunk] if ctx.with_entropy_grad else None
            _write_gradient(grad, logits, picked, column, is_here, *of_rows, of_entropy, shard.scale, shard.num_real)
        return grad, None, None, None, None


def _rows_of(chunk: slice, rows: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    if rows is None:
        return torch.arange(chunk.start, chunk.stop, device=logits.device)
    return rows[chunk]


def _forward_chunk(
    logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, shard: _Shard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropy and log of the normaliser of `rows` [n]."""
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
    return at_target - log_total, log_total - weighted / total, log_total + top


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
    scale: float,
    num_real: int,
) -> None:
    """Write the rows [n] of the logits' gradient [T, V/tp].

    d log p_t / dx_i = [i = t] - p_i ;  dH / dx_i = -p_i (log p_i + H)
    """
    log_p = _scaled(logits, rows, scale, num_real).sub_(log_normaliser[:, None])
    if entropy_grad is None:
        of_row = log_p.exp_().mul_(-log_prob_grad[:, None])
    else:
        p = log_p.exp()
        log_p.add_(entropy[:, None]).mul_(-entropy_grad[:, None]).sub_(log_prob_grad[:, None])
        of_row = p.mul_(log_p)
    grad[:, :num_real][rows] = of_row.mul_(scale).to(grad.dtype)
    # Once more for the target's column, with its [i = t]: a scatter into the row would have to keep it in float32.
    log_p_t = logits[rows, column].float() * scale - log_normaliser
    of_p = log_prob_grad if entropy_grad is None else log_prob_grad + entropy_grad * (log_p_t + entropy)
    of_target = torch.where(is_here, log_prob_grad, 0) - log_p_t.exp() * of_p
    grad[rows, column] = (of_target * scale).to(grad.dtype)


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    with_entropy_grad: bool = True,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each target and, if asked for, the entropy of each row.

    Args:
        logits: [T, V/tp], any float type; this rank's columns.
        tokens: [n], the target of each row, as global token ids.
        tp_group: the ranks that share the vocabulary; None = all of it is here.
        with_entropy: also return the entropy in nats.
        chunk_size: rows worked on at a time (bounds the float32 copies); -1 = all.
        with_entropy_grad: the entropy is differentiable; False saves its part of the backward pass.
        temperature: divides the logits, as the engine does when it samples.
        vocab_size: real tokens over all ranks; columns beyond are padding, which no engine has. None = no padding.
        rows: [n], which of the T rows belong to the targets, each at most once; None = all, in order (n = T). Gathered
            before, they would be a second copy of the logits, and of their gradient.

    Returns:
        log_probs [n] and entropy [n] (None unless asked for), float32, the same on every rank of the group.
    """
    tp_size, tp_rank = (tp_group.size(), tp_group.rank()) if tp_group is not None else (1, 0)
    width = logits.shape[-1]
    real = width * tp_size if vocab_size is None else vocab_size
    start = tp_rank * width
    shard = _Shard(tp_group, start, min(max(real - start, 0), width), 1.0 / temperature, chunk_size)
    log_probs, entropy = _LogProbAndEntropy.apply(logits, rows, tokens, shard, with_entropy and with_entropy_grad)
    return log_probs, entropy if with_entropy else None
