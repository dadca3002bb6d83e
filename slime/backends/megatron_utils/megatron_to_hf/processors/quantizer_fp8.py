"""Quantise a bucket of HF tensors to fp8, as the HF checkpoint of the engines stores them.

A bucket has many small matrices (a mixture of experts: thousands), and a kernel launch costs as much as the work on
one. So matrices of the same width whose rows are whole blocks are quantised as one tall matrix; the blocks are the
same. It does not know where the tensors come from or go to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.finite import QuantizationError, check_finite
from slime.conversion.reader import TensorInfo
from slime.weights.formats import Fp8Format
from slime.weights.fp8 import E4M3, largest_of, quantize_blocks, quantize_tensor

__all__ = ["QuantizationError", "planned", "quantize_bucket"]

Bucket = list[tuple[str, torch.Tensor]]
_GATE_OR_UP = re.compile(r"(?<=\.)((gate|up)(?=_proj\.weight$)|w[13](?=\.weight$))")  # MiniMax: w1 and w3


@torch.no_grad()
def quantize_bucket(bucket: Bucket, fmt: Fp8Format) -> Bucket:
    """Return the tensors of `bucket` in their order, each quantised one followed by its scales.

    Args:
        bucket: (HF name, full tensor); gate and up of an expert are in the same bucket.
        fmt: what the checkpoint wants.

    Raises:
        QuantizationError: a weight is infinite or no number; names it.
    """
    chosen = [(name, tensor) for name, tensor in bucket if fmt.quantizes(name)]
    found = _by_block(chosen, fmt, fmt.block_size) if fmt.block_size else _by_tensor(chosen, fmt)
    check_finite([(name, scales) for name, (_, scales) in found.items()])
    quantized: Bucket = []
    for name, tensor in bucket:
        if name in found:
            values, scales = found[name]
            quantized += [(name, values), (name + fmt.scale_suffix, scales)]
        else:
            quantized.append((name, tensor))
    return quantized


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


def planned(tensors: Mapping[str, TensorInfo], fmt: Fp8Format) -> dict[str, TensorInfo]:
    """What `quantize_bucket` makes of tensors like these, without their values; in the same order."""
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if not fmt.quantizes(name):
            found[name] = info
            continue
        scales = tuple(-(-size // block) for size, block in zip(info.shape, fmt.block_size or (), strict=False)) or (
            1,
        )
        found |= {name: TensorInfo(E4M3, info.shape), name + fmt.scale_suffix: TensorInfo(torch.float32, scales)}
    return found
