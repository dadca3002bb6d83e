"""All model families that can be trained, by model_type; and which of them a name means."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.models.deepseek import DEEPSEEK
from slime.models.family import LLAMA, Family
from slime.models.glm import GLM
from slime.models.layouts import GateUpTogether
from slime.models.minimax import MINIMAX
from slime.models.qwen import QWEN
from slime.plugins import Table
from slime.utils.errors import UsageError
from slime.utils.misc import load_function
from slime.utils.model_shape import MODEL_DEFAULTS, moe_pattern

if TYPE_CHECKING:
    from slime.config.args import Args

FAMILIES: Table[Family] = Table(
    "slime.families",
    Family,
    {family.model_type: family for family in (LLAMA, *QWEN, MINIMAX, *GLM, *DEEPSEEK)},
    check=lambda name, row: (
        None if row.model_type == name else f"has the model_type {row.model_type!r}, which must be its name"
    ),
)
"""A new family is one row here, or in a package (docs/plugins.md); see docs/adding_a_family.md."""


def family_of_config(hf_config: Any) -> Family | None:
    """Return the family of a config.json; None for a model_type without one."""
    model_type = hf_config.get("model_type")
    return FAMILIES.get(model_type) if isinstance(model_type, str) else None


_NAMES = {
    "qwen2.5vl": "qwen25vl",
    "qwen2.5": "qwen2",
    "qwen3.5": "qwen35",
    "deepseekv3.2exp": "deepseekv32",
    "deepseekv3.2": "deepseekv32",
    "glm5.2": "glmmoedsa",
    "glm5": "glmmoedsa",
}
"""What models are called -> how their model_type begins, without underscores."""


def family_of(model_name: str) -> Family:
    """Return the family of a model_type ("qwen3") or of a longer name of it ("qwen3config", "Qwen3-0.6B").

    With a colon it is the path of a `Family` of the user's own: "pkg.module:NAME" or "path/to/file.py:NAME".

    Raises:
        UsageError: when no table fits, naming those that exist.
    """
    if ":" in model_name:
        return _own_family(model_name)
    plain = re.sub(r"[^a-z0-9.]", "", model_name.lower())
    for written, meant in _NAMES.items():
        plain = plain.replace(written, meant)
    # 30B-A3B: 3 B of 30 B are active
    plain = re.sub(r"(qwen35|qwen[23])(?=.*a\d+b)(?!.*(moe|next|vl))", r"\1moe", plain)
    longest = max((name for name in FAMILIES if name.replace("_", "") in plain), key=len, default=None)
    rest = plain.replace(longest.replace("_", ""), "", 1) if longest else ""
    is_variant = re.search(r"moe|next|vl|lite|audio|qwen|llama|^4(?!b)|^v|^\.?2$|^\.\d|^\.?5(?!\d*b)", rest)
    if longest is None or is_variant or (longest.endswith("_vl") and re.search(r"a\d+b", rest)):
        raise UsageError(f"no weight rules for {model_name!r}; there are rules for {', '.join(FAMILIES)}.")
    return FAMILIES[longest]


def family_of_checkpoint(model_name: str | None, checkpoint: str | Path) -> Family:
    """Return the family of a name; without one that of the model_type of a checkpoint's config."""
    return family_of(model_name or json.loads((Path(checkpoint) / "config.json").read_text())["model_type"])


def family_of_args(args: Args) -> Family:
    """Return the family of `--model-name`, or of the model_type of --hf-checkpoint's config."""
    return family_of_checkpoint(args.model_name, args.hf_checkpoint)


def _own_family(path: str) -> Family:
    try:
        found = load_function(path)
    except ImportError as error:
        raise UsageError(str(error)) from error
    if not isinstance(found, Family):
        raise UsageError(f"{path} is a {type(found).__name__}, not a slime.models.family.Family.")
    return found


# ---- linear layers that can have LoRA adapters

OUTPUT_LAYER = "output_layer"
"""The linear layer behind the decoder; `all-linear` does not stand for it, as PEFT's does not."""
LINEARS = (
    *(f"self_attention.linear_{name}" for name in ("qkv", "q_proj", "q_down_proj", "q_up_proj")),
    *(f"self_attention.linear_{name}" for name in ("kv_down_proj", "kv_up_proj", "proj")),
    *(f"{mlp}.linear_{fc}" for mlp in ("mlp", "mlp.shared_experts") for fc in ("fc1", "fc2")),
    *(f"mlp.experts.local_experts.{{e}}.linear_{fc}" for fc in ("fc1", "fc2")),
    OUTPUT_LAYER,
)
"""Megatron's linear layers that can have adapters, by their names in a decoder layer; {e} stands for the expert."""
_RULE = re.compile(r"(?:decoder\.layers\.\{i\}\.)?(.+)\.weight")


def projections_of(args: Args) -> dict[str, tuple[str, ...]]:
    """Megatron's linear layers of the model that can have adapters -> the projections of HF and PEFT that each holds.

    Empty where the family is not known.
    """
    try:
        is_known = vars(args).get("num_layers") and (args.hf_checkpoint or args.model_name)
        rules = family_of_args(args).rules if is_known else ()
    except (UsageError, OSError, ValueError):
        return {}  # said elsewhere
    found = {match[1]: rule for rule in rules if (match := _RULE.fullmatch(rule.megatron))}
    return {
        linear: tuple(name.split(".")[-2] for name in found[linear].hf)
        for linear in LINEARS
        if linear in found and _is_there(args, linear) and not isinstance(found[linear].layout, GateUpTogether)
    }


def _is_there(args: Args, linear: str) -> bool:
    """Whether some layer of the model has this linear layer; a family's rules name those of all its models."""
    if linear == OUTPUT_LAYER:
        return True
    part = linear.removeprefix("self_attention.linear_")
    if part != linear:
        compressed = ("q_down_proj", "q_up_proj") if vars(args).get("q_lora_rank") else ("q_proj",)
        latent = (*compressed, "kv_down_proj", "kv_up_proj", "proj")
        return part in (latent if vars(args).get("multi_latent_attention") else ("qkv", "proj"))
    has_experts = moe_pattern(MODEL_DEFAULTS | vars(args))
    if "shared_experts" in linear:
        return any(has_experts) and bool(args.moe_shared_expert_intermediate_size)
    return any(has_experts) if "{e}" in linear else not all(has_experts)
