"""The block quantiser under its public name. It is plain torch, compiled on CUDA, and no triton of ours."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.weights.formats import DEFAULT_BLOCK
from slime.weights.quantization import quantize_blocks

__all__ = ["blockwise_cast_to_fp8_triton"]


def blockwise_cast_to_fp8_triton(
    x: torch.Tensor, block_size: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 values [N, K], fp32 scales [ceil(N / bn), ceil(K / bk)]) of a matrix [N, K].

    Args:
        x: the matrix, on CPU or CUDA.
        block_size: (bn, bk), default (128, 128).
    """
    rows, columns = block_size or DEFAULT_BLOCK
    return quantize_blocks(x, (rows, columns))
