"""Whether engines can serve a model: what SGLang would say minutes later, or would serve wrongly without a word.

Config and names of tensors are read as plain JSON; only sizes whose names are known are judged, SGLang judges the rest
when an engine starts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.args import Args
from slime.config.problems import Problems
from slime.models.families import family_of_config
from slime.utils.errors import UsageError
from slime.weights.formats import PROBES, Int4Format, WeightFormat, format_of_checkpoint
from slime.weights.names import is_fused, read_config, text_config

if TYPE_CHECKING:
    from slime.config.sglang.topology import EngineGroupPlan, ModelPlan

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
UNSERVED = {
    "olmo3": "its own reader of that config.json drops the rotation's parameters, so that an engine cannot start"
}
"""model_type -> why the pinned SGLang (0.5.17) does not serve what it lists as supported."""


def shape_problems(models: Sequence[ModelPlan]) -> list[str]:
    """A sentence for each kind of engine whose ranks cannot divide its model; a model that is not here has none."""
    found: list[str] = []
    for model in models:
        config = text_config(read_config(model.model_path or ""))
        for group in model.groups if config else ():
            if group.worker_type != "placeholder":
                found += _problems_of(model, group, config)
    return list(dict.fromkeys(found))


def _problems_of(model: ModelPlan, group: EngineGroupPlan, config: Mapping[str, Any]) -> Iterator[str]:
    kind = str(config.get("model_type"))
    if why := UNSERVED.get(kind):
        yield f"--hf-checkpoint {model.model_path}: SGLang serves no {kind}: {why}; take another model."
        return
    tp = group.num_gpus_per_engine // max(1, int(group.settings.get("pp_size") or 1))
    if problem := _expert_problem(model.model_path, config, tp, group.settings):
        yield problem
        return
    if bad := undivided(config, tp, group.settings):
        possible = [size for size in range(1, tp) if not undivided(config, size, group.settings)]
        numbers = " and ".join(f"{name} {size}" for name, size in bad.items())
        sizes = ", ".join(map(str, possible)) or "another model"
        yield (
            f"--rollout-num-gpus-per-engine {group.num_gpus_per_engine}: the {tp} tensor-parallel ranks of an engine "
            f"cannot divide {numbers} of {model.model_path}; tensor-parallel sizes below it that can: {sizes}."
        )


def _expert_problem(path: str | None, config: Mapping[str, Any], tp: int, settings: Mapping[str, Any]) -> str | None:
    """Why `tp` ranks cannot share experts as ep_size says; with a backend of its own for them, SGLang sets it."""
    ep = int(settings.get("ep_size") or 1)
    if ep <= 1 or has_expert_backend(settings):
        return None
    experts = next((int(config[name]) for name in NUM_EXPERTS if config.get(name)), 0)
    if not experts:
        if any("expert" in name for name in config):
            return None  # by another name
        return f"--sglang-ep-size {ep}: {path} has no experts; leave it out."
    held = experts + int(settings.get("ep_num_redundant_experts") or 0)
    if tp % ep or held % ep:
        sizes = ", ".join(str(size) for size in range(1, tp + 1) if tp % size == held % size == 0)
        return (
            f"--sglang-ep-size {ep} must divide the {tp} tensor-parallel ranks of an engine "
            f"(--rollout-num-gpus-per-engine) and the {held} experts of {path}; sizes that do: {sizes}."
        )
    return None


def has_expert_backend(settings: Mapping[str, Any]) -> bool:
    """Return whether tokens go to experts by a backend of its own (DeepEP, ...), for which SGLang sets ep_size."""
    return settings.get("moe_a2a_backend") not in (None, "none")


def expert_ranks(settings: Mapping[str, Any], tp: int) -> int:
    """Ranks of which each has whole experts of its own, of `tp` tensor-parallel ones."""
    return tp if has_expert_backend(settings) else max(1, int(settings.get("ep_size") or 1))


def undivided(config: Mapping[str, Any], tp: int, settings: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a model that `tp` ranks cannot divide, by their name in config.json.

    Args:
        config: of the language model.
        tp: tensor-parallel ranks of an engine.
        settings: ServerArgs values: with enable_dp_attention fewer ranks share attention; ep_size ranks share experts.
    """
    attention_tp = tp // max(1, int(settings.get("dp_size") or 1)) if settings.get("enable_dp_attention") else tp
    ep = expert_ranks(settings, tp)
    # the dense layers' width is in every config.json, also where all layers have experts
    widths = {"moe_intermediate_size": tp // ep} if any(map(config.get, NUM_EXPERTS)) else {"intermediate_size": tp}
    shared = {"num_attention_heads": attention_tp} | widths
    bad = {
        name: int(config[name])
        for name, ranks in shared.items()
        if isinstance(config.get(name), int) and config[name] % max(1, ranks)
    }
    heads = config.get("num_key_value_heads")
    if isinstance(heads, int) and heads > 0 and "kv_lora_rank" not in config:
        # fewer heads than ranks: each is kept by as many ranks
        larger, smaller = max(heads, attention_tp), min(heads, attention_tp)
        if larger % max(1, smaller):
            bad["num_key_value_heads"] = heads
    return bad


def served_model_problems(hf_config: Mapping[str, Any], checkpoint: str, *, is_synced: bool) -> list[str]:
    """Sentences about a model that engines would compute with weights that nothing loads.

    Args:
        hf_config: the content of config.json.
        checkpoint: its directory.
        is_synced: whether the engines get a trainer's weights before they generate.
    """
    family, model_type, problems = family_of_config(hf_config), hf_config.get("model_type"), []
    if family and family.sglang_has_own_head and hf_config.get("tie_word_embeddings"):
        problems.append(
            f"--hf-checkpoint {checkpoint}: SGLang ignores tie_word_embeddings of {model_type} and would sample with "
            "a random output layer; save the embedding as lm_head.weight, too, and set tie_word_embeddings to false."
        )
    problems += [
        f"--hf-checkpoint {checkpoint}: config.json has no {name}, which SGLang needs for {model_type} and "
        f"transformers does not write; add it as the published model has it ({value!r})."
        for name, value in (family.sglang_needs if family else {}).items()
        if hf_config.get(name) is None
    ]
    if not is_synced and any(map(is_fused, names_of_tensors(Path(checkpoint)))):
        problems.append(
            f"--hf-checkpoint {checkpoint} stores the experts of a layer as one tensor, which SGLang does not load "
            "(a trainer's weight sync would bring them); save it with save_original_format=True of transformers."
        )
    return problems


def names_of_tensors(checkpoint: Path) -> Collection[str]:
    """Names of tensors, from the index or the header; none where there is neither, or no readable one."""
    index, single = checkpoint / "model.safetensors.index.json", checkpoint / "model.safetensors"
    try:
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        with single.open("rb") as stream:
            size = min(int.from_bytes(stream.read(8), "little"), single.stat().st_size)
            return dict(json.loads(stream.read(size)))
    except (OSError, ValueError, KeyError, TypeError):
        return []  # whoever loads it says what is wrong with it


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
        config = text_config(read_config(model.model_path or ""))
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
        settings: ServerArgs values, as for `undivided`.
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
