"""GPTQ (arXiv:2210.17323): 4-bit weights whose error on given inputs is small, not only on each weight.

Columns are rounded one after the other, and what each loses is made up for by those that come after it, as the inputs'
second moments H = sum x x^T say. It departs from the paper in one point: scales belong to groups of columns and are
chosen, symmetric, when the first column of a group is reached. Arithmetic on tensors, on any device; it knows no
models.
"""

from __future__ import annotations

import torch

from slime.weights.int4 import HIGHEST, LOWEST, quantize_groups

BLOCK = 128


class SingularInputsError(ValueError):
    """The inputs leave columns without a second moment that could be inverted."""


def quantize(
    weight: torch.Tensor, moments: torch.Tensor, group_size: int, *, dampening: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix for the inputs with these second moments.

    Args:
        weight: [N, K].
        moments: sum of x x^T over inputs, fp32 [K, K]; all zero (an expert that saw no token): plain rounding.
        group_size: columns that share a scale; K is a multiple.
        dampening: of the mean of the diagonal, added to it.

    Returns:
        values int8 [N, K] in -8 .. 7, and scales [N, K / group_size] in the weight's dtype.

    Raises:
        SingularInputsError: the moments cannot be inverted.
    """
    if not bool(moments.any()):
        values, scales, _ = quantize_groups(weight, group_size)
        return values, scales
    left, factor = weight.float().clone(), _inverse_factor(moments, dampening)
    values, scales = torch.empty_like(weight, dtype=torch.int8), []
    block_size = max(BLOCK // group_size, 1) * group_size
    for start in range(0, weight.shape[1], block_size):
        block = slice(start, min(start + block_size, weight.shape[1]))
        errors = torch.zeros_like(left[:, block])
        for column in range(block.start, block.stop):
            if column % group_size == 0:
                _, scale, _ = quantize_groups(left[:, column : column + group_size].to(weight.dtype), group_size)
                scales.append(scale[:, 0])
            step = scales[-1].float()
            values[:, column] = (left[:, column] / step).round().clamp(LOWEST, HIGHEST).to(torch.int8)
            error = (left[:, column] - values[:, column] * step) / factor[column, column]
            left[:, column : block.stop] -= torch.outer(error, factor[column, column : block.stop])
            errors[:, column - block.start] = error
        left[:, block.stop :] -= errors @ factor[block, block.stop :]
    return values, torch.stack(scales, 1)


def _inverse_factor(moments: torch.Tensor, dampening: float) -> torch.Tensor:
    """The upper factor U of the inverse of the dampened moments: U^T U."""
    damped = moments.float().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1  # a column whose input is always zero may be anything
    diagonal += dampening * diagonal.mean()
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:
        raise SingularInputsError(f"the inputs' second moments cannot be inverted ({error})") from error
