"""Add a weight's gradient to the fp32 buffer inside the matrix product, without Apex.

Upstream (0.16.1): --gradient-accumulation-fusion (its default) needs Apex's fused_weight_gradient_mlp_cuda; without
it the product is written in 16 bit and then added to the buffer, which rounds it and moves twice the memory. cuBLAS
accumulates into an fp32 output by itself; torch offers that as addmm with out_dtype. It can go when Megatron calls
torch's.
"""

from __future__ import annotations

import types

import torch


def add_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += grad_output [T, out]^T @ total_input [T, in], in the precision of main_grad."""
    left = grad_output.t()
    if main_grad.dtype == total_input.dtype:
        main_grad.addmm_(left, total_input)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, left, total_input, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(left @ total_input)


def apply() -> None:
    """Give Megatron's linear layers the function where Apex is not installed."""
    import megatron.core.tensor_parallel.layers as layers

    if layers._grad_accum_fusion_available:
        return
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    layers._grad_accum_fusion_available = True
