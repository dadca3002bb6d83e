"""Flags for plans, without a parser: what `make_plan` reads, with the defaults of a command line."""

from __future__ import annotations

import argparse
from typing import Any

from slime.config.parse import FLAG_CLASSES
from slime.config.parser import defaults_of
from slime.config.prompt_sources import prompt_sources
from slime.config.sglang.engine_flags import SglangFlags
from slime.config.sglang.topology import plan_engines

CPU = {"accelerator": "cpu", "bf16": False, "fp16": False, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}
CUDA = {"accelerator": "cuda", "bf16": True, "fp16": False}
DERIVED = {
    "rollout_external": False,
    "sglang_pp_size": 1,
    "sglang_overrides": {},
    "eval_datasets": [],
    "use_critic": False,
    "output_dir": "out",
}
DENSE = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "kv_channels": 32,
    "padded_vocab_size": 256,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "bias_swiglu_fusion": True,
    "add_bias_linear": False,
}
BATCH = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "global_batch_size": 32, "num_rollout": 10}


def plan_args(**changes: Any) -> argparse.Namespace:
    """A dense model of four layers on one CPU slot, 8 x 4 samples a rollout; `changes` are set last."""
    defaults = {name: value for group in (*FLAG_CLASSES, SglangFlags) for name, value in defaults_of(group).items()}
    args = argparse.Namespace(**(defaults | DERIVED | CPU | DENSE | BATCH | changes))
    args.engine_models = plan_engines(args)
    args.prompt_sources = prompt_sources(args)
    return args
