"""How often a function that is fused on CUDA is compiled, seen with a compiler on CPU that changes nothing, and where
kernels by hand are taken; what they compute is tests/gpu/test_fusion.py's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from slime.utils.accelerator import fusion


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    """The CPU stand-ins for CUDA turn the compiler off; no size may change but what is marked."""
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(disable=False, recompile_limit=limit, automatic_dynamic_shapes=False):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def test_a_function_stays_compiled_beyond_torchs_own_limit_of_kinds() -> None:
    counter = CompileCounter()

    call = fusion.compiled(lambda x: 2 * x, backend=counter, dynamic=False)
    for size in range(2, 14):
        assert call(torch.ones(size)).sum() == 2 * size
    assert counter.frame_count == 12  # torch's limit is 8


def test_a_kernel_by_hand_is_for_cuda_alone() -> None:
    assert double(torch.ones(2)).tolist() == [2, 2]


def test_without_triton_a_function_runs_as_it_is_written_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    fusion.triton_works.cache_clear()
    x = said_to_be_on_cuda()
    assert [double(x).shape, double(x).shape] == [(2,), (2,)]
    assert caplog.text.count("triton does not work here") == 1
    fusion.triton_works.cache_clear()


def test_a_function_has_its_kernel_where_triton_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "triton_works", lambda: True)
    with pytest.raises(ZeroDivisionError):  # the kernel's, below
        double(said_to_be_on_cuda())


def said_to_be_on_cuda() -> torch.Tensor:
    """Not made with device="cuda", which the stand-ins for CUDA of another test in this process turn into the CPU."""
    return FakeTensor(FakeTensorMode(), torch.empty(2, device="meta"), torch.device("cuda:0"))


@fusion.kernel_on_cuda("tests.unit.test_fusion.kernel")
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def kernel(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError
