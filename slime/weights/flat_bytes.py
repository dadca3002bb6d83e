"""Bytes in which tensors of several types lie one behind the other. It imports nothing: a tensor is handed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def view_as(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [num_bytes] as so many elements of a type as there is room for; bytes at the end may be left over."""
    return data[: data.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
