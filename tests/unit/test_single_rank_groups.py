"""Groups of one rank get the smallest NCCL communicator; tests/gpu/test_offload.py shows what that saves."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core import parallel_state

from slime.backends.megatron_utils.megatron_patch import layers as patches


def test_only_an_nccl_group_of_one_rank_without_options_of_its_own_is_made_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(parallel_state, "create_group", lambda *given, **more: made.append((*given, more)))
    monkeypatch.setattr(patches, "smallest", lambda: "small")  # torch for the CPU has no options of NCCL
    patches.use_small_groups()
    create = parallel_state.create_group
    create([0], timeout=9, pg_options=None, group_desc="TP")
    create([0], backend="nccl")
    create([0, 1], backend="nccl")
    create([0], backend="gloo")
    create([0], pg_options="the user's")
    assert made == [
        ([0], 9, None, "small", {"group_desc": "TP"}),
        ([0], None, "nccl", "small", {}),
        ([0, 1], None, "nccl", None, {}),
        ([0], None, "gloo", None, {}),
        ([0], None, None, "the user's", {}),
    ]
