"""Whether other processes can open this one's CUDA memory; asked before the first sync.

Where a container or a driver forbids it, SGLang's scheduler would die of the attempt.
"""

from __future__ import annotations

import functools

import torch

from slime.backends.megatron_utils.update_weight.buffers import BucketBuffers
from slime.backends.sglang_utils.weight_transfer import EXPECTED, NUM_BYTES, opened_elsewhere, serialize_flat


@functools.cache
def ipc_refusal() -> str | None:
    """Why CUDA memory cannot be shared with another process here; None where it can. Takes seconds the first time."""
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = BucketBuffers(1, NUM_BYTES, device)
    try:
        flat = buffers.fill(0, [("probe", torch.full((NUM_BYTES,), EXPECTED, dtype=torch.uint8, device=device))])
        handles, kept = serialize_flat(flat.data, [], 1)
    except RuntimeError as error:  # torch passes on what the driver says
        return str(error).splitlines()[0]
    reason = opened_elsewhere(handles[0])
    del kept
    return reason
