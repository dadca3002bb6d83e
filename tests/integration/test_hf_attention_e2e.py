"""Models whose tokens transformers' own modules mix, through train.py: with an engine that knows the architecture no
better than Megatron does, and under context parallelism.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts
from tools.make_tiny_model import build_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SPEC = ("--spec", "slime_plugins.models.hf_attention", "get_hf_attention_spec")
SMOLLM3 = (
    *(*SPEC, "--model-name", "llama", "--num-layers", 2, "--hidden-size", 64, "--ffn-hidden-size", 96),
    *("--num-attention-heads", 4, "--group-query-attention", "--num-query-groups", 2, "--vocab-size", 112),
    *("--normalization", "RMSNorm", "--norm-epsilon", 1e-6, "--swiglu", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
)


def save_tiny(path: Path, config_class: Any, model_class: Any, **of_its_own: Any) -> Path:
    """A random model of two layers, with a tokenizer."""
    tokenizer = build_tokenizer()
    config = config_class(
        vocab_size=112,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
        bos_token_id=None,
        **of_its_own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_smollm3(path: Path) -> Path:
    """Two layers, the second of which does not rotate."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    own = {"no_rope_layers": [1, 0], "tie_word_embeddings": False}
    return save_tiny(path, SmolLM3Config, SmolLM3ForCausalLM, **own)


def test_an_architecture_that_neither_megatron_nor_sglang_knows_is_trained_and_synced(tmp_path: Path) -> None:
    model, prompts = make_smollm3(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    flags: list[Any] = [flag for flag in grpo_flags(model, prompts) if flag != "--model-args-from-hf"]
    more = ("--num-rollout", 3, "--rollout-num-gpus", 1, "--save-hf", tmp_path / "hf_{rollout_id}")
    run = train(tmp_path / "out", *flags, *SMOLLM3, *more)
    differences = run.column("train/train_rollout_logprob_abs_diff")
    assert len(differences) == 3
    assert max(differences) < 1e-5
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "hf_2"))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before if "self_attn" in name)


def make_lfm2(path: Path) -> Path:
    """A convolution, then attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    own = {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"], "tie_word_embeddings": True}
    return save_tiny(path, Lfm2Config, Lfm2ForCausalLM, **own)


def learn_by_heart(directory: Path, model: Path, *flags: Any, **env: str) -> None:
    """Eight steps on one sentence, without an engine; the export has the checkpoint's tensors."""
    prompts = directory / "chats.jsonl"
    turns = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "seven, I think"}]
    prompts.write_text((json.dumps({"messages": turns}) + "\n") * 8)
    run = train(
        directory / "out",
        *("--accelerator", "cpu", "--hf-checkpoint", model, "--debug-train-only", "--calculate-per-token-loss"),
        *("--loss-type", "sft_loss", "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout"),
        *("--disable-compute-advantages-and-returns", "--loss-mask-type", "qwen3", "--prompt-data", prompts),
        *("--input-key", "messages", "--num-rollout", 8, "--rollout-batch-size", 8, "--global-batch-size", 8),
        *("--lr", 1e-2, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 512),
        *("--save-hf", directory / "hf_{rollout_id}", *flags),
        **env,
    )
    losses = run.column("train/loss")
    assert len(losses) == 8 and losses[-1] < 0.5 * losses[0]
    exported = load_file(directory / "hf_7" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()


def test_delta_nets_learn_a_sentence_by_heart_over_two_context_parallel_ranks(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "--family", "qwen3_5")
    place = ("--actor-num-gpus-per-node", 2, "--context-parallel-size", 2)
    learn_by_heart(tmp_path, model, "--model-args-from-hf", *SPEC, *place)


def test_the_plugin_of_the_documentation_learns_a_sentence_by_heart(tmp_path: Path) -> None:
    page = ROOT / "docs" / "architectures_beyond_megatron.md"
    (written,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "my_lfm2.py").write_text(written)
    flags = (
        *("--spec", "my_lfm2", "spec", "--model-name", "my_lfm2:RULES", "--actor-num-gpus-per-node", 1),
        *("--num-layers", 2, "--hidden-size", 64, "--ffn-hidden-size", 96, "--num-attention-heads", 4),
        *("--group-query-attention", "--num-query-groups", 2, "--vocab-size", 112, "--normalization", "RMSNorm"),
        *("--norm-epsilon", 1e-5, "--swiglu", "--disable-bias-linear", "--position-embedding-type", "rope"),
    )
    where = os.pathsep.join([str(tmp_path), str(ROOT)])
    learn_by_heart(tmp_path, make_lfm2(tmp_path / "model"), *flags, PYTHONPATH=where)
