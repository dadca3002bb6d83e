"""One rank's share of a rollout as tensors, and as the micro-batches that the model sees.

What is computed later (`log_probs`, `advantages`, any column that a hook adds) is a column of the RolloutBatch with
one entry per sample, and reaches the micro-batches by itself. How samples are laid out as the model's inputs is the
backend's part (`Packing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist

from slime.processes.progress_counts import went_on
from slime.utils.dp_schedule import first_fit_pack, split_or_repeat
from slime.utils.train_data import MicroBatch, RolloutBatch

SCHEDULE_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
Columns = dict[str, list[np.ndarray]]
"""Columns of a share in host memory: per sample an array, of one value per response token."""
FloatColumn = Literal["rollout_log_probs", "teacher_log_probs", "values", "returns"]
FLOAT_COLUMNS: tuple[FloatColumn, ...] = ("rollout_log_probs", "teacher_log_probs", "values", "returns")


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
        columns["first_pass"] = self._first_pass[index]
        return cast(MicroBatch, columns | self._packed[index])
