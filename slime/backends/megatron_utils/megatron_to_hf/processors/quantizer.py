"""Quantise a bucket of HF tensors as the engines' checkpoint stores them: fp8, 4-bit integers, or not at all.

A bucket has many small matrices (a mixture of experts: thousands), and a kernel launch costs as much as the work on
one. So matrices of the same width are quantised as one tall matrix: in fp8 those whose rows are whole blocks, in 4 bit
all, because their groups lie along the columns. The converters in tools/ store weights by the same functions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from slime.config.args import Args
from slime.conversion.reader import TensorInfo
from slime.weights.formats import PACKED, SCALE, SHAPE, ZERO, Fp8Format, Int4Format, WeightFormat, weight_format_of
from slime.weights.quantization import (
    E4M3,
    PER_INT32,
    largest_of,
    pack,
    quantize_blocks,
    quantize_groups,
    quantize_tensor,
)

__all__ = ["QuantizationError", "divides", "planned", "quantize_bucket", "quantize_params", "stored_bytes"]

Bucket = list[tuple[str, torch.Tensor]]
_GATE_OR_UP = re.compile(r"(?<=\.)((gate|up)(?=_proj\.weight$)|w[13](?=\.weight$))")  # MiniMax: w1 and w3
MAX_ELEMENTS = 2**26
"""Of matrices that are quantised together to 4 bit: in fp32, with what is computed of it, 1 GB."""


class QuantizationError(RuntimeError):
    """A weight has no place in the format: it is not finite."""


@torch.no_grad()
def quantize_bucket(bucket: Bucket, fmt: WeightFormat | None) -> Bucket:
    """Return the tensors of `bucket` in their order, each quantised one followed by what belongs to it.

    Args:
        bucket: (HF name, full tensor); gate and up of an expert are in the same bucket.
        fmt: what the checkpoint wants; None changes nothing.

    Raises:
        QuantizationError: a weight cannot be stored so; names it.
    """
    if fmt is None:
        return bucket
    chosen = [(name, tensor) for name, tensor in bucket if fmt.quantizes(name)]
    found = _stored_int4(chosen, fmt) if isinstance(fmt, Int4Format) else _stored_fp8(chosen, fmt)
    return [stored for name, tensor in bucket for stored in found.get(name, [(name, tensor)])]


def quantize_params(
    args: Args,
    megatron_name: str,
    converted_named_params: Sequence[tuple[str, torch.Tensor]],
    quantization_config: Mapping[str, Any] | None,
) -> list[tuple[str, torch.Tensor]]:
    """Return HF (name, tensor) pairs as `quantization_config` wants them; unchanged where it is None.

    Args:
        args: unused; part of the public signature.
        megatron_name: unused; part of the public signature.
        converted_named_params: of one Megatron parameter.
        quantization_config: of the HF config.

    Raises:
        UsageError: a quantisation that is not supported.
        QuantizationError: a weight that cannot be stored so.
    """
    fmt = weight_format_of({"quantization_config": quantization_config or None})
    return quantize_bucket(list(converted_named_params), fmt)


def stored_bytes(bucket: Iterable[tuple[str, torch.Tensor]], fmt: WeightFormat | None) -> int:
    """Bytes of a bucket once it is quantised."""
    if fmt is None:
        return sum(tensor.nbytes for _, tensor in bucket)
    return sum(fmt.stored_bytes(name, tuple(t.shape), itemsize=t.element_size()) for name, t in bucket)


def planned(tensors: Mapping[str, TensorInfo], fmt: WeightFormat | None) -> dict[str, TensorInfo]:
    """What `quantize_bucket` makes of tensors like these, without their values; in the same order."""
    if fmt is None:
        return dict(tensors)
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if not fmt.quantizes(name):
            found[name] = info
        elif isinstance(fmt, Int4Format):
            found |= _planned_int4(name, info, fmt)
        else:
            scales = tuple(-(-size // n) for size, n in zip(info.shape, fmt.block_size or (), strict=False)) or (1,)
            found |= {name: TensorInfo(E4M3, info.shape), name + fmt.scale_suffix: TensorInfo(torch.float32, scales)}
    return found


def _check_finite(named_scales: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise for the first weight with a scale that is not finite; one answer from the device for the whole bucket.

    Raises:
        QuantizationError: names the weight.
    """
    if not named_scales:
        return
    largest = torch.stack([scales.amax() for _, scales in named_scales])
    if bool(largest.isfinite().all()):
        return
    index = int((~largest.isfinite()).nonzero()[0])
    raise QuantizationError(
        f"{named_scales[index][0]} has a weight that is infinite or no number, and so cannot be quantized for the "
        "engines: training has diverged (look at train/grad_norm and train/loss of the last steps)"
    )


# ---- fp8


def _stored_fp8(chosen: Bucket, fmt: Fp8Format) -> dict[str, Bucket]:
    """Name -> its values, then its scales."""
    found = _by_block(chosen, fmt, fmt.block_size) if fmt.block_size else _by_tensor(chosen, fmt)
    _check_finite([(name, scales) for name, (_, scales) in found.items()])
    return {name: [(name, values), (name + fmt.scale_suffix, scales)] for name, (values, scales) in found.items()}


def _by_block(
    named: Sequence[tuple[str, torch.Tensor]], fmt: Fp8Format, block_size: tuple[int, int]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    stacks: dict[tuple[int, str], list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in named:
        # Rows that are no whole blocks would shift the blocks of what is stacked below: such a matrix stays alone.
        alone = name if tensor.shape[0] % block_size[0] else ""
        stacks[tensor.shape[1], alone].append((name, tensor))
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for stack in stacks.values():
        tall = torch.cat([tensor for _, tensor in stack]) if len(stack) > 1 else stack[0][1]
        values, scales = quantize_blocks(tall, block_size, ue8m0=fmt.is_ue8m0)
        rows = [tensor.shape[0] for _, tensor in stack]
        parts = zip(values.split(rows), scales.split([-(-n // block_size[0]) for n in rows]), strict=True)
        found.update(zip([name for name, _ in stack], parts, strict=True))
    return found


def _by_tensor(
    named: Sequence[tuple[str, torch.Tensor]], fmt: Fp8Format
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """One scale a tensor; gate and up share theirs, for SGLang's kernel of experts has one for both."""
    largest: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        pair = _GATE_OR_UP.sub("gate_up", name)
        here = largest_of(tensor)
        largest[pair] = torch.maximum(largest[pair], here) if pair in largest else here
    return {
        name: quantize_tensor(tensor, largest=largest[_GATE_OR_UP.sub("gate_up", name)], ue8m0=fmt.is_ue8m0)
        for name, tensor in named
    }


# ---- 4-bit integers


def _stored_int4(chosen: Bucket, fmt: Int4Format) -> dict[str, Bucket]:
    """Name -> its values, scales and shape, and zero points where the format has them."""
    for name, tensor in chosen:
        if not divides(tuple(tensor.shape), fmt):
            raise QuantizationError(
                f"{name} has the shape {list(tensor.shape)}, which is not whole groups of {fmt.group_size} columns, "
                "as the quantization_config of --hf-checkpoint has them: is it the config.json of this model?"
            )
    found = {name: parts for stack in _stacks(chosen) for name, parts in _stored_together(stack, fmt)}
    _check_finite([(name, parts[1]) for name, parts in found.items()])
    sizes = {tuple(tensor.shape): tensor.device for _, tensor in chosen}
    shapes = {size: torch.tensor(size, device=device) for size, device in sizes.items()}
    stored: dict[str, Bucket] = {}
    for name, tensor in chosen:
        values, scales, zeros = found[name]
        parts = [values, scales, shapes[tuple(tensor.shape)], *([] if zeros is None else [zeros])]
        stored[name] = list(zip(_stored_names(name, fmt), parts, strict=True))
    return stored


def _stored_names(name: str, fmt: Int4Format) -> list[str]:
    """Names of what a weight is stored as, in the order of `quantize_bucket`."""
    module = name.removesuffix("weight")
    return [module + part for part in (PACKED, SCALE, SHAPE, *(() if fmt.is_symmetric else (ZERO,)))]


def divides(shape: Sequence[int], fmt: Int4Format) -> bool:
    """Whether a weight of this shape can be stored: whole groups, and zero points packed along the rows."""
    rows_of = 1 if fmt.is_symmetric else PER_INT32
    return len(shape) == 2 and shape[1] % fmt.group_size == 0 and shape[0] % rows_of == 0


def _planned_int4(name: str, info: TensorInfo, fmt: Int4Format) -> dict[str, TensorInfo]:
    (rows, columns), groups = info.shape, info.shape[1] // fmt.group_size
    infos = [
        TensorInfo(torch.int32, (rows, -(-columns // PER_INT32))),
        TensorInfo(info.dtype, (rows, groups)),
        TensorInfo(torch.int64, (2,)),
        TensorInfo(torch.int32, (rows // PER_INT32, groups)),
    ]
    return dict(zip(_stored_names(name, fmt), infos, strict=False))


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
