"""A model of each family gives the numbers of one process under every layout, as those of test_layouts do: with its
experts spread over ranks (EP, ETP) and mixed with TP, PP, interleaved PP, CP and DP.

Layers are of every kind that the families have: dense before those with experts, shared experts, latent attention,
choices among groups, gated delta nets, sparse attention. The biases of routers move, so that they are compared too.
Families whose layers differ little from those of another one train under fewer layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.training.parallel.layout_results import (
    Results,
    check_parity,
    check_resharding,
    check_training,
    selected_params,
)
from tests.training.parallel.layout_world import Case
from tests.unit.megatron_fakes import make_hf_model

pytestmark = pytest.mark.timeout(1800)  # the first test of a family waits for all of its layouts
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
CP = "--context-parallel-size"
EP = "--expert-model-parallel-size"
ETP = "--expert-tensor-parallel-size"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OTHER_PASSES = {"log_probs_max_tokens_per_gpu": 20}

LAYOUTS = {
    "one rank, recomputed": Case(FULL),
    "TP 2": Case(TP2),
    "TP 2, ETP 1": Case(f"{TP2} {ETP} 1"),
    "TP 2, EP 2": Case(f"{TP2} {EP} 2 {ETP} 1"),
    "PP 2": Case(PP2),
    "PP 2 VPP 2, recomputed": Case(f"{VPP2} {FULL}", changes=OTHER_PASSES),
    "CP 2": Case(f"{CP} 2"),
    "CP 2, EP 2, passes of other sizes": Case(f"{CP} 2 {EP} 2", changes=OTHER_PASSES),
    "CP 2, ETP 2": Case(f"{CP} 2 {ETP} 2"),
    "DP 2": Case(dp=2),
    "DP 2, EP 2": Case(f"{EP} 2", 2, changes=OTHER_PASSES),
    "DP 2, ETP 2": Case(f"{ETP} 2", 2),
    "DP 2, EP 2, by tokens": Case(f"{EP} 2", 2, changes={"calculate_per_token_loss": True}),
    "DP 2, EP 2, split micro-batches": Case(f"{EP} 2", 2, changes={"max_tokens_per_gpu": 24}),
    "TP 2 DP 2, EP 2, ETP 2": Case(f"{TP2} {EP} 2", 2),
    "TP 2 DP 2, EP 4": Case(f"{TP2} {EP} 4 {ETP} 1", 2),
    "TP 2 DP 2, EP 2": Case(f"{TP2} {EP} 2 {ETP} 1", 2),
    "DP 4, EP 4": Case(f"{EP} 4", 4),
    "DP 4, EP 2": Case(f"{EP} 2", 4),
    "DP 4, EP 2, ETP 2": Case(f"{EP} 2 {ETP} 2", 4),
    "PP 2 DP 2, EP 2": Case(f"{PP2} {EP} 2", 2, changes=OTHER_PASSES),
    "PP 2 VPP 2 DP 2, EP 2, recomputed": Case(f"{VPP2} {EP} 2 {FULL}", 2, changes=OTHER_PASSES),
    "PP 2 VPP 2 DP 2, EP 2, overlapped": Case(f"{VPP2} {EP} 2 --overlap-grad-reduce --overlap-param-gather", 2),
    "PP 2 CP 2, EP 2": Case(f"{PP2} {CP} 2 {EP} 2"),
    "TP 2 PP 2, EP 2": Case(f"{TP2} {PP2} {EP} 2 {ETP} 1"),
    "TP 2 PP 2 VPP 2": Case(f"{TP2} {VPP2}"),
    "TP 2 CP 2, EP 2, ETP 2": Case(f"{TP2} {CP} 2 {EP} 2"),
    "TP 2 CP 2, EP 4": Case(f"{TP2} {CP} 2 {EP} 4 {ETP} 1"),
    "CP 2 DP 2, EP 4": Case(f"{CP} 2 {EP} 4", 2),
    "CP 2 DP 2, EP 2": Case(f"{CP} 2 {EP} 2", 2),
    "CP 4, EP 2": Case(f"{CP} 4 {EP} 2"),
    "PP 2, last stage of 1 layer, EP 2": Case(f"{PP2} --decoder-last-pipeline-num-layers 1 {EP} 2", 2),
}
MOVES_BIASES = {"moe_router_bias_update_rate": 0.01}
BALANCES = {
    "moe_aux_loss_coeff": 1.0,
    "moe_z_loss_coeff": 0.1,
    "data_pad_size_multiplier": 16,  # so that ranks differ in how much padding they have
    "use_dynamic_batch_size": False,  # every layout has the same micro-batches, over which these losses are means
    "micro_batch_size": 1,
}
REPLAYS = {"use_routing_replay": True, "lr": 0.01}
GENTLE = {"lr": 2e-4}
"""For models whose gradients have norms of 30: four steps at 1e-3 let rounding grow beyond the bound."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "minimax_m2": ("minimax_m2", MOVES_BIASES),
    "glm_moe_dsa": ("glm_moe_dsa", MOVES_BIASES),
    "glm4_moe": ("glm4_moe", MOVES_BIASES),
    "glm4_moe_lite": ("glm4_moe_lite", MOVES_BIASES),
    "deepseek_v3": ("deepseek_v3", MOVES_BIASES),
    "qwen3_moe, R2": ("qwen3_moe", REPLAYS),
    "deepseek_v3, R3": ("deepseek_v3", {**REPLAYS, **MOVES_BIASES, "use_rollout_routing_replay": True}),
    "qwen3_moe, balanced": ("qwen3_moe", BALANCES),
    **{family: (family, {}) for family in ("llama", "qwen2", "mimo", "glm4", "qwen3_5", "qwen3_5_text")},
    **{family: (family, GENTLE) for family in ("qwen3_5_moe", "qwen3_5_moe_text")},
    **{family: (family, MOVES_BIASES) for family in ("deepseek_v32", "kimi_k2")},
}
"""Name -> (family, flags): of each model without flags of routing all is compared, of the others the training."""
SAME_PASSES = (
    *("one rank, recomputed", "TP 2", "TP 2, ETP 1", "TP 2, EP 2", "PP 2", "TP 2 PP 2, EP 2"),
    *("CP 2", "CP 2, ETP 2", "TP 2 CP 2, EP 4"),
)
"""Layouts that train on the same micro-batches, over which the losses on the routers' choices are means."""
FEW = ("TP 2", "PP 2 VPP 2, recomputed", "CP 2", "DP 2")
FEW_WITH_EXPERTS = (*FEW, "TP 2, EP 2", "CP 2 DP 2, EP 2")
ONLY = {
    **dict.fromkeys(("llama", "qwen2", "mimo", "glm4", "qwen3_5", "qwen3_5_text"), FEW),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v32", "kimi_k2"), FEW_WITH_EXPERTS),
    "qwen3_moe, balanced": SAME_PASSES,
}
"""Model -> its layouts, where they are not all."""
ALWAYS = {
    "qwen3_moe": ("TP 2 DP 2, EP 2, ETP 2",),
    "qwen3_next": ("TP 2, EP 2", "CP 2"),
    "minimax_m2": ("TP 2, EP 2",),
    "glm_moe_dsa": ("CP 2, EP 2, passes of other sizes",),
    "deepseek_v3": ("PP 2 VPP 2 DP 2, EP 2, recomputed", "TP 2 CP 2, EP 4"),
    "qwen3_moe, R2": ("CP 2, EP 2, passes of other sizes",),
    "deepseek_v3, R3": ("TP 2 PP 2, EP 2",),
    "qwen3_moe, balanced": ("TP 2, EP 2",),
}


def what_is_compared(changes: dict[str, Any]) -> str:
    """Of a model with these flags: "all", or the training alone, whose routers "replay" or "balance"."""
    if "moe_z_loss_coeff" in changes:
        return "balance"
    return "replay" if "use_routing_replay" in changes else "all"


def each_case_of(compared: str) -> pytest.MarkDecorator:
    """(model, layout) with their marks."""
    found = [
        pytest.param(model, layout, marks=() if layout in ALWAYS.get(model, ()) else pytest.mark.slow)
        for model, (_, changes) in MODELS.items()
        for layout in ONLY.get(model, LAYOUTS)
        if what_is_compared(changes) == compared
    ]
    return pytest.mark.parametrize(("model", "layout"), found)


each_case = each_case_of("all")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Results of a model's layouts that this file's tests ask for."""
    selected = selected_params(request)
    made: dict[str, Results] = {}

    def of(model: str) -> Results:
        if model not in made:
            family, changes = MODELS[model]
            names = {params.get("layout") for params in selected if params.get("model") == model}
            layouts = {name: case for name, case in LAYOUTS.items() if name in names}
            make_model = partial(make_hf_model, family=family, num_hidden_layers=4)
            root = tmp_path_factory.mktemp(family)
            only_training = what_is_compared(changes) != "all"
            made[model] = Results(root, layouts, make_model, changes=changes, only_training=only_training)
        return made[model]

    return of


@each_case
def test_two_train_steps_are_those_of_one_process(results, model, layout):
    check_training(results(model), layout)


@each_case
def test_logits_and_gradients_are_those_of_the_hf_model(results, model, layout):
    check_parity(results(model), layout)


@each_case
def test_a_checkpoint_of_any_layout_goes_on_in_another(results, model, layout):
    check_resharding(results(model), layout)


@each_case_of("balance")
def test_losses_on_the_routers_choices_do_not_depend_on_which_rank_has_the_padding(results, model, layout):
    """The last rank has more of it than the others, or nothing else."""
    check_training(results(model), layout)


@each_case_of("replay")
def test_every_rank_replays_the_experts_of_its_own_tokens(results, model, layout):
    """Experts of other tokens, or those that routers would choose by themselves, would give other numbers."""
    check_training(results(model), layout)
