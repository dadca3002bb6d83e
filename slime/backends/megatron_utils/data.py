"""One rank's share of a rollout as tensors, and as the packed micro-batches that the model sees.

Packing is THD: the samples of a micro-batch lie one after the other in a single row, and `packed_seq_params` says
where each starts. The row is filled up with token 0, as a sequence of its own, to a multiple of the tensor-parallel
size x --data-pad-size-multiplier. It knows nothing about losses: what is computed later (`log_probs`, `advantages`,
any column that a hook adds) is a column of the RolloutBatch with one entry per sample, and reaches the micro-batches
by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from slime.utils.dp_schedule import first_fit_pack

PAD_TOKEN = 0
SCHEDULE_KEYS = ("partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes")
FLOAT_COLUMNS = ("rollout_log_probs", "teacher_log_probs")


def to_tensors(rollout_data: dict[str, Any], device: torch.device) -> dict[str, Any]:
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


def response_rows(total_lengths: Sequence[int], response_lengths: Sequence[int]) -> torch.Tensor:
    """Rows of the packed logits that predict the response tokens, [sum of R]: row p predicts the token at p + 1."""
    total, response = torch.tensor(total_lengths), torch.tensor(response_lengths)
    first_row = total.cumsum(0) - response - 1
    first_out = response.cumsum(0) - response
    return torch.arange(int(response.sum())) + (first_row - first_out).repeat_interleave(response)


def pack(tokens: Sequence[torch.Tensor], multiple: int) -> dict[str, Any]:
    """The model's inputs for these samples: `tokens` [1, T], `position_ids` [1, T], `packed_seq_params`.

    Args:
        tokens: [S][prompt + R] on one device.
        multiple: T is a multiple of it.
    """
    lengths = [len(sample) for sample in tokens]
    used = sum(lengths)
    padding = -used % multiple
    if padding:
        lengths = [*lengths, padding]
    device = tokens[0].device
    row = torch.cat([*tokens, tokens[0].new_full((padding,), PAD_TOKEN)])
    size = torch.tensor(lengths)
    ends = size.cumsum(0)
    position_ids = torch.arange(used + padding) - (ends - size).repeat_interleave(size)
    cu_seqlens = torch.cat([ends.new_zeros(1), ends]).to(device=device, dtype=torch.int32)
    longest = max(lengths)
    return {
        "tokens": row[None],
        "position_ids": position_ids[None].to(device),
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    }


class MicroBatches:
    """The scheduled micro-batches of one rank's share; each is packed once and used by every pass over the rollout.

    Args:
        rollout_data: a RolloutBatch of tensors (`to_tensors`), with the schedule's columns.
        pad_multiple: packed rows are padded to a multiple of it.
    """

    def __init__(self, rollout_data: dict[str, Any], pad_multiple: int) -> None:
        self.rollout_data = rollout_data
        self.num_samples = len(rollout_data["tokens"])
        self.indices: list[list[int]] = rollout_data["micro_batch_indices"]
        self.num_microbatches: list[int] = rollout_data["num_microbatches"]
        self.global_batch_sizes: list[int] = rollout_data["global_batch_sizes"]
        self._pad_multiple = pad_multiple
        self._packed = [self._pack(samples) for samples in self.indices]

    @property
    def num_steps(self) -> int:
        """Train steps of the rollout."""
        return len(self.num_microbatches)

    def all(self) -> Iterator[dict[str, Any]]:
        """Every micro-batch of the rollout, in order."""
        return (self._micro_batch(i) for i in range(len(self.indices)))

    def of_step(self, step_id: int) -> Iterator[dict[str, Any]]:
        """The micro-batches of one train step."""
        start = sum(self.num_microbatches[:step_id])
        return (self._micro_batch(i) for i in range(start, start + self.num_microbatches[step_id]))

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

    def repacked(self, max_tokens: int, *, as_many_over: dist.ProcessGroup | None = None) -> MicroBatches:
        """The same samples in micro-batches of at most `max_tokens` tokens (one sample may be longer), for a pass
        without gradients, which has no train steps: all of the rollout's samples are packed together.

        Args:
            max_tokens: of a micro-batch.
            as_many_over: ranks that must have equally many micro-batches, because they exchange tokens in each; those
                with fewer compute their last one again.
        """
        indices = first_fit_pack(self.rollout_data["total_lengths"], max_tokens)
        if as_many_over is not None and as_many_over.size() > 1:
            most = torch.tensor(len(indices), device=self.rollout_data["tokens"][0].device)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=as_many_over)
            indices = indices + [indices[-1]] * (int(most) - len(indices))
        return self.of_data(self.rollout_data | {"micro_batch_indices": indices, "num_microbatches": [len(indices)]})

    def of_data(self, rollout_data: dict[str, Any]) -> MicroBatches:
        """Other data, or the same with another schedule, packed in the same way."""
        return MicroBatches(rollout_data, self._pad_multiple)

    def _pack(self, samples: list[int]) -> dict[str, Any]:
        data = self.rollout_data
        packed = pack([data["tokens"][i] for i in samples], self._pad_multiple)
        rows = response_rows(
            [data["total_lengths"][i] for i in samples], [data["response_lengths"][i] for i in samples]
        )
        rows = rows.to(packed["tokens"].device)
        full_loss_masks = torch.zeros_like(packed["tokens"], dtype=torch.int32)
        full_loss_masks[0, rows] = torch.cat([data["loss_masks"][i] for i in samples])
        targets = packed["tokens"][0, rows + 1]
        return packed | {"full_loss_masks": full_loss_masks, "response_rows": rows, "response_tokens": targets}

    def _micro_batch(self, index: int) -> dict[str, Any]:
        samples = self.indices[index]
        columns = {name: [self.rollout_data[name][i] for i in samples] for name in self.columns()}
        columns["unconcat_tokens"] = columns.pop("tokens")
        return columns | self._packed[index]
