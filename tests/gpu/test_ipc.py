"""CUDA IPC on a real GPU: another process reads the buffers, they are used again, and none of it is left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from slime.backends.megatron_utils.update_weight.buckets import BucketBuffers
from slime.backends.megatron_utils.update_weight.from_tensor import ipc_refusal
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


READER = """
import sys
from slime.backends.sglang_utils.weight_transfer import open_flat

for line in sys.stdin:
    print(int(open_flat(line.strip())[0]), flush=True)
"""


def test_a_buffer_may_be_shared_hundreds_of_times_and_gives_its_memory_back() -> None:
    """As often as a long run syncs, with a process that opens each handle and lets go of it, as an engine does."""
    reader = subprocess.Popen([sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin and reader.stdout
    device = torch.device("cuda", 0)
    source = torch.zeros(200 * 2**20, dtype=torch.uint8, device=device)
    buffers = BucketBuffers(1, 256 * 2**20, device)

    def share(value: int) -> None:
        flat = buffers.fill(0, [("w", source.fill_(value))])
        (handle,), kept = serialize_flat(flat.data, [], 1)
        print(handle, file=reader.stdin, flush=True)
        assert int(reader.stdout.readline()) == value
        del kept

    try:
        share(1)
        buffers.release()
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for number in range(300):
            share(number % 200)
            if number % 3 == 0:
                buffers.release()  # as between two syncs of a colocated run
        buffers.release()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        assert before - torch.cuda.mem_get_info()[0] < 32 * 2**20
    finally:
        reader.stdin.close()
        reader.wait(60)
