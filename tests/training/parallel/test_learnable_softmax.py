"""A Llama with a learnable sink in every head, as gpt-oss computes it, under parallel layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.models.families import FAMILIES
from slime.models.family import Family
from tests.training.parallel.layout_results import (
    Results,
    check_parity,
    check_resharding,
    check_training,
    made_when_asked,
)
from tests.training.parallel.layout_world import Case
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

pytestmark = pytest.mark.timeout(1800)  # the first test waits for the layouts of all
SPEC = ["slime_plugins.models.learnable_softmax_attention", "get_learnable_softmax_spec"]
TP2, CP2 = "--tensor-model-parallel-size 2 --sequence-parallel", "--context-parallel-size 2"
ALWAYS = {"TP 2": Case(TP2), "CP 2": Case(CP2)}
SLOW = {
    "one rank, recomputed": Case("--recompute-granularity selective --recompute-modules core_attn"),
    "TP 4, two ranks to a key head": Case("--tensor-model-parallel-size 4 --sequence-parallel"),
    "TP 2 CP 2": Case(f"{TP2} {CP2}"),
    "PP 2": Case("--pipeline-model-parallel-size 2"),
}
LAYOUTS = ALWAYS | SLOW
each_layout = pytest.mark.parametrize(
    "layout", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)


def __getattr__(name: str) -> Any:
    """RULES, which needs Megatron: what --model-name names."""
    if name != "RULES":
        raise AttributeError(name)
    from slime_plugins.models.learnable_softmax_attention import SINKS

    return Family("llama", (*FAMILIES["llama"].rules, SINKS))


def make_model(path: Path) -> torch.nn.Module:
    """Llama with gpt-oss's attention function, which reads `sinks` of the module."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    ALL_ATTENTION_FUNCTIONS.register("with_sinks", eager_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register("with_sinks", eager_mask)
    model = make_hf_model(path, "llama", num_hidden_layers=4)
    model.config._attn_implementation = "with_sinks"
    for number, layer in enumerate(model.model.layers):
        sinks = torch.randn(4, generator=torch.Generator().manual_seed(number))
        layer.self_attn.sinks = torch.nn.Parameter(sinks)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Results]:
    """Results of the layouts that this session's tests ask for."""
    changes = {"spec": SPEC, "model_name": f"{__name__}:RULES"}
    return made_when_asked(request, tmp_path_factory.mktemp("sinks"), LAYOUTS, make_model, changes)


@each_layout
def test_two_train_steps_are_those_of_one_process(results, layout):
    check_training(results(), layout)


@each_layout
def test_logits_and_gradients_are_those_of_the_hf_model(results, layout):
    check_parity(results(), layout)


@each_layout
def test_a_checkpoint_of_any_layout_goes_on_in_another(results, layout):
    check_resharding(results(), layout)


def check_a_batch(args, ids, expected):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    load_hf_weights(args, [model], args.hf_checkpoint)
    assert (model(ids, None, None)[..., :100] - expected).abs().max() < 1e-5


def test_a_batch_without_packing_has_the_sinks_too(tmp_path):
    model = make_model(tmp_path)
    ids = torch.randint(0, 100, (3, 14), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits
    run_world(1, check_a_batch, make_args(tmp_path, spec=SPEC, model_name=f"{__name__}:RULES"), ids, expected)
