"""Optimizer states lie in one piece of GPU memory each, whatever is cached when they are made; needs a GPU.

python -m pytest -q tests/gpu/test_segments.py
"""

from __future__ import annotations

from bisect import bisect_right

import pytest
import torch

from slime.backends.megatron_utils.megatron_patch.without_apex import Adam
from slime.utils import accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
MB = 2**20


def segment_of(tensor: torch.Tensor) -> int:
    """Where the piece begins that holds the tensor."""
    begins = sorted(segment["address"] for segment in torch.cuda.memory_snapshot())
    return begins[bisect_right(begins, tensor.data_ptr()) - 1]


def test_the_moments_of_many_weights_share_one_piece_of_memory() -> None:
    accelerator.empty_cache()  # another test's pieces would be filled first
    shapes = [(1024, 512)] * 20 + [(4096, 1024)] * 5  # 2 MB and 16 MB in fp32
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    left = [torch.empty(15 * MB, dtype=torch.uint8, device="cuda") for _ in range(10)]
    kept = left[::2]
    del left  # holes, as a first pass leaves them
    for param in params:
        param.grad = torch.ones_like(param)
    adam = Adam(params)
    adam.step()
    moments = [adam.state[param][name] for param in params for name in ("exp_avg", "exp_avg_sq")]
    pieces = {segment_of(moment) for moment in moments}
    # holes of the others' pieces may be filled first, but each of these holds at most two of the 16 MB
    assert max(sum(segment_of(moment) == piece for moment in moments) for piece in pieces) >= 40, pieces
    assert len(pieces) <= 1 + len(kept), pieces


def test_a_workspace_of_cublas_keeps_no_large_piece() -> None:
    accelerator.empty_cache()
    before = torch.cuda.memory_reserved()
    large = torch.empty(512 * MB, dtype=torch.uint8, device="cuda")
    del large
    x = torch.randn(256, 256, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # the first product of the forward and of the backward thread
    x = None
    accelerator.empty_cache()
    assert torch.cuda.memory_reserved() - before < 512 * MB
