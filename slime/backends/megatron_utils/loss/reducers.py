"""From the sums that each micro-batch reports to the metrics of a train step, over all data-parallel ranks.

One collective and one copy to the host for all metrics together. It knows names only as keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist


def pack_report(metrics: Mapping[str, Any], num_tokens: torch.Tensor) -> dict[str, Any]:
    """What a micro-batch hands to `reduce_reports`: its metrics' names, and its trained tokens before their values."""
    values = [num_tokens, *metrics.values()]
    flat = [torch.as_tensor(value, dtype=torch.float32, device=num_tokens.device).detach() for value in values]
    return {"keys": list(metrics), "values": torch.stack(flat)}


def reduce_reports(
    reports: Sequence[Mapping[str, Any]], denominator: float | None, group: dist.ProcessGroup
) -> dict[str, float]:
    """Sum over micro-batches and ranks, divided by `denominator` (None: by the trained tokens of all of them)."""
    keys = reports[0]["keys"]
    total = torch.stack([report["values"] for report in reports]).double().sum(dim=0)
    num_tokens, *sums = all_reduce_sum(total, group)
    by = denominator if denominator is not None else max(num_tokens, 1.0)
    return {key: value / by for key, value in zip(keys, sums, strict=True)}


def all_reduce_sum(values: torch.Tensor, group: dist.ProcessGroup) -> list[float]:
    """`values` [n] summed over the group's ranks, on the host."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values.tolist()
