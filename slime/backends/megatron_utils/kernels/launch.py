"""Starting triton kernels with little work for the host.

triton finds the compiled kernel for the arguments of a call anew each time, which takes the host longer than the rest
of starting a small kernel; what every layer of a model calls is worth a shorter way.
"""

from __future__ import annotations

from typing import Any

import torch

Grid = tuple[int, int, int]


class Launcher:
    """A triton kernel whose parameters are tensors, then numbers of a fixed type that triton does not specialise
    (`do_not_specialize`), then constants."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self,
        grid: Grid,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        num_warps: int = 4,
    ) -> None:
        """Start it on the current stream. It is compiled once for each device, type and alignment of the tensors, and
        value of the constants."""
        kinds = [(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]
        key = (constants, num_warps, tensors[0].get_device(), *kinds)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *constants)
            return
        compiled = self._kernel[grid](*tensors, *numbers, *constants, num_warps=num_warps)
        if compiled is not None:  # triton's interpreter compiles nothing
            self._compiled[key] = compiled


def refuse_second_derivative() -> None:
    """To be called in a backward pass: what torch's `once_differentiable` does, which takes the host as long as
    starting a kernel.

    Raises:
        RuntimeError: the gradients themselves are to be differentiated (create_graph=True).
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True differentiates gradients, which kernels by hand cannot; set TORCHDYNAMO_DISABLE=1 to "
            "run the functions as they are written"
        )
