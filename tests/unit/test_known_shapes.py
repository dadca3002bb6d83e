"""Shapes that pipeline stages know of each other's tensors; that passes work so is in tests/training/parallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from slime.backends.megatron_utils.megatron_patch import known_shapes

SHAPES = [(tokens, 1, 8) for tokens in (5, 7, 6)]
FIRST, SECOND, THIRD = ([tokens, 1, 8] for tokens in (5, 7, 6))


@pytest.fixture(autouse=True)
def _patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own way of asking shows in its answer."""
    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", lambda *_: "asked the other stages")
    known_shapes.send_known_shapes()


def stage(rank: int, size: int) -> Any:
    """What a communicator is asked."""
    return SimpleNamespace(pp_group=SimpleNamespace(rank=lambda: rank, size=lambda: size))


def received(of: Any, *, count: int, forward: bool) -> list[list[int]]:
    """The next shapes that the stage expects from one side."""
    answers = (P2PCommunicator._communicate_shapes(of, None, None, forward, not forward) for _ in range(count))
    return [list(answer[0 if forward else 1]) for answer in answers]


def test_without_known_shapes_stages_ask_each_other():
    assert P2PCommunicator._communicate_shapes(stage(1, 2), None, None, True, False) == "asked the other stages"


def test_a_stage_expects_the_micro_batches_in_their_order_in_each_direction():
    with known_shapes.known_shapes(SHAPES, num_chunks=1, group_size=None):
        middle = stage(1, 3)
        assert received(middle, count=2, forward=True) == [FIRST, SECOND]
        assert received(middle, count=3, forward=False) == [FIRST, SECOND, THIRD]
        assert received(middle, count=1, forward=True) == [THIRD]
        with pytest.raises(RuntimeError, match="more tensors to receive forward than micro-batches"):
            received(middle, count=1, forward=True)


def test_what_goes_around_is_what_has_another_chunk_before_it():
    """Two chunks, micro-batches in groups of two: 0 1 in chunk 0, 0 1 in chunk 1, then 2 in each."""
    with known_shapes.known_shapes(SHAPES, num_chunks=2, group_size=2):
        assert received(stage(1, 2), count=6, forward=True) == [FIRST, SECOND, FIRST, SECOND, THIRD, THIRD]
    with known_shapes.known_shapes(SHAPES, num_chunks=2, group_size=2):
        assert received(stage(0, 2), count=3, forward=True) == [FIRST, SECOND, THIRD]


def test_a_tensor_of_another_shape_is_not_sent():
    with known_shapes.known_shapes(SHAPES, num_chunks=1, group_size=None):
        sender = stage(0, 2)
        P2PCommunicator._communicate_shapes(sender, torch.zeros(SHAPES[0]), None, False, False)
        with pytest.raises(RuntimeError, match=r"tensor \(7, 1, 9\) to send forward.* \[7, 1, 8\] is expected"):
            P2PCommunicator._communicate_shapes(sender, torch.zeros(7, 1, 9), None, False, False)
