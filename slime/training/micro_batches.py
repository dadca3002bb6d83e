"""One rank's share of a rollout: as tensors, as the micro-batches that the model sees, and the passes over it.

What is computed later (`log_probs`, `advantages`, any column that a hook adds) is a column of the RolloutBatch with
one entry per sample, and reaches the micro-batches by itself. How samples are laid out as the model's inputs is the
backend's part (`Packing`).

The passes: which are needed, whose weights each takes, which samples each step has.

1. Passes without gradients come before training. They add columns to the rollout (`log_probs`, `ref_log_probs`, ...)
   and leave the model as it was: other weights than the policy's are swapped in from copies in host memory.
2. With --keep-old-actor the old log-probs are of the weights that generated the rollout, which says at which version
   (`weight_version`) that was. When it is trained, the trainer has moved on, and engines may have newer weights too
   (train_async.py); so a copy of each version that engines got is kept as long as a rollout may still come with it.
3. Passes of training (--ppo-epochs): without --shuffle-mini-batches every pass has the same train steps. With it,
   every pass after the first schedules the rollout again with its executions (samples of one `rollout_id`) in
   another order: steps, micro-batches and ranks of a sample change, the rules of slime.utils.dp_schedule hold as
   before. For that, every data-parallel rank gets the columns of the whole rollout once, in host memory, so that old
   log-probs and advantages, which are those of the first pass, go with their sample. The order follows from --seed,
   the rollout and the pass: it is equal on all ranks and in a resumed run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from slime.config.args import Args
from slime.processes.progress import went_on
from slime.utils import accelerator
from slime.utils.accelerator import to_device
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.dp_schedule import build_dp_schedule, first_fit_pack, packing_lengths, split_or_repeat
from slime.utils.misc import num_weight_versions
from slime.utils.train_data import MicroBatch, RolloutBatch

SCHEDULE_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
Columns = dict[str, list[np.ndarray]]
"""Columns of a share in host memory: per sample an array, of one value per response token."""
FloatColumn = Literal["rollout_log_probs", "teacher_log_probs", "token_rewards", "values", "returns"]
FLOAT_COLUMNS: tuple[FloatColumn, ...] = (
    "rollout_log_probs",
    "teacher_log_probs",
    "token_rewards",
    "values",
    "returns",
)


def to_tensors(rollout_data: RolloutBatch, device: torch.device) -> RolloutBatch:
    """Turn the ragged columns of a share, as they come from the object store, into lists of tensors (in place).

    Args:
        rollout_data: a RolloutBatch with Python lists; its `tokens` become [S][prompt + R] int64, its `loss_masks`
            [S][R] int32, its engine log-probs [S][R] float32.
        device: where the tensors go.

    Raises:
        ValueError: a sample without prompt, or a column whose lengths do not match its responses.
    """
    total_lengths = [len(tokens) for tokens in rollout_data["tokens"]]
    response_lengths = rollout_data["response_lengths"]
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        if not 0 <= response < total:
            raise ValueError(
                f"sample {i} of this rank has {total} tokens with a response of {response}; a trained sample needs a "
                "prompt of at least one token, whose logits predict the first of the response"
            )
    rollout_data["total_lengths"] = total_lengths
    rollout_data["tokens"] = _ragged("tokens", rollout_data["tokens"], total_lengths, np.int64, device)
    rollout_data["loss_masks"] = _ragged("loss_masks", rollout_data["loss_masks"], response_lengths, np.int32, device)
    for name in FLOAT_COLUMNS:
        if name in rollout_data:
            rollout_data[name] = _ragged(name, rollout_data[name], response_lengths, np.float32, device)
    return rollout_data


def to_host(columns: Mapping[str, Sequence[torch.Tensor]]) -> Columns:
    """Columns of tensors as another process takes them."""
    return {name: [value.detach().cpu().numpy() for value in column] for name, column in columns.items()}


def _ragged(
    name: str, values: Sequence[Any], lengths: Sequence[int], dtype: type, device: torch.device
) -> list[torch.Tensor]:
    """One copy to the device for the whole column; the entries are views of it."""
    found = [len(value) for value in values]
    if found != list(lengths):
        i = next((k for k, (a, b) in enumerate(zip(found, lengths, strict=False)) if a != b), len(found))
        raise ValueError(f"column {name!r} does not match the samples from sample {i} on: {found[i:][:1]} entries")
    flat = np.concatenate([np.asarray(value, dtype=dtype) for value in values])
    return list(torch.from_numpy(flat).to(device).split(found))


def image_key(inputs: Mapping[str, np.ndarray]) -> int:
    """Return what tells the images of one prompt from another's: its samples share the arrays."""
    return id(inputs["pixel_values"])


def joined_images(
    of_samples: Sequence[Mapping[str, np.ndarray] | None], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the processor's tensors of a micro-batch on a device, joined along their first axis; {} without images.

    Images of a prompt that several samples have are there once.
    """
    of_prompts = list({image_key(inputs): inputs for inputs in of_samples if inputs is not None}.values())
    names = of_prompts[0] if of_prompts else ()
    return {
        name: to_device(torch.from_numpy(np.concatenate([inputs[name] for inputs in of_prompts])), device)
        for name in names
    }


class Packing(Protocol):
    """How a backend lays samples out on one rank."""

    @property
    def cp_size(self) -> int:
        """Context-parallel ranks, which share the tokens of a micro-batch."""

    @property
    def count_multiple(self) -> int:
        """Micro-batches of a pass are a multiple of it, as interleaved pipeline stages need; the schedule sees to it
        for train steps."""

    def micro_batch(self, data: RolloutBatch, samples: Sequence[int]) -> MicroBatch:
        """Return the model's inputs for some samples of a share (`MicroBatch`, without the columns of `data`).

        Args:
            data: a share of tensors.
            samples: positions in it, in the order in which they are laid out.
        """


class MicroBatches:
    """The scheduled micro-batches of one rank's share; each is packed once and used by every pass over the rollout.

    Args:
        rollout_data: a RolloutBatch of tensors (`to_tensors`), with the schedule's columns.
        packing: how they are packed.
    """

    def __init__(self, rollout_data: RolloutBatch, packing: Packing) -> None:
        self.rollout_data = rollout_data
        self.num_samples = len(rollout_data["tokens"])
        self.indices: list[list[int]] = rollout_data["micro_batch_indices"]
        self.num_microbatches: list[int] = rollout_data["num_microbatches"]
        self.global_batch_sizes: list[int] = rollout_data["global_batch_sizes"]
        self._packing = packing
        self._packed = [packing.micro_batch(rollout_data, samples) for samples in self.indices]
        seen, self._repeated = set[int](), set[int]()
        for index, samples in enumerate(self.indices):
            if seen >= set(samples):  # a sample counts in the first micro-batch that has it (slime.utils.dp_schedule)
                self._repeated.add(index)
                self._packed[index]["full_loss_masks"].zero_()
            seen.update(samples)
        self._first_pass: list[dict[str, torch.Tensor]] = [{} for _ in self.indices]

    @property
    def num_steps(self) -> int:
        """Train steps of the rollout."""
        return len(self.num_microbatches)

    def of_step(self, step_id: int | None) -> Iterator[MicroBatch]:
        """The micro-batches of one train step, or with None of the rollout, in order."""
        return (self._micro_batch(i) for i in self._range(step_id))

    def row_lengths(self, step_id: int | None) -> list[int]:
        """T of each of those micro-batches."""
        return [self._packed[i]["tokens"].shape[1] for i in self._range(step_id)]

    def scatter(self, per_micro_batch: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """One tensor per sample in the order of the share, from one list per micro-batch in the order of `all()`."""
        by_sample = {
            sample: value
            for samples, values in zip(self.indices, per_micro_batch, strict=True)
            for sample, value in zip(samples, values, strict=True)
        }
        return [by_sample[i] for i in range(self.num_samples)]

    def columns(self) -> list[str]:
        """Names with one entry per sample, at this moment."""
        return [
            name
            for name, column in self.rollout_data.items()
            if name not in SCHEDULE_KEYS and isinstance(column, list | tuple) and len(column) == self.num_samples
        ]

    def column(self, name: str) -> Sequence[Any]:
        """One of `columns`: an entry for each sample, in the order of the share."""
        return cast(dict[str, Any], self.rollout_data)[name]

    def first_pass_column(self, name: str) -> list[torch.Tensor] | None:
        """What the loss's first pass gave each sample's response tokens ("log_probs", "entropy"), in the order of the
        share; None where some micro-batch has not been through it, or a loss of the user's own does not say."""
        lengths = self.rollout_data["response_lengths"]
        if not self._first_pass or not all(name in found for found in self._first_pass):
            return None
        sizes = [[lengths[i] for i in samples] for samples in self.indices]
        return self.scatter([found[name].split(size) for found, size in zip(self._first_pass, sizes, strict=True)])

    def repacked(self, max_tokens: int, *, as_many_over: dist.ProcessGroup | None = None) -> MicroBatches:
        """The same samples in micro-batches of at most `max_tokens` tokens (one sample may be longer), for a pass
        without gradients, which has no train steps: all of the rollout's samples are packed together.

        Args:
            max_tokens: of a micro-batch on a rank; context-parallel ranks share one of as many times more.
            as_many_over: ranks that must have equally many micro-batches, because they exchange tokens in each; those
                with fewer split theirs, and compute the last one again where there is nothing to split.
        """
        lengths = self.rollout_data["total_lengths"]
        indices = first_fit_pack(lengths, max_tokens * self._packing.cp_size)
        count = len(indices)
        if as_many_over is not None and as_many_over.size() > 1:
            most = torch.tensor(count, device=self.rollout_data["tokens"][0].device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=as_many_over)
            count = int(most)
        multiple = self._packing.count_multiple
        indices = split_or_repeat(indices, lengths, -(-count // multiple) * multiple)
        return self.of_data(self.rollout_data | {"micro_batch_indices": indices, "num_microbatches": [len(indices)]})

    def of_data(self, rollout_data: RolloutBatch) -> MicroBatches:
        """Other data, or the same with another schedule, packed in the same way."""
        return MicroBatches(rollout_data, self._packing)

    def _range(self, step_id: int | None) -> range:
        if step_id is None:
            return range(len(self.indices))
        start = sum(self.num_microbatches[:step_id])
        return range(start, start + self.num_microbatches[step_id])

    def _micro_batch(self, index: int) -> MicroBatch:
        went_on("micro-batches")
        samples = self.indices[index]
        columns: dict[str, Any] = {name: [self.column(name)[i] for i in samples] for name in self.columns()}
        columns["unconcat_tokens"] = columns.pop("tokens")
        if index in self._repeated:
            columns["loss_masks"] = [torch.zeros_like(mask) for mask in columns["loss_masks"]]
        columns["first_pass"] = self._first_pass[index]
        packed = self._packed[index]
        if "multimodal_train_inputs" in columns:  # joined for one pass: pixels are the largest part of a rollout
            images = joined_images(columns["multimodal_train_inputs"], packed["tokens"].device)
            columns["multimodal_train_inputs"] = images
        return cast(MicroBatch, columns | packed)


REFERENCE = "ref"
"""Tag of the reference's weights."""
TEACHER = "teacher"
"""Tag of the weights of --opd-teacher-load."""
_OLD_ACTOR = "old_actor/"
"""What the tags of versions of the weights begin with (--keep-old-actor)."""


def needs_reference(args: Args) -> bool:
    """Whether the run compares the policy with reference weights."""
    return args.use_kl_loss or args.kl_coef != 0


def needs_teacher(args: Args) -> bool:
    """Whether the trainer itself holds the weights of a teacher (--opd-type megatron)."""
    return args.use_opd and args.opd_type == "megatron"


def needs_old_log_probs(args: Args, num_updates: int) -> bool:
    """Whether they take a pass of their own: not where the loss's own forward pass gives the same numbers.

    Args:
        args: the flags that ask for them.
        num_updates: of the rollout; with one, nothing is updated before the loss's pass.
    """
    draws_masks = bool(args.lora_dropout or args.hidden_dropout)  # in the loss's pass alone
    same_as_in_loss = num_updates == 1 and args.loss_type == "policy_loss" and args.kl_coef == 0 and not draws_masks
    return not same_as_in_loss or any(
        (
            args.recompute_old_log_probs or args.use_rollout_logprobs or args.use_rollout_entropy,
            args.use_critic or args.keep_old_actor,  # the loss's pass is of newer weights
            args.use_opd,  # the advantages depend on them
            args.ci_test or args.save_debug_train_data is not None,  # for their readers
        )
    )


# ---- the weights that generated a rollout


def keep_version(args: Args, weights: TensorBackuper, version: int) -> None:
    """Copy the model's weights, which engines have now, and drop what no rollout can come with any more.

    Args:
        args: `async_buffer_size` and `update_weights_interval` say how many versions that leaves.
        weights: of the model.
        version: number of the weight sync.
    """
    _drop_before(weights, version + 1 - num_weight_versions(args.async_buffer_size, args.update_weights_interval))
    weights.backup(f"{_OLD_ACTOR}{version}")


def swapped_old_actor(weights: TensorBackuper, rollout_data: RolloutBatch) -> AbstractContextManager[None]:
    """The model holds the weights that generated this rollout inside the block; older copies are dropped for good.

    Rollouts are trained in the order in which they were generated, so no later one needs those. A rollout of no known
    version (nothing was synced: --debug-train-only) leaves the model as it is.
    """
    version = rollout_data.get("weight_version")
    if version is None:
        return nullcontext()
    _drop_before(weights, version)
    return weights.swapped(f"{_OLD_ACTOR}{version}")


def _drop_before(weights: TensorBackuper, version: int) -> None:
    for tag in weights.tags:
        if tag.startswith(_OLD_ACTOR) and int(tag.removeprefix(_OLD_ACTOR)) < version:
            weights.drop(tag)


# ---- passes of training


def passes_over(
    args: Args,
    micro_batches: MicroBatches,
    rollout_id: int,
    *,
    layout: Mapping[str, int],
    dp_group: dist.ProcessGroup | None,
) -> Iterator[MicroBatches]:
    """Yield the micro-batches of each pass; every rank goes through all of them.

    Args:
        args: `ppo_epochs`, `shuffle_mini_batches`, `seed`; with the second also what `build_dp_schedule` reads.
        micro_batches: those of the first pass, with every column that training needs.
        rollout_id: part of the seed.
        layout: the trainer's `dp_size` and `cp_size`, and this rank's `dp_rank`.
        dp_group: a gloo group of the data-parallel ranks, in their order; None = there is one.
    """
    if not args.shuffle_mini_batches:
        for _ in range(args.ppo_epochs):
            yield micro_batches
        return
    yield micro_batches
    rollout = _whole_rollout(micro_batches, dp_group) if args.ppo_epochs > 1 else {}
    for number in range(1, args.ppo_epochs):
        order = random.Random(f"{args.seed}/{rollout_id}/{number}")  # a text: seeded by all of it
        share = _share_in_new_order(args, rollout, order, layout=layout, steps=micro_batches.global_batch_sizes)
        yield micro_batches.of_data(cast(RolloutBatch, micro_batches.rollout_data | share))


def _whole_rollout(micro_batches: MicroBatches, dp_group: dist.ProcessGroup | None) -> dict[str, list[Any]]:
    """The per-sample columns of all ranks, tensors in host memory, in the order in which the rollout was made."""
    data = micro_batches.rollout_data
    mine = {
        name: [_on(torch.device("cpu"), value) for value in micro_batches.column(name)]
        for name in micro_batches.columns()
    }
    mine["partition"] = list(data["partition"])
    shares: list[Any] = [mine]
    if dp_group is not None and dp_group.size() > 1:
        shares = [None] * dp_group.size()
        dist.all_gather_object(shares, mine, group=dp_group)
    places = [place for share in shares for place in share["partition"]]
    order = sorted(range(len(places)), key=places.__getitem__)
    joined = {name: [value for share in shares for value in share[name]] for name in mine}
    return {name: [column[i] for i in order] for name, column in joined.items()}


def _share_in_new_order(
    args: Args, rollout: dict[str, list[Any]], order: random.Random, *, layout: Mapping[str, int], steps: list[int]
) -> dict[str, Any]:
    """This rank's columns and schedule of a pass."""
    executions = list(dict.fromkeys(rollout["rollout_ids"]))
    order.shuffle(executions)
    rank_of = {execution: i for i, execution in enumerate(executions)}
    # stable: samples of one execution stay together, in their order
    samples = sorted(range(len(rollout["rollout_ids"])), key=lambda i: rank_of[rollout["rollout_ids"][i]])
    lengths = packing_lengths(args, rollout["total_lengths"], rollout.get("image_spans"), cp_size=layout["cp_size"])
    schedule = build_dp_schedule(
        args,
        layout,
        [lengths[i] for i in samples],
        global_batch_size=steps[0],
        rollout_indices=[rollout["rollout_ids"][i] for i in samples],
    )
    mine = [samples[i] for i in schedule.partitions[layout["dp_rank"]]]
    device = accelerator.current_device()
    return {
        **{name: [_on(device, column[i]) for i in mine] for name, column in rollout.items()},
        "micro_batch_indices": schedule.micro_batch_indices[layout["dp_rank"]],
        "num_microbatches": schedule.num_microbatches,
        "global_batch_sizes": schedule.global_batch_sizes,
    }


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
