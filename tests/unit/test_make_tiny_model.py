"""The tiny model: a tokenizer that keeps text, and weights that follow the seed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.make_tiny_model import build_parser, build_tokenizer, make_tiny_model

pytest.importorskip("transformers")


def make(path: Path, *flags: str) -> int:
    return make_tiny_model(build_parser().parse_args(["--output", str(path), *flags]))


@pytest.mark.parametrize(
    "text", ["12+34=46", "Hello, World!  two spaces\nuser wrote {x}", "<|im_start|>user\n1<|im_end|>"]
)
def test_every_ascii_text_survives_the_tokenizer(text: str):
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_chat_prompt_is_short():
    tokenizer = build_tokenizer()
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12+34="}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    # <|im_start|> user \n, six characters, <|im_end|> \n, <|im_start|> assistant \n
    assert len(ids) == 3 + 6 + 2 + 3
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_the_saved_directory_loads_and_the_seed_decides_the_weights(tmp_path: Path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoTokenizer

    count = make(tmp_path / "a", "--seed", "1")
    make(tmp_path / "b", "--seed", "1")
    make(tmp_path / "c", "--seed", "2")
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert sum(tensor.numel() for tensor in a.values()) == count and 0.5e6 < count < 3e6
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)
    config = AutoConfig.from_pretrained(tmp_path / "a")
    assert config.model_type == "qwen3" and config.vocab_size % 128 == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([2]) == "<|im_end|>"


def test_untied_embeddings_have_their_own_output_matrix(tmp_path: Path):
    from safetensors.torch import load_file

    make(tmp_path, "--no-tie-embeddings", "--layers", "1")
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax_m2", "glm_moe_dsa", "deepseek_v32"]
)
def test_a_tiny_model_of_a_family_is_one_that_we_train(family: str, tmp_path: Path):
    """Its flags are derived, every tensor has a rule, and both kinds of layers are there."""
    from safetensors.torch import load_file

    from slime.models.families import family_of
    from slime.models.hf_config import model_args_from_hf, unsupported_model
    from slime.utils.model_shape import linear_attention_pattern

    make(tmp_path, "--family", family, "--layers", "2")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == family and unsupported_model(config) == []
    flags = model_args_from_hf(config)
    known = {hf for rule in family_of(family).rules for hf in rule.hf}
    if "qwen3" in family:
        assert linear_attention_pattern(flags["linear_attention_freq"], 2) == [1, 0]
    names = [re.sub(r"(?<=layers\.)\d+", "{i}", name) for name in load_file(tmp_path / "model.safetensors")]
    names = [re.sub(r"(?<=experts\.)\d+", "{e}", name) for name in names]
    assert [name for name in names if name not in known and "visual" not in name and name not in FUSED] == []


@pytest.mark.parametrize(("family", "patch"), [("qwen3_vl", 8), ("qwen2_5_vl", 14)])
def test_a_model_that_sees_images_has_a_processor_and_a_template_for_them(family: str, patch: int, tmp_path: Path):
    pytest.importorskip("torchvision")
    from PIL import Image
    from transformers import AutoConfig, AutoProcessor

    make(tmp_path, "--family", family, "--layers", "1", "--hidden-size", "64")
    config, processor = AutoConfig.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>how many?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = [{"role": "user", "content": "how many?"}]
    assert processor.tokenizer.apply_chat_template(plain, tokenize=False) == build_tokenizer().apply_chat_template(
        plain, tokenize=False
    )
    inputs = processor(text=[text], images=[Image.new("RGB", (4 * patch, 2 * patch))], return_tensors="np")
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert inputs["pixel_values"].shape == (8, 3 * 2 * patch * patch)
    assert (inputs["input_ids"] == config.image_token_id).sum() == 2  # 2 x 2 patches are a token


FUSED = (
    "model.language_model.layers.{i}.mlp.experts.down_proj",
    "model.language_model.layers.{i}.mlp.experts.gate_up_proj",
)
"""All experts of a layer in one tensor: read as single ones."""
