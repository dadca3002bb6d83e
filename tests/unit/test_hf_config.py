"""From an HF config.json to Megatron's model flags: GLM-4, Qwen3-MoE, and configs with something wrong or missing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from slime.models.families import FAMILIES
from slime.models.hf_config import (
    CROSS_CHECKED,
    SUPPORTED_MODEL_TYPES,
    config_mismatches,
    flag_of,
    model_args_from_hf,
    moe_layer_pattern,
    unsupported_model,
)
from slime.utils.errors import UsageError
from slime.weights.formats import EXPERTS_ONLY, Int4Format
from slime.weights.names import text_config
from tests.unit.megatron_fakes import NAMED_AS

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf_configs"
ALL = sorted(path.stem for path in FIXTURES.glob("*.json"))
MOE_LAYERS = {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}


def fixture(name: str, **changes) -> dict:
    """The language model's config."""
    config = text_config(json.loads((FIXTURES / f"{name}.json").read_text()))
    config.pop("text_config", None)
    return config | changes


def flags_of(hf: dict, **changes) -> argparse.Namespace:
    """All flags as the config has them, but for `changes`."""
    # Where a dense model's flags say nothing, Megatron's defaults hold.
    values = {"moe_layer_freq": 1, "moe_router_topk": 2, "mtp_num_layers": None} | model_args_from_hf(hf) | changes
    return argparse.Namespace(**values)


@pytest.mark.parametrize("name", ALL)
def test_a_fixture_names_its_source(name):
    assert fixture(name)["_source"].startswith("config.json of ")


def test_glm4_has_norms_around_both_parts_and_rotates_half_of_each_head_pairwise():
    derived = model_args_from_hf(fixture("glm4-9B"))
    assert derived["post_self_attn_layernorm"] and derived["post_mlp_layernorm"]
    assert (derived["rotary_percent"], derived["rotary_interleaved"]) == (0.5, True)
    assert (derived["add_qkv_bias"], derived["qk_layernorm"], derived["num_moe_experts"]) == (True, False, None)
    assert model_args_from_hf(fixture("glm4-9B", attention_bias=False))["add_qkv_bias"] is False


def test_the_share_of_rotated_channels_is_read_where_transformers_5_writes_it():
    hf = fixture("glm4-9B", rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25})
    derived = model_args_from_hf(hf)
    assert (derived["rotary_base"], derived["rotary_percent"]) == (500_000, 0.25)


def test_qwen3_moe_routes_as_transformers_does():
    derived = model_args_from_hf(fixture("qwen3-30B-A3B"))
    assert (derived["num_moe_experts"], derived["moe_ffn_hidden_size"], derived["moe_router_topk"]) == (128, 768, 8)
    assert (derived["moe_router_score_function"], derived["moe_router_pre_softmax"]) == ("softmax", False)
    assert (derived["moe_layer_freq"], derived["moe_aux_loss_coeff"]) == (1, 0.0)
    other = model_args_from_hf(fixture("qwen3-30B-A3B", norm_topk_prob=False, output_router_logits=True))
    assert (other["moe_router_pre_softmax"], other["moe_aux_loss_coeff"]) == (True, 0.001)


def test_layers_without_experts_become_a_pattern():
    # transformers: layers 2, 4, 6 counted from 1 have experts (every second); index 1, the first of them, is excluded.
    assert model_args_from_hf(fixture("qwen3-30B-A3B", **MOE_LAYERS))["moe_layer_freq"] == [0, 0, 0, 1, 0, 1]
    assert moe_layer_pattern(2, 5) == [1, 0, 1, 0, 1]
    assert moe_layer_pattern([0, 1, 1], 3) == [0, 1, 1]


def test_the_number_of_experts_is_read_under_the_name_that_transformers_5_writes():
    hf = fixture("qwen3-30B-A3B")
    del hf["num_experts"]
    assert model_args_from_hf(hf | {"num_local_experts": 16})["num_moe_experts"] == 16


@pytest.mark.parametrize("model_type", SUPPORTED_MODEL_TYPES)
def test_what_a_config_leaves_out_is_what_transformers_takes(model_type):
    import transformers

    written = text_config(transformers.AutoConfig.for_model(NAMED_AS.get(model_type, model_type)).to_dict())
    if "num_local_experts" in written:
        written["num_experts"] = written["num_local_experts"]
    ours = FAMILIES[model_type].defaults
    if model_type == "llama":  # None means as many as there are heads, and transformers fills that in
        assert written["num_key_value_heads"] == written["num_attention_heads"]
        ours = {}
    assert {name: written[name] for name in ours} == ours


@pytest.mark.parametrize("name", ALL)
def test_flags_from_a_config_agree_with_it(name):
    hf = fixture(name)
    assert config_mismatches(flags_of(hf), hf) == []


def changed(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + "x"
    if value is None:
        return 3
    return [0] if isinstance(value, list) else value + 1


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        (name, a)
        for name in ("glm4-9B", "qwen3-30B-A3B")
        for a in CROSS_CHECKED
        if a in model_args_from_hf(fixture(name))
    ],
)
def test_a_flag_that_disagrees_with_the_config_is_named(name, attribute):
    hf = fixture(name)
    args = flags_of(hf)
    vars(args)[attribute] = changed(vars(args)[attribute])
    flags = [sentence.split(":")[0] for sentence in config_mismatches(args, hf)]
    assert flag_of(attribute) in flags


def test_what_a_config_does_not_speak_of_at_all_is_not_in_the_model():
    hf = fixture("qwen3-30B-A3B")
    one = flags_of(hf, moe_router_num_groups=1, moe_router_group_topk=1, moe_router_topk_scaling_factor=1.0)
    assert config_mismatches(one, hf) == [], "one group, or a factor of 1, is none"
    other = flags_of(hf, moe_router_topk_scaling_factor=2.0, multi_latent_attention=True, rope_type="rope")
    assert config_mismatches(other, hf) == [
        "--moe-router-topk-scaling-factor: the flags say 2.0, the HF config says None; correct the flag or give "
        "--model-args-from-hf.",
        "--multi-latent-attention: the flags say True, the HF config says False; correct the flag or give "
        "--model-args-from-hf.",
    ]
    given = flags_of(hf, softmax_scale=0.5, model_args_from_hf=True)
    (problem,) = config_mismatches(given, hf)
    assert problem.startswith("--softmax-scale: the flags say 0.5") and problem.endswith("the flag or leave it out.")


def test_a_pattern_of_layers_agrees_with_the_number_that_means_the_same():
    hf = fixture("qwen3-30B-A3B")
    assert config_mismatches(flags_of(hf, moe_layer_freq=[1] * 48), hf) == []
    (problem,) = config_mismatches(flags_of(hf, moe_layer_freq=[0] + [1] * 47), hf)
    assert problem.startswith("--moe-layer-freq: the flags say [0, 1,")


def test_a_left_out_width_of_the_experts_is_the_width_of_the_mlp():
    hf = fixture("qwen3-30B-A3B")
    (problem,) = config_mismatches(flags_of(hf, moe_ffn_hidden_size=None), hf)
    assert problem.startswith("--moe-ffn-hidden-size: the flags say 6144, the HF config says 768")
    same = fixture("qwen3-30B-A3B", moe_intermediate_size=6144)
    assert config_mismatches(flags_of(same, moe_ffn_hidden_size=None), same) == []


def test_a_language_model_beside_one_that_sees_images_is_read_as_one_by_itself():
    nested = json.loads((FIXTURES / "qwen3.5-35B-A3B.json").read_text())
    assert "hidden_size" not in nested
    assert model_args_from_hf(nested) == model_args_from_hf(fixture("qwen3.5-35B-A3B"))
    assert config_mismatches(flags_of(nested), nested) == []


def test_layers_of_linear_attention_are_a_number_or_a_list():
    derived = model_args_from_hf(fixture("qwen3-next-80B-A3B", num_hidden_layers=5))
    assert (derived["experimental_attention_variant"], derived["linear_attention_freq"]) == ("gated_delta_net", 4)
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    hf = fixture("qwen3-next-80B-A3B", num_hidden_layers=3, layer_types=kinds)
    assert model_args_from_hf(hf)["linear_attention_freq"] == [0, 1, 1]
    assert config_mismatches(flags_of(hf), hf) == []
    with pytest.raises(UsageError, match="layer_types with sliding_attention"):
        model_args_from_hf(hf | {"layer_types": ["sliding_attention"] * 3})
    with pytest.raises(UsageError, match="3 layer_types for 4 layers"):
        model_args_from_hf(hf | {"num_hidden_layers": 4})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3-next-80B-A3B", {"full_attention_interval": 0}),
        ("qwen3-next-80B-A3B", {"linear_num_key_heads": "16"}),
        ("minimax-m2", {"rotary_dim": "64"}),
        ("glm5-744B-A40B", {"index_topk": None}),
    ],
)
def test_numbers_of_special_attention_are_checked(name, changes):
    with pytest.raises(UsageError, match=next(iter(changes))):
        model_args_from_hf(fixture(name, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_qk_norm": False}, "use_qk_norm false"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ({"use_routing_bias": False}, "use_routing_bias false"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"attn_type_list": [1, 0]}, "attn_type_list"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size 8"),
        ({"partial_rotary_factor": 0.25}, "rotary_dim 64 and partial_rotary_factor 0.25"),
    ],
)
def test_another_minimax_than_ours_is_refused(changes, named):
    assert model_args_from_hf(fixture("minimax-m2"))["rotary_percent"] == 0.5
    with pytest.raises(UsageError, match=named):
        model_args_from_hf(fixture("minimax-m2", **changes))


def test_a_first_layer_that_takes_an_earlier_ones_keys_is_refused():
    with pytest.raises(UsageError, match="a first layer whose indexer is shared"):
        model_args_from_hf(fixture("glm5-744B-A40B", index_topk_pattern="SF"))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        (name, field)
        for name in ALL
        for field in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
        if field in fixture(name)  # Qwen3.5 with experts has no dense layer
    ],
)
def test_a_missing_number_is_named(name, field):
    hf = fixture(name)
    del hf[field]
    with pytest.raises(UsageError, match=f"the HF config has no {field}"):
        model_args_from_hf(hf)


@pytest.mark.parametrize("value", ["four", 0, -1, 2.5, [1]])
def test_what_is_no_size_is_named(value):
    with pytest.raises(UsageError, match="num_attention_heads = .* no whole number above 0"):
        model_args_from_hf(fixture("qwen3-4B", num_attention_heads=value))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": "8"},
        {"rope_theta": "big"},
        {"rope_parameters": {"rope_theta": -1}},
        {"rope_parameters": "default"},
        {"rms_norm_eps": []},
    ],
)
def test_what_is_no_number_is_named(changes):
    with pytest.raises(UsageError, match=next(iter(changes))[:4]):
        model_args_from_hf(fixture("qwen3-4B", **changes))


def test_all_missing_numbers_are_named_together():
    with pytest.raises(UsageError) as caught:
        model_args_from_hf({"model_type": "qwen3"})
    assert len(caught.value.messages) == 5


def test_llama3_rope_without_its_numbers_is_refused():
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
    with pytest.raises(UsageError, match="without low_freq_factor, high_freq_factor"):
        model_args_from_hf(fixture("smollm2-135M", rope_parameters=rope))


@pytest.mark.parametrize("model_type", ["mamba", None, ["qwen3"]])
def test_a_type_whose_flags_cannot_be_derived_points_to_the_flags(model_type):
    hf = fixture("qwen3-4B", model_type=model_type)
    with pytest.raises(UsageError, match="cannot be derived.*scripts/models"):
        model_args_from_hf(hf)
    assert config_mismatches(flags_of(fixture("qwen3-4B")), hf) == []


def test_a_type_without_weight_rules_is_not_supported_yet():
    (sentence,) = unsupported_model(fixture("qwen3-4B", model_type="mamba"))
    assert "not supported; use llama, qwen2, mimo, qwen3" in sentence
    assert unsupported_model(fixture("qwen3-4B")) == []


def test_fp8_weights_of_a_family_that_was_not_compared_are_refused():
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (sentence,) = unsupported_model(fixture("qwen3-next-80B-A3B", quantization_config=config))
    assert "checkpoint (fp8) of model_type 'qwen3_next'" in sentence and "fp8_cast_bf16" in sentence
    for name in ("deepseek-v3.2", "glm5-744B-A40B", "minimax-m2"):
        assert unsupported_model(fixture(name, quantization_config=config)) == []


def test_a_sparse_family_is_served_in_fp8_by_blocks_alone():
    (sentence,) = unsupported_model(fixture("glm5-744B-A40B", quantization_config={"quant_method": "fp8"}))
    assert "with one scale a tensor are not supported" in sentence and "weight_block_size" in sentence
    int4 = Int4Format(ignored=EXPERTS_ONLY).config()
    (sentence,) = unsupported_model(fixture("glm5-744B-A40B", quantization_config=int4))
    assert "checkpoint (compressed-tensors) of model_type 'glm_moe_dsa'" in sentence


def test_fp8_weights_have_the_same_flags_as_unquantized_ones():
    hf = fixture("qwen3-4B", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert unsupported_model(hf) == []
    assert model_args_from_hf(hf) == model_args_from_hf(fixture("qwen3-4B"))
    hf["quantization_config"]["quant_method"] = "awq"
    (sentence,) = unsupported_model(hf)
    assert "quant_method 'awq' is not supported" in sentence and "tools/convert_hf_to_fp8.py" in sentence


KIMI_K2 = {
    "model_type": "kimi_k2",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_nextn_predict_layers": 0,
}


def test_the_config_of_kimi_k2_is_taken_as_it_is():
    derived = model_args_from_hf(KIMI_K2)
    assert (derived["num_moe_experts"], derived["moe_layer_freq"]) == (384, [0] + [1] * 60)
    assert (derived["rope_type"], derived["beta_fast"], derived["rotary_base"]) == ("yarn", 1.0, 50_000)
    assert derived["moe_router_num_groups"] is None  # one group: every expert is looked at
    assert config_mismatches(flags_of(KIMI_K2), KIMI_K2) == []
    # Moonlight is the same architecture under DeepSeek-V3's name, with queries of full rank.
    moonlight = KIMI_K2 | {"model_type": "deepseek_v3", "q_lora_rank": None, "rope_scaling": None}
    derived = model_args_from_hf(moonlight)
    assert (derived["q_lora_rank"], derived["rope_type"]) == (None, "rope")


@pytest.mark.parametrize(
    "changes",
    [
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"moe_layer_freq": 2},
        {"mlp_layer_types": ["sparse"] * 61},
    ],
)
def test_another_choice_of_experts_than_our_models_is_refused(changes):
    with pytest.raises(UsageError, match=f"the HF config has {next(iter(changes))}"):
        model_args_from_hf(KIMI_K2 | changes)


def test_layers_with_experts_are_read_from_their_number_or_from_their_list():
    lite = KIMI_K2 | {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "rope_scaling": None}
    assert model_args_from_hf(lite)["moe_layer_freq"] == [0, 1, 1, 1]
    del lite["first_k_dense_replace"]
    assert model_args_from_hf(lite)["moe_layer_freq"] == [0, 1, 1, 1]
    listed = lite | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}
    assert model_args_from_hf(listed)["moe_layer_freq"] == [0, 0, 1, 1]


def test_prediction_layers_of_a_family_without_rules_for_them_are_refused():
    args = flags_of(fixture("qwen3-4B"), mtp_num_layers=1)
    (sentence,) = config_mismatches(args, fixture("qwen3-4B", num_nextn_predict_layers=1))
    assert "there are rules for those of mimo, glm4_moe, glm4_moe_lite, deepseek_v3" in sentence


def test_more_prediction_layers_than_the_config_has_are_refused_with_its_number():
    hf = fixture("mimo-7B-rl", num_nextn_predict_layers=1)
    (sentence,) = config_mismatches(flags_of(hf, mtp_num_layers=2), hf)
    assert sentence.startswith("--mtp-num-layers 2: the HF config (model_type mimo) has 1 layers")
    assert sentence.endswith("; give 1 or leave it out.")
