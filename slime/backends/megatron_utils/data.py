"""One rank's share of a rollout as tensors, and as the packed micro-batches that the model sees.

Packing is THD: the samples of a micro-batch lie one after the other in a single row, and `packed_seq_params` says
where each starts. The row is filled up with token 0, as a sequence of its own, to a multiple of the tensor-parallel
size x --data-pad-size-multiplier. Under context parallelism the row holds this rank's chunks of each sample
(slime.backends.megatron_utils.cp_utils), and `packed_seq_params` speaks of the whole samples. It knows nothing about
losses: what is computed later (`log_probs`, `advantages`, any column that a hook adds) is a column of the RolloutBatch
with one entry per sample, and reaches the micro-batches by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.cp_utils import (
    chunk_size_of,
    get_logits_and_tokens_offset_with_cp,
    slice_with_cp,
    zigzag_positions,
)
from slime.backends.megatron_utils.layers.packs import note_ends
from slime.utils.accelerator import to_device
from slime.utils.dp_schedule import first_fit_pack, split_or_repeat
from slime.utils.progress_counts import went_on
from slime.utils.train_data import MicroBatch, RolloutBatch

PAD_TOKEN = 0
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


@dataclass(frozen=True)
class Packing:
    """How samples become packed rows on one rank."""

    multiple: int = 1
    """The tokens of a row are a multiple of it."""
    cp_rank: int = 0
    cp_size: int = 1
    num_predictions: int = 0
    """Layers that predict further tokens and are trained."""
    count_multiple: int = 1
    """Micro-batches of a pass are a multiple of it, as interleaved pipeline stages need; the schedule sees to it for
    train steps."""


def response_rows(
    total_lengths: Sequence[int], response_lengths: Sequence[int], packing: Packing = Packing()
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Which rows of this rank's packed logits predict response tokens: row p predicts the token at p + 1.

    Returns:
        [n] rows; [n] which token of the responses, one after the other, each predicts; [S] how many are each sample's.
        Without context parallelism n is the sum of R, and the second is 0, 1, 2 ...
    """
    if packing.cp_size == 1:
        # numpy: torch wakes up a thread for each core to repeat a few numbers
        totals, responses = np.asarray(total_lengths, np.int64), np.asarray(response_lengths, np.int64)
        place = np.arange(responses.sum())
        first_rows, first_places = totals.cumsum() - responses - 1, responses.cumsum() - responses
        row = place + (first_rows - first_places).repeat(responses)
        return torch.from_numpy(row), torch.from_numpy(place), list(response_lengths)
    rows, places = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    counts = [0] * len(total_lengths)
    first_row = first_place = 0
    for i, (total, response) in enumerate(zip(total_lengths, response_lengths, strict=True)):
        found = get_logits_and_tokens_offset_with_cp(total, response, cp_rank=packing.cp_rank, cp_size=packing.cp_size)
        for number, (chunk, logits) in enumerate(zip(found.chunks, found.logits, strict=True)):
            if logits[0] < logits[1]:
                positions = torch.arange(*logits)
                rows.append(first_row + number * found.chunk_size + positions - chunk[0])
                places.append(first_place + positions + 1 - (total - response))
                counts[i] += len(positions)
        first_row += 2 * found.chunk_size
        first_place += response
    return torch.cat(rows), torch.cat(places), counts


def prediction_rows(
    total_lengths: Sequence[int], response_lengths: Sequence[int], ahead: int, packing: Packing = Packing()
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `response_rows`, where row p predicts the token at p + 1 + `ahead`, without the counts.

    A response token that has fewer than 1 + `ahead` tokens before it is predicted nowhere.
    """
    rows, places = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    first_row = first_place = 0
    for total, response in zip(total_lengths, response_lengths, strict=True):
        chunk = total if packing.cp_size == 1 else chunk_size_of(total, packing.cp_size)
        owned = (0,) if packing.cp_size == 1 else (packing.cp_rank, 2 * packing.cp_size - 1 - packing.cp_rank)
        first, end = max(total - response - 1 - ahead, 0), total - 1 - ahead
        for number, index in enumerate(owned):
            start, stop = max(first, index * chunk), min(end, (index + 1) * chunk)
            positions = torch.arange(start, max(start, stop))
            rows.append(first_row + (number - index) * chunk + positions)
            places.append(first_place + positions + 1 + ahead - (total - response))
        first_row += len(owned) * chunk
        first_place += response
    return torch.cat(rows), torch.cat(places)


def pack(tokens: Sequence[torch.Tensor], packing: Packing = Packing()) -> MicroBatch:
    """The model's inputs for these samples: `tokens` [1, T], `position_ids` [1, T], `packed_seq_params`.

    Args:
        tokens: [S][prompt + R] on one device.
        packing: T, the tokens of this rank's row, is a multiple of its `multiple`.
    """
    cp_rank, cp_size = packing.cp_rank, packing.cp_size
    if cp_size == 1:
        lengths, multiple = [len(sample) for sample in tokens], packing.multiple
    else:  # a rank has two chunks of everything, the padding included
        lengths = [2 * chunk_size_of(len(sample), cp_size) for sample in tokens]
        multiple = math.lcm(packing.multiple, 2)
        tokens = [slice_with_cp(sample, PAD_TOKEN, cp_rank=cp_rank, cp_size=cp_size) for sample in tokens]
    padding = -sum(lengths) % multiple
    if padding:
        lengths = [*lengths, padding]
    device = tokens[0].device
    ends = torch.tensor([0, *lengths]).cumsum(0) * cp_size
    position_ids = zigzag_positions(ends, sum(lengths), cp_rank=cp_rank, cp_size=cp_size)
    cu_seqlens = to_device(ends.int(), device)
    longest = max(lengths) * cp_size
    packed_seq_params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    note_ends(packed_seq_params, ends.tolist())
    return {
        "tokens": torch.cat([*tokens, tokens[0].new_full((padding,), PAD_TOKEN)])[None],
        "position_ids": to_device(position_ids[None], device),
        "packed_seq_params": packed_seq_params,
    }


class MicroBatches:
    """The scheduled micro-batches of one rank's share; each is packed once and used by every pass over the rollout.

    Args:
        rollout_data: a RolloutBatch of tensors (`to_tensors`), with the schedule's columns.
        packing: how they are packed.
    """

    def __init__(self, rollout_data: RolloutBatch, packing: Packing = Packing()) -> None:
        self.rollout_data = rollout_data
        self.num_samples = len(rollout_data["tokens"])
        self.indices: list[list[int]] = rollout_data["micro_batch_indices"]
        self.num_microbatches: list[int] = rollout_data["num_microbatches"]
        self.global_batch_sizes: list[int] = rollout_data["global_batch_sizes"]
        self._packing = packing
        self._packed = [self._pack(samples) for samples in self.indices]

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

    def _pack(self, samples: list[int]) -> MicroBatch:
        data, cp = self.rollout_data, (self._packing.cp_rank, self._packing.cp_size)
        tokens = [data["tokens"][i] for i in samples]
        packed = pack(tokens, self._packing)
        response_lengths = [data["response_lengths"][i] for i in samples]
        total_lengths = [len(sample) for sample in tokens]
        rows, places, counts = response_rows(total_lengths, response_lengths, self._packing)
        rows, places = (to_device(x, packed["tokens"].device) for x in (rows, places))
        responses = [
            sample[total - response :]
            for sample, total, response in zip(tokens, total_lengths, response_lengths, strict=True)
        ]
        full_loss_masks = torch.zeros_like(packed["tokens"], dtype=torch.int32)
        full_loss_masks[0, rows] = torch.cat([data["loss_masks"][i] for i in samples])[places]
        # On the host: on the device each sample would cost kernels of its own.
        is_token = [
            slice_with_cp(torch.ones(total, dtype=torch.bool), 0, cp_rank=cp[0], cp_size=cp[1])
            for total in total_lengths
        ]
        padding = torch.ones(packed["tokens"].shape[1], dtype=torch.bool)
        sample_rows = [x.shape[0] for x in is_token]
        padding[: sum(sample_rows)] = ~torch.cat(is_token)
        packed |= {
            "padding": to_device(padding, packed["tokens"].device),
            "sample_rows": sample_rows,
            "full_loss_masks": full_loss_masks,
            "response_rows": rows,
            "response_row_counts": counts,
            "response_tokens": torch.cat(responses)[places],
        }
        packed |= {"response_places": places} if self._packing.cp_size > 1 else {}
        return packed | (self._predictions(tokens, responses) if self._packing.num_predictions else {})

    def _predictions(self, tokens: list[torch.Tensor], responses: list[torch.Tensor]) -> MicroBatch:
        """For each prediction layer the tokens that it embeds [1, T]; the rows that predict response tokens, those
        tokens, and their places among all of the micro-batch."""
        found: MicroBatch = {"further_tokens": [], "prediction_rows": [], "prediction_places": []}
        total_lengths, response_lengths = [len(x) for x in tokens], [len(x) for x in responses]
        device = tokens[0].device
        for ahead in range(1, self._packing.num_predictions + 1):
            further = [torch.nn.functional.pad(x[ahead:], (0, min(ahead, len(x)))) for x in tokens]
            found["further_tokens"].append(pack(further, self._packing)["tokens"])
            rows, places = prediction_rows(total_lengths, response_lengths, ahead, self._packing)
            found["prediction_rows"].append(rows.to(device))
            found["prediction_places"].append(places.to(device))
        found["prediction_targets"] = [torch.cat(responses)[places] for places in found["prediction_places"]]
        return found

    def _micro_batch(self, index: int) -> MicroBatch:
        went_on("micro-batches")
        samples = self.indices[index]
        columns = {name: [self.column(name)[i] for i in samples] for name in self.columns()}
        columns["unconcat_tokens"] = columns.pop("tokens")
        return cast(MicroBatch, columns | self._packed[index])
