"""One rollout on its way to the trainer: samples -> dump, checks, metrics -> `TrainData` -> a share of it for each
data-parallel rank, which gets there through Ray's object store, or over NIXL.

With NIXL (--rollout-data-transport nixl) the columns of one value per token stay in the memory of the rollout manager,
where each trainer reads them (RDMA, where the network has it); the rest goes with the reference.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from slime.checkpoints.rollout_files import load_samples, save_dump, subsample
from slime.config.args import Args
from slime.config.lora_policies import policies_of
from slime.observability import logging_utils
from slime.observability.rollout_metrics import log_rollout_data
from slime.observability.rollout_records.recorder import SampleRecorder
from slime.rollout.base_types import call_rollout_fn, flatten
from slime.rollout.hooks.errors import blame_hook, hook_name
from slime.rollout.hooks.process_rewards import token_reward_column
from slime.rollout.hooks.returns import check_train_data, check_trainable
from slime.rollout.hooks.sample_errors import check_distinct
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sampling.weight_versions import WeightClock, staleness, staleness_metrics
from slime.rollout.train_data import (
    filter_train_data,
    mask_untrusted,
    post_process_rewards,
    samples_to_train_data,
)
from slime.utils.dp_schedule import build_dp_schedule, packing_lengths
from slime.utils.misc import Box, group_by, hook_args, load_function
from slime.utils.train_data import FlatColumn, flatten_columns
from slime.utils.types import Sample
from slime.weights.adapters import POLICY

# Flags of the hooks that are called between the rollout function and the trainer.
HOOKS_ON_SAMPLES = (
    "custom_rollout_log_function_path",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
)


Shares = list[Box] | dict[str, list[Box]]
"""Of each data-parallel rank; with several policies (--lora-policies) of each of them."""


@dataclass(frozen=True)
class Generated:
    """A rollout whose samples are there, and of which no training data was made yet.

    Attributes:
        rollout_id: which.
        samples: of all groups.
        metrics: those of the rollout function.
        seconds: how long it took.
        weight_version: of the engines when it began; None before the first weight sync.
    """

    rollout_id: int
    samples: list[Sample]
    metrics: Mapping[str, float]
    seconds: float
    weight_version: int | None


def make_samples(args: Args, rollout_id: int, generate: Callable[..., Any], data_source: Any) -> Generated:
    """Generate the samples of a rollout, or replay them (--load-debug-rollout-data)."""
    start, begun = time.monotonic(), WeightClock().version
    if template := args.load_debug_rollout_data:
        samples = load_samples(template.format(rollout_id=rollout_id), option="--load-debug-rollout-data")
        samples, metrics = subsample(samples, args.load_debug_rollout_data_subsample), None
    else:
        set_current_rollout_id(rollout_id)  # the data source may draw other prompts in each rollout
        output = call_rollout_fn(generate, hook_args(args), rollout_id, data_source, evaluation=False)
        samples, metrics = flatten(output.samples), output.metrics
    return Generated(rollout_id, samples, metrics or {}, time.monotonic() - start, begun)


def make_shares(
    args: Args,
    rollout: Generated,
    parallel_config: Mapping[str, int],
    server_metrics: Mapping[str, float],
    recorder: SampleRecorder,
) -> Shares:
    """Dump, check, log and record the samples of a rollout, and make each data-parallel rank's share of them.

    Args:
        args: the run's flags.
        rollout: with its samples.
        parallel_config: see `split_train_data`.
        server_metrics: of engines and routers, which are logged with the rollout's.
        recorder: keeps the samples for readers.

    Returns:
        one Box with an object reference per data-parallel rank, of several policies by their names; none without
        trainers.
    """
    dump_samples(args, rollout.samples, str(rollout.rollout_id))
    mask_untrusted(args, rollout.samples)
    if args.custom_convert_samples_to_train_data_path:  # it makes of them what is checked and trained on
        check_distinct(_source_name(args, rollout.rollout_id), rollout.samples)
    elif not args.debug_rollout_only:
        check_trainable(args, _source_name(args, rollout.rollout_id), rollout.samples)
    _check_staleness(args, rollout)
    _log_rollout(args, rollout, server_metrics)
    with recorder.rollout(rollout.rollout_id, rollout.samples) as recorded:
        if args.debug_rollout_only:
            return []
        common = {"weight_version": rollout.weight_version, "recorded_indices": recorded}
        common = {name: value for name, value in common.items() if value is not None}

        def of(samples: list[Sample]) -> list[Box]:
            shares = split_train_data(args, _convert(args, samples) | common, parallel_config)
            return [put_share(share, args.rollout_data_transport) for share in shares]

        if not policies_of(args):
            return of(rollout.samples)
        of_policies = group_by(rollout.samples, lambda sample: sample.metadata[POLICY])
        return {policy.name: of(of_policies[policy.name]) for policy in policies_of(args)}


def dump_samples(args: Args, samples: list[Sample], rollout_id: str) -> None:
    """Write samples to --save-debug-rollout-data, if it is given; those of an evaluation are "eval_..."."""
    if args.save_debug_rollout_data is None:
        return
    template = args.save_debug_rollout_data
    path = Path(template.format(rollout_id=rollout_id))
    if "{rollout_id" not in template and rollout_id.startswith("eval_"):
        path = path.with_name(f"eval_{path.name}")  # one file of rollouts, which can be replayed, and one of these
    save_dump(path, {"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]})


def call_log_hook(args: Args, attribute: str, *given: Any) -> dict[str, float] | None:
    """Call the user's log function of a flag, if there is one.

    Returns:
        what it adds to slime's metrics; None where it replaces them.
    """
    if not (path := vars(args)[attribute]):
        return {}
    with blame_hook(f"--{attribute.replace('_', '-')} {hook_name(path)}"):
        returned = load_function(path)(*given)
        if isinstance(returned, dict):
            return logging_utils.numbers(returned)
        return None if returned else {}


def _source_name(args: Args, rollout_id: int) -> str:
    """Where the samples come from, for an error."""
    if template := args.load_debug_rollout_data:
        return f"--load-debug-rollout-data {template.format(rollout_id=rollout_id)}"
    return f"--rollout-function-path {hook_name(args.rollout_function_path)}"


def _check_staleness(args: Args, rollout: Generated) -> None:
    bound = args.max_weight_staleness
    age = staleness(rollout.samples, WeightClock().trained_at(rollout.rollout_id))
    if bound is not None and age > bound:
        raise RuntimeError(
            f"--max-weight-staleness {bound}: --rollout-function-path {args.rollout_function_path} returned tokens "
            f"for rollout {rollout.rollout_id} that are {age} versions older than the trainer then"
        )


def _log_rollout(args: Args, rollout: Generated, server_metrics: Mapping[str, float]) -> None:
    number, samples, extra = rollout.rollout_id, rollout.samples, dict(rollout.metrics)  # a hook may add to them
    hook = "custom_rollout_log_function_path"
    own = call_log_hook(args, hook, number, hook_args(args), samples, extra, rollout.seconds)
    if own is None:
        return
    extra |= own | staleness_metrics(samples, WeightClock().trained_at(number)) | dict(server_metrics)
    log_rollout_data(number, args, samples, extra, rollout.seconds)


def _convert(args: Args, samples: list[Sample]) -> dict[str, Any]:
    if path := args.custom_convert_samples_to_train_data_path:
        with blame_hook(f"--custom-convert-samples-to-train-data-path {hook_name(path)}"):
            columns = load_function(path)(hook_args(args), samples)
        return check_train_data(args, columns, samples)
    raw_rewards, rewards = post_process_rewards(args, samples)
    if path := args.custom_reward_post_process_path:  # it may have put teacher log-probs on the samples
        check_trainable(args, f"--custom-reward-post-process-path {hook_name(path)}", samples)
    made = samples_to_train_data(samples, raw_rewards, rewards)
    data = dict(made)
    if (of_tokens := token_reward_column(args, samples, made["loss_masks"])) is not None:
        data["token_rewards"] = of_tokens
    return filter_train_data(args, data, samples) if args.pf_ppo_reweight else data


def split_train_data(
    args: Args, train_data: Mapping[str, Any], parallel_config: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Cut every column of a rollout by rank.

    Args:
        args: `global_batch_size`, `drop_last_rollouts` and what `build_dp_schedule` reads.
        train_data: columns of one value per sample; a column of another length is not per sample and goes to
            every rank.
        parallel_config: the trainer's `dp_size` and `cp_size` (and `vpp_size`).

    Returns:
        [dp] dict of the same columns, in the order in which the rank trains them, plus `total_lengths` (tokens of each
        sample), `partition` (indices into the rollout), `micro_batch_indices`, `num_microbatches`,
        `global_batch_sizes`.

    Raises:
        ValueError: some executions fill no train step, and --drop-last-rollouts is off.
    """
    if not args.drop_last_rollouts:
        _check_rest(len(set(train_data["rollout_ids"])), args.global_batch_size)
    num_samples = len(train_data["tokens"])
    total_lengths = [len(tokens) for tokens in train_data["tokens"]]
    columns = {**train_data, "total_lengths": total_lengths}
    schedule = build_dp_schedule(
        args,
        parallel_config,
        packing_lengths(args, total_lengths, train_data.get("image_spans"), cp_size=parallel_config["cp_size"]),
        global_batch_size=args.global_batch_size,
        rollout_indices=train_data["rollout_ids"],
    )
    return [
        {
            **{name: _take(values, partition, num_samples) for name, values in columns.items()},
            "partition": partition,
            "micro_batch_indices": schedule.micro_batch_indices[rank],
            "num_microbatches": schedule.num_microbatches,
            "global_batch_sizes": schedule.global_batch_sizes,
        }
        for rank, partition in enumerate(schedule.partitions)
    ]


def _check_rest(num_rollouts: int, global_batch_size: int) -> None:
    if rest := num_rollouts % global_batch_size:
        raise ValueError(
            f"{num_rollouts} samples were generated, which do not divide into train steps of --global-batch-size "
            f"{global_batch_size}; return a multiple of it, or leave out the last {rest} with --drop-last-rollouts"
        )


def _take(values: Any, partition: list[int], num_samples: int) -> Any:
    if isinstance(values, list) and len(values) == num_samples:
        return [values[i] for i in partition]
    return values


def put_share(share: Mapping[str, Any], transport: str) -> Box:
    """Make a share available to trainers, which `slime.utils.data.process_rollout_data` fetches.

    Args:
        share: columns of a rank.
        transport: of --rollout-data-transport.
    """
    columns = flatten_columns(share)
    if transport == "nixl":
        return Box(ray.put({name: _as_tensor(column) for name, column in columns.items()}, _tensor_transport="nixl"))
    return Box(ray.put(columns))


def _as_tensor(column: Any) -> Any:
    """NIXL carries tensors alone; one without elements has no memory to read."""
    if not isinstance(column, FlatColumn) or not column.values.size:
        return column
    import torch

    return dataclasses.replace(column, values=torch.from_numpy(column.values))
