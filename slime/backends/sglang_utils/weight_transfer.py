"""SGLang's side of a weight sync, for the sender: its bucket, its serializer and its process groups.

The one module that `megatron_utils/update_weight` imports from this package. It does not know which tensors there
are, what they are called, or which engines take them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def serialize_bucket(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> str:
    """`serialize_bucket_for` one receiver."""
    return serialize_bucket_for(named_tensors, 1)[0]


def serialize_bucket_for(named_tensors: Sequence[tuple[str, torch.Tensor]], num_receivers: int) -> list[str]:
    """Flatten tensors into one and return handles to its memory, for load format "flattened_bucket".

    On CPU the memory is shared memory that the handle names, with CUDA it is an IPC handle. The sender must keep
    running until the engines have answered; nothing else has to be kept.

    Args:
        named_tensors: (HF name, tensor), all on one device; dtypes may differ. num_receivers: processes (an engine
        has one a TP rank) that will open it. Each needs a handle of its own: opening
            one takes back one of the references that serializing it added, and the last one frees the memory.
    """
    _prepare()
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    bucket = FlattenedTensorBucket(named_tensors=list(named_tensors))
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return [MultiprocessingSerializer.serialize(content, output_str=True) for _ in range(num_receivers)]


def init_process_group(
    backend: str, meeting: str | dist.Store, world_size: int, rank: int, group_name: str, timeout_s: float = 600.0
) -> dist.ProcessGroup:
    """Join a process group beside the default one, as SGLang's servers do with the same name.

    Args:
        backend: "gloo" or "nccl".
        meeting: `tcp://host:port` of rank 0; on rank 0 its store may be given, which listens there already.
        world_size: trainer ranks plus engine ranks.
        rank: of this process.
        group_name: names the group's keys in the store.
        timeout_s: for forming the group and for its collectives.
    """
    _prepare()
    import torch.distributed as dist
    from sglang.srt.utils.common import init_custom_process_group

    if isinstance(meeting, str):
        where: dict[str, Any] = {"init_method": meeting}
    else:
        where = {"store": dist.PrefixStore(group_name, meeting)}  # the keys that the others look for
    return init_custom_process_group(
        backend=backend,
        timeout=timedelta(seconds=timeout_s),
        world_size=world_size,
        rank=rank,
        group_name=group_name,
        **where,
    )


def preload() -> None:
    """Import now what the first sync would otherwise wait for (1 to 2 s)."""
    _prepare()
    import sglang.srt.utils.common
    import sglang.srt.weight_sync.tensor_bucket  # noqa: F401


@functools.cache
def _prepare() -> None:
    from slime.backends.sglang_utils import cpu_standins

    cpu_standins.install()
    import torch

    if not torch.cuda.is_available():
        # torch's default passes a file descriptor over a socket that asks for a key the server does not have: it would
        # die of an AuthenticationError.
        torch.multiprocessing.set_sharing_strategy("file_system")
