"""Positions and places of packed sequences with images (Qwen3.5-VL, Qwen3-VL), as functions of token ids alone.

slime's own trainers know from the rollout which tokens are images (`image_spans`); these find them by their ids.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import gathered_places
from slime.backends.megatron_utils.data import mrope_positions

Grid = list[int]


def build_packed_mrope_position_ids(
    input_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    image_grid_thw: torch.Tensor | None,
    video_grid_thw: torch.Tensor | None,
    *,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    spatial_merge_size: int,
) -> torch.Tensor:
    """Return positions in time, height and width [3, 1, n] of packed sequences; each starts at 0.

    Args:
        input_ids: [1, n], images' tokens included.
        cu_seqlens: [sequences + 1] cumulative lengths.
        image_grid_thw: [images, 3] patches of each image in time, height and width.
        video_grid_thw: [videos, 3]; each frame is an image by itself, as timestamps stand between them.
        image_token_id, video_token_id: of a token of an image, or of a video's frame.
        vision_start_token_id: not needed, for the grids say where an image ends; part of the public signature.
        spatial_merge_size: patches that are one token, in each direction.

    Raises:
        ValueError: there are more or fewer tokens of images than the grids make.
    """
    waiting = {image_token_id: _rows(image_grid_thw), video_token_id: _frames(video_grid_thw)}
    kinds = {image_token_id: "image", video_token_id: "video"}
    parts, ends = [], cu_seqlens.tolist()
    for first, end in zip(ends[:-1], ends[1:], strict=True):
        tokens, place = input_ids[0, first:end].tolist(), 0
        spans: list[tuple[int, int]] = []
        grids: list[Grid] = []
        while place < len(tokens):
            token = tokens[place]
            if token not in waiting:
                place += 1
                continue
            grid = next(waiting[token], None)
            size = 0 if grid is None else grid[0] * grid[1] * grid[2] // spatial_merge_size**2
            if grid is None or tokens[place : place + size] != [token] * size:
                raise ValueError(f"token {first + place} is an {kinds[token]}'s, and no grid makes as many of them")
            spans.append((place, size))
            grids.append(grid)
            place += size
        parts.append(mrope_positions(len(tokens), spans, grids, spatial_merge_size))
    for token, rest in waiting.items():
        if left := len(list(rest)):
            raise ValueError(f"Unused {left} {kinds[token]} grids: there are no tokens of them")
    return torch.cat(parts, dim=1)[:, None].to(input_ids.device)


def _rows(grids: torch.Tensor | None) -> Iterator[Grid]:
    yield from [] if grids is None else grids.tolist()


def _frames(grids: torch.Tensor | None) -> Iterator[Grid]:
    for time, height, width in _rows(grids):
        yield from [[1, height, width]] * time


def get_packed_cp_local_indices(
    cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int, device: torch.device | None = None
) -> torch.Tensor:
    """Return which tokens of a pack a context-parallel rank has, in its order [n / CP].

    Args:
        cu_seqlens: [sequences + 1] cumulative lengths, each a multiple of 2 x CP.
        cp_size, cp_rank: ranks, and which.
        device: of the result.

    Example:
        >>> get_packed_cp_local_indices(torch.tensor([0, 8, 16]), 2, 0).tolist()
        [0, 1, 6, 7, 8, 9, 14, 15]
    """
    return gathered_places(cu_seqlens.tolist(), cp_size).chunk(cp_size)[cp_rank].to(device)


def gather_packed_input_ids(
    input_ids: torch.Tensor, cu_seqlens: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the token ids of a whole pack [1, n] from each context-parallel rank's part [1, n / CP] (collective)."""
    if group is None or group.size() == 1:
        return input_ids
    parts = [torch.empty_like(input_ids) for _ in range(group.size())]
    dist.all_gather(parts, input_ids.contiguous(), group=group)
    whole = torch.empty_like(torch.cat(parts, dim=1))
    whole[:, gathered_places(cu_seqlens.tolist(), group.size()).to(whole.device)] = torch.cat(parts, dim=1)
    return whole
