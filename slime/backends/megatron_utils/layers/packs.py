"""What layers ask of a pack of sequences, found once for all of them and kept with Megatron's description of it.

To read a tensor of the GPU, or to copy a list to it, the host waits until the GPU has done all that it was given. In
every layer, that would keep the host from going ahead, and the GPU waiting for it in turn, most of all where a rank
has little work for each layer. What is kept follows from the pack as it was when a layer asked first: who changes a
pack makes another description of it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def keep(packed_seq_params: Any, name: str, make: Callable[[], T]) -> T:
    """What `make` returned when this object was first asked for this name; each pass through a model has its own."""
    known, attribute = vars(packed_seq_params), f"_slime_{name}"
    if attribute not in known:
        known[attribute] = make()
    found: T = known[attribute]
    return found


def cu_seqlens_of(packed_seq_params: Any) -> torch.Tensor:
    """[sequences + 1] where the sequences start, padding included, and the end of the last, on the device."""
    padded = packed_seq_params.cu_seqlens_q_padded
    found: torch.Tensor = packed_seq_params.cu_seqlens_q if padded is None else padded
    return found


def note_ends(packed_seq_params: Any, ends: list[int]) -> None:
    """Say what `host_ends` is, where it is known without the GPU."""
    keep(packed_seq_params, "ends", lambda: ends)


def host_ends(packed_seq_params: Any) -> list[int]:
    """`cu_seqlens_of` on the host."""
    return keep(packed_seq_params, "ends", lambda: cu_seqlens_of(packed_seq_params).tolist())


def longest_run(ends: list[int]) -> int:
    """Tokens of the longest of the runs that end and begin there, the first at 0."""
    return max(end - start for start, end in pairwise(ends))
