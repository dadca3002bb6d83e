"""Whether an engine's tensor-parallel ranks can divide its model: SGLang asserts it without a word, minutes later.

It reads config.json as plain JSON, and judges only sizes that it knows the names of; SGLang judges the rest when the
engine starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.config.sglang.topology import EngineGroupPlan, ModelPlan

NUM_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def shape_problems(models: Sequence[ModelPlan]) -> list[str]:
    """A sentence for each kind of engine whose ranks cannot divide its model; a model that is not here has none."""
    found: list[str] = []
    for model in models:
        config = read_text_config(Path(model.model_path or "") / "config.json")
        for group in model.groups if config else ():
            if group.worker_type != "placeholder":
                found += _problems_of(model, group, config)
    return list(dict.fromkeys(found))


def read_text_config(path: Path) -> dict[str, Any]:
    """The language model's part of a config.json; empty where there is none that can be read."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # said elsewhere
    text = config.get("text_config") if isinstance(config, dict) else None
    return text if isinstance(text, dict) else config if isinstance(config, dict) else {}


def _problems_of(model: ModelPlan, group: EngineGroupPlan, config: Mapping[str, Any]) -> Iterator[str]:
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
