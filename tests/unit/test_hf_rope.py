"""Every rotary setting of an HF config is honoured or refused; that the honoured ones are right is
test_model_parity's."""

from __future__ import annotations

import math

import pytest

from slime.models.hf_config import model_args_from_hf
from slime.utils.errors import UsageError
from tests.unit.test_hf_config import KIMI_K2, fixture

YARN = KIMI_K2["rope_scaling"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def latent(**rope) -> dict:
    return model_args_from_hf(KIMI_K2 | {"rope_scaling": YARN | rope})


def dense(rope: dict, **config) -> dict:
    return model_args_from_hf(fixture("smollm2-135M", rope_scaling=None, rope_parameters=rope, **config))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"attention_factor": 0.5}, "attention_factor 0.5"),
        ({"truncate": False}, "truncate False"),
        ({"mscale": 0.7, "mscale_all_dim": None}, "mscale 0.7 and mscale_all_dim None"),
        ({"mscale": None}, "mscale None and mscale_all_dim 1.0"),
        ({"mscale": 0, "mscale_all_dim": 0}, "mscale 0 and mscale_all_dim 0"),
        ({"attn_factor": 0.5}, "with attn_factor"),
        ({"extrapolation_factor": 2}, "with extrapolation_factor"),
    ],
)
def test_what_latent_attention_would_not_rotate_by_is_refused(rope, named):
    with pytest.raises(UsageError, match=f"the HF config has .*{named}, which our model"):
        latent(**rope)


def test_yarn_settings_that_say_what_is_computed_anyway_are_taken():
    # mscale and mscale_all_dim are the same, so that cosines are not scaled
    plain = latent()
    assert latent(attention_factor=1.0, truncate=True) == plain
    # with mscale_all_dim of 0 they are scaled by 0.1 ln(factor) + 1
    assert latent(mscale_all_dim=0, attention_factor=0.1 * math.log(32) + 1)["mscale_all_dim"] == 0.0
    with pytest.raises(UsageError, match="attention_factor 1.0"):
        latent(mscale_all_dim=0, attention_factor=1.0)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "proportional", "su"])
def test_kinds_of_rotary_embedding_that_dense_models_lack_are_refused(kind):
    with pytest.raises(UsageError, match=f"rotary embedding of type '{kind}'"):
        dense(LLAMA3 | {"rope_type": kind})


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_kinds_of_rotary_embedding_that_latent_attention_lacks_are_refused(kind):
    with pytest.raises(UsageError, match=f"rotary embedding of type '{kind}'"):
        model_args_from_hf(KIMI_K2 | {"rope_scaling": LLAMA3 | {"rope_type": kind}})


@pytest.mark.parametrize("name", ["alpha", "use_fope", "full_attention"])
def test_a_rotary_setting_that_we_do_not_know_is_refused(name):
    with pytest.raises(UsageError, match=f"with {name}, which our model"):
        dense({"rope_type": "default", name: {"rope_theta": 1e6}})
    assert dense({"rope_type": "default", name: None}) == dense({})


def test_sections_of_multimodal_positions_change_nothing_on_text():
    assert dense({"mrope_section": [8, 12, 12], "mrope_interleaved": True}) == dense({})


def test_the_original_length_outside_the_settings_counts_as_in_transformers():
    inside = dense(LLAMA3 | {"original_max_position_embeddings": 1024})
    assert dense(LLAMA3, original_max_position_embeddings=1024) == inside != dense(LLAMA3)


@pytest.mark.parametrize("rope", [{"beta_fast": "x"}, {"attention_factor": "x"}, {"mscale": -1}, {"factor": [1]}])
def test_a_setting_of_yarn_that_is_no_number_is_named(rope):
    ((name, value),) = rope.items()
    with pytest.raises(UsageError, match=f"the HF config says {name} = .*, which is no number"):
        latent(**rope)


def test_the_other_attention_of_engines_is_refused():
    with pytest.raises(UsageError, match="dual_chunk_attention_config"):
        model_args_from_hf(fixture("qwen2.5-7B", dual_chunk_attention_config={"chunk_size": 8}))


@pytest.mark.parametrize(("name", "norm"), [("qwen3-30B-A3B", True), ("glm4.5-106B-A12B", True), ("minimax-m2", None)])
def test_one_expert_whose_weight_is_divided_by_itself_is_refused(name, norm):
    with pytest.raises(UsageError, match="num_experts_per_tok 1 with norm_topk_prob"):
        model_args_from_hf(fixture(name, num_experts_per_tok=1, norm_topk_prob=norm))


def test_one_expert_with_its_own_weight_is_taken():
    derived = model_args_from_hf(fixture("qwen3-30B-A3B", num_experts_per_tok=1, norm_topk_prob=False))
    assert derived["moe_router_topk"] == 1 and derived["moe_router_pre_softmax"]
