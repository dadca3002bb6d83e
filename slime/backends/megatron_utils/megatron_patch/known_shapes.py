"""Pipeline stages that do not ask each other for shapes.

Upstream (0.16.1): where micro-batches vary in length, the shape of every tensor goes from stage to stage before the
tensor does, and the host waits for it until the GPU has done all its work. So the host is never ahead, and the GPU
waits for it in turn. Here each stage has every micro-batch, and can say all shapes of a pass beforehand. It can go
when Megatron takes shapes of single micro-batches from its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]
_NONE = [0, 0, 0]
_pass: _Pass | None = None


@contextlib.contextmanager
def known_shapes(shapes: Sequence[Shape], *, num_chunks: int, group_size: int | None) -> Iterator[None]:
    """Say what stages send each other in the pass that is run inside, of activations as of their gradients.

    Args:
        shapes: one for each micro-batch, in the order of the pass.
        num_chunks: of the model on each rank.
        group_size: micro-batches that go through one chunk before the next has its turn, with more than one chunk.
    """
    global _pass
    _pass = _Pass(_order(len(shapes), num_chunks, group_size), shapes)
    try:
        yield
    finally:
        _pass = None


def _order(num_microbatches: int, num_chunks: int, group_size: int | None) -> list[tuple[int, bool]]:
    """(micro-batch, whether it is in the last chunk) in the order in which each stage works on them.

    Backward chunks come in the opposite order, so that in both directions it is entries of the last kind that go no
    further at the end of the pipeline.
    """
    if num_chunks == 1:
        return [(i, True) for i in range(num_microbatches)]
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    table = get_schedule_table(num_microbatches, num_chunks, group_size)
    return [(microbatch, chunk == num_chunks - 1) for microbatch, chunk in table]


class _Pass:
    """What a stage sends and receives, each of the four in its own order."""

    def __init__(self, order: Sequence[tuple[int, bool]], shapes: Sequence[Shape]) -> None:
        self._all = [shapes[microbatch] for microbatch, _ in order]
        self._around = [shapes[microbatch] for microbatch, is_last in order if not is_last]
        self._left: dict[str, Iterator[Shape]] = {}

    def next(self, what: str, is_around: bool) -> Shape:
        """The shape of the next tensor of `what`; those around go from the last stage to the first or back."""
        if what not in self._left:
            self._left[what] = iter(self._around if is_around else self._all)
        shape = next(self._left[what], None)
        if shape is None:
            raise RuntimeError(f"pipeline: more tensors to {what} than micro-batches of this pass")
        return shape


def _shapes(
    known: _Pass,
    pp_group: Any,
    tensor_send_next: torch.Tensor | None,
    tensor_send_prev: torch.Tensor | None,
    recv_prev: bool,
    recv_next: bool,
) -> tuple[Sequence[int], Sequence[int]]:
    """(shape from the stage before, shape from the one behind)."""
    is_first, is_last = pp_group.rank() == 0, pp_group.rank() == pp_group.size() - 1
    for what, tensor, is_around in (
        ("send forward", tensor_send_next, is_last),
        ("send backward", tensor_send_prev, is_first),
    ):
        if tensor is not None and tuple(tensor.shape) != (shape := known.next(what, is_around)):
            raise RuntimeError(
                f"pipeline: stage {pp_group.rank()} has a tensor {tuple(tensor.shape)} to {what}, where "
                f"[tokens, 1, hidden size] = {list(shape)} is expected; layers of --spec must keep that shape."
            )
    return (
        known.next("receive forward", is_first) if recv_prev else _NONE,
        known.next("receive backward", is_last) if recv_next else _NONE,
    )


def send_known_shapes() -> None:
    """Have stages use `known_shapes` where they are said."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    ask = P2PCommunicator._communicate_shapes

    def communicate_shapes(self: Any, *of_tensors: Any) -> Any:
        """As upstream's."""
        return ask(self, *of_tensors) if _pass is None else _shapes(_pass, self.pp_group, *of_tensors)

    P2PCommunicator._communicate_shapes = communicate_shapes
