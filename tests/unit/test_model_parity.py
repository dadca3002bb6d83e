"""The Megatron model computes what the HF model computes, for every family, packed, and cut over two ranks."""

from __future__ import annotations

import math

import pytest
import torch

from slime.models.families import FAMILIES
from slime.weights.names import is_of_other_part
from tests.unit.megatron_fakes import gather_vocab, make_args, make_hf_model, packed, run_world

pytestmark = pytest.mark.processes

LENGTHS = [9, 3, 9, 1, 21, 3]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
YARN_WITHOUT_MSCALE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
    "attention_factor": 0.1 * math.log(4.0) + 1,  # what follows from the factor
    "truncate": True,
}
KIMI_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
# The norm of queries and keys makes the gradients of a weight's length vanish: what is left is rounding.
GRADIENT_TOLERANCE = 1e-4


def token_ids(vocab: int) -> torch.Tensor:
    return torch.randint(0, vocab, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))


def reference_logits(hf_model, ids: torch.Tensor) -> torch.Tensor:
    """Each sequence by itself through the HF model: [1, T, V]."""
    with torch.no_grad():
        return torch.cat([hf_model(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


def check_logits(args, ids, expected):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    load_hf_weights(args, [model], args.hf_checkpoint)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        logits = gather_vocab(model(ids, positions, None, packed_seq_params=packed(LENGTHS)))
    vocab = expected.shape[-1]
    assert (logits[..., :vocab] - expected).abs().max() < 1e-5
    # Padding vocabulary takes no probability: the softmax over everything is the softmax over the real vocabulary.
    assert logits.shape[-1] == args.padded_vocab_size
    torch.testing.assert_close(logits.log_softmax(-1)[..., :vocab], expected.log_softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("family", "tied", "flags", "config"),
    [
        ("qwen3", False, "", {}),
        ("qwen3", True, "--tensor-model-parallel-size 2 --sequence-parallel", {}),
        ("qwen2", True, "", {}),
        ("qwen2", False, "--tensor-model-parallel-size 2", {}),
        ("llama", True, "", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", False, "--tensor-model-parallel-size 2 --sequence-parallel", {"rope_theta": 500000.0}),
        ("llama", True, "", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
        ("llama", False, "", {"rope_parameters": LLAMA3_ROPE, "original_max_position_embeddings": 16}),
        ("glm4", False, "", {}),
        ("glm4", True, TP2, {"attention_bias": False, "partial_rotary_factor": 0.25}),
        ("mimo", False, TP2, {}),
        ("qwen2_moe", False, "", {"mlp_only_layers": [0], "norm_topk_prob": True}),
        ("qwen2_moe", False, f"{TP2} --expert-model-parallel-size 2", {}),
        ("qwen2_moe", True, "", {"qkv_bias": False}),
        ("qwen3_moe", False, "", {"mlp_only_layers": [0]}),
        ("qwen3_moe", False, "--expert-model-parallel-size 2", {"norm_topk_prob": False}),
        ("qwen3_next", False, "", {}),
        ("qwen3_5_text", True, "", {}),
        ("qwen3_5", False, TP2, {"num_hidden_layers": 3}),
        ("qwen3_5_moe", True, f"{TP2} --expert-tensor-parallel-size 1", {}),
        (
            "qwen3_5_moe_text",
            False,
            "--expert-model-parallel-size 2",
            {"num_hidden_layers": 3, "full_attention_interval": 3},
        ),
        ("qwen3_next", True, f"{TP2} --expert-model-parallel-size 2", {"mlp_only_layers": [0]}),
        ("minimax_m2", False, "", {}),
        ("minimax_m2", False, f"{TP2} --expert-model-parallel-size 2", {}),
        ("glm_moe_dsa", False, "", {}),
        ("glm_moe_dsa", False, f"{TP2} --expert-tensor-parallel-size 1", {"index_topk": 100}),
        ("deepseek_v32", False, "", {"rope_parameters": YARN_ROPE}),
        ("deepseek_v32", False, f"{TP2} --expert-tensor-parallel-size 1", {}),
        ("glm4_moe", False, "", {}),
        ("glm4_moe", True, "--expert-model-parallel-size 2", {"attention_bias": False, "use_qk_norm": False}),
        ("glm4_moe_lite", False, "", {}),
        ("glm4_moe_lite", True, f"{TP2} --expert-tensor-parallel-size 1", {"q_lora_rank": None}),
        ("kimi_k2", False, "--expert-model-parallel-size 2", {"rope_parameters": KIMI_ROPE}),
        ("deepseek_v3", False, "", {}),
        ("deepseek_v3", False, "", {"q_lora_rank": None, "n_group": 1, "rope_parameters": YARN_ROPE}),
        ("deepseek_v3", False, "", {"rope_parameters": YARN_WITHOUT_MSCALE}),
        ("deepseek_v3", True, f"{TP2} --expert-tensor-parallel-size 1", {"num_experts_per_tok": 4, "topk_group": 2}),
    ],
)
def test_logits_equal_those_of_the_hf_model(tmp_path, family, tied, flags, config):
    hf_model = make_hf_model(tmp_path / "hf", family, tied=tied, **config)
    args = make_args(tmp_path / "hf", flags)
    ids = token_ids(100)
    run_world(args.actor_num_gpus_per_node, check_logits, args, ids, reference_logits(hf_model, ids))


def check_gradients(args, ids, weights, expected):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.models.families import family_of_args

    model = get_model_provider_func(args)()
    load_hf_weights(args, [model], args.hf_checkpoint)
    for param in model.parameters():  # what DistributedDataParallel gives them: some gradients are added up in it
        param.main_grad = torch.zeros_like(param)
    logits = model(ids, None, None, packed_seq_params=packed(LENGTHS))
    (logits[..., : weights.shape[-1]] * weights).sum().backward()
    family = args.model_name or family_of_args(args).model_type
    seen = set()
    for name, param in model.named_parameters():
        grad = param.main_grad if param.grad is None else param.main_grad + param.grad
        for hf_name, found in convert_to_hf(args, family, name, grad):
            error = (found - expected[hf_name]).norm()
            assert error <= GRADIENT_TOLERANCE * expected[hf_name].norm() + 1e-7, (hf_name, error)
            seen.add(hf_name)
    assert seen == expected.keys()


def reference_gradients(hf_model, ids, weights):
    """Gradients of sum(logits * weights) under the names of the checkpoint, where each expert has its own tensors."""
    (torch.cat([hf_model(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1) * weights).sum().backward()
    found = {}
    gate_name, up_name, down_name = "gate_proj", "up_proj", "down_proj"
    if hf_model.config.model_type == "minimax_m2":
        gate_name, up_name, down_name = "w1", "w3", "w2"
    for name, param in hf_model.named_parameters():
        if is_of_other_part(name):
            continue
        if hf_model.config.model_type == "minimax_m2":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if hf_model.config.model_type == "qwen2_5_vl":
            name = name.replace("language_model.", "")
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(grad.chunk(2) for grad in param.grad):
                base = f"{name.removesuffix('.gate_up_proj')}.{i}"
                found |= {f"{base}.{gate_name}.weight": gate, f"{base}.{up_name}.weight": up}
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix(".down_proj")
            found |= {f"{base}.{i}.{down_name}.weight": grad for i, grad in enumerate(param.grad)}
        else:  # none of what only chooses
            found[name] = torch.zeros_like(param) if param.grad is None else param.grad
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_the_hf_model(tmp_path, family):
    hf_model = make_hf_model(tmp_path / "hf", family)
    ids = token_ids(100)
    weights = torch.randn(1, sum(LENGTHS), 100, generator=torch.Generator().manual_seed(4))
    expected = reference_gradients(hf_model, ids, weights)
    run_world(1, check_gradients, make_args(tmp_path / "hf"), ids, weights, expected)


def check_rope_does_not_depend_on_max_seqlen(args):
    """Megatron's own packed rotary embedding counts on through the pack when max_seqlen equals its length."""
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    ids = token_ids(100)
    with torch.no_grad():
        tight = model(ids, None, None, packed_seq_params=packed(LENGTHS))
        generous = model(ids, None, None, packed_seq_params=packed(LENGTHS, max_seqlen=sum(LENGTHS)))
    assert torch.equal(tight, generous)


def test_positions_start_again_in_each_sequence_whatever_max_seqlen_says(tmp_path):
    make_hf_model(tmp_path / "hf")
    run_world(1, check_rope_does_not_depend_on_max_seqlen, make_args(tmp_path / "hf"))


def check_type_of_logits(args, ids):
    from slime.backends.megatron_utils.model.setup import build_model

    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        logits = build_model(args)(ids, positions, None, packed_seq_params=packed(LENGTHS))
    assert logits.dtype == torch.bfloat16


def test_logits_of_a_16_bit_model_are_not_copied_to_fp32(tmp_path):
    make_hf_model(tmp_path)
    args = make_args(tmp_path)
    vars(args).update(bf16=True, params_dtype=torch.bfloat16)
    run_world(1, check_type_of_logits, args, token_ids(args.vocab_size))


def check_seeds(args):
    seeds = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seeds, torch.initial_seed())
    assert seeds == [args.seed] * 2 + [args.seed + 100] * 2


def test_tensor_parallel_ranks_draw_the_same_dropout_and_pipeline_stages_another(tmp_path):
    make_hf_model(tmp_path / "hf")
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    run_world(4, check_seeds, make_args(tmp_path / "hf", flags))
