"""The tiny model: a tokenizer that keeps text, and weights that follow the seed."""

from __future__ import annotations

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
