"""Quantise a bf16 matrix to e4m3 by tiles of 128 x 128, in triton: along rows, along columns, or as a whole tile.

One pass over the matrix writes all that its products want: values with a scale for 128 neighbours of a row, the
transposed values with a scale for 128 neighbours of a column, or, of weights, values with one scale a tile and their
transpose. The numbers are those of slime.weights.quantization, bit for bit; what is not finite gets an infinite scale.
It needs triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slime.weights.quantization import E4M3

TILE = 128
LARGEST: tl.constexpr = tl.constexpr(448.0)
INVERSE: tl.constexpr = tl.constexpr(1 / 448.0)
SMALLEST_OF_WEIGHTS: tl.constexpr = tl.constexpr(1e-12)
SMALLEST_OF_ROWS: tl.constexpr = tl.constexpr(1e-10)


@triton.jit
def _as_bytes(values):
    clamped = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    return clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _sizes(tile):
    """Of NaN infinity, which makes a scale, and so the product, not finite: triton's max leaves NaN out."""
    return tl.where(tile == tile, tl.abs(tile), float("inf"))


@triton.jit
def _quantize_vectors(  # type: ignore[no-untyped-def]
    x, row_values, row_scales, column_values, column_scales, num_rows, padded_rows, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tile = tl.load(x + places, mask=(rows < num_rows)[:, None], other=0.0).to(tl.float32)
    sizes = _sizes(tile)
    if ROWS:
        largest = tl.maximum(tl.max(sizes, axis=1), SMALLEST_OF_ROWS)
        tl.store(row_values + places, _as_bytes(tile * (tl.div_rn(1.0, largest) * LARGEST)[:, None]))
        tl.store(row_scales + j.to(tl.int64) * padded_rows + rows, largest * INVERSE)
    if COLUMNS:
        largest = tl.maximum(tl.max(sizes, axis=0), SMALLEST_OF_ROWS)
        turned = tl.trans(_as_bytes(tile * (tl.div_rn(1.0, largest) * LARGEST)[None, :]))
        turned_places = columns.to(tl.int64)[:, None] * padded_rows + rows[None, :]
        tl.store(column_values + turned_places, turned)
        tl.store(column_scales + i.to(tl.int64) * width + columns, largest * INVERSE)


@triton.jit
def _quantize_weight(  # type: ignore[no-untyped-def]
    weight, values, scales, num_rows, width, scale_stride,
    IS_UE8M0: tl.constexpr, TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i, j = tl.program_id(0), tl.program_id(1)
    rows, columns = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    places = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tile = tl.load(weight + places).to(tl.float32)
    largest = tl.maximum(tl.max(tl.max(_sizes(tile), axis=1), axis=0), SMALLEST_OF_WEIGHTS)
    scale = tl.div_rn(largest, LARGEST)
    if IS_UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    found = _as_bytes(tile * tl.div_rn(1.0, scale))
    if TRANSPOSED:
        tl.store(values + columns.to(tl.int64)[:, None] * num_rows + rows[None, :], tl.trans(found))
        tl.store(scales + j * scale_stride + i, scale)
    else:
        tl.store(values + places, found)
        tl.store(scales + i * scale_stride + j, scale)


Pair = tuple[torch.Tensor, torch.Tensor]


def quantize_vectors(matrix: torch.Tensor, *, rows: bool, columns: bool) -> tuple[Pair | None, Pair | None]:
    """Quantise activations or gradients along one or both directions.

    Args:
        matrix: [T, K], K a multiple of 128; T is filled up to a multiple of 128, T', with zeros.
        rows: scales for 128 neighbours of a row.
        columns: the same of a column.

    Returns:
        (e4m3 [T', K], fp32 [T', K / 128]), and of the transposed matrix (e4m3 [K, T'], fp32 [K, T' / 128]); None for
        what was not asked for. Scales lie column by column, as cuBLAS reads them.
    """
    matrix = matrix.contiguous()
    num_rows, width = matrix.shape
    tall = -(-num_rows // TILE) * TILE
    new = matrix.new_empty
    along_rows = (new(tall, width, dtype=torch.uint8), new(width // TILE, tall, dtype=torch.float32)) if rows else None
    along_columns = (
        (new(width, tall, dtype=torch.uint8), new(tall // TILE, width, dtype=torch.float32)) if columns else None
    )
    grid = (tall // TILE, width // TILE)
    outputs = [*(along_rows or (matrix, matrix)), *(along_columns or (matrix, matrix))]
    if tall:
        _quantize_vectors[grid](
            matrix, *outputs, num_rows, tall, width, ROWS=rows, COLUMNS=columns, TILE=TILE, num_warps=8
        )
    return _finished(along_rows), _finished(along_columns)


def quantize_weight(weight: torch.Tensor, *, is_ue8m0: bool, transposed: bool) -> Pair:
    """Quantise a weight with one scale a tile of 128 x 128.

    Args:
        weight: [N, K], multiples of 128.
        is_ue8m0: scales are rounded up to powers of two.
        transposed: return the transposed weight.

    Returns:
        e4m3 [N, K] or [K, N], and fp32 scales [N / 128, K / 128] or [K / 128, N / 128], whose rows lie at multiples of
        16 bytes, as cuBLAS reads them.
    """
    weight = weight.contiguous()
    num_rows, width = weight.shape
    out_rows, out_width = (width, num_rows) if transposed else (num_rows, width)
    values = weight.new_empty(out_rows, out_width, dtype=torch.uint8)
    stride = -(-(out_width // TILE) // 4) * 4
    scales = weight.new_zeros(out_rows // TILE, stride, dtype=torch.float32)
    grid = (num_rows // TILE, width // TILE)
    _quantize_weight[grid](
        weight, values, scales, num_rows, width, stride,
        IS_UE8M0=is_ue8m0, TRANSPOSED=transposed, TILE=TILE, num_warps=8,
    )  # fmt: skip
    return values.view(E4M3), scales[:, : out_width // TILE]


def _finished(pair: Pair | None) -> Pair | None:
    return None if pair is None else (pair[0].view(E4M3), pair[1].t())
