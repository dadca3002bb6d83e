"""Bring one trainer process up: device, patches, process group, Megatron's parallel state, seeds.

It builds no model and knows nothing about Ray: whoever starts the process says its rank and where rank 0 listens.
"""

from __future__ import annotations

import os
import random
import socket
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.backends.megatron_utils import megatron_patch
from slime.backends.megatron_utils.megatron_patch.layers import smallest
from slime.config.args import Args
from slime.observability.timer import CudaClock, Timer
from slime.utils import accelerator
from slime.utils.accelerator import reloadable_process_group
from slime.utils.accelerator.memory_saver import outside_saver
from slime.utils.distributed_utils import store_at


def init(
    args: Args,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int | socket.socket,
    local_rank: int = 0,
) -> None:
    """Initialise this process as `rank` of `world_size` trainers; every rank calls it, and it waits for the others.

    Args:
        args: parsed flags (accelerator, parallel sizes, seed, distributed_timeout_minutes, deterministic_mode,
            offload_train).
        rank: global rank; rank 0 listens on master_addr:master_port.
        master_port: rank 0 may give the socket that listens there already, so that nobody takes the port before.
        local_rank: index of this process's GPU among those it can see.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local_rank)}
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if isinstance(master_port, socket.socket):
        listener, master_port = master_port, master_port.getsockname()[1]
        store = store_at(listener, world_size, timeout)
        # The name is torch's: the other ranks, which give an init_method, look for keys of that prefix.
        meeting: dict[str, Any] = {"store": dist.PrefixStore("default_pg", store)}
    else:
        meeting = {"init_method": f"tcp://{master_addr}:{master_port}"}
    os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
    # Sequence parallelism counts on kernels being queued in one order (Megatron asserts this on CUDA).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    accelerator.activate(args.accelerator)
    accelerator.set_device(local_rank)
    if accelerator.kind() == "cuda":
        Timer().use(CudaClock())  # the host's clock would say when work was queued
    megatron_patch.apply(accelerator.kind())
    if args.deterministic_mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # TransformerEngine's attention
        torch.use_deterministic_algorithms(True)
    backend = accelerator.process_group_backend("nccl")
    with outside_saver():
        if world_size == 1 and backend == "nccl":
            meeting["pg_options"] = smallest()
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, **meeting)
        if args.offload_train:
            reloadable_process_group.install(backend=backend, timeout=timeout)
        initialize_model_parallel(args)
    set_seeds(args.seed)


def initialize_model_parallel(args: Args) -> None:
    """Make Megatron's process groups for the parallel sizes of `args` (collective over the whole world)."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        use_sharp=args.use_sharp,
        sharp_enabled_group=args.sharp_enabled_group,
        # Gathering optimizer state for a checkpoint goes over the CPU on every device.
        create_gloo_process_groups=True,
    )


def set_seeds(seed: int) -> None:
    """Seed Python, numpy, torch and Megatron's per-region random states; the same seed on every data-parallel rank.

    Pipeline stages draw from other states, as in Megatron: else dropout would be the same in layers of all of them.
    """
    from megatron.core import parallel_state, tensor_parallel

    random.seed(seed)
    np.random.seed(seed % 2**32)
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def shutdown() -> None:
    """Leave Megatron's groups and the world, if this process is in one."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    reloadable_process_group.uninstall()
