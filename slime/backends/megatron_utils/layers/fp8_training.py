"""Linear layers that are trained in fp8: the forward pass and both gradients multiply e4m3 values (--fp8-format e4m3).

As DeepSeek-V3 (arXiv:2412.19437, section 3.3), with every product's sums in fp32:

| product | left | right |
|---|---|---|
| output [T, out] = input x weight^T | input, 1 x 128 along its channels | weight, 128 x 128 |
| gradient of the input [T, in] = grad x weight | grad, 1 x 128 along its channels | the same values, transposed |
| gradient of the weight [out, in] = grad^T x input | grad, 128 x 1 along tokens | input, 128 x 1 along tokens |

The weight's values are those that a sync sends to an fp8 engine, and the input's those that it computes with. Master
weights, the sum of gradients, the optimizer, embeddings, norms, routers, experts and the output layer stay as they
are. Everything is quantised where it is multiplied; between layers there is bf16.

On a GPU the products are cuBLAS's (torch.nn.functional.scaled_mm, Hopper and CUDA 12.9) and the values come from
kernels/fp8_tiles.py. On a CPU, where tests run, the same values are multiplied in fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.layers.fp8_forward import Scaled, is_on_gpu
from slime.backends.megatron_utils.layers.rounded_linear import WeightGradient, compute_with, linears_of
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.megatron.precision.fp8_training_plan import Fp8Training
from slime.config.megatron.precision.linear_plan import BLOCK
from slime.weights.quantization import dequantize, quantize_blocks, quantize_rows

logger = logging.getLogger(__name__)


def train_in_fp8(models: Sequence[torch.nn.Module], plan: Fp8Training | None) -> None:
    """Let the linear layers of the plan compute forward pass and gradients in fp8, and say which ones do not.

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        plan: None changes nothing.
    """
    if plan is None:
        return
    count, others = 0, set()
    for model in models:
        for layer in unwrap(model).decoder.layers:
            for name, module in linears_of(layer):
                if plan.takes(layer.layer_number - 1, name):  # Megatron counts from 1, over all pipeline stages
                    compute_with(module, Fp8Products(plan.fmt.is_ue8m0))
                    count += 1
                else:
                    others.add(f"{name} {list(module.weight.shape)}")
    logger.info("%d linear layers are trained in fp8, these in 16 bit: %s", count, ", ".join(sorted(others)) or "none")


class Fp8Products(NamedTuple):
    """The products of a linear layer (`Rounding`), all three in fp8."""

    is_ue8m0: bool

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [T, in] times a weight [out, in] transposed -> [T, out]."""
        along_rows, _ = quantized(rows, rows=True)
        return multiply(along_rows, quantized_weight(weight, is_ue8m0=self.is_ue8m0), rows.dtype)[: len(rows)]

    def gradients(self, grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, WeightGradient]:
        """As `Rounding.gradients`."""
        along_rows, along_columns = quantized(grad, rows=True, columns=weight.requires_grad)
        turned = quantized_weight(weight, is_ue8m0=self.is_ue8m0, transposed=True)
        of_input = multiply(along_rows, turned, grad.dtype)[: len(grad)]

        def of_weight(rows: torch.Tensor, main_grad: torch.Tensor | None) -> torch.Tensor | None:
            _, input_columns = quantized(rows, columns=True)
            if main_grad is None:
                return multiply(along_columns, input_columns, grad.dtype)
            main_grad.add_(multiply(along_columns, input_columns, torch.float32))
            return None

        return of_input, of_weight


Vectors = Scaled
"""e4m3 [M, C] and fp32 [M, C / 128], or, of a weight, fp32 [M / 128, C / 128]."""
NOTHING = Scaled(torch.empty(0), torch.empty(0))


def quantized(matrix: torch.Tensor, *, rows: bool = False, columns: bool = False) -> tuple[Vectors, Vectors]:
    """A matrix [T, K], with T filled up to T' = a multiple of 128, quantised along its rows [T', K], and, transposed,
    along its columns [K, T']; NOTHING for what was not asked for."""
    if is_on_gpu(matrix):
        from slime.backends.megatron_utils.kernels.fp8_tiles import quantize_vectors

        found = quantize_vectors(matrix, rows=rows, columns=columns)
        of_rows, of_columns = (NOTHING if pair is None else Scaled(*pair) for pair in found)
        return of_rows, of_columns
    padded = F.pad(matrix, (0, 0, 0, -len(matrix) % BLOCK))
    return (
        Scaled(*quantize_rows(padded, BLOCK)) if rows else NOTHING,
        Scaled(*quantize_rows(padded.t(), BLOCK)) if columns else NOTHING,
    )


def quantized_weight(weight: torch.Tensor, *, is_ue8m0: bool, transposed: bool = False) -> Scaled:
    """A weight [N, K] with one scale a block of 128 x 128, both multiples of it; or its transpose, of the same
    values."""
    weight = weight.detach()
    if is_on_gpu(weight):
        from slime.backends.megatron_utils.kernels.fp8_tiles import quantize_weight

        return Scaled(*quantize_weight(weight, is_ue8m0=is_ue8m0, transposed=transposed))
    values, scales = quantize_blocks(weight, (BLOCK, BLOCK), ue8m0=is_ue8m0)
    return Scaled(values.t(), scales.t()) if transposed else Scaled(values, scales)


def multiply(left: Scaled, right: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """left [M, C] times right [N, C] transposed, each with scales for 1 x 128 or for 128 x 128 -> [M, N]."""
    if not is_on_gpu(left.values):
        matrices = (dequantize(*side, (rows_per_scale(side), BLOCK)) for side in (left, right))
        first, second = matrices
        return (first @ second.t()).to(dtype)
    if not left.values.numel():
        return left.values.new_zeros((len(left.values), len(right.values)), dtype=dtype)
    (scale_a, recipe_a), (scale_b, recipe_b) = map(_as_cublas_reads, (left, right))
    found: torch.Tensor = F.scaled_mm(
        left.values, right.values.t(), scale_a, recipe_a, scale_b, recipe_b, output_dtype=dtype
    )
    return found


def rows_per_scale(side: Scaled) -> int:
    """1 of tokens, 128 of weights. A matrix of one row of blocks is a weight's where it has one row of scales."""
    return 1 if side.scales.shape[0] == side.values.shape[0] else BLOCK


def _as_cublas_reads(side: Scaled) -> tuple[torch.Tensor, F.ScalingType]:
    """Scales, and what they are called. [M, C / 128] column by column; of blocks, which are read in fours, [C' / 128,
    M / 128] with C' filled up to 4 x 128."""
    if rows_per_scale(side) == 1:
        return side.scales, F.ScalingType.BlockWise1x128
    rows, columns = side.scales.shape
    stride = -(-columns // 4) * 4
    return side.scales.as_strided((stride, rows), (1, stride)), F.ScalingType.BlockWise128x128
