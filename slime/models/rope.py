"""What a Hugging Face config.json says about rotary embeddings, in Megatron's terms.

It works on the plain dict of config.json and imports nothing heavy. Everything that transformers or SGLang would read
is honoured or named as a feature that our models do not have: the policy is the one that the engines serve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime.models.family import Family

_NEEDED = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "linear": ("factor",),
}
_POSITIVE = ("rope_theta", "partial_rotary_factor", *_NEEDED["llama3"], "beta_fast", "beta_slow", "attention_factor")
_NOT_NEGATIVE = ("mscale", "mscale_all_dim")
_KNOWN = {"type", "rope_type", "truncate", "mrope_section", "mrope_interleaved", *_POSITIVE, *_NOT_NEGATIVE}
"""On text the sections of multimodal positions make no difference."""


def rope_of(hf: Mapping[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """Return the rotary settings, as transformers >= 5 writes them (`rope_parameters`) or as older versions did.

    Args:
        theta: the base where the config does not say.
    """
    rope = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    some, head = hf.get("rotary_dim"), hf.get("head_dim")
    rotated = some / head if isinstance(some, int) and isinstance(head, int) and head > 0 else 1.0
    for name, default in (("rope_theta", theta), ("partial_rotary_factor", rotated)):
        if rope.get(name) is None:
            rope[name] = default if hf.get(name) is None else hf[name]
    if hf.get("original_max_position_embeddings") is not None:  # transformers prefers it to that of the settings
        rope["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_type"] = "default" if kind == "mrope" else kind  # Qwen2.5-VL's word for sections, which are a key too
    return rope


def rope_numbers(hf: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each rotary setting that should be a number and is none."""
    rope = rope_of(hf)
    return [
        f"the HF config says {name} = {value!r}, which is no number {bound}."
        for names, bound in ((_POSITIVE, "above 0"), (_NOT_NEGATIVE, "of at least 0"))
        for name in names
        if (value := rope.get(name)) is not None
        and not (isinstance(value, int | float) and (value > 0 or (value == 0 and names is _NOT_NEGATIVE)))
    ]


def rope_args(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the flags of the rotary embedding: {attribute: value}."""
    rope, is_latent = rope_of(hf, family.rope_theta), family.is_latent
    base = float(rope["rope_theta"])
    values: dict[str, Any] = {
        "rotary_base": int(base) if base.is_integer() else base,
        "rotary_percent": float(rope["partial_rotary_factor"]),
        "rotary_interleaved": False,
        "use_rope_scaling": rope["rope_type"] == "llama3",
        "rotary_seq_len_interpolation_factor": int(rope["factor"]) if rope["rope_type"] == "linear" else None,
    }
    if values["use_rope_scaling"]:
        values |= {
            "rope_scaling_factor": float(rope["factor"]),
            "rope_scaling_low_freq_factor": float(rope["low_freq_factor"]),
            "rope_scaling_high_freq_factor": float(rope["high_freq_factor"]),
            "rope_scaling_original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        }
    if is_latent:
        values["rope_type"] = "yarn" if rope["rope_type"] == "yarn" else "rope"
    if is_latent and values["rope_type"] == "yarn":
        values |= {
            "rotary_scaling_factor": float(rope["factor"]),
            "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
            "beta_fast": float(rope.get("beta_fast") or 32),
            "beta_slow": float(rope.get("beta_slow") or 1),
            "mscale": float(rope.get("mscale") or 1),
            "mscale_all_dim": float(rope.get("mscale_all_dim") or 0),
        }
    return values


def missing_rope_features(hf: Mapping[str, Any], family: Family) -> list[str]:
    """Return what the rotary embedding has and our models do not, each as the object of a sentence."""
    rope = rope_of(hf, family.rope_theta)
    kind, partial = rope["rope_type"], rope["partial_rotary_factor"]
    missing = [name for name in _NEEDED.get(kind, ()) if rope.get(name) is None]
    known = ("default", "yarn") if family.is_latent else ("default", "llama3", "linear")
    factor = rope.get("factor") if kind == "linear" else None
    unknown = sorted(name for name, value in rope.items() if name not in _KNOWN and value is not None)
    found = {
        f"rotary embedding of type {kind!r}": kind not in known,
        f"rotary embedding of type {kind!r} without {', '.join(missing)}": bool(missing),
        f"rotary embedding of type 'linear' with the factor {factor}": factor is not None and int(factor) != factor,
        f"partial_rotary_factor {partial}": partial != 1.0 and "partial_rotary_factor" not in family.takes,
        f"rope_parameters (rope_scaling) with {', '.join(unknown)}": bool(unknown),
    }
    names = [name for name, is_so in found.items() if is_so]
    return names + (_missing_yarn_features(rope) if kind == "yarn" and not names else [])


def _missing_yarn_features(rope: Mapping[str, Any]) -> list[str]:
    """What neither Megatron's latent attention nor the engines' reads: both compute it from the other settings."""
    given, mscale, all_dim = rope.get("attention_factor"), rope.get("mscale"), rope.get("mscale_all_dim")
    found = {
        f"attention_factor {given}": given is not None
        and not math.isclose(given, _attention_factor(rope), rel_tol=1e-6),
        f"truncate {rope.get('truncate')}": not rope.get("truncate", True),
        # where one of the two is absent or 0, transformers ignores the other, and engines take it
        f"mscale {mscale} and mscale_all_dim {all_dim}": not (mscale and all_dim)
        and (mscale not in (None, 1) or bool(all_dim)),
    }
    return [f"rotary embedding of type 'yarn' with {name}" for name, is_so in found.items() if is_so]


def _attention_factor(rope: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines by where the config does not say (arXiv:2309.00071)."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
