"""What follows from Megatron's flags (V28), one rule at a time."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import pytest
import torch

from slime.backends.megatron_utils.model_provider import torch_type
from slime.config.megatron import derived
from slime.config.megatron.arguments import add_megatron_arguments
from tests.unit.megatron_fakes import SLIME_DEFAULTS


def derive(flags: str = "", **values):
    args = add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags.split())
    vars(args).update(SLIME_DEFAULTS | values)
    before = dict(vars(args))
    found = derived.derive_megatron(args)
    assert vars(args) == before  # it returns, and sets nothing
    return argparse.Namespace(**found)


def test_the_optimizer_is_always_distributed_and_lengths_always_vary():
    found = derive()
    assert found.use_distributed_optimizer is True
    assert found.variable_seq_lengths is True
    assert found.rank == 0
    assert found.ckpt_fully_parallel_load is True


def test_bf16_is_not_fp16_and_neither_without_a_gpu():
    assert derive(accelerator="cuda").bf16 is True
    assert derive("--fp16", accelerator="cuda").bf16 is False
    assert derive(accelerator="cpu").bf16 is False


def test_weights_have_the_type_of_the_precision():
    assert torch_type(derive(accelerator="cuda").params_dtype) == torch.bfloat16
    assert torch_type(derive("--fp16", accelerator="cuda").params_dtype) == torch.float16
    assert torch_type(derive(accelerator="cpu").params_dtype) == torch.float32


def test_bf16_keeps_gradients_in_fp32_unless_told_not_to():
    assert derive(accelerator="cuda").grad_reduce_in_fp32 is True
    assert derive("--grad-reduce-in-bf16", accelerator="cuda").grad_reduce_in_fp32 is False
    assert derive("--fp16", accelerator="cuda").grad_reduce_in_fp32 is False
    assert derive("--fp16 --accumulate-allreduce-grads-in-fp32", accelerator="cuda").grad_reduce_in_fp32 is True


def test_the_older_switch_asks_for_flash_attention():
    assert derive("--use-flash-attn").attention_backend == "flash"
    assert derive("--use-flash-attn --attention-backend unfused").attention_backend == "unfused"
    assert derive().attention_backend == "auto"


def test_weight_decay_of_qk_norms_has_two_names():
    assert derive("--no-weight-decay-cond-type apply_wd_to_qk_layernorm").apply_wd_to_qk_layernorm is True
    assert derive("--apply-wd-to-qk-layernorm").apply_wd_to_qk_layernorm is True
    assert derive().apply_wd_to_qk_layernorm is False


def test_tokens_are_dispatched_all_to_all():
    assert derive().moe_token_dispatcher_type == "alltoall"
    assert derive("--moe-token-dispatcher-type allgather").moe_token_dispatcher_type == "alltoall"
    assert derive("--moe-token-dispatcher-type flex").moe_token_dispatcher_type == "alltoall", "a dense model"


@pytest.mark.parametrize("flags", ["--moe-enable-deepep", "--moe-token-dispatcher-type flex"])
def test_deepep_is_used_where_it_is_installed_and_has_ranks(monkeypatch, flags):
    experts = f"--num-experts 8 {flags}"
    monkeypatch.setattr(derived, "has_deepep", lambda: True)

    def of(more="", accelerator="cuda"):
        found = derive(f"{experts} {more}", accelerator=accelerator)
        return found.moe_enable_deepep, found.moe_token_dispatcher_type

    assert of("--expert-model-parallel-size 2") == (True, "flex")
    assert of() == (False, "alltoall"), "one rank"
    assert of("--expert-model-parallel-size 2", accelerator="cpu") == (False, "alltoall")
    monkeypatch.setattr(derived, "has_deepep", lambda: False)
    assert of("--expert-model-parallel-size 2") == (False, "alltoall")


def test_lengths_default_to_4096_positions():
    found = derive()
    assert (found.seq_length, found.max_position_embeddings) == (4096, 4096)
    found = derive("--seq-length 100")
    assert (found.seq_length, found.max_position_embeddings) == (100, 100)
    assert derive("--seq-length 100 --max-position-embeddings 300").max_position_embeddings == 300


def test_the_rotary_embedding_of_latent_attention_is_yarn():
    assert derive().rope_type == "rope"
    assert derive("--multi-latent-attention").rope_type == "yarn"
    assert derive("--multi-latent-attention --rope-type rope").rope_type == "rope"


def test_the_tokenizer_is_the_hf_checkpoints():
    found = derive(hf_checkpoint="/hf")
    assert (found.tokenizer_type, found.tokenizer_model) == ("HuggingFaceTokenizer", "/hf")
    assert derive("--tokenizer-model /t", hf_checkpoint="/hf").tokenizer_model == "/t"


def test_weight_decay_stays_unless_its_ends_are_given():
    found = derive("--weight-decay 0.1")
    assert (found.start_weight_decay, found.end_weight_decay) == (0.1, 0.1)
    found = derive("--weight-decay 0.1 --start-weight-decay 0 --end-weight-decay 0.2")
    assert (found.start_weight_decay, found.end_weight_decay) == (0.0, 0.2)


def test_the_world_divides_into_copies_of_the_model():
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --context-parallel-size 2"
    found = derive(flags, actor_num_nodes=8, actor_num_gpus_per_node=8)
    assert (found.world_size, found.data_parallel_size) == (64, 4)  # 64 / (2 * 4 * 2)
    assert found.expert_tensor_parallel_size == 2  # as the tensor-parallel size
    assert derive(flags + " --expert-tensor-parallel-size 1").expert_tensor_parallel_size == 1


def test_virtual_stages_follow_from_layers_or_are_given():
    pipeline = "--num-layers 32 --pipeline-model-parallel-size 4"
    assert derive(pipeline).virtual_pipeline_model_parallel_size is None
    # 32 layers on 4 ranks are 8 a rank: 4 stages of 2
    two = derive(f"{pipeline} --num-layers-per-virtual-pipeline-stage 2")
    assert two.virtual_pipeline_model_parallel_size == 4
    given = derive(f"{pipeline} --num-virtual-stages-per-pipeline-rank 2")
    assert given.virtual_pipeline_model_parallel_size == 2


def test_a_list_of_one_is_its_value():
    found = derive("--moe-aux-loss-coeff 0.1 --cp-comm-type a2a --moe-router-load-balancing-type aux_loss sinkhorn")
    assert (found.moe_aux_loss_coeff, found.cp_comm_type) == (0.1, "a2a")
    assert found.moe_router_load_balancing_type == ["aux_loss", "sinkhorn"]


def test_the_vocabulary_is_padded_for_every_tensor_parallel_rank(tmp_path):
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4"
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100}))
    assert derive(model, hf_checkpoint=str(tmp_path)).padded_vocab_size == 128  # up to a multiple of 128
    assert derive(f"{model} --vocab-size 300 --tensor-model-parallel-size 2").padded_vocab_size == 512  # of 256
    assert derive(f"{model} --vocab-size 300 --make-vocab-size-divisible-by 1").padded_vocab_size == 300
    assert "padded_vocab_size" not in vars(derive(f"{model} --vocab-size 300 --padded-vocab-size 320"))


def test_sizes_of_the_model_have_megatrons_defaults():
    found = derive("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 8 --num-query-groups 2")
    assert (found.kv_channels, found.ffn_hidden_size) == (8, 128)
    assert found.num_query_groups == 4  # without --group-query-attention every head has its own
    grouped = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2"
    assert derive(grouped).num_query_groups == 2


def test_options_are_registered_without_torch_and_megatron_core():
    derived.derive_megatron  # noqa: B018  (imported above: the table is cached from here on)
    add_megatron_arguments(argparse.ArgumentParser())
    code = (
        "import argparse, sys\n"
        "from slime.config.megatron.arguments import add_megatron_arguments\n"
        "add_megatron_arguments(argparse.ArgumentParser())\n"
        "print(sorted({'torch', 'megatron.core'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
