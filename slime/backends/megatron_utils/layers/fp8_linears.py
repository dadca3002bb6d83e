"""Linear layers in fp8: their forward pass alone, as SGLang's fp8 engine computes it, or gradients, too.

An engine with fp8 weights multiplies e4m3 values: weights with one scale a block of 128 x 128, and what a layer is
given with one scale for each token's next 128 channels. Here the same is done to the trainer's weights and
activations, so that the policy that is trained is the one that generates. The backward pass takes both as they were
before (straight through): rounding has no gradient of use.

Only the product on a rank changes (rounded_linear.py). On CUDA it is DeepGEMM's (sgl-deep-gemm, Hopper's fp32 scales);
`emulated_product` is what it is compared to, and what it is on a CPU, where the tests run it and the command line
refuses it. Which layers are chosen is fp8_forward_plan's.

`train_in_fp8` (--fp8-format e4m3) multiplies e4m3 values in the forward pass and in both gradients.
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
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts, stacked
from slime.backends.megatron_utils.layers.rounded_linear import (
    WeightGradient,
    compute_with,
    gradients_of_16_bit,
    linears_of,
    numbered_layers,
)
from slime.config.megatron.precision.fp8_forward_plan import LAYERS, MOE_LAYERS, Fp8Choice
from slime.config.megatron.precision.fp8_training_plan import Fp8Training
from slime.config.megatron.precision.linear_plan import BLOCK, EXPERTS, PART_OF_BLOCK
from slime.utils.errors import UsageError
from slime.weights.quantization import dequantize, quantize_blocks, quantize_rows

logger = logging.getLogger(__name__)


class Scaled(NamedTuple):
    """e4m3 values [..., N, K] and fp32 scales: [N, K / 128] of tokens, [..., ceil(N / 128), K / 128] of weights."""

    values: torch.Tensor
    scales: torch.Tensor


def compute_in_fp8(models: Sequence[torch.nn.Module], choice: Fp8Choice | None) -> None:
    """Let the chosen layers of this rank compute their forward pass in fp8.

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        choice: None changes nothing.

    Raises:
        UsageError: a layer of this rank has nothing that is chosen, or weights that are no whole blocks. (Of the
            models that the flags describe, the command line's check says it.)
    """
    if choice is None:
        return
    for number, layer in numbered_layers(models):
        if number in choice.layers:
            _change_linears(layer, number, choice)
        if number in choice.expert_layers:
            _change_experts(layer, number, choice)


def _change_linears(layer: torch.nn.Module, number: int, choice: Fp8Choice) -> None:
    names, linears = [], [(name, module) for name, module in linears_of(layer) if not name.startswith(EXPERTS)]
    for name, module in linears:
        if choice.takes(number, name):
            _check_shape(f"{LAYERS} {number}: {name}", module.weight)
            compute_with(module, Fp8Forward(choice.fmt.is_ue8m0))
            names.append(name)
    if not names:
        raise UsageError(
            f"{LAYERS} {number}: none of the layer's linear layers is chosen, or in fp8 in the checkpoint; there are "
            f"{', '.join(name for name, _ in linears)}."
        )
    logger.info("layer %d: forward pass in fp8 of %s", number, ", ".join(names))


def _change_experts(layer: torch.nn.Module, number: int, choice: Fp8Choice) -> None:
    experts = getattr(layer.mlp, "experts", None)
    if not isinstance(experts, GroupedExperts):
        raise UsageError(f"{MOE_LAYERS} {number}: the layer has no experts that are computed as one product.")
    for expert in experts.local_experts:
        for name in ("linear_fc1", "linear_fc2"):
            _check_shape(f"{MOE_LAYERS} {number}: {name}", expert.get_submodule(name).weight)
    experts.multiply_with(partial(fp8_grouped_product, is_ue8m0=choice.fmt.is_ue8m0), weigh_last=True)
    logger.info("layer %d: forward pass in fp8 of its experts", number)


def _check_shape(what: str, weight: torch.Tensor) -> None:
    if weight.shape[0] % PART_OF_BLOCK or weight.shape[1] % BLOCK:
        raise UsageError(
            f"{what}: a weight of {weight.shape[0]} x {weight.shape[1]} is not blocks of {BLOCK} as the engine has "
            "them; leave it out."
        )


class Fp8Forward(NamedTuple):
    """The products of a linear layer (`Rounding`): the forward pass in fp8, gradients in 16 bit."""

    is_ue8m0: bool

    def product(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """rows [T, in] times a weight [out, in] transposed -> [T, out]."""
        return fp8_product(rows, weight, self.is_ue8m0)

    def gradients(self, grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, WeightGradient]:
        """Compute the gradients, see `Rounding.gradients`."""
        return gradients_of_16_bit(grad, weight)


def fp8_product(rows: torch.Tensor, weight: torch.Tensor, is_ue8m0: bool) -> torch.Tensor:
    """rows [T, in] times a weight [out, in] transposed, as an fp8 engine computes it: [T, out].

    Both are quantised here, at every call: weights change with every step, and reading one costs little beside its
    product with thousands of tokens. The result has bf16's digits, and the type of `rows`.
    """
    quantized = Scaled(*quantize_rows(rows, BLOCK))
    of_weight = Scaled(*quantize_blocks(weight, (BLOCK, BLOCK), ue8m0=is_ue8m0))
    multiply = _deep_gemm_product if is_on_gpu(rows) else emulated_product
    return multiply(quantized, of_weight).to(rows.dtype)


def fp8_grouped_product(
    rows: torch.Tensor,
    weights: Sequence[torch.Tensor],
    counts: Sequence[int],
    offsets: torch.Tensor,
    *,
    is_ue8m0: bool,
) -> torch.Tensor:
    """Each group of rows times its weight transposed, as an fp8 engine computes experts.

    Args:
        rows: [T, in], group after group.
        weights: [groups][out, in].
        counts: [groups] rows of each; they may be 0.
        offsets: the same as ends of the groups; not read.
        is_ue8m0: scales of weights are powers of two.

    Returns:
        [T, out].
    """
    # Of whole blocks, all experts are one tall matrix; else blocks would go on from one expert to the next.
    tall = [stacked(weights).flatten(0, 1)] if weights[0].shape[0] % BLOCK == 0 else weights
    pairs = [quantize_blocks(weight, (BLOCK, BLOCK), ue8m0=is_ue8m0) for weight in tall]
    of_weights = Scaled(*(torch.cat(part).unflatten(0, (len(weights), -1)) for part in zip(*pairs, strict=True)))
    if is_on_gpu(rows):
        return _deep_gemm_grouped_product(rows, of_weights, counts)
    quantized = Scaled(*quantize_rows(rows, BLOCK))
    parts = zip(*(part.split(list(counts)) for part in quantized), *of_weights, strict=True)
    return torch.cat([emulated_product(Scaled(a, b), Scaled(c, d)) for a, b, c, d in parts]).to(rows.dtype)


def emulated_product(rows: Scaled, weight: Scaled) -> torch.Tensor:
    """The numbers of an fp8 product without its kernel: values times scales, multiplied in fp32, as bf16 [M, N]."""
    left = dequantize(rows.values, rows.scales, (1, BLOCK))
    right = dequantize(weight.values, weight.scales, (BLOCK, BLOCK))
    return (left @ right.t()).bfloat16()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether real CUDA kernels can take a tensor."""
    return tensor.device.type == "cuda"  # the CPU stand-ins for CUDA answer is_cuda


def _deep_gemm_product(rows: Scaled, weight: Scaled) -> torch.Tensor:
    import deep_gemm

    output = rows.values.new_empty((rows.values.shape[0], weight.values.shape[0]), dtype=torch.bfloat16)
    if len(output):
        deep_gemm.fp8_gemm_nt((rows.values, _aligned_columns(rows.scales)), tuple(weight), output)
    return output


def _deep_gemm_grouped_product(rows: torch.Tensor, weights: Scaled, counts: Sequence[int]) -> torch.Tensor:
    """DeepGEMM wants each group to start at a multiple of its block of rows, and of every row whose group it is."""
    import deep_gemm

    out_size = weights.values.shape[1]
    if not len(rows):
        return rows.new_empty((0, out_size))
    places, groups = aligned_places(counts, int(deep_gemm.get_mk_alignment_for_contiguous_layout()))
    places, groups = places.to(rows.device), groups.to(rows.device)
    spread = rows.new_zeros((len(groups), rows.shape[1]))
    spread[places] = rows
    values, scales = quantize_rows(spread, BLOCK)
    output = rows.new_empty((len(groups), out_size), dtype=torch.bfloat16)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((values, _aligned_columns(scales)), tuple(weights), output, groups)
    return output[places].to(rows.dtype)


def aligned_places(counts: Sequence[int], alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows of groups go when each group starts at a multiple of `alignment`.

    Args:
        counts: [groups] rows of each.

    Returns:
        int64 [T] the new place of each row; int32 [places] the group of each place, those between groups included.

    Example: counts [3, 0, 1] aligned to 2 -> places [0, 1, 2, 4] and groups [0, 0, 0, 0, 2, 2].
    """
    of_groups = torch.tensor(counts)
    sizes = -(-of_groups // alignment) * alignment
    gaps = (sizes.cumsum(0) - sizes) - (of_groups.cumsum(0) - of_groups)
    places = torch.arange(int(of_groups.sum())) + gaps.repeat_interleave(of_groups)
    return places, torch.arange(len(counts), dtype=torch.int32).repeat_interleave(sizes)


def _aligned_columns(scales: torch.Tensor) -> torch.Tensor:
    """[M, G] with neighbours in a column, columns at multiples of 16 bytes: as the kernel's loads (TMA) want them."""
    rows, groups = scales.shape
    columns = scales.new_empty((groups, -(-rows // 4) * 4))[:, :rows]
    columns.copy_(scales.t())
    return columns.t()


# ---- gradients in fp8, too


def train_in_fp8(models: Sequence[torch.nn.Module], plan: Fp8Training | None) -> None:
    """Let the linear layers of the plan compute forward pass and gradients in fp8, and say which ones do not.

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        plan: None changes nothing.
    """
    if plan is None:
        return
    count, others = 0, set()
    for number, layer in numbered_layers(models):
        for name, module in linears_of(layer):
            if plan.takes(number, name):
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
        """Compute the gradients, see `Rounding.gradients`."""
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
