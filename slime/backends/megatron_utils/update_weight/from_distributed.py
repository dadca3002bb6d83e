"""Weight sync for engines with slots of their own: a collective broadcast (NCCL on CUDA, gloo on CPU).

The group has the source rank as rank 0 and every rank of every engine behind it. The engines are told names, types and
shapes over HTTP and then take part in the broadcasts; gloo does not notice a type that differs, so they must match.
On CUDA both ends need NCCL_CUMEM_ENABLE=0 in their environment (slime.ray.actor_group sets it for the trainer).
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.base import WeightUpdater
from slime.backends.megatron_utils.update_weight.engines import EngineFleet
from slime.backends.megatron_utils.update_weight.transport import Bucket, Posted, Transport
from slime.backends.sglang_utils.weight_transfer import init_process_group
from slime.utils.accelerator import process_group_backend
from slime.utils.distributed_utils import store_at
from slime.utils.memory_saver import outside_saver
from slime.utils.misc import get_current_node_ip, listen_anywhere

GROUP_NAME = "slime-pp_0"


class DistributedWeightUpdater(WeightUpdater):
    """Broadcasts every tensor to the engines."""

    def open(self, engine_sizes: list[int]) -> list[Transport]:
        """Form the process group with the engines."""
        fleet = self.fleet if self.is_source else None
        return [CollectiveTransport(fleet, engine_sizes, deadline_s=self.deadline_s)]


class CollectiveTransport(Transport):
    """A process group with engines.

    One bucket at a time: the broadcasts must come in the order in which the engines are told of them.

    Args:
        fleet: the engines (source rank only; other ranks take no part).
        engine_sizes: ranks of each.
        deadline_s: for forming the group and for each collective.
        backend: None is the device's own.
    """

    def __init__(
        self, fleet: EngineFleet | None, engine_sizes: list[int], *, deadline_s: float, backend: str | None = None
    ) -> None:
        self._fleet = fleet
        if fleet is not None:
            self._form_group(fleet, engine_sizes, deadline_s, backend or process_group_backend())

    def _form_group(self, fleet: EngineFleet, engine_sizes: list[int], deadline_s: float, backend: str) -> None:
        listener = listen_anywhere()
        address, port = get_current_node_ip(), listener.getsockname()[1]
        world_size = 1 + sum(engine_sizes)
        offsets = [1 + sum(engine_sizes[:index]) for index in range(len(fleet))]
        joining = fleet.start_each(
            "init_weights_update_group",
            [((address, port, offset, world_size, GROUP_NAME, backend), {}) for offset in offsets],
        )
        with outside_saver():
            self._group = init_process_group(
                backend=backend,
                meeting=store_at(listener, world_size, timedelta(seconds=deadline_s)),
                world_size=world_size,
                rank=0,
                group_name=GROUP_NAME,
                timeout_s=deadline_s,
            )
        fleet.wait(joining, "the engines' process group")

    def prepare(self, bucket: Bucket, *, slot: int) -> Bucket:
        """The tensors as they are broadcast."""
        return [(name, tensor.detach().contiguous()) for name, tensor in bucket] if self._fleet is not None else []

    def post(self, prepared: Bucket, *, version: str) -> Posted:
        """Announce the bucket and broadcast its tensors."""
        assert self._fleet is not None, "the source rank alone posts"
        tensors = [tensor for _, tensor in prepared]
        receiving = self._fleet.start(
            "update_weights_from_distributed",
            [name for name, _ in prepared],
            [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            [list(tensor.shape) for tensor in tensors],
            group_name=GROUP_NAME,
            flush_cache=False,
            weight_version=version,
        )
        sending = [dist.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in tensors]

        def finish() -> None:
            # Only now: an engine that refuses the bucket would leave the broadcasts waiting for their timeout.
            for work in sending:
                work.wait()

        return Posted(receiving, finish)
