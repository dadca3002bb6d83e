"""Which compiled kernel a call starts. The kernel is a stand-in that notes how it was started: triton is not installed
with torch's builds for the CPU, and only the choice is looked at; tests/gpu/test_fusion.py starts real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.kernels.launch import Launcher, refuse_second_derivative


class Kernel:
    """Notes each call; as triton's own, it returns what it compiled, which takes a grid and the same arguments."""

    def __init__(self, compiled: Any = None) -> None:
        self.compiled, self.calls = compiled, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*args: Any, **options: Any) -> Any:
            self.calls.append((grid, args, options))
            return self.compiled

        return start


def test_a_kernel_is_compiled_once_for_arguments_of_a_kind_and_started_again_with_the_new_ones():
    compiled = Kernel()
    kernel = Kernel(compiled)
    start = Launcher(kernel)
    first, second = torch.zeros(4), torch.zeros(8)
    start((1, 1, 1), (first,), (4,), (128, True), num_warps=8)
    start((2, 1, 1), (second,), (8,), (128, True), num_warps=8)
    assert kernel.calls == [((1, 1, 1), (first, 4, 128, True), {"num_warps": 8})]
    assert compiled.calls == [((2, 1, 1), (second, 8, 128, True), {})]


@pytest.mark.parametrize(
    ("tensor", "constants", "num_warps"),
    [
        (torch.zeros(8)[1:], (128, True), 4),
        (torch.zeros(8, dtype=torch.bfloat16), (128, True), 4),
        (torch.zeros(8), (128, False), 4),
        (torch.zeros(8), (128, True), 8),
    ],
    ids=["alignment", "type", "constant", "warps"],
)
def test_another_kind_of_arguments_is_compiled_for_itself(tensor, constants, num_warps):
    kernel = Kernel(Kernel())
    start = Launcher(kernel)
    start((1, 1, 1), (torch.zeros(8),), (), (128, True))
    start((1, 1, 1), (tensor,), (), constants, num_warps)
    assert len(kernel.calls) == 2 and not kernel.compiled.calls


def test_an_interpreter_which_compiles_nothing_is_called_each_time():
    kernel = Kernel(compiled=None)
    start = Launcher(kernel)
    for _ in range(2):
        start((1, 1, 1), (torch.zeros(8),), (), ())
    assert len(kernel.calls) == 2


def test_gradients_of_kernels_are_not_differentiated_again():
    with pytest.raises(RuntimeError, match="create_graph=True.*TORCHDYNAMO_DISABLE=1"):
        refuse_second_derivative()
    with torch.no_grad():
        refuse_second_derivative()
