"""Trainings of one rollout under many parallel layouts, one after the other in a single world of processes.

A layout's result is what does not depend on it: the metrics of its train steps, the columns that passes without
gradients made, and the weights after them under their HF names, gathered from all ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp

from slime.observability.timer import Timer
from tests.integration.trainer_world import make_train_data, trainer_args

FLAGS = "--make-vocab-size-divisible-by 8 --adam-eps 1e-5 --adam-beta2 0.95 --weight-decay 0.1"
TRAINING: dict[str, Any] = {
    "use_critic": False,
    "lr": 1e-3,
    "clip_grad": 0.05,
    "entropy_coef": 0.01,
    "global_batch_size": 6,
    "max_tokens_per_gpu": 50,
    "normalize_advantages": True,
    "rollout_temperature": 0.8,
}
"""Two train steps, so that old log-probs take a pass of their own; the clip binds."""


@dataclass(frozen=True)
class Case:
    """One layout: Megatron's flags, copies of the model, and slime's flags that differ from TRAINING."""

    flags: str = ""
    dp: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)

    def args(self, hf_path: Path) -> argparse.Namespace:
        """All flags."""
        return trainer_args(hf_path, f"{FLAGS} {self.flags}", dp_size=self.dp, **{**TRAINING, **self.changes})


def run_cases(cases: Mapping[str, Case], hf_path: Path, out: Path) -> None:
    """Train each case from the model at `hf_path` and write <out>/<name>.pt, or .error; all of one world size."""
    jobs = [(name, case.args(hf_path)) for name, case in cases.items()]
    sizes = {args.actor_num_gpus_per_node for _, args in jobs}
    assert len(sizes) == 1, f"layouts of {sizes} ranks cannot share a world"
    ports = [_free_port() for _ in jobs]
    import megatron.core.distributed  # noqa: F401  (once here, instead of once in each child)

    context = mp.get_context("fork")
    world = sizes.pop()
    children = [context.Process(target=_child, args=(r, world, ports, jobs, out), daemon=True) for r in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60 * len(jobs))
    for child in children:
        child.kill()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _child(rank: int, world: int, ports: Sequence[int], jobs: Sequence[tuple[str, Any]], out: Path) -> None:
    from slime.backends.megatron_utils import initialize

    torch.set_num_threads(1)
    for port, (name, args) in zip(ports, jobs, strict=True):
        try:
            initialize.init(args, rank=rank, world_size=world, master_addr="127.0.0.1", master_port=port)
            result = train(args)
            if rank == 0:
                torch.save(result, out / f"{name}.pt")
            torch.distributed.barrier()
            initialize.shutdown()
        except BaseException:  # noqa: BLE001  (whatever it is, the other ranks would wait for this one)
            (out / f"{name}.error").write_text(f"rank {rank}: {traceback.format_exc()}")
            os._exit(1)
    os._exit(0)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train on one rollout; returns "steps", "columns" (of all samples) and "weights" (HF names)."""
    from slime.backends.megatron_utils import actor as actor_module
    from slime.backends.megatron_utils.hf_weight_iterator import iter_hf_buckets
    from slime.ray.rollout.dp_split import split_train_data

    actor = actor_module.MegatronTrainActor(args, rank=0, world_size=0, master_addr="", master_port=0)
    with mock.patch.object(actor_module.initialize, "init"):  # `_child` has done it
        actor.init()
    layout = actor.parallel_config()
    share = split_train_data(args, make_train_data(), layout)[layout["dp_rank"]]
    records = actor.train_on(0, share)
    Timer().end("train_wait")  # the next layout's actor starts it again
    weights = {}
    for bucket in iter_hf_buckets(args, actor.state.model, buffer_size=10_000):
        weights |= {name: tensor.clone() for name, tensor in bucket}
    return {
        "steps": same_on_all_ranks([metrics for metrics, key in records if key == "train/step"]),
        "rollout": same_on_all_ranks([metrics for metrics, key in records if key == "rollout/step"][-1]),
        "columns": columns_of_all_ranks(share),
        "weights": weights,
    }


def same_on_all_ranks(value: Any) -> Any:
    """`value`, after asserting that no rank has another one."""
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    assert all(other == value for other in found), found
    return value


def columns_of_all_ranks(share: Mapping[str, Any]) -> dict[int, dict[str, torch.Tensor]]:
    """{sample: {column: values}} of what passes before training made, after asserting that ranks agree."""
    names = ("log_probs", "advantages", "returns")
    mine = {sample: {name: share[name][i] for name in names} for i, sample in enumerate(share["sample_indices"])}
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    joined: dict[int, dict[str, torch.Tensor]] = {}
    for part in found:
        for sample, columns in part.items():
            known = joined.setdefault(sample, columns)
            assert all(torch.equal(known[name], columns[name]) for name in names), sample
    return joined
