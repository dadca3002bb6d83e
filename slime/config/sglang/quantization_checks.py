"""Whether engines can serve a quantised model and take a trainer's weights: what SGLang raises while it loads, before.

A block of weights shares a scale, so no tensor-parallel rank may get a part of a block, and neither may one part of a
merged layer (q, k, v; gate, up). In int4 a block is a group of columns, and on CUDA 64 rows, which the kernels shuffle
among each other. It reads config.json as plain JSON and starts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.args import Args
from slime.config.problems import Problems
from slime.config.sglang.shape_checks import NUM_EXPERTS, expert_ranks, has_expert_backend, read_text_config
from slime.utils.errors import UsageError
from slime.utils.int4_format import Int4Format
from slime.utils.weight_format import PROBES, WeightFormat, format_of_checkpoint

if TYPE_CHECKING:
    from slime.config.sglang.topology import EngineGroupPlan, ModelPlan


KERNEL_ROWS = KERNEL_COLUMNS = 64
"""Rows and columns of a tile of SGLang's CUDA kernels for int4 (Marlin)."""


def quantization_problems(args: Args, models: Sequence[ModelPlan]) -> Problems:
    """Everything about quantised weights that engines cannot do.

    Args:
        args: reads `accelerator`, `debug_rollout_only`, `rollout_external`.
        models: of the run; a quantisation that is not supported is said elsewhere.
    """
    problems = Problems()
    for model in models:
        config = read_text_config(Path(model.model_path or "") / "config.json")
        try:
            fmt = format_of_checkpoint(model.model_path)
        except (UsageError, OSError, ValueError):
            continue
        takes_weights = model.update_weights and not args.debug_rollout_only
        if isinstance(fmt, Int4Format) and takes_weights and args.rollout_external:
            problems.wrong.append(
                f"--rollout-external-engine-addrs: {model.model_path} is in int4, which SGLang re-packs as it loads; "
                "only engines that this run starts can take new weights in it. Leave the flag out, or use an fp8 or "
                "an unquantised checkpoint."
            )
        for group in model.groups if config else ():
            if group.worker_type == "placeholder":
                continue
            if takes_weights and (method := group.settings.get("quantization")) and method != _method(fmt):
                problems.wrong.append(
                    f"--sglang-quantization {method}: SGLang quantises as it loads {model.model_path} and cannot take "
                    "the trainer's weights afterwards; leave it out, or convert the checkpoint with "
                    "tools/convert_hf_to_fp8.py and give that as --hf-checkpoint."
                )
            if isinstance(fmt, Int4Format) and takes_weights:
                problems.wrong += _backend_problems(model, group)
            if fmt is not None and (block := _block_of(fmt, args.accelerator)):
                problems.wrong += _block_problems(model, group, config, fmt, block)
    problems.wrong = list(dict.fromkeys(problems.wrong))
    return problems


def _method(fmt: WeightFormat | None) -> str | None:
    """What SGLang calls the format."""
    return None if fmt is None else "compressed-tensors" if isinstance(fmt, Int4Format) else "fp8"


def _backend_problems(model: ModelPlan, group: EngineGroupPlan) -> Iterator[str]:
    backend = group.settings.get("moe_runner_backend") or "auto"
    if backend not in ("auto", "marlin", "triton"):
        yield (
            f"--sglang-moe-runner-backend {backend}: {model.model_path} is in int4, and how this backend stores it is "
            "not known, so that it could not take the trainer's weights; leave it out, or use marlin or triton."
        )


def _block_of(fmt: WeightFormat, accelerator: str) -> tuple[int, int] | None:
    """(rows, columns) of which a rank must hold a multiple; None: any number."""
    if not isinstance(fmt, Int4Format):
        return fmt.block_size
    if accelerator == "cpu":
        return 1, fmt.group_size
    return KERNEL_ROWS, math.lcm(fmt.group_size, KERNEL_COLUMNS)


def _block_problems(
    model: ModelPlan, group: EngineGroupPlan, config: Mapping[str, Any], fmt: WeightFormat, block: tuple[int, int]
) -> Iterator[str]:
    tp = group.num_gpus_per_engine // max(1, int(group.settings.get("pp_size") or 1))
    bad = cut_blocks(config, fmt, block, tp, group.settings)
    if not bad:
        return
    possible = [size for size in range(1, tp) if not cut_blocks(config, fmt, block, size, group.settings)]
    what = ", ".join(f"{name} is {size}" for name, size in bad.items())
    sizes = f"use tensor-parallel size {' or '.join(map(str, possible))}" if possible else "use smaller blocks"
    if isinstance(fmt, Int4Format):
        described = f"group_size {fmt.group_size}, and so in blocks of {list(block)}"
        other = "or leave these layers out with --ignore-rules (tools/convert_hf_to_int4_direct.py)"
    else:
        described = f"weight_block_size {list(block)}"
        other = "or convert with --strategy tensor (tools/convert_hf_to_fp8.py)"
    yield (
        f"--rollout-num-gpus-per-engine {group.num_gpus_per_engine}: {model.model_path} is in {fmt.kind} with "
        f"{described}, of which each of {tp} tensor-parallel rank(s) must hold a multiple, but its part of {what}; "
        f"{sizes}, {other}."
    )


def cut_blocks(
    config: Mapping[str, Any], fmt: WeightFormat, block: tuple[int, int], tp: int, settings: Mapping[str, Any]
) -> dict[str, int]:
    """Rows or columns of a rank that are no multiple of a block, by what they are.

    What `tp` ranks cannot divide is left out.

    SGLang's rule (Fp8LinearMethod.validate_block_quant_shapes): always for the parts of merged layers, and for others
    where they are divided. In int4 columns are always whole groups.

    Args:
        config: of the language model.
        fmt: says which layers are quantised.
        block: rows and columns of one.
        tp: tensor-parallel ranks.
        settings: ServerArgs values, as for `shape_checks.undivided`.
    """
    rows, columns = block
    attention_tp = tp // max(1, int(settings.get("dp_size") or 1)) if settings.get("enable_dp_attention") else tp
    attention_tp, ep = max(1, attention_tp), expert_ranks(settings, tp)
    dense_tp = int(settings.get("moe_dense_tp_size") or tp)
    shared_tp = 1 if has_expert_backend(settings) else tp
    is_int4 = isinstance(fmt, Int4Format)
    parts: list[tuple[str, int, int, int]] = []  # what, size, ranks, block
    if _quantizes(fmt, config, "self_attn.o_proj"):
        parts += _attention_parts(config, attention_tp, rows, columns)
    for name, module, size, ranks in _mlp_sizes(config, dense_tp, max(1, tp // ep), shared_tp):
        if _quantizes(fmt, config, module):
            parts += [(name, size, ranks, rows)] + ([(name, size, ranks, columns)] if ranks > 1 or is_int4 else [])
    hidden = config.get("hidden_size")
    if is_int4 and isinstance(hidden, int) and any(_quantizes(fmt, config, module) for module in PROBES.values()):
        parts.append(("hidden_size", hidden, 1, columns))
    return {name: size // ranks for name, size, ranks, block in parts if size % ranks == 0 and size // ranks % block}


def _quantizes(fmt: WeightFormat, config: Mapping[str, Any], module: str) -> bool:
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


def _mlp_sizes(
    config: Mapping[str, Any], dense_tp: int, expert_tp: int, shared_tp: int
) -> Iterator[tuple[str, str, int, int]]:
    """(name, its last matrix in a layer, size, ranks) of every kind of MLP that the model has."""
    has_experts = any(map(config.get, NUM_EXPERTS))
    has_dense = not has_experts or config.get("first_k_dense_replace") or config.get("mlp_only_layers")
    if has_dense and isinstance(size := config.get("intermediate_size"), int):
        yield "intermediate_size", PROBES["mlp"], size, dense_tp
    width = config.get("moe_intermediate_size") or (None if has_dense else config.get("intermediate_size"))
    if has_experts and isinstance(size := width, int):  # MiniMax calls the width of an expert intermediate_size
        yield "moe_intermediate_size", PROBES["experts"], size, expert_tp
        if shared := config.get("n_shared_experts"):
            yield "the shared experts", "mlp.shared_experts.down_proj", size * shared, shared_tp
