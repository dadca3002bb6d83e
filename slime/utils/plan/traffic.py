"""How weights travel from trainer to engines, and what a run writes to disk: ways, places and sizes.

It reads flags and counts parameters; it opens no file and no connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.utils.plan.devices import Device
from slime.utils.plan.shape import ModelShape
from slime.utils.plan.timing import DISK_BANDWIDTH
from slime.utils.plan.trainer_memory import Precision
from slime.utils.weight_format import WeightFormat, quantized_parts

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class Transport:
    """The weight sync."""

    way: str
    num_bytes: int
    """Of one full set of weights: in the trainer's precision, or quantised as the engines store them."""
    bucket_bytes: int
    num_buckets: int
    every: str
    """How often, in words."""
    bandwidth: float
    """Bytes/s assumed for the estimate."""


@dataclass(frozen=True)
class Output:
    """Something that the run writes."""

    what: str
    where: str
    size_bytes: int | None
    """None: depends on the run."""
    when: str


def transport(
    args: Args, shape: ModelShape, device: Device, *, num_nodes: int, fmt: WeightFormat | None = None
) -> Transport | None:
    """The way of the weights, which are quantised where the engines' checkpoint is (`fmt`); None without engines."""
    if args.debug_train_only or args.debug_rollout_only:
        return None
    num_bytes = hf_bytes(args, shape, fmt)
    network = device.network_bandwidth if num_nodes > 1 else device.link_bandwidth
    if args.update_weight_transport == "disk":
        is_delta = args.update_weight_mode == "delta"
        kind = f"changed bytes ({args.update_weight_delta_encoding})" if is_delta else "full HF checkpoint"
        way, bandwidth = f"disk: {kind} under {args.update_weight_disk_dir or '(no directory given)'}", DISK_BANDWIDTH
    elif args.colocate:
        # Both hand over one flattened tensor a bucket; only its handle travels.
        is_cpu = args.accelerator == "cpu"
        way = "colocated tensors in shared memory" if is_cpu else "colocated tensors over CUDA IPC"
        bandwidth = device.ipc_bandwidth
        if not is_cpu and args.rollout_num_gpus > args.actor_num_nodes * args.actor_num_gpus_per_node:
            way += ", NCCL broadcast to engines behind the trainer's GPUs"
            bandwidth = network
    else:
        way = ("gloo" if args.accelerator == "cpu" else "NCCL") + " broadcast from the trainer to every engine rank"
        bandwidth = network
    if fmt is not None:
        way += f", as {fmt.kind}"
    bucket = min(args.update_weight_buffer_size, num_bytes)
    interval = args.update_weights_interval
    every = "every rollout" if interval == 1 else f"every {interval} rollouts (train_async.py)"
    return Transport(way, num_bytes, bucket, -(-num_bytes // max(1, bucket)), every, bandwidth)


def hf_bytes(args: Args, shape: ModelShape, fmt: WeightFormat | None) -> int:
    """Of the model as HF tensors: in the trainer's precision, but for what `fmt` quantises."""
    parts, itemsize = shape.components, Precision.of(args).weight
    if fmt is None:
        return parts["total"] * itemsize
    quantized = sum(parts[part] for part in quantized_parts(fmt))
    return fmt.bytes_of_params(quantized, itemsize=itemsize) + (parts["total"] - quantized) * itemsize


def outputs(args: Args, shape: ModelShape | None, fmt: WeightFormat | None = None) -> list[Output]:
    """Everything that the run writes, in the order in which it happens; HF exports are stored as `fmt` says."""
    directory = args.output_dir
    found = [
        Output("metrics", f"{directory}/metrics.jsonl", None, "every rollout"),
        Output("logs", f"{directory}/logs/", None, "as they come"),
    ]
    if args.log_eval_samples:
        found.append(Output("answers", f"{directory}/eval_samples.jsonl", None, "every evaluation"))
    when = (
        f"every {args.save_interval} rollouts, and after the last" if args.save_interval else "after the last rollout"
    )
    if args.keep_checkpoints:
        when += f"; the newest {args.keep_checkpoints} are kept"
    if args.save:
        size = None if shape is None else checkpoint_bytes(args, shape, fmt)
        found.append(Output("checkpoint", f"{args.save}/iter_<rollout id>/", size, when))
        found.append(Output("data position", f"{args.save}/rollout/", None, when))
    if args.save_hf:
        size = None if shape is None else hf_bytes(args, shape, fmt)
        found.append(Output("HF export", args.save_hf, size, when))
    found += [Output(what, str(where), None, when) for what, where, when in _dumps(args) if where]
    return found


def checkpoint_bytes(args: Args, shape: ModelShape, fmt: WeightFormat | None = None) -> int:
    """What --checkpoint-contents says: weights as trained, the optimizer's fp32 state, an HF export."""
    precision, contents = Precision.of(args), args.checkpoint_contents or ("model", "optimizer")
    optimizer = precision.saved if "optimizer" in contents else 0
    export = hf_bytes(args, shape, fmt) if "hf" in contents else 0
    return shape.num_params * (precision.weight + optimizer) + export


def _when_files_are_sent(args: Args) -> str:
    return "every weight sync" + ("" if args.update_weight_transport == "disk" else ", if there is no other way")


def _dumps(args: Args) -> list[tuple[str, Any, str]]:
    return [
        ("rollout dump", args.save_debug_rollout_data, "every rollout"),
        ("trainer's inputs", args.save_debug_train_data, "every rollout"),
        ("dumps of both", args.dump_details, "every rollout"),
        ("W&B files", args.wandb_dir if args.use_wandb else None, "every rollout"),
        ("TensorBoard", args.tb_project_name if args.use_tensorboard else None, "every rollout"),
        ("weights for the engines", args.update_weight_disk_dir, _when_files_are_sent(args)),
    ]
