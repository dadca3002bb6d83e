"""Logits and gradients of a model on GPUs beside HF's; needs CUDA."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.utils.misc import listen_anywhere
from tests.training.parallel import hf_parity

Look = Callable[[argparse.Namespace, set[str]], None]


def relative(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> float:
    """|found - expected| / |expected| over all tensors together."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name].cpu().float() - wanted).square().sum()) for name, wanted in expected.items())
    return float((difference / sum(float(wanted.square().sum()) for wanted in expected.values())) ** 0.5)


def of_gpus(args: argparse.Namespace, num_gpus: int, out: Path, look: Look | None = None) -> hf_parity.Parity:
    """What a world of fresh processes finds; forked ones could not use the GPU that this one has looked at.

    Args:
        args: of the trainer, with its layout.
        num_gpus: processes, each with a GPU.
        out: a file to write to.
        look: is called in each process with `args` and the names of the classes of all modules that ran.
    """
    with listen_anywhere("127.0.0.1") as listener:
        torch.multiprocessing.spawn(_rank, (num_gpus, listener, args, out, look), nprocs=num_gpus)
    found: hf_parity.Parity = torch.load(out)
    return found


def _rank(
    rank: int, num_gpus: int, listener: socket.socket, args: argparse.Namespace, out: Path, look: Look | None
) -> None:
    from slime.backends.megatron_utils import initialize

    port = listener.getsockname()[1]
    if rank != 0:
        listener.close()
    where = {"master_addr": "127.0.0.1", "master_port": listener if rank == 0 else port}
    initialize.init(args, rank=rank, world_size=num_gpus, local_rank=rank, **where)
    ran: set[str] = set()
    torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: ran.add(type(module).__name__))
    found = hf_parity.of_layout(args)
    if look is not None:
        look(args, ran)
    if rank == 0:
        torch.save(found, out)
    torch.distributed.barrier()
