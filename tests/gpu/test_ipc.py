"""CUDA IPC on a real GPU: another process reads the buffers, they are used again, and none of it is left behind."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils.update_weight.buffers import BucketBuffers
from slime.backends.megatron_utils.update_weight.ipc import ipc_refusal
from slime.backends.sglang_utils.weight_transfer import EXPECTED, NUM_BYTES, opened_elsewhere, serialize_flat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_another_process_opens_memory_of_this_one() -> None:
    assert ipc_refusal() is None


def test_a_buffer_that_is_used_again_shows_its_new_content() -> None:
    device = torch.device("cuda", 0)
    buffers = BucketBuffers(2, NUM_BYTES, device)
    for value in (EXPECTED + 1, EXPECTED):
        flat = buffers.fill(0, [("w", torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=device))])
        (handle,), kept = serialize_flat(flat.data, [], 1)
        reason = opened_elsewhere(handle)
        assert (reason is None) == (value == EXPECTED), reason
        del kept


def test_a_buffer_may_be_shared_thousands_of_times_and_gives_its_memory_back() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    buffers = BucketBuffers(1, 256 * 2**20, device)
    source = torch.ones(200 * 2**20, dtype=torch.uint8, device=device)
    flat = buffers.fill(0, [("w", source)])
    for _ in range(2000):
        _, kept = serialize_flat(flat.data, [], 1)
        del kept
    del flat, source
    torch.cuda.ipc_collect()
    buffers.release()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 32 * 2**20
