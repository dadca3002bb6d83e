"""Packed rows: how samples become the inputs of Megatron's model.

Packing is THD: the samples of a micro-batch lie one after the other in a single row, and `packed_seq_params` says
where each starts. The row is filled up with token 0, as a sequence of its own, to a multiple of the tensor-parallel
size x --data-pad-size-multiplier. Under context parallelism the row holds this rank's chunks of each sample
(slime.backends.megatron_utils.cp_utils), and `packed_seq_params` speaks of the whole samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime.backends.megatron_utils.cp_utils import chunk_size_of, response_rows, slice_with_cp, zigzag_positions
from slime.backends.megatron_utils.layers.varlen_attention import note_ends
from slime.training.micro_batches import image_key
from slime.utils.accelerator import to_device
from slime.utils.train_data import MicroBatch, RolloutBatch

PAD_TOKEN = 0


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
    merge_size: int = 0
    """Patches of an image that are one token, in each direction, for a model whose positions are of three kinds."""

    def micro_batch(self, data: RolloutBatch, samples: Sequence[int]) -> MicroBatch:
        """Return the model's inputs for some samples of a share."""
        tokens = [data["tokens"][i] for i in samples]
        packed = pack(tokens, self)
        response_lengths = [data["response_lengths"][i] for i in samples]
        total_lengths = [len(sample) for sample in tokens]
        rows, places, counts = response_rows(
            total_lengths, response_lengths, cp_rank=self.cp_rank, cp_size=self.cp_size
        )
        rows, places = (to_device(x, packed["tokens"].device) for x in (rows, places))
        responses = [
            sample[total - response :]
            for sample, total, response in zip(tokens, total_lengths, response_lengths, strict=True)
        ]
        full_loss_masks = torch.zeros_like(packed["tokens"], dtype=torch.int32)
        full_loss_masks[0, rows] = torch.cat([data["loss_masks"][i] for i in samples])[places]
        # On the host: on the device each sample would cost kernels of its own.
        is_token = [
            slice_with_cp(torch.ones(total, dtype=torch.bool), 0, cp_rank=self.cp_rank, cp_size=self.cp_size)
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
        packed |= {"response_places": places} if self.cp_size > 1 else {}
        if "image_spans" in data:
            packed |= self._images(data, samples, packed)
        return packed | (self._predictions(tokens, responses) if self.num_predictions else {})

    def _images(self, data: RolloutBatch, samples: Sequence[int], packed: MicroBatch) -> MicroBatch:
        """Where the row has images' tokens, which of the images' tokens each is, and all tokens' positions."""
        spans, images = (
            [data["image_spans"][i] for i in samples],
            [data["multimodal_train_inputs"][i] for i in samples],
        )
        lengths, device = [len(data["tokens"][i]) for i in samples], packed["tokens"].device
        first: dict[int, int] = {}  # of the tokens of a prompt's images, which its samples share
        count = 0
        for inputs, of_sample in zip(images, spans, strict=True):
            if inputs is not None and image_key(inputs) not in first:
                first[image_key(inputs)] = count
                count += sum(length for _, length in of_sample)
        numbers, positions = [], []
        for length, inputs, of_sample in zip(lengths, images, spans, strict=True):
            number, place = torch.full((length,), -1), first[image_key(inputs)] if inputs is not None else 0
            for start, size in of_sample:
                number[start : start + size] = torch.arange(place, place + size)
                place += size
            numbers.append(slice_with_cp(number, -1, cp_rank=self.cp_rank, cp_size=self.cp_size))
            if self.merge_size:
                grids = [] if inputs is None else inputs["image_grid_thw"].tolist()
                found = mrope_positions(length, of_sample, grids, self.merge_size)
                positions.append(slice_with_cp(found.T, 0, cp_rank=self.cp_rank, cp_size=self.cp_size).T)
        which = torch.cat(numbers)
        rows = (which >= 0).nonzero()[:, 0]
        placed: MicroBatch = {"image_rows": to_device(rows, device), "image_tokens": to_device(which[rows], device)}
        if self.merge_size:
            plain = packed["position_ids"]
            of_kinds = plain.expand(3, -1).clone()
            of_kinds[:, : len(which)] = to_device(torch.cat(positions, 1), device)
            placed["position_ids"] = torch.stack((plain, *of_kinds[:, None]))
        return placed

    def _predictions(self, tokens: list[torch.Tensor], responses: list[torch.Tensor]) -> MicroBatch:
        """For each prediction layer the tokens that it embeds [1, T]; the rows that predict response tokens, those
        tokens, and their places among all of the micro-batch."""
        found: MicroBatch = {"further_tokens": [], "prediction_rows": [], "prediction_places": []}
        total_lengths, response_lengths = [len(x) for x in tokens], [len(x) for x in responses]
        device = tokens[0].device
        for ahead in range(1, self.num_predictions + 1):
            further = [torch.nn.functional.pad(x[ahead:], (0, min(ahead, len(x)))) for x in tokens]
            found["further_tokens"].append(pack(further, self)["tokens"])
            rows, places, _ = response_rows(
                total_lengths, response_lengths, cp_rank=self.cp_rank, cp_size=self.cp_size, ahead=ahead
            )
            found["prediction_rows"].append(rows.to(device))
            found["prediction_places"].append(places.to(device))
        found["prediction_targets"] = [torch.cat(responses)[places] for places in found["prediction_places"]]
        return found


def mrope_positions(
    length: int, spans: Sequence[Sequence[int]], grids: Sequence[Sequence[int]], merge_size: int
) -> torch.Tensor:
    """Return the positions in time, height and width [3, length] of a sample's tokens (Qwen-VL's M-RoPE).

    A text token has the same position three times. An image's tokens count on from the last one along its three axes,
    and the text behind it from the longest of them.

    Args:
        length: tokens of the sample.
        spans: (first token, tokens) of each image.
        grids: its patches in time, height and width.
        merge_size: patches that are one token, in each direction.

    Raises:
        ValueError: an image has more or fewer tokens than its patches make.

    Example:
        >>> mrope_positions(7, [(1, 4)], [(1, 4, 4)], 2).tolist()
        [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    """
    parts, end, place = [torch.empty(3, 0, dtype=torch.int64)], 0, 0
    for (start, size), (time, height, width) in zip(spans, grids, strict=True):
        axes = (time, height // merge_size, width // merge_size)
        if math.prod(axes) != size:
            raise ValueError(
                f"an image of {time} x {height} x {width} patches makes {math.prod(axes)} tokens, not {size}"
            )
        parts.append((torch.arange(start - end) + place).expand(3, -1))
        place += start - end
        parts.append(torch.cartesian_prod(*map(torch.arange, axes)).reshape(-1, 3).T + place)
        place, end = place + max(axes[1:]), start + size
    parts.append((torch.arange(length - end) + place).expand(3, -1))
    return torch.cat(parts, dim=1)


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
