"""Log-probability and entropy of a softmax whose vocabulary may be split over tensor-parallel ranks.

The logits are read, never changed, and are all that is kept for the backward pass (the softmax is made again there);
the rows that are asked for are gathered a chunk at a time. Above the given logits that costs two float32 chunks
forward, and the logits' gradient in their type and two chunks backward. It knows nothing about samples, packing or
masks: one row of logits, one target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class _Shard:
    """This rank's columns of the vocabulary: how the rows are scaled, where they start, how many are real."""

    group: dist.ProcessGroup | None
    start: int
    num_real: int
    inverse_temperature: float
    chunk_size: int

    def chunks(self, num_rows: int) -> list[slice]:
        size = self.chunk_size if self.chunk_size > 0 else max(num_rows, 1)
        return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]

    def scaled(self, logits: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """A float32 copy of `rows` of the logits [T, V/tp] without padding columns, divided by the temperature."""
        picked = logits[:, : self.num_real][rows]
        is_copy = not isinstance(rows, slice) and picked.dtype == torch.float32
        return (picked if is_copy else picked.to(torch.float32, copy=True)).mul_(self.inverse_temperature)

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
            x = shard.scaled(logits, chunk if rows is None else rows[chunk])
            log_probs[chunk], entropy[chunk], log_normaliser[chunk] = _forward_chunk(x, targets[chunk], shard)
            del x  # or it would live on beside that of the next chunk
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
        for chunk in shard.chunks(targets.shape[0]):
            picked = chunk if rows is None else rows[chunk]
            log_p = shard.scaled(logits, picked).sub_(log_normaliser[chunk, None])
            of_entropy = entropy_grad[chunk] if ctx.with_entropy_grad else None
            log_p = _backward_chunk(log_p, targets[chunk], entropy[chunk], log_prob_grad[chunk], of_entropy, shard)
            grad[:, : shard.num_real][picked] = log_p.to(grad.dtype)
            del log_p
        return grad, None, None, None, None


def _forward_chunk(
    x: torch.Tensor, targets: torch.Tensor, shard: _Shard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, entropy and log of the normaliser of scaled logits x [n, V/tp], which are overwritten."""
    # a rank may hold nothing but padding columns
    top = x.amax(dim=-1) if shard.num_real else x.new_full((x.shape[0],), float("-inf"))
    top = shard.all_reduce(top, dist.ReduceOp.MAX)
    x -= top[:, None]
    column, is_here = shard.local_targets(targets)
    at_target = (
        x.gather(1, column[:, None])[:, 0].masked_fill(~is_here, 0) if shard.num_real else torch.zeros_like(top)
    )
    e = x.exp()
    total, weighted, at_target = shard.all_reduce(
        torch.stack([e.sum(dim=-1), e.mul_(x).sum(dim=-1), at_target]), dist.ReduceOp.SUM
    )
    log_total = total.log()
    return at_target - log_total, log_total - weighted / total, log_total + top


def _backward_chunk(
    log_p: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    log_prob_grad: torch.Tensor,
    entropy_grad: torch.Tensor | None,
    shard: _Shard,
) -> torch.Tensor:
    """Gradient of the logits [n, V/tp] given log p, which is overwritten.

    d log p_t / dx_i = [i = t] - p_i ;  dH / dx_i = -p_i (log p_i + H)
    """
    if entropy_grad is None:
        grad = log_p.exp_().mul_(-log_prob_grad[:, None])
    else:
        p = log_p.exp()
        log_p.add_(entropy[:, None]).mul_(-entropy_grad[:, None]).sub_(log_prob_grad[:, None])
        grad = p.mul_(log_p)
    if shard.num_real:
        column, is_here = shard.local_targets(targets)
        grad.scatter_add_(1, column[:, None], torch.where(is_here, log_prob_grad, 0)[:, None])
    return grad.mul_(shard.inverse_temperature)


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
