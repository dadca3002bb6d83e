"""Weights that SGLang loads in pairs only: it forgets one without the other, so they stay in one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.weights.names import kept_together, partner_of, with_partners

LAYER = "model.layers.0.self_attn"
Q, KV, UP = (f"{LAYER}.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"))
FUSED = f"{LAYER}.fused_qkv_a_proj_with_mqa.weight"


def loaded_by_sglang(calls: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> torch.Tensor:
    """What SGLang's loader makes of the fused weight in these calls; 0 where it loads nothing."""
    from slime.backends.sglang_utils import cpu_standins

    cpu_standins.install()
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import DeepseekV2WeightLoaderMixin

    class Model(torch.nn.Module, DeepseekV2WeightLoaderMixin):
        config: Any = SimpleNamespace(q_lora_rank=2, n_routed_experts=1, num_hidden_layers=1)
        quant_config: Any = None
        pp_group: Any = None
        num_fused_shared_experts = 0

        def named_parameters(self, *values: Any, **keywords: Any) -> Any:
            return iter([(FUSED, self.fused)])

        def post_load_weights(self, *values: Any, **keywords: Any) -> None:
            pass

    model = Model()
    model.model = torch.nn.Module()
    model.fused = torch.nn.Parameter(torch.zeros(5, 3), requires_grad=False)
    for call in calls:
        model.do_load_weights(iter(call))
    return model.fused.data


@pytest.fixture
def pair() -> list[tuple[str, torch.Tensor]]:
    return [(Q, torch.full((2, 3), 1.0)), (KV, torch.full((3, 3), 2.0))]


def test_sglang_forgets_what_comes_without_its_partner(pair: list[tuple[str, torch.Tensor]]) -> None:
    """As long as this holds, the pairs are needed."""
    assert loaded_by_sglang([[pair[0]], [pair[1]]]).sum() == 0
    assert torch.equal(loaded_by_sglang([pair]), torch.cat([tensor for _, tensor in pair]))


def test_what_is_kept_together_is_loaded_however_small_the_buckets_are(pair: list[tuple[str, torch.Tensor]]) -> None:
    (first, second), up = pair, ("model.norm.weight", torch.zeros(1))
    parts = list(kept_together([[first], [up], [second]]))
    assert parts == [[up], [first, second]]
    assert torch.equal(loaded_by_sglang([part for part in parts if part != [up]]), torch.cat([first[1], second[1]]))


def test_nothing_is_lost_or_held_where_there_is_no_partner() -> None:
    """A model without --q-lora-rank has no first one; one that is cut off has no second."""
    assert list(kept_together([[(KV, 1)], [(UP, 2)]])) == [[(KV, 1)], [(UP, 2)]]
    assert list(kept_together([[(Q, 1)], [(UP, 2)]])) == [[(UP, 2)], [(Q, 1)]]
    experts = [[(f"model.layers.0.mlp.experts.{e}.down_proj.weight", e) for e in range(3)]]
    assert list(kept_together(experts)) == experts


def test_partners_are_of_the_same_layer_and_kind() -> None:
    assert partner_of(Q) == KV and partner_of(KV) == Q and partner_of(UP) is None
    assert partner_of(f"{LAYER}.q_a_proj.weight_scale_inv") == f"{LAYER}.kv_a_proj_with_mqa.weight_scale_inv"
    assert partner_of(f"{LAYER}.indexer.wk.weight") == f"{LAYER}.indexer.wk.weight_scale_inv"
    assert partner_of(f"{LAYER}.indexer.wk.weight_scale_inv") == f"{LAYER}.indexer.wk.weight"
    assert partner_of(f"{LAYER}.q_a_layernorm.weight") is None
    assert with_partners([Q, UP]) == {Q, KV, UP}
