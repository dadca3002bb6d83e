"""Layers whose tokens are mixed by transformers' own modules give the numbers of the HF model under every layout:
logits, gradients, two train steps, and what follows from another layout's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.training.parallel.layout_results import (
    Results,
    check_parity,
    check_resharding,
    check_training,
    made_when_asked,
)
from tests.training.parallel.layout_world import Case
from tests.unit.megatron_fakes import make_hf_model

pytestmark = pytest.mark.timeout(1800)  # the first test waits for the layouts of all
SPEC = ["slime_plugins.models.hf_attention", "get_hf_attention_spec"]
TP2, CP2, PP2 = "--tensor-model-parallel-size 2", "--context-parallel-size 2", "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
CORE = "--recompute-granularity selective --recompute-modules core_attn"

ALWAYS = {
    "TP 2, sequence parallel": Case(f"{TP2} --sequence-parallel"),
    "CP 2, recomputed": Case(f"{CP2} {CORE}"),
}
SLOW = {
    "TP 2": Case(TP2),
    "TP 2 CP 2": Case(f"{TP2} --sequence-parallel {CP2}"),
    "one rank": Case(),
    "one rank, small packs": Case(changes={"max_tokens_per_gpu": 24}),
    "one rank, recomputed": Case(FULL),
    "TP 2, recomputed": Case(f"{TP2} --sequence-parallel {CORE}"),
    "CP 4": Case("--context-parallel-size 4"),
    "PP 2": Case(PP2),
    "PP 2 VPP 2": Case(f"{PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "PP 2 CP 2, recomputed": Case(f"{PP2} {CP2} {FULL}"),
    "DP 2": Case(dp=2),
}
LAYOUTS = ALWAYS | SLOW
each_layout = pytest.mark.parametrize(
    "layout", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Results]:
    """Results of the layouts that this session's tests ask for: a model with two delta nets and two attentions."""
    make_model = partial(make_hf_model, family="qwen3_5_text", num_hidden_layers=4)
    return made_when_asked(request, tmp_path_factory.mktemp("hf_attention"), LAYOUTS, make_model, {"spec": SPEC})


@each_layout
def test_two_train_steps_are_those_of_one_process(results, layout):
    check_training(results(), layout)


@each_layout
def test_logits_and_gradients_are_those_of_the_hf_model(results, layout):
    check_parity(results(), layout)


@each_layout
def test_a_checkpoint_of_any_layout_goes_on_in_another(results, layout):
    check_resharding(results(), layout)
