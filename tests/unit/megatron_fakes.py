"""Tiny models and gloo worlds for the Megatron tests.

A world is made of forked processes, each of which goes through `initialize.init` as a trainer does, so that the test
process itself stays free of the stand-ins for CUDA. A test function runs on every rank and fails the test by
raising.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from slime.config.megatron.arguments import add_megatron_arguments, derive_megatron, model_args_from_hf
from slime.config.parse import FLAG_CLASSES
from slime.config.parser import defaults_of
from slime.models.families import FAMILIES
from slime.utils.misc import listen_anywhere

SLIME_DEFAULTS: dict[str, Any] = {
    name: value for flags_class in FLAG_CLASSES for name, value in defaults_of(flags_class).items()
} | {
    "accelerator": "cpu",
    "actor_num_gpus_per_node": 1,
    "distributed_timeout_minutes": 2,
    "lr": 1e-3,
    "use_critic": False,
}
"""The command line's own defaults, what a test on CPU gives, and what follows from the estimator."""

BEYOND: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"model_type": "llama"},
    "smollm3": {"model_type": "llama", "layer_types": None, "use_sliding_window": False},
    "lfm2": {"model_type": "llama", "rms_norm_eps": 1e-5},
}
"""Architectures without a family -> what describes the layers around their attention; what differs a test gives."""


def make_args(hf_path: Path | None = None, flags: str = "", **overrides: Any) -> argparse.Namespace:
    """Flags of a CPU run of the HF model at `hf_path`, derived; `overrides` are set before deriving."""
    parser = add_megatron_arguments(argparse.ArgumentParser())
    args = parser.parse_args(flags.split())
    values = SLIME_DEFAULTS | overrides
    if hf_path is not None:
        config = json.loads((hf_path / "config.json").read_text())
        values = model_args_from_hf(config | BEYOND.get(config["model_type"], {})) | values
        values["hf_checkpoint"] = str(hf_path)
    vars(args).update(values)
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    smallest = args.pipeline_model_parallel_size * math.lcm(args.tensor_model_parallel_size, experts)
    args.actor_num_gpus_per_node = max(args.actor_num_gpus_per_node, smallest)
    vars(args).update(derive_megatron(args))
    return args


_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
_LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
    "head_dim": 16,
}
_SPARSE = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 8}
_SHARED_EXPERT = {"num_experts": 8, "shared_expert_intermediate_size": 40}
_VISION = {
    **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
}
_VISION_OF = {
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}
IMAGE_TOKENS = {"vision_start_token_id": 95, "vision_end_token_id": 96, "image_token_id": 97, "video_token_id": 98}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16, "pad_token_id": None},
    # the second layer does not rotate, the first sees 5 tokens back
    "smollm3": {
        "pad_token_id": None,
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "pad_token_id": None,
    },
    "glm4": {"head_dim": 16, "pad_token_id": None},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "norm_topk_prob": True, **_EXPERTS},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, **_EXPERTS, **_SHARED},
    "qwen2_moe": {"num_experts": 8, "norm_topk_prob": False, "shared_expert_intermediate_size": 40, **_EXPERTS},
    "qwen3_next": {**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT},
    "qwen2_5_vl": {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1]}},
    "qwen3_vl": {
        "head_dim": 16,
        "rope_parameters": {**_SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
    "qwen3_5": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe": {**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT},
    "qwen3_5_moe_text": {**_DELTA_NET, **_EXPERTS, **_SHARED_EXPERT},
    "minimax_m2": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        # transformers knows the first of these, SGLang the second
        "partial_rotary_factor": 0.5,
        "rotary_dim": 8,
    },
    "glm_moe_dsa": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, **_SPARSE, **_LATENT, **_EXPERTS, **_SHARED},
    "deepseek_v32": {
        "num_experts": 8,  # what transformers builds, whatever n_routed_experts says
        "n_group": 4,
        "topk_group": 1,
        "num_key_value_heads": 4,
        **_SPARSE,
        **_LATENT,
        **_EXPERTS,
        **_SHARED,
    },
    # transformers' latent norms have this epsilon, whatever the config says.
    "glm4_moe_lite": {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, **_LATENT, **_EXPERTS, **_SHARED},
    "deepseek_v3": {"n_group": 4, "topk_group": 1, "num_key_value_heads": 4, **_LATENT, **_EXPERTS, **_SHARED},
    "kimi_k2": {"n_group": 1, "topk_group": 1, "num_key_value_heads": 4, **_LATENT, **_EXPERTS, **_SHARED},
}
"""What a tiny model of a family has of its own."""
NAMED_AS = {name: row.hf_type for name, row in FAMILIES.items() if row.hf_type}
"""Families without a class of transformers -> the one that they are under another name."""


def make_hf_model(path: Path, family: str = "qwen3", *, tied: bool = False, vocab: int = 100, **config: Any) -> Any:
    """A random HF model of two layers, saved at `path`; norms and biases are random too: none can be forgotten.

    Most norms multiply by their weight, those of families with a gated delta net by 1 + weight.
    """
    import transformers as hf

    settings = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    settings |= OF_FAMILY.get(family, {}) | config
    auto_class = hf.AutoModelForCausalLM
    if family in FAMILIES and FAMILIES[family].sees_images:
        outer = {name: settings[name] for name in ("tie_word_embeddings", "dtype")}
        vision = {**_VISION, **_VISION_OF.get(family, {})}
        settings = {"text_config": settings, "vision_config": vision, **outer, **IMAGE_TOKENS}
        auto_class = hf.AutoModelForImageTextToText
    hf_config = hf.AutoConfig.for_model(NAMED_AS.get(family, family), **settings)
    torch.manual_seed(0)
    model = auto_class.from_config(hf_config).to(hf_config.dtype).eval()
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        is_zero_centered = family in FAMILIES and FAMILIES[family].sets("layernorm_zero_centered_gamma")
        for name, param in [*model.named_parameters(), *biases]:
            spread = torch.randn_like(param, dtype=torch.float32)
            is_factor = "norm" in name and not (is_zero_centered and "linear_attn" not in name)
            param.copy_(1 + 0.1 * spread if is_factor else 0.1 * spread)
    model.save_pretrained(path)
    if family in NAMED_AS:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(written | {"model_type": family}))
    return model


def prepare_to_fork() -> None:
    """Do once, in this process, what each child would do: import trainers, and look through all objects for garbage.

    Children leave the objects that are there alone: their first collection would cost half a second and a copy of
    every page.
    """
    import slime.backends.megatron_utils.actor  # noqa: F401

    gc.collect()
    gc.freeze()


def run_forked(run: Callable[[], int]) -> int:
    """Call `run` in a forked process and return its status: what `run` returns, -9 where it was killed."""

    def call() -> None:
        # Torch gives up the parent's thread pool at the first use of it; two threads at once may find none.
        torch.set_num_threads(torch.get_num_threads())
        os._exit(run())

    prepare_to_fork()
    child = mp.get_context("fork").Process(target=call)
    child.start()
    child.join(timeout=120)
    assert child.exitcode is not None, "it has not ended in two minutes"
    return int(child.exitcode)


def run_world(world_size: int, fn: Callable[..., None], args: argparse.Namespace, *more: Any) -> None:
    """Run fn(args, *more) on every rank of a world of `world_size` initialised processes; raise if one fails."""
    listener = listen_anywhere()
    prepare_to_fork()
    context = mp.get_context("fork")
    errors = context.SimpleQueue()
    children = [
        context.Process(target=_child, args=(rank, world_size, listener, errors, fn, args, more), daemon=True)
        for rank in range(world_size)
    ]
    for child in children:
        child.start()
    listener.close()  # rank 0 has it too
    for child in children:
        child.join(timeout=120)
    alive = [child for child in children if child.is_alive()]
    for child in alive:
        child.kill()
    if not errors.empty():
        raise AssertionError(errors.get())
    assert not alive, f"{fn.__name__} did not end on {len(alive)} of {world_size} ranks"
    assert all(child.exitcode == 0 for child in children), [child.exitcode for child in children]


def _child(
    rank: int, world_size: int, listener: socket.socket, errors: Any, fn: Callable[..., None], args: Any, more: Any
) -> None:
    from slime.backends.megatron_utils import initialize

    torch.set_num_threads(1)
    port = listener.getsockname()[1]
    if rank != 0:
        listener.close()
    where = {"master_addr": "127.0.0.1", "master_port": listener if rank == 0 else port}
    try:
        initialize.init(args, rank=rank, world_size=world_size, **where)
        fn(args, *more)
        torch.distributed.barrier()
        initialize.shutdown()
    except BaseException:  # noqa: BLE001  (a child's failure of any kind is the test's failure)
        errors.put(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def packed(lengths: list[int], max_seqlen: int | None = None) -> Any:
    """Megatron's description of a pack of sequences of these lengths."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max_seqlen or max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def gather_vocab(logits: torch.Tensor) -> torch.Tensor:
    """[1, T, V / tp] of every rank -> [1, T, V]."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
