"""Sleep and wake-up of one trainer rank: it leaves its GPU to the engines, or to the other role, and comes back.

Asleep, a rank holds its CUDA context and nothing else: gradients are dropped (each train step begins by zeroing them),
process groups are destroyed, and all that torch has allocated is in pinned host memory. Both functions are collective:
every rank of the role calls them, and a rank that does not come is named by the barrier's deadline.

It does not know whose turn it is (`slime.ray.run_parts`), and keeps no copy of anything itself.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel

from slime.utils import accelerator, memory_saver
from slime.utils.distributed_utils import barrier
from slime.utils.reloadable_process_group import destroy_process_groups, reload_process_groups

KEEP_WORLD = "SLIME_DESTROY_WORLD_PROCESS_GROUP"


def fall_asleep(model: Sequence[DistributedDataParallel], *, deadline_s: float) -> None:
    """Give up all GPU memory that can be given up.

    Args:
        model: this rank's chunks.
        deadline_s: for all ranks to come here.

    Raises:
        WaitTimeout: a rank did not come; the message names it.
    """
    barrier("its part before the trainer leaves the GPU", deadline_s)
    accelerator.synchronize()
    destroy_process_groups(default_too=os.environ.get(KEEP_WORLD, "1") != "0")
    for chunk in model:
        chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
    gc.collect()  # a tensor in a cycle of Python objects would be copied to the host
    accelerator.empty_cache()
    memory_saver.pause()


def wake_up(model: Sequence[DistributedDataParallel]) -> None:
    """Undo `fall_asleep`; gradients are zero."""
    memory_saver.resume()
    reload_process_groups()
    for chunk in model:
        chunk.restore_grad_buffers(synchronize=False)
    accelerator.synchronize()
