"""Linear layers in tensor-parallel groups of one rank take no autograd functions that do nothing. Groups are stand-ins
that have a size: only whether Megatron's function is called depends on them here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers

from slime.backends.megatron_utils.megatron_patch import layers as patches

NAMES = ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region")


@pytest.mark.parametrize("name", NAMES)
def test_a_region_of_one_rank_gives_back_what_it_got_and_any_other_is_megatrons(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def upstream(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        asked.append(group)
        return input_ + 1

    for each in NAMES:
        monkeypatch.setattr(layers, each, upstream)
    patches.skip_regions()
    region, x = getattr(layers, name), torch.ones(2)
    alone, two = (SimpleNamespace(size=lambda size=size: size) for size in (1, 2))
    assert region(x, group=alone) is x
    assert region(x, group=two).tolist() == region(x).tolist() == [2.0, 2.0]
    assert asked == [two, None], "without a group Megatron finds it"
