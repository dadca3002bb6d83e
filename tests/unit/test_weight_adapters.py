"""What is refused before an engine gets a LoRA adapter."""

from __future__ import annotations

import pytest

from slime.weights.adapters import check_adapter

RANK, OUT, IN = 4, 6, 5
LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BASE = {f"model.layers.0.{leaf}.weight": (OUT, IN) for leaf in LEAVES}
CONFIG = {"r": RANK, "lora_alpha": 8.0}
Shapes = dict[str, tuple[int, ...]]


def whole() -> Shapes:
    stems = [f"base_model.model.model.layers.0.{leaf}" for leaf in LEAVES]
    return {f"{stem}.lora_A.weight": (RANK, IN) for stem in stems} | {
        f"{stem}.lora_B.weight": (OUT, RANK) for stem in stems
    }


def without(part: str) -> Shapes:
    return {name: shape for name, shape in whole().items() if part not in name}


def test_a_whole_adapter_and_one_of_some_modules_pass() -> None:
    check_adapter(whole(), CONFIG, base=BASE, max_rank=RANK)
    only_down = {name: shape for name, shape in whole().items() if "down_proj" in name}
    check_adapter(only_down, CONFIG, base=BASE, max_rank=RANK)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (without("q_proj"), "k_proj comes without q_proj"),
        (without("gate_proj"), "up_proj comes without gate_proj"),
        (without("down_proj.lora_A"), "down_proj has lora_B alone"),
        (whole() | {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (RANK, IN + 1)}, "has the shape"),
        (whole() | {"base_model.model.model.layers.0.mlp.up.lora_A.weight": (RANK, IN)}, "the model has no"),
        ({}, "no tensors"),
    ],
)
def test_what_would_end_a_server_is_refused(shapes: Shapes, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_adapter(shapes, CONFIG, base=BASE, max_rank=RANK)


@pytest.mark.parametrize("ignored", ["use_rslora", "alpha_pattern", "rank_pattern", "use_dora"])
def test_what_engines_ignore_is_refused(ignored: str) -> None:
    with pytest.raises(ValueError, match=f"has {ignored}, which engines ignore"):
        check_adapter(whole(), CONFIG | {ignored: {"q_proj": 1}}, base=BASE, max_rank=RANK)


def test_a_rank_that_engines_have_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4, and engines take 3"):
        check_adapter(whole(), CONFIG, base=BASE, max_rank=3)


def test_what_an_engine_fuses_counts_only_where_the_model_has_it() -> None:
    """With --q-lora-rank, SGLang makes q_a_proj and kv_a_proj_with_mqa one weight; without it, there is only one."""
    block, names = "model.layers.0.self_attn", ("q_a_proj", "kv_a_proj_with_mqa")
    base = {f"{block}.{name}.weight": (OUT, IN) for name in names}
    shapes: Shapes = {f"base_model.model.{block}.{names[1]}.lora_A.weight": (RANK, IN)}
    shapes |= {f"base_model.model.{block}.{names[1]}.lora_B.weight": (OUT, RANK)}
    with pytest.raises(ValueError, match="kv_a_proj_with_mqa comes without q_a_proj"):
        check_adapter(shapes, CONFIG, base=base, max_rank=RANK)
    del base[f"{block}.q_a_proj.weight"]
    check_adapter(shapes, CONFIG, base=base, max_rank=RANK)
