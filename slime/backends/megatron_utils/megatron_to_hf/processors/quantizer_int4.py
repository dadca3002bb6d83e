"""Quantise a bucket of HF tensors to 4-bit integers by rounding, as the HF checkpoint of the engines stores them.

Groups lie along the columns, so matrices of the same width are quantised as one tall matrix: a bucket of experts has
thousands, and a kernel launch costs as much as the work on one. tools/convert_hf_to_int4_direct.py stores weights by
`stored` and `planned`, too. It does not know where the tensors come from or go to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.finite import QuantizationError, check_finite
from slime.conversion.reader import TensorInfo
from slime.weights.formats import PACKED, SCALE, SHAPE, ZERO, Int4Format
from slime.weights.int4 import PER_INT32, pack, quantize_groups

Bucket = list[tuple[str, torch.Tensor]]
MAX_ELEMENTS = 2**26
"""Of matrices that are quantised together: in fp32, with what is computed of it, 1 GB."""


@torch.no_grad()
def quantize_bucket(bucket: Bucket, fmt: Int4Format) -> Bucket:
    """Return the tensors of `bucket` in their order, each quantised one as its values, scales and shape.

    Args:
        bucket: (HF name, full tensor).
        fmt: what the checkpoint wants.

    Raises:
        QuantizationError: a weight is infinite or no number, or its columns are no whole groups; names it.
    """
    chosen = [(name, tensor) for name, tensor in bucket if fmt.quantizes(name)]
    for name, tensor in chosen:
        if not divides(tuple(tensor.shape), fmt):
            raise QuantizationError(
                f"{name} has the shape {list(tensor.shape)}, which is not whole groups of {fmt.group_size} columns, "
                "as the quantization_config of --hf-checkpoint has them: is it the config.json of this model?"
            )
    found = {name: parts for stack in _stacks(chosen) for name, parts in _stored_together(stack, fmt)}
    check_finite([(name, parts[1]) for name, parts in found.items()])
    shapes: dict[tuple[int, ...], torch.Tensor] = {}
    quantized: Bucket = []
    for name, tensor in bucket:
        if name not in found:
            quantized.append((name, tensor))
            continue
        size = tuple(tensor.shape)
        if size not in shapes:
            shapes[size] = torch.tensor(size, device=tensor.device)
        values, scales, zeros = found[name]
        parts = [values, scales, shapes[size]] + ([] if zeros is None else [zeros])
        quantized += zip(stored_names(name, fmt), parts, strict=True)
    return quantized


def stored_names(name: str, fmt: Int4Format) -> list[str]:
    """Names of what a weight is stored as, in the order of `quantize_bucket`."""
    module = name.removesuffix("weight")
    return [module + part for part in (PACKED, SCALE, SHAPE, *(() if fmt.is_symmetric else (ZERO,)))]


def divides(shape: Sequence[int], fmt: Int4Format) -> bool:
    """Whether a weight of this shape can be stored: whole groups, and zero points packed along the rows."""
    rows_of = 1 if fmt.is_symmetric else PER_INT32
    return len(shape) == 2 and shape[1] % fmt.group_size == 0 and shape[0] % rows_of == 0


def planned(tensors: Mapping[str, TensorInfo], fmt: Int4Format) -> dict[str, TensorInfo]:
    """What `quantize_bucket` makes of tensors like these, without their values; in the same order."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if not fmt.quantizes(name):
            found[name] = info
            continue
        (rows, columns), groups = info.shape, info.shape[1] // fmt.group_size
        infos = [
            TensorInfo(torch.int32, (rows, -(-columns // PER_INT32))),
            TensorInfo(info.dtype, (rows, groups)),
            TensorInfo(torch.int64, (2,)),
            TensorInfo(torch.int32, (rows // PER_INT32, groups)),
        ]
        found |= zip(stored_names(name, fmt), infos, strict=False)
    return found


def _stacks(named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Matrices of the same width, not too many at a time."""
    by_width: dict[tuple[int, torch.dtype], list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in named:
        key = tensor.shape[1], tensor.dtype
        if sum(other.numel() for _, other in by_width[key]) + tensor.numel() > MAX_ELEMENTS and by_width[key]:
            yield by_width.pop(key)
        by_width[key].append((name, tensor))
    yield from by_width.values()


def _stored_together(
    stack: Sequence[tuple[str, torch.Tensor]], fmt: Int4Format
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
    """(name, (values, scales, zero points)) of every matrix of a stack."""
    tall = torch.cat([tensor for _, tensor in stack]) if len(stack) > 1 else stack[0][1]
    values, scales, zeros = quantize_groups(tall, fmt.group_size, symmetric=fmt.is_symmetric)
    rows = [tensor.shape[0] for _, tensor in stack]
    names = [name for name, _ in stack]
    packed_zeros = [None] * len(rows) if zeros is None else [pack(part, 0) for part in zeros.split(rows)]
    yield from zip(names, zip(pack(values).split(rows), scales.split(rows), packed_zeros, strict=True), strict=True)
