"""Names of the versions of a LoRA adapter in an engine, and what must hold before an engine gets one.

SGLang 0.5.17 hardly looks at an adapter when it loads it. A part that is missing, or has another shape, ends the
server at the first request, and a scale that is not alpha / rank is ignored. So `check_adapter` looks first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

BASE = "slime-base"
"""As `lora_path` of a request: the model without adapters, on an engine of ours."""
POLICY = "lora_policy"
"""Key of a sample's metadata: the policy (--lora-policies) that answers it."""
SERVED = "slime-served"
"""In an engine's answer to the load of a version, beside the names of adapters: its weight version from now on."""
_LIVE = "slime-live@"
_VERSION = re.compile(r"slime-v(?P<version>\d+)(?:@(?P<policy>[\w-]+))?(?:\.\d+)?")
PEFT_PREFIX = "base_model.model."
"""Of the name of every tensor in a PEFT directory."""
PEFT_COPY = ".base_layer.weight"
"""Ends the name under which PEFT saves a base's own output layer beside an adapter of it."""
_IGNORED = ("use_dora", "use_rslora", "alpha_pattern", "rank_pattern")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Of init_lora_weights: PEFT takes B A, as it begins, off the base's weights when it loads such an adapter."""
FUSED_IN_ENGINES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""SGLang's name of a weight that it makes of several projections -> these, where a model has them."""
_FUSED_AS = {part: fused for fused, parts in FUSED_IN_ENGINES.items() for part in parts}
STACKED = "slime_stacked"
"""In the configuration that an adapter's tensors come with: what engines fuse comes as one (`stacks_of`)."""


def adapter_name(version: int, policy: str | None = None) -> str:
    """The name of a version, of one policy where there are several.

    >>> adapter_name(17), adapter_name(17, "math")
    ('slime-v17', 'slime-v17@math')
    """
    return f"slime-v{version}" + (f"@{policy}" if policy else "")


def live_name(policy: str) -> str:
    """As `lora_path` of a request: the newest version of a policy, on an engine of ours."""
    return f"{_LIVE}{policy}"


def version_of(name: Any) -> str | None:
    """The version that a name stands for; None where it is another adapter's.

    >>> version_of("slime-v17"), version_of("slime-v17@math.2"), version_of("judge")
    ('17', '17', None)
    """
    found = _VERSION.fullmatch(name) if isinstance(name, str) else None
    return found and found["version"]


def policy_of(name: str) -> str | None:
    """The policy that the name of a version, or `live_name`, is about; None where there is one, without a name.

    >>> policy_of("slime-v17@math.2"), policy_of("slime-live@math"), policy_of("slime-v17")
    ('math', 'math', None)
    """
    if name.startswith(_LIVE):
        return name.removeprefix(_LIVE)
    found = _VERSION.fullmatch(name)
    return found and found["policy"]


def check_adapter(
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any],
    *,
    base: Mapping[str, tuple[int, ...]],
    max_rank: int,
) -> None:
    """Refuse an adapter that an engine would load, and then die of or serve wrongly.

    Args:
        shapes: PEFT's name of each tensor -> its shape.
        config: of adapter_config.json: r, lora_alpha, target_modules, ...
        base: HF name of each weight of the model -> its shape, [out, in].
        max_rank: that the engine has room for.

    Raises:
        ValueError: says what is wrong, with the name of the tensor.
    """
    rank = config["r"]
    if rank > max_rank:
        raise ValueError(f"the adapter has rank {rank}, and engines take {max_rank} at most")
    if ignored := [name for name in _IGNORED if config.get(name)]:
        raise ValueError(f"the adapter has {', '.join(ignored)}, which engines ignore: their scale is lora_alpha / r")
    modules: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        module, _, half = name.removeprefix(PEFT_PREFIX).removesuffix(".weight").rpartition(".lora_")
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise ValueError(f"{name}: the model has no {module}.weight")
        expected = (rank, weight[1]) if half == "A" else (weight[0], rank)
        if tuple(shape) != expected:
            raise ValueError(f"{name} has the shape {tuple(shape)}; {expected} fits the model")
        modules.setdefault(module, set()).add(half)
    if not modules:
        raise ValueError("the adapter has no tensors")
    for module, halves in modules.items():
        _check_complete(module, halves, modules, base)


def _check_complete(module: str, halves: set[str], modules: Mapping[str, Any], base: Mapping[str, Any]) -> None:
    """Both halves are there, and what the engine fuses with the module."""
    if halves != {"A", "B"}:
        raise ValueError(f"{module} has lora_{min(halves)} alone")
    block, _, leaf = module.rpartition(".")
    for names in FUSED_IN_ENGINES.values():
        paths = [f"{block}.{name}" for name in names]
        missing = [path.rpartition(".")[2] for path in paths if f"{path}.weight" in base and path not in modules]
        if leaf in names and missing:
            raise ValueError(f"{module} comes without {', '.join(missing)}, of which the engine makes one weight")


def stacks_of(names: Iterable[str]) -> dict[str, list[str]]:
    """The tensors that an engine keeps: its name of each -> PEFT's names of those whose rows it has, in order.

    >>> stacks_of(["mlp.up_proj.lora_A.weight", "mlp.down_proj.lora_A.weight", "mlp.gate_proj.lora_A.weight"])
    {'mlp.gate_up_proj.lora_A.weight': ['mlp.gate_proj.lora_A.weight', 'mlp.up_proj.lora_A.weight'],
     'mlp.down_proj.lora_A.weight': ['mlp.down_proj.lora_A.weight']}
    """
    there, found = dict.fromkeys(names), dict[str, list[str]]()
    for name in there:
        module, _, half = name.rpartition(".lora_")
        block, _, leaf = module.rpartition(".")
        fused = _FUSED_AS.get(leaf)
        parts = [f"{block}.{part}.lora_{half}" for part in FUSED_IN_ENGINES[fused]] if fused else []
        if parts and all(part in there for part in parts):
            found[f"{block}.{fused}.lora_{half}"] = parts
        else:
            found[name] = [name]
    return found


def is_stack(name: str) -> bool:
    """Whether an engine's name of a tensor is that of a fused weight."""
    return any(f".{fused}.lora_" in name for fused in FUSED_IN_ENGINES)


def scale_of(config: Mapping[str, Any]) -> float:
    """What B A is multiplied by, as adapter_config.json says: alpha / r, or alpha / sqrt(r) with use_rslora."""
    rank = config["r"]
    return float(config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def not_plain(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for everything that makes an adapter more than W + scale B A over an unchanged W."""
    if str(config.get("init_lora_weights")).partition("_niter")[0] in _CHANGES_BASE:
        yield (
            f"init_lora_weights {config['init_lora_weights']} of its adapter_config.json changes the base; convert it "
            "with PEFT (path_initial_model_for_weight_conversion)."
        )
    odd = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "alora_invocation_tokens")
    for name in [
        *(name for name in odd if config.get(name)),
        *(["bias"] if config.get("bias", "none") != "none" else []),
    ]:
        yield f"{name} {config[name]} of its adapter_config.json is not built; take an adapter without it."


def adapter_differences(config: Mapping[str, Any], rank: int, scale: float, targets: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for every way in which an adapter is not one of this rank, scale and projections.

    Args:
        config: of adapter_config.json.
        rank: of --lora-rank.
        scale: what the flags multiply B A by.
        targets: HF's names of the projections that the flags train.
    """
    theirs = config.get("r") or 0
    if theirs != rank:
        yield f"the adapter has rank {theirs}; give --lora-rank {theirs}."
    elif not math.isclose(scale_of(config), scale):
        rslora = " --lora-use-rslora" if config.get("use_rslora") else ""
        yield f"the adapter is multiplied by {scale_of(config):g}; give --lora-alpha {config['lora_alpha']}{rslora}."
    named = config.get("target_modules") or ()
    if named != "all-linear" and set(named) != set(targets):
        yield f"the adapter is of {', '.join(sorted(named))}; give --lora-target-modules {' '.join(sorted(named))}."
    yield from not_plain(config)
