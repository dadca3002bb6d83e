"""DeepGEMM's products are those of the emulation, with the gradients of bf16, and activations are quantised as
SGLang's kernel does it; needs a Hopper GPU and the packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from slime.weights.quantization import quantize_blocks, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability(0)[0] != 9, reason="needs a Hopper GPU"
    ),
]
needs_deep_gemm = pytest.mark.skipif(
    importlib.util.find_spec("deep_gemm") is None, reason="the package sgl-deep-gemm is not installed"
)
HIDDEN, WIDTH = 1024, 768


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@needs_deep_gemm
@pytest.mark.parametrize("is_ue8m0", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 768, 1024), (333, 576, 7168), (4096, 4096, 512)])
def test_a_product_is_that_of_the_emulation(tokens: int, rows: int, columns: int, is_ue8m0: bool) -> None:
    from slime.backends.megatron_utils.layers.fp8_linears import Scaled, emulated_product, fp8_product

    given, weight = normal(tokens, columns), normal(rows, columns, seed=1)
    found = fp8_product(given, weight, is_ue8m0)
    of_weight = Scaled(*quantize_blocks(weight, (128, 128), ue8m0=is_ue8m0))
    expected = emulated_product(Scaled(*quantize_rows(given, 128)), of_weight)
    # bf16's rounding, and that of Hopper's fp8 sums over 128 channels, which have fewer bits than fp32
    assert relative(found, expected) < 4e-3
    exact = given.double() @ weight.double().t()
    assert 1e-2 < relative(found, exact) < 6e-2  # it is fp8, and no more than that


@needs_deep_gemm
@pytest.mark.parametrize("counts", [[300, 0, 17, 195], [0, 512, 0, 0], [1, 2, 3, 506], [0, 0, 0, 0]])
def test_experts_have_the_products_of_the_emulation(counts: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils.layers import fp8_linears

    rows = normal(sum(counts), HIDDEN)
    weights = [normal(WIDTH, HIDDEN, seed=1 + expert) for expert in range(len(counts))]
    found = fp8_linears.fp8_grouped_product(rows, weights, counts, torch.empty(0), is_ue8m0=False)
    monkeypatch.setattr(fp8_linears, "is_on_gpu", lambda _: False)
    expected = fp8_linears.fp8_grouped_product(rows, weights, counts, torch.empty(0), is_ue8m0=False)
    assert found.shape == expected.shape == (sum(counts), WIDTH)
    assert not sum(counts) or relative(found, expected) < 4e-3


@needs_deep_gemm
def test_gradients_are_those_of_megatrons_linear_layer() -> None:
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

    from slime.backends.megatron_utils.layers.fp8_linears import Fp8Forward
    from slime.backends.megatron_utils.layers.rounded_linear import rounded_linear

    grad, gradients = normal(64, 2, WIDTH, seed=2), []
    options = (False, False, False, None, None, None)
    for product in (
        lambda x, w: rounded_linear(x, w, None, *options, rounding=Fp8Forward(False)),
        lambda x, w: LinearWithGradAccumulationAndAsyncCommunication.apply(x, w, None, *options),
    ):
        given = normal(64, 2, HIDDEN).requires_grad_()
        weight = torch.nn.Parameter(normal(WIDTH, HIDDEN, seed=1))
        product(given, weight).backward(grad)
        gradients.append((given.grad, weight.grad))
    assert torch.equal(gradients[0][0], gradients[1][0]) and torch.equal(gradients[0][1], gradients[1][1])


def test_activations_are_quantized_as_sglangs_kernel_does_it() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    given = normal(777, 2048) * torch.logspace(-3, 3, 777, device="cuda")[:, None].bfloat16()
    values, scales = quantize_rows(given, 128)
    theirs, their_scales = sglang_per_token_group_quant_fp8(
        given, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )
    assert torch.equal(scales, their_scales.contiguous())
    # The kernel is compiled with fast division: what lies between two e4m3 numbers may go to the other one.
    differ = values.view(torch.uint8) != theirs.view(torch.uint8)
    assert differ.float().mean() < 1e-3, differ.sum()
