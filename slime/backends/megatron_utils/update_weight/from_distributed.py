"""Weight sync for engines with slots of their own: a collective broadcast (NCCL on CUDA, gloo on CPU).

The group has the source rank as rank 0 and every rank of every engine behind it. The engines are told names, types and
shapes over HTTP and then take part in the broadcasts; gloo does not notice a type that differs, so they must match.
On CUDA both ends need NCCL_CUMEM_ENABLE=0 in their environment (slime.ray.actor_group sets it for the trainer).
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from slime.backends.megatron_utils.update_weight.base import Bucket, WeightUpdater
from slime.backends.sglang_utils.weight_transfer import init_process_group
from slime.utils.accelerator import process_group_backend
from slime.utils.distributed_utils import store_at
from slime.utils.misc import get_current_node_ip, listen_anywhere

GROUP_NAME = "slime-pp_0"


class DistributedWeightUpdater(WeightUpdater):
    """Broadcasts every tensor to the engines."""

    def open(self, engine_sizes: list[int]) -> None:
        """Form the process group with the engines."""
        listener = listen_anywhere()
        address, port = get_current_node_ip(), listener.getsockname()[1]
        backend = process_group_backend()
        world_size = 1 + sum(engine_sizes)
        offsets = [1 + sum(engine_sizes[:index]) for index in range(len(self.fleet))]
        joining = self.fleet.start_each(
            "init_weights_update_group",
            [((address, port, offset, world_size, GROUP_NAME, backend), {}) for offset in offsets],
        )
        self._group = init_process_group(
            backend=backend,
            meeting=store_at(listener, world_size, timedelta(seconds=self.deadline_s)),
            world_size=world_size,
            rank=0,
            group_name=GROUP_NAME,
            timeout_s=self.deadline_s,
        )
        self.fleet.wait(joining, "the engines' process group")

    def send(self, bucket: Bucket, *, version: str) -> None:
        """Announce the bucket, broadcast its tensors, and wait for the engines' answers."""
        tensors = [tensor.detach().contiguous() for _, tensor in bucket]
        receiving = self.fleet.start(
            "update_weights_from_distributed",
            [name for name, _ in bucket],
            [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            [list(tensor.shape) for tensor in tensors],
            group_name=GROUP_NAME,
            flush_cache=False,
            weight_version=version,
        )
        sending = [dist.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in tensors]
        # The answers first: an engine that refuses the bucket would leave the broadcasts waiting for their timeout.
        self.fleet.wait(receiving, f"the load of weights {version}")
        for work in sending:
            work.wait()
