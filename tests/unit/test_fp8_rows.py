"""Activations and weights are quantised to fp8 as SGLang does it: bit for bit as its own torch code on the CPU."""

from __future__ import annotations

import pytest
import torch

from slime.backends.sglang_utils import cpu_standins
from slime.weights.quantization import E4M3, dequantize, quantize_blocks, quantize_rows

pytestmark = pytest.mark.timeout(300)  # SGLang's import


@pytest.fixture(scope="module", autouse=True)
def sglang_without_cuda() -> None:
    cpu_standins.install()


def rows(kind: str) -> torch.Tensor:
    """[64, 384] in bf16: ordinary, of very different sizes from group to group, or with values that recur."""
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(64, 384, generator=generator)
    if kind == "spread":
        plain = plain * torch.logspace(-3, 6, 64)[:, None]
    if kind == "coarse":
        plain = (plain * 4).round() / 4  # many that lie between two e4m3 numbers
        plain[:, ::128] = 448.0
    return plain.bfloat16()


@pytest.mark.parametrize("kind", ["plain", "spread", "coarse"])
def test_activations_have_the_values_of_sglangs_torch_code_and_its_kernels_scales(kind: str) -> None:
    from sglang.test.test_deepep_utils import per_token_cast_to_fp8

    given = rows(kind)
    values, scales = quantize_rows(given, 128)
    expected, expected_scales = per_token_cast_to_fp8(given)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    # per_token_group_quant.cuh multiplies by fp32(1 / 448), as torch does on CUDA; on the CPU torch divides.
    largest = given.unflatten(1, (-1, 128)).abs().amax(-1).float()
    assert torch.equal(scales, largest * torch.tensor(1 / 448, dtype=torch.float32))
    torch.testing.assert_close(scales, expected_scales, rtol=2**-23, atol=0)


def test_a_group_of_zeros_stays_zeros_and_the_largest_value_of_a_group_becomes_448() -> None:
    given = torch.zeros(2, 256, dtype=torch.bfloat16)
    given[1, 130] = -3.0
    values, scales = quantize_rows(given, 128)
    assert values.float()[1, 130] == -448.0 and int((values.float() != 0).sum()) == 1
    floor = torch.tensor(1e-10) * torch.tensor(1 / 448)  # SGLang's smallest largest value
    assert scales[0].tolist() == [floor.item()] * 2 and scales[1, 0] == floor
    torch.testing.assert_close(dequantize(values, scales, (1, 128))[1, 130], torch.tensor(-3.0), rtol=2**-22, atol=0)
    assert quantize_rows(given[:0], 128)[0].shape == (0, 256)


def test_what_is_no_number_stays_none() -> None:
    """SGLang's kernel makes 448 of it, so that graphs can be captured with anything; a trainer has to see it."""
    given = torch.ones(1, 128, dtype=torch.bfloat16)
    given[0, 5] = float("nan")
    assert quantize_rows(given, 128)[0].float().isnan().any()


def test_weights_have_the_blocks_of_sglangs_torch_code() -> None:
    """Of powers of two, the only scales that SGLang makes itself; test_fp8 has the others against float64."""
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, per_block_cast_to_fp8

    weight = torch.randn(320, 384, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = quantize_blocks(weight, (128, 128), ue8m0=True)
    expected, expected_scales = per_block_cast_to_fp8(weight)
    assert values.dtype == E4M3 and torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    for ue8m0 in (True, False):
        values, scales = quantize_blocks(weight, (128, 128), ue8m0=ue8m0)
        theirs = block_quant_dequant(values, scales, [128, 128], torch.float32)
        assert torch.equal(dequantize(values, scales, (128, 128)), theirs)
