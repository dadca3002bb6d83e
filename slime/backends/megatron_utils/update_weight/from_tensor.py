"""Weight sync for colocated engines: buckets handed over in shared memory (`/update_weights_from_tensor`).

One flattened tensor a bucket, in host memory; only its handle goes through Ray and HTTP. Every engine, and every
tensor-parallel rank of it, maps the same memory and takes its own slice.
"""

from __future__ import annotations

from itertools import islice

import torch.multiprocessing

from slime.backends.megatron_utils.update_weight.base import Bucket, WeightUpdater
from slime.backends.sglang_utils.weight_transfer import serialize_bucket_for


class TensorWeightUpdater(WeightUpdater):
    """Sends flattened buckets through shared memory."""

    def open(self, engine_sizes: list[int]) -> None:
        """Remember how many ranks of each engine take a handle."""
        # torch's default passes a file descriptor over a socket whose key the engine does not know.
        torch.multiprocessing.set_sharing_strategy("file_system")
        self._engine_sizes = engine_sizes

    def send(self, bucket: Bucket, *, version: str) -> None:
        """Flatten, hand over, and wait: the memory may be reused once every engine has answered."""
        tensors = [(name, tensor.detach().cpu()) for name, tensor in bucket]
        handles = iter(serialize_bucket_for(tensors, sum(self._engine_sizes)))  # every receiver needs its own
        keywords = {"load_format": "flattened_bucket", "flush_cache": False, "weight_version": version}
        calls = self.fleet.start_each(
            "update_weights_from_tensor",
            [((list(islice(handles, size)),), keywords) for size in self._engine_sizes],
        )
        self.fleet.wait(calls, f"the load of weights {version}")
