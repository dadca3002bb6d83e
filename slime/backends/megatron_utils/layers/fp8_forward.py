"""Linear layers whose forward pass computes as SGLang's fp8 engine does, and whose gradients are those of bf16.

An engine with fp8 weights multiplies e4m3 values: weights with one scale a block of 128 x 128, and what a layer is
given with one scale for each token's next 128 channels. Here the same is done to the trainer's weights and
activations, so that the policy that is trained is the one that generates. The backward pass takes both as they were
before (straight through): rounding has no gradient of use.

Only the product on a rank changes. Gathering, reducing and the gradients are Megatron's, whose autograd functions are
inherited. On CUDA the product is DeepGEMM's (sgl-deep-gemm, Hopper's fp32 scales); `emulated_product` is what it is
compared to, and what it is on a CPU, where the tests run it and the command line refuses it. Which layers are chosen
is fp8_forward_plan's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    custom_fwd,
    dist_all_gather_func,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from slime.backends.megatron_utils.layers.grouped_experts import GroupedExperts, stacked
from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.megatron.fp8_forward_plan import BLOCK, EXPERTS, LAYERS, MOE_LAYERS, PART_OF_BLOCK, Fp8Choice
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
    for model in models:
        for layer in unwrap(model).decoder.layers:
            number = layer.layer_number - 1  # Megatron counts from 1, over all pipeline stages
            if number in choice.layers:
                _change_linears(layer, number, choice)
            if number in choice.expert_layers:
                _change_experts(layer, number, choice)


def _change_linears(layer: torch.nn.Module, number: int, choice: Fp8Choice) -> None:
    names = []
    for name, module in _linears(layer):
        if choice.takes(number, name):
            _check_shape(f"{LAYERS} {number}: {name}", module.weight)
            module._forward_impl = partial(fp8_linear, is_ue8m0=choice.fmt.is_ue8m0)
            names.append(name)
    if not names:
        raise UsageError(
            f"{LAYERS} {number}: none of the layer's linear layers is chosen, or in fp8 in the checkpoint; there are "
            f"{', '.join(name for name, _ in _linears(layer))}."
        )
    logger.info("layer %d: forward pass in fp8 of %s", number, ", ".join(names))


def _linears(layer: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Linear layers outside of experts, by their names in the layer."""
    for name, module in layer.named_modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not name.startswith(EXPERTS + "."):
            yield name, module


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


def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[torch.Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Any = None,
    *,
    is_ue8m0: bool,
) -> torch.Tensor:
    """What Megatron's linear layers call, by these names, for their product with a rank's weight [out, in].

    Returns:
        [..., out], of all the sequence where `sequence_parallel` says that `input` is a part of it.
    """
    if not weight.requires_grad:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        frozen: torch.Tensor = _FrozenFp8Linear.apply(input, weight, bias, allreduce_dgrad, tp_group, is_ue8m0)
        return frozen
    output: torch.Tensor = _Fp8Linear.apply(
        input,
        weight,
        bias,
        gradient_accumulation_fusion,
        allreduce_dgrad,
        sequence_parallel,
        grad_output_buffer,
        wgrad_deferral_limit,
        tp_group,
        is_ue8m0,
    )
    return output


class _Fp8Linear(LinearWithGradAccumulationAndAsyncCommunication):
    """Megatron's function with another product: what its backward pass reads is kept as its forward pass keeps it."""

    @staticmethod
    @custom_fwd
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: list[torch.Tensor] | None,
        wgrad_deferral_limit: int | None,
        tp_group: Any,
        is_ue8m0: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if gradient_accumulation_fusion else None
        ctx.use_bias = bias is not None
        ctx.gradient_accumulation_fusion = gradient_accumulation_fusion
        ctx.allreduce_dgrad = allreduce_dgrad
        ctx.sequence_parallel = sequence_parallel
        ctx.wgrad_deferral_limit = wgrad_deferral_limit
        ctx.grad_output_buffer = grad_output_buffer
        ctx.tp_group = tp_group
        return fp8_product(_gathered(input, tp_group) if sequence_parallel else input, weight, bias, is_ue8m0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *LinearWithGradAccumulationAndAsyncCommunication.backward(ctx, *grads), None


class _FrozenFp8Linear(LinearWithFrozenWeight):
    """The same for a weight that takes no gradient."""

    @staticmethod
    @custom_fwd
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        tp_group: Any,
        is_ue8m0: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.allreduce_dgrad, ctx.tp_group = allreduce_dgrad, tp_group
        return fp8_product(input, weight, bias, is_ue8m0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *LinearWithFrozenWeight.backward(ctx, *grads), None


def _gathered(input: torch.Tensor, tp_group: Any) -> torch.Tensor:
    """[s / TP, b, in] -> [s, b, in], in Megatron's buffer for it."""
    size = [input.shape[0] * tp_group.size(), *input.shape[1:]]
    whole: torch.Tensor = get_global_memory_buffer().get_tensor(size, input.dtype, "mpu")
    dist_all_gather_func(whole, input, group=tp_group)
    return whole


def fp8_product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_ue8m0: bool) -> torch.Tensor:
    """[..., in] times a weight [out, in] transposed, plus a bias [out], as an fp8 engine computes it: [..., out].

    Both are quantised here, at every call: weights change with every step, and reading one costs little beside its
    product with thousands of tokens. The result has bf16's digits, and the type of `input`.
    """
    rows = Scaled(*quantize_rows(input.flatten(0, -2), BLOCK))
    of_weight = Scaled(*quantize_blocks(weight, (BLOCK, BLOCK), ue8m0=is_ue8m0))
    multiply = _deep_gemm_product if is_on_gpu(input) else emulated_product
    output = multiply(rows, of_weight).to(input.dtype).unflatten(0, input.shape[:-1])
    return output if bias is None else output + bias


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
