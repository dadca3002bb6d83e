"""The triton kernels that quantise to e4m3: bytes of slime.weights.quantization, and nothing that hides a NaN.

TRITON_INTERPRET=1 runs the last test on a CPU, where triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch

from slime.weights.quantization import dequantize, quantize_blocks, quantize_rows

HAS_DEVICE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="needs CUDA")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
rounds = pytest.mark.skipif(DEVICE == "cpu", reason="triton's interpreter cuts off what a GPU rounds")


def matrix(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-4, 4, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


@rounds
def test_vectors_have_the_bytes_of_the_reference() -> None:
    from slime.backends.megatron_utils.kernels.fp8_tiles import quantize_vectors

    given = matrix(200, 256)  # filled up to 256 rows
    padded = torch.nn.functional.pad(given, (0, 0, 0, 56))
    for found, expected in zip(
        quantize_vectors(given.to(DEVICE), rows=True, columns=True),
        (quantize_rows(padded, 128), quantize_rows(padded.t(), 128)),
        strict=True,
    ):
        assert found is not None
        assert found[0].cpu().view(torch.uint8).equal(expected[0].view(torch.uint8))
        assert found[1].cpu().equal(expected[1])


@rounds
@pytest.mark.parametrize("is_ue8m0", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_have_the_bytes_of_the_reference(is_ue8m0: bool, transposed: bool) -> None:
    from slime.backends.megatron_utils.kernels.fp8_tiles import quantize_weight

    weight = matrix(256, 384)
    values, scales = quantize_blocks(weight, (128, 128), ue8m0=is_ue8m0)
    found = quantize_weight(weight.to(DEVICE), is_ue8m0=is_ue8m0, transposed=transposed)
    expected = (values.t(), scales.t()) if transposed else (values, scales)
    assert found[0].cpu().view(torch.uint8).equal(expected[0].view(torch.uint8))
    assert found[1].cpu().equal(expected[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    """All values of its 128 neighbours become NaN or infinite, and no others do."""
    from slime.backends.megatron_utils.kernels.fp8_tiles import quantize_vectors, quantize_weight

    given = matrix(128, 256)
    given[3, 130] = bad
    rows, columns = quantize_vectors(given.to(DEVICE), rows=True, columns=True)
    assert rows is not None and columns is not None
    expected = torch.ones(128, 256, dtype=torch.bool)
    expected[3, 128:] = False
    assert dequantize(rows[0].cpu(), rows[1].cpu(), (1, 128)).isfinite().equal(expected)
    expected = torch.ones(256, 128, dtype=torch.bool)
    expected[130] = False
    assert dequantize(columns[0].cpu(), columns[1].cpu(), (1, 128)).isfinite().equal(expected)
    for is_ue8m0 in (False, True):
        values, scales = quantize_weight(given.to(DEVICE), is_ue8m0=is_ue8m0, transposed=False)
        finite = dequantize(values.cpu(), scales.cpu(), (128, 128)).isfinite()
        assert finite[:, :128].all() and not finite[:, 128:].any()
