"""The model scripts say what the HF configs say, and both models have the published parameters."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import Any

import pytest
import torch

from slime.config.megatron.arguments import add_megatron_arguments
from slime.config.parse import CommandLine
from slime.models.families import FAMILIES
from slime.models.family import strip_wrappers
from slime.models.hf_config import model_args_from_hf
from slime.weights.names import text_config
from tests.unit.megatron_fakes import make_args, run_world
from tests.unit.script_fakes import FIXTURES, ROOT, SHORTENED, hf_config, script_flags

# Scripts under the names of older documents, or of a platform.
ALIASES = {
    "llama3-8B": "llama3.1-8B-Instruct",
    "llama3.2-3B-Instruct-amd": "llama3.2-3B-Instruct",
    "qwen3-4b": "qwen3-4B",
    # The sizes are the same, and no flag says what else there is: which layers share the choice of an indexer, and
    # the part that sees images.
    "glm5.2-744B-A40B": "glm5-744B-A40B",
    "qwen3.5-35B-A3B-vl": "qwen3.5-35B-A3B",
}
# What such a script adds.
BEYOND = {"glm5.2-744B-A40B": ("--rotary-base", "8000000")}
# Parameters of the published models, tied embeddings counted once; the hub counts as many. Known only rounded are
# deepseek-v3 (671 B), glm4-32B (33 B), glm4.7-30B-A3B (30 B), moonlight (16 B), both kimi-k2 (1 T) and mimo-7B-rl
# (7.83 B with a prediction layer of 0.21 B), and all with a gated delta net or an indexer, minimax-m2 and qwen3.5
# (without the part that sees images). The hub counts the two glm4.5 with their prediction layer:
# HUB_WITH_PREDICTION_LAYER. Nobody publishes the first layers of deepseek-v3: those numbers say only that both models
# agree. What no count shows (rotary base and scaling, epsilon) is compared with config.json when a run starts.
PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "deepseek-v3-5layer": 26_618_387_456,
    "deepseek-v3-20layer": 199_227_677_696,
    "glm4-9B": 9_400_279_040,
    "glm4-32B": 32_566_081_536,
    "glm4.5-106B-A12B": 106_852_245_504,
    "glm4.5-355B-A32B": 352_797_814_784,
    "glm4.7-30B-A3B": 29_943_390_976,
    "glm5-744B-A40B": 743_911_199_232,
    "kimi-k2": 1_026_408_209_408,
    "kimi-k2-thinking": 1_026_408_209_408,
    "llama3.1-8B-Instruct": 8_030_261_248,
    "llama3.2-3B-Instruct": 3_212_749_824,
    "mimo-7B-rl": 7_622_619_136,
    "minimax-m2": 228_689_748_992,
    "moonlight": 15_960_108_544,
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-32B": 32_763_876_352,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-4B-Instruct-2507": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "qwen3-next-80B-A3B": 79_674_391_296,
    "qwen3.5-0.8B": 752_393_024,
    "qwen3.5-4B": 4_205_751_296,
    "qwen3.5-9B": 8_953_803_264,
    "qwen3.5-27B": 26_895_998_464,
    "qwen3.5-35B-A3B": 34_660_610_688,
    "smollm2-135M": 134_515_008,
}
HUB_WITH_PREDICTION_LAYER = {"glm4.5-106B-A12B": 110_468_824_832, "glm4.5-355B-A32B": 358_337_791_296}
# transformers joins the experts of a layer (Megatron name in a layer, all experts as one -> HF).
JOINED_EXPERTS = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
# Types without a class in transformers: the one that has their layers.
CLASS_OF = {
    "kimi_k2": "deepseek_v3",
    "mimo": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
Shapes = dict[str, tuple[int, ...]]


def parse(flags: list[str]) -> argparse.Namespace:
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags)


def test_every_model_script_has_a_fixture_and_a_number_of_parameters():
    scripts = {path.stem for path in ROOT.glob("scripts/models/*.sh")}
    assert scripts == PARAMETERS.keys() | ALIASES.keys()
    assert {path.stem for path in FIXTURES.glob("*.json")} == PARAMETERS.keys() - SHORTENED.keys()


@pytest.mark.parametrize(("name", "meant"), ALIASES.items())
def test_a_model_script_under_another_name_says_the_same(name, meant):
    assert script_flags(name) == [*script_flags(meant), *BEYOND.get(name, ())]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_script_says_what_the_hf_config_says_and_nothing_else(name):
    derived = vars(parse([])) | model_args_from_hf(hf_config(name))
    assert vars(parse(script_flags(name))) == derived


def period(config: dict[str, Any]) -> int:
    """Layers after which their kinds come again."""
    return config.get("full_attention_interval", 1)


def num_kept(config: dict[str, Any]) -> int:
    """Layers that are built: the dense ones and two behind them, or one period, which all others are like."""
    return min(config["num_hidden_layers"], config.get("first_k_dense_replace", 0) + max(2, period(config)))


def num_parameters(shapes: Shapes, config: dict[str, Any]) -> int:
    """Parameters of the whole model, whose last kept layers stand for all that were left out."""
    kept, length = num_kept(config), period(config)
    lasts = [f".layers.{index}." for index in range(kept - length, kept)]
    last = [shape for name, shape in shapes.items() if any(layer in name for layer in lasts)]
    times, rest = divmod(config["num_hidden_layers"] - kept, length)
    assert rest == 0
    return sum(map(math.prod, shapes.values())) + times * sum(map(math.prod, last))


def hf_shapes(config: dict[str, Any]) -> Shapes:
    """Parameters of the kept layers of the transformers model, built without memory."""
    import transformers

    values = {key: value for key, value in config.items() if key not in ("_source", "model_type", "text_config")}
    model_type = CLASS_OF.get(config["model_type"], config["model_type"])
    built = transformers.AutoConfig.for_model(model_type, **(values | {"num_hidden_layers": num_kept(config)}))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    shapes = {key: tuple(param.shape) for key, param in model.named_parameters()}
    if not FAMILIES[config["model_type"]].sees_images:
        return shapes
    return {key.replace("model.", "model.language_model.", 1): shape for key, shape in shapes.items()}


def megatron_shapes(args: argparse.Namespace) -> Shapes:
    """Parameters of the Megatron model, built without memory; all experts of a layer are one, as in transformers."""
    from slime.backends.megatron_utils.model_provider import build_gpt

    with torch.device("meta"):
        model = build_gpt(args)
    shapes: Shapes = {}
    experts: Counter[str] = Counter()
    for key, param in model.named_parameters():
        before, is_expert, after = key.partition("local_experts.")
        together = before + after.split(".", 1)[1] if is_expert else key
        experts[together] += 1
        shapes[together] = (experts[together], *param.shape) if is_expert else tuple(param.shape)
    return shapes


def hf_names(model_type: str, megatron_name: str) -> tuple[str, ...]:
    """The HF parameters that are in a Megatron parameter."""
    name = strip_wrappers(megatron_name)
    layer, _, inner = name.removeprefix("decoder.layers.").partition(".")
    if name.startswith("decoder.layers.") and inner in JOINED_EXPERTS:
        model = "model.language_model" if FAMILIES[model_type].sees_images else "model"
        return (f"{model}.layers.{layer}.{JOINED_EXPERTS[inner]}",)
    return FAMILIES[model_type].find(name, num_layers=0)[1]


def check_shapes(args: argparse.Namespace, config: dict[str, Any], hf: Shapes, total: int) -> None:
    ours = megatron_shapes(args)
    assert num_parameters(ours, config) == total
    used = []
    for name, shape in ours.items():
        names = hf_names(config["model_type"], name)
        parts = [hf[part] for part in names]
        used += names
        # Joined are rows (q, k and v; gate and up); everything else of the shapes is the same.
        assert shape == (sum(part[0] for part in parts), *parts[0][1:]), name
    assert sorted(used) == sorted(hf)


@pytest.mark.processes
@pytest.mark.parametrize("name", PARAMETERS)
def test_both_models_have_the_published_number_of_parameters_and_the_same_shapes(name):
    config = text_config(hf_config(name))
    hf, kept = hf_shapes(config), num_kept(config)
    assert num_parameters(hf, config) == PARAMETERS[name]
    flags = [*script_flags(name), "--no-initialization", "--num-layers", str(kept)]
    if dense := config.get("first_k_dense_replace"):
        flags += ["--moe-layer-freq", f"[0]*{dense}+[1]*{kept - dense}"]
    args = make_args(None, " ".join(flags))
    assert args.padded_vocab_size == args.vocab_size  # else Megatron's model has rows that HF's does not have
    run_world(1, check_shapes, args, config, hf, PARAMETERS[name])


@pytest.mark.parametrize(("name", "on_the_hub"), HUB_WITH_PREDICTION_LAYER.items())
def test_with_its_prediction_layer_and_biases_a_model_has_as_many_numbers_as_on_the_hub(name, on_the_hub):
    config, sizes = hf_config(name), hf_shapes(hf_config(name))
    last = num_kept(config) - 1
    layer = sum(math.prod(shape) for key, shape in sizes.items() if f".layers.{last}." in key)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # Three norms, the product of two hidden states side by side, an embedding and an output layer of its own.
    predicting = layer + 3 * hidden + hidden * 2 * hidden + 2 * vocab * hidden
    with_experts = config["num_hidden_layers"] + 1 - config["first_k_dense_replace"]
    biases = with_experts * config["n_routed_experts"]  # of the choice of experts: no parameters for torch
    assert PARAMETERS[name] + predicting + biases == on_the_hub


@pytest.mark.parametrize("name", [*PARAMETERS, *ALIASES])
def test_every_flag_of_a_model_script_is_known(name):
    wrong = CommandLine().check(script_flags(name)).problems.wrong
    assert not [sentence for sentence in wrong if "unknown" in sentence or "did you mean" in sentence], wrong
