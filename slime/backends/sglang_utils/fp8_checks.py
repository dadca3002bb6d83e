"""Whether engines can serve a model in fp8 and take a trainer's weights: what SGLang raises while it loads, before.

A block of weights shares a scale, so no tensor-parallel rank may get a part of a block, and neither may one part of a
merged layer (q, k, v; gate, up). It reads config.json as plain JSON and starts nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.backends.sglang_utils.shape_checks import NUM_EXPERTS, read_text_config
from slime.utils.arguments.problems import Problems
from slime.utils.errors import UsageError
from slime.utils.fp8_format import Fp8Format, fp8_format_of

if TYPE_CHECKING:
    from slime.backends.sglang_utils.topology import EngineGroupPlan, ModelPlan


def fp8_problems(args: argparse.Namespace, models: Sequence[ModelPlan]) -> Problems:
    """Everything about quantised weights that engines cannot do.

    Args:
        args: reads `debug_rollout_only`.
        models: of the run; a quantisation that is not fp8 is said elsewhere.
    """
    problems = Problems()
    for model in models:
        config = read_text_config(Path(model.model_path or "") / "config.json")
        try:
            fmt = fp8_format_of(model.model_path)
        except (UsageError, OSError, ValueError):
            continue
        takes_weights = model.update_weights and not args.debug_rollout_only
        for group in model.groups if config else ():
            if group.worker_type == "placeholder":
                continue
            if takes_weights and (method := group.settings.get("quantization")) and (fmt is None or method != "fp8"):
                problems.wrong.append(
                    f"--sglang-quantization {method}: SGLang quantises as it loads {model.model_path} and cannot take "
                    "the trainer's weights afterwards; leave it out, or convert the checkpoint with "
                    "tools/convert_hf_to_fp8.py and give that as --hf-checkpoint."
                )
            if fmt is not None and fmt.block_size is not None:
                problems.wrong += _block_problems(model, group, config, fmt)
    problems.wrong = list(dict.fromkeys(problems.wrong))
    return problems


def _block_problems(
    model: ModelPlan, group: EngineGroupPlan, config: Mapping[str, Any], fmt: Fp8Format
) -> Iterator[str]:
    tp = group.num_gpus_per_engine // max(1, int(group.settings.get("pp_size") or 1))
    bad = cut_blocks(config, fmt, tp, group.settings)
    if not bad:
        return
    possible = [size for size in range(1, tp) if not cut_blocks(config, fmt, size, group.settings)]
    what = ", ".join(f"{name} is {size}" for name, size in bad.items())
    sizes = f"use tensor-parallel size {' or '.join(map(str, possible))}" if possible else "use smaller blocks"
    yield (
        f"--rollout-num-gpus-per-engine {group.num_gpus_per_engine}: {model.model_path} is in fp8 with "
        f"weight_block_size {list(fmt.block_size or ())}, of which each of {tp} tensor-parallel rank(s) must hold a "
        f"multiple, but its part of {what}; {sizes}, or convert with --strategy tensor (tools/convert_hf_to_fp8.py)."
    )


def cut_blocks(config: Mapping[str, Any], fmt: Fp8Format, tp: int, settings: Mapping[str, Any]) -> dict[str, int]:
    """Rows or columns of a rank that are no multiple of a block, by what they are.

    What `tp` ranks cannot divide is left out.

    SGLang's rule (Fp8LinearMethod.validate_block_quant_shapes): always for the parts of merged layers, and for others
    where they are divided.

    Args:
        config: of the language model.
        fmt: with a block size.
        tp: tensor-parallel ranks.
        settings: ServerArgs values, as for `shape_checks.undivided`.
    """
    assert fmt.block_size is not None
    rows, columns = fmt.block_size
    attention_tp = tp // max(1, int(settings.get("dp_size") or 1)) if settings.get("enable_dp_attention") else tp
    attention_tp, ep = max(1, attention_tp), max(1, int(settings.get("ep_size") or 1))
    parts: list[tuple[str, int, int, int]] = []  # what, size, ranks, block
    if _quantizes(fmt, config, "self_attn.o_proj"):
        parts += _attention_parts(config, attention_tp, rows, columns)
    if _quantizes(fmt, config, "mlp.down_proj"):
        for name, size, ranks in _mlp_sizes(config, tp, max(1, tp // ep)):
            parts += [(name, size, ranks, rows)] + ([(name, size, ranks, columns)] if tp > 1 else [])
    return {name: size // ranks for name, size, ranks, block in parts if size % ranks == 0 and size // ranks % block}


def _quantizes(fmt: Fp8Format, config: Mapping[str, Any], module: str) -> bool:
    layers = range(int(config.get("num_hidden_layers") or 1))
    return any(fmt.quantizes(f"model.layers.{layer}.{module}.weight") for layer in layers)


def _attention_parts(
    config: Mapping[str, Any], tp: int, rows: int, columns: int
) -> Iterator[tuple[str, int, int, int]]:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return
    if "kv_lora_rank" in config:
        nope, value = int(config.get("qk_nope_head_dim") or 0), int(config.get("v_head_dim") or 0)
        if tp > 1:
            yield "the query heads", heads * (nope + int(config.get("qk_rope_head_dim") or 0)), tp, rows
            yield "the key and value heads", heads * (nope + value), tp, rows
            yield "the attention's output", heads * value, tp, columns
        return
    head_dim, kv_heads = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
    yield "the query heads", heads * head_dim, tp, rows
    yield "the key heads", kv_heads * head_dim, min(tp, kv_heads), rows
    if tp > 1:
        yield "the attention's output", heads * head_dim, tp, columns


def _mlp_sizes(config: Mapping[str, Any], tp: int, expert_tp: int) -> Iterator[tuple[str, int, int]]:
    """(name, size, ranks) of every kind of MLP that the model has."""
    has_experts = any(map(config.get, NUM_EXPERTS))
    has_dense = not has_experts or config.get("first_k_dense_replace") or config.get("mlp_only_layers")
    if has_dense and isinstance(size := config.get("intermediate_size"), int):
        yield "intermediate_size", size, tp
    if has_experts and isinstance(size := config.get("moe_intermediate_size"), int):
        yield "moe_intermediate_size", size, expert_tp
        if shared := config.get("n_shared_experts"):
            yield "the shared experts", size * shared, tp
