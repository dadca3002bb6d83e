"""Weight sync for colocated engines: buckets handed over in shared memory (`/update_weights_from_tensor`).

One flattened tensor a bucket, in host memory; only its handle goes through Ray and HTTP. Every engine, and every
tensor-parallel rank of it, maps the same memory and takes its own slice.
"""

from __future__ import annotations

import torch.multiprocessing

from slime.backends.megatron_utils.update_weight.base import Bucket, WeightUpdater
from slime.backends.sglang_utils.weight_transfer import serialize_bucket


class TensorWeightUpdater(WeightUpdater):
    """Sends flattened buckets through shared memory."""

    def open(self, num_gpus_per_engine: int) -> None:
        """Remember how many ranks of an engine each take the handle."""
        # torch's default passes a file descriptor over a socket whose key the engine does not know.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self._ranks_per_engine = num_gpus_per_engine

    def send(self, bucket: Bucket, *, version: str) -> None:
        """Flatten, hand over, and wait: the memory may be reused once every engine has answered."""
        handle = serialize_bucket([(name, tensor.detach().cpu()) for name, tensor in bucket])
        self.fleet.call(
            "update_weights_from_tensor",
            [handle] * self._ranks_per_engine,
            what=f"the load of weights {version}",
            load_format="flattened_bucket",
            flush_cache=False,
            weight_version=version,
        )
