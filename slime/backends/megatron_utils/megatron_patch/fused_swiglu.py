"""SwiGLU without a bias by one kernel each way, started without torch.compile.

Upstream (0.16.1): its autograd function calls two functions of torch.compile, whose guards and wrappers take the host
longer than the operations one by one. Functions that add a bias or weigh experts are left as they are. It can go when
a compiled function costs the host no more than a kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from slime.utils.accelerator.fusion import triton_works


def apply() -> None:
    """Replace Megatron's autograd function; does nothing the second time."""
    import megatron.core.fusions.fused_bias_swiglu as fused_bias_swiglu

    upstream = fused_bias_swiglu.SwiGLUFunction
    if upstream.__module__ == __name__:
        return

    class SwiGLUFunction:
        """What Megatron calls: our kernel where it keeps its input as it is."""

        @staticmethod
        def apply(y: torch.Tensor, is_kept_in_fp8: bool, is_offloaded: bool) -> Any:
            """y [n, 2 F] -> [n, F]."""
            if is_kept_in_fp8 or is_offloaded or y.device.type != "cuda" or not triton_works():
                return upstream.apply(y, is_kept_in_fp8, is_offloaded)
            from slime.backends.megatron_utils.kernels.pointwise import SwiGLU

            return SwiGLU.apply(y)

    fused_bias_swiglu.SwiGLUFunction = SwiGLUFunction
