"""Which tokens a distribution keeps when it is cut: the nucleus of top-p, or a mask; and what is left of it.

A cut is either a bool mask [n, V/tp] or one bound per row [n]: the smallest logit that is kept, in the logits' type.
The bound is found by bisection, without sorting: a row is read once per bit of its type (16 times for bf16, 32 for
fp32), nothing of its size is kept, and a vocabulary that is split over ranks needs but sums. It knows nothing about
samples; which rows and columns belong together, its callers know (slime.utils.ppo_utils.log_probs).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime.utils.fusion import fused_on_cuda

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def is_kept(logits: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Which of the logits [n, V] a cut keeps."""
    return cut[:, : logits.shape[1]] if cut.dtype == torch.bool else logits >= cut[:, None]


def is_kept_at(logits: torch.Tensor, column: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Whether a cut keeps one logit [n] of each row, of column [n]."""
    return cut.gather(1, column[:, None])[:, 0] if cut.dtype == torch.bool else logits >= cut


@fused_on_cuda
def mass_above(
    logits: torch.Tensor, rows: torch.Tensor, bound: torch.Tensor, top: torch.Tensor, scale: float, num_real: int
) -> torch.Tensor:
    """Sum of exp(scaled logit - top) over the logits of each row that are larger than bound [n]."""
    raw = logits[:, :num_real][rows]
    dropped = raw <= bound[:, None]
    return raw.float().mul_(scale).sub_(top[:, None]).exp_().masked_fill_(dropped, 0).sum(dim=-1)


@fused_on_cuda
def kept_sums(
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
    target_only = is_here & ~is_kept_at(at_target, column, cut)
    raw = logits[:, :num_real][rows]
    kept = is_kept(raw, cut)
    mass = raw.float().mul_(scale).sub_(top[:, None]).exp_().masked_fill_(~kept, 0).sum(dim=-1)
    mass = mass + torch.where(target_only, (at_target.float() * scale - top).exp(), 0)
    return torch.stack([mass, kept.sum(dim=-1).float() + target_only])


def kept_probabilities(
    logits: torch.Tensor,
    rows: torch.Tensor,
    cut: torch.Tensor,
    log_normaliser: torch.Tensor,
    scale: float,
    num_real: int,
) -> torch.Tensor:
    """What a row's tokens have once it is cut, [n, V/tp] float32; of a target that was dropped, 0."""
    raw = logits[:, :num_real][rows]
    kept = is_kept(raw, cut)
    return raw.float().mul_(scale).sub_(log_normaliser[:, None]).exp_().masked_fill_(~kept, 0)
