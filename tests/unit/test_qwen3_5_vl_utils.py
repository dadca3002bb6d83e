"""Positions and places of packed sequences with images, by their token ids; the values are upstream's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_plugins.models.qwen3_5_vl_utils import (
    build_packed_mrope_position_ids,
    gather_packed_input_ids,
    get_packed_cp_local_indices,
)
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

IDS = [99, 10, 10, 10, 10, 98, 7]


def positions(ids: list[int], ends: list[int], images: Any = None, videos: Any = None) -> list[list[int]]:
    grids = (None if grid is None else torch.tensor(grid) for grid in (images, videos))
    found = build_packed_mrope_position_ids(
        torch.tensor([ids]),
        torch.tensor(ends),
        *grids,
        image_token_id=10,
        video_token_id=11,
        vision_start_token_id=99,
        spatial_merge_size=2,
    )
    assert found.shape == (3, 1, len(ids))
    return found[:, 0].tolist()


def test_an_images_positions_count_on_along_three_axes_and_start_anew_in_each_sequence() -> None:
    one = [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    assert positions(IDS, [0, 7], [[1, 4, 4]]) == one
    assert positions([*IDS, 7, 8, *IDS], [0, 7, 9, 16], [[1, 4, 4], [1, 4, 4]]) == [
        [*axis, 0, 1, *axis] for axis in one
    ]


def test_each_frame_of_a_video_is_an_image_by_itself() -> None:
    frames = [5, 11, 6, 11, 7]
    assert positions(frames, [0, 5], None, [[2, 2, 2]]) == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(
    ("grids", "sentence"),
    [
        ([[1, 4, 4], [1, 2, 2]], "Unused 1 image grids"),
        ([[1, 4, 6]], "token 1 is an image's, and no grid makes as many"),
        (None, "token 1 is an image's, and no grid makes as many"),
    ],
)
def test_grids_and_tokens_that_do_not_fit_are_an_error(grids: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        positions(IDS, [0, 7], grids)


def test_a_context_parallel_rank_has_two_chunks_of_each_sequence() -> None:
    ends = torch.tensor([0, 8, 16])
    assert get_packed_cp_local_indices(ends, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert get_packed_cp_local_indices(ends, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]


@pytest.mark.processes
def test_the_parts_of_a_pack_become_the_pack(tmp_path: Any) -> None:
    make_hf_model(tmp_path / "hf")
    run_world(2, _gathered, make_args(tmp_path / "hf", "--context-parallel-size 2"))


def _gathered(args: Any) -> None:
    from megatron.core import parallel_state

    ids, ends, group = (
        torch.arange(100, 116)[None],
        torch.tensor([0, 8, 16]),
        parallel_state.get_context_parallel_group(),
    )
    mine = ids[:, get_packed_cp_local_indices(ends, 2, group.rank())]
    assert torch.equal(gather_packed_input_ids(mine, ends, group), ids)
    assert gather_packed_input_ids(ids, ends, None) is ids
