"""Trainings of the same rollouts under many parallel layouts, one after the other, each in processes of its own.

A job's result is what does not depend on the layout: metrics of train steps, the columns that passes without gradients
made, and the weights after them under their HF names, gathered from all ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.multiprocessing as mp

from slime.utils.misc import listen_anywhere
from tests.integration.trainer_world import make_train_data, trainer_args
from tests.unit.megatron_fakes import prepare_to_fork

FLAGS = "--make-vocab-size-divisible-by 8 --adam-eps 1e-5 --adam-beta2 0.95 --weight-decay 0.1"
TRAINING: dict[str, Any] = {
    "lr": 1e-3,
    "clip_grad": 0.05,
    "data_pad_size_multiplier": 1,
    "entropy_coef": 0.01,
    "global_batch_size": 6,
    "max_tokens_per_gpu": 50,
    "normalize_advantages": True,
    "rollout_temperature": 0.8,
    "use_critic": False,
}
"""Two train steps a rollout, so that old log-probs take a pass of their own; the clip binds. Rows are padded no
further than tensor parallelism needs: the usual 128 would leave all that is trained to the first sequence-parallel
rank."""
SECONDS_PER_JOB = 300


@dataclass(frozen=True)
class Case:
    """One layout: Megatron's flags, copies of the model, and slime's flags that differ from TRAINING."""

    flags: str = ""
    dp: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)

    def args(self, hf_path: Path, **more: Any) -> argparse.Namespace:
        """All flags, for training from the HF model."""
        return trainer_args(hf_path, f"{FLAGS} {self.flags}", dp_size=self.dp, **{**TRAINING, **self.changes, **more})

    def resumed(self, hf_path: Path, checkpoint: Path) -> argparse.Namespace:
        """All flags, for going on from a checkpoint of rollout 0."""
        return self.args(hf_path, load=str(checkpoint), finetune=False, no_load_optim=False)


@dataclass(frozen=True)
class Job:
    """`run` is called with args on every rank, in the layout of args; what rank 0 returns is saved under `name`."""

    name: str
    args: argparse.Namespace
    run: Callable[..., Any]
    more: tuple[Any, ...] = ()


def run_jobs(jobs: Sequence[Job], out: Path) -> None:
    """Run jobs of one world size, each in processes of its own; each leaves <out>/<name>.pt, or the first that fails
    <name>.error.

    (In one world for all, the groups of every earlier layout stayed: Megatron's gradient hooks hold them, and gloo's
    threads of dozens of layouts brought the machine to a halt.)
    """
    sizes = {job.args.actor_num_gpus_per_node for job in jobs}
    assert len(sizes) == 1, f"layouts of {sizes} ranks cannot share a world"
    context, world = mp.get_context("fork"), sizes.pop()
    for job in jobs:
        listener = listen_anywhere()
        prepare_to_fork()
        children = [context.Process(target=_child, args=(rank, listener, world, job, out)) for rank in range(world)]
        for child in children:
            child.daemon = True
            child.start()
        listener.close()
        deadline = time.monotonic() + SECONDS_PER_JOB
        for child in children:
            child.join(timeout=max(0.0, deadline - time.monotonic()))
            child.kill()
        if not (out / f"{job.name}.pt").exists():
            return


def _child(rank: int, listener: socket.socket, world: int, job: Job, out: Path) -> None:
    """Do a job as one rank; rank 0 keeps the socket where they meet."""
    from slime.backends.megatron_utils import initialize

    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    if rank != 0:
        listener.close()
    try:
        where = {"master_addr": "127.0.0.1", "master_port": listener if rank == 0 else port}
        initialize.init(job.args, rank=rank, world_size=world, **where)
        forbid_waits_between_stages()
        result = job.run(job.args, *job.more)
        if rank == 0:
            torch.save(result, out / f"{job.name}.pt")
        torch.distributed.barrier()
    except BaseException:  # noqa: BLE001  (whatever it is, the other ranks would wait for this one)
        with (out / f"{job.name}.error").open("a") as file:  # the first rank's comes first; the others lose it
            file.write(f"{job.name}, rank {rank}: {traceback.format_exc()}\n")
        os._exit(1)
    os._exit(0)


def forbid_waits_between_stages() -> None:
    """On a GPU the host would not be ahead of it: where stages ask each other for shapes, or wait after a message."""
    from megatron.core.pipeline_parallel import p2p_communication

    from slime.backends.megatron_utils.megatron_patch.known_shapes import send_known_shapes

    def refuse(*_: Any) -> None:
        raise AssertionError("the host waits for the GPU between pipeline stages")

    p2p_communication.P2PCommunicator._communicate_shapes = refuse
    send_known_shapes()  # over that: stages that know the shapes do not ask
    synchronize = torch.cuda.synchronize
    torch.cuda.synchronize = lambda *device: (
        refuse() if sys._getframe(1).f_globals is vars(p2p_communication) else synchronize(*device)
    )


def train(args: argparse.Namespace, rollouts: Sequence[int] = (0,)) -> dict[int, dict[str, Any]]:
    """Train on some rollouts and save the first one's checkpoint where --save says.

    Returns:
        {rollout: {"steps", "rollout" (metrics), "columns" (of all samples), "weights" (HF names)}}.
    """
    from slime.backends.megatron_utils import actor as actor_module
    from slime.ray.rollout.shares import split_train_data

    actor = actor_module.MegatronTrainActor(args, rank=0, world_size=0, master_addr="", master_port=0)
    with mock.patch.object(actor_module.initialize, "init"):  # `_child` has done it
        started = actor.init()
    assert started["start_rollout_id"] == rollouts[0]
    layout = actor.parallel_config()
    data = make_train_data()
    if args.use_rollout_routing_replay:
        data["rollout_routed_experts"] = engine_choices(args, data["tokens"])
    results = {}
    for rollout_id in rollouts:
        share = split_train_data(args, data, layout)[layout["dp_rank"]]
        records = actor.train_on(rollout_id, share)
        results[rollout_id] = {
            "steps": same_on_all_ranks([metrics for metrics, key in records if key == "train/step"]),
            "rollout": same_on_all_ranks([metrics for metrics, key in records if key == "rollout/step"][-1]),
            "columns": columns_of_all_ranks(share),
            "weights": hf_tensors(args, actor.state.model),
        }
        if args.save and rollout_id == rollouts[0]:
            actor.save_model(rollout_id)
    return results


def engine_choices(args: argparse.Namespace, tokens: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Random experts for every token of every sample, as if an engine had chosen them."""
    rng = np.random.default_rng(0)
    experts = np.arange(args.num_moe_experts, dtype=np.int32)
    wide = [np.tile(experts, (len(sample) - 1, args.num_layers, 1)) for sample in tokens]
    return [rng.permuted(choices, axis=2)[..., : args.moe_router_topk] for choices in wide]


def hf_tensors(args: argparse.Namespace, model: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """All weights under their HF names, on every rank."""
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    found: dict[str, torch.Tensor] = {}
    for bucket in iter_hf_buckets(args, model, buffer_size=10_000):
        found |= {name: tensor.clone() for name, tensor in bucket}
    return found


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
