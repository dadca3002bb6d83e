"""Which kernels of other libraries can run the model that the flags describe, on the machine they are asked for.

TransformerEngine (--transformer-impl), FlashQLA (--qwen-gdn-backend flashqla) and DeepGEMM (--megatron-deepgemm-*).
What the kernels cannot compute is read from their code (flash-qla 0.1.3, sgl-deep-gemm 0.1.5 and 0.2.5), and refused
here with the reason, for they would say it in the middle of a step. It reads flags and, where the kernels are to run
on this machine, imports the packages: their libraries are built for one version of torch, and do not load beside
another. What can be chosen of a model for a forward pass in fp8 is in fp8_forward_plan.py.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

from slime.config.args import Args
from slime.config.megatron.precision.fp8_forward_plan import check_fp8_forward, given_flags
from slime.config.megatron.precision.fp8_training_plan import fp8_training_problems
from slime.config.problems import Check, Problems, Rule, WithoutEffect, broken, each, first_of, for_each, where
from slime.config.rules.devices import is_missing
from slime.utils import accelerator
from slime.utils.misc import attempt

TRANSFORMER_ENGINE = "--transformer-impl transformer_engine"
TRANSFORMER_ENGINES = ("2.9.0", "2.12.0")
"""The first version that Megatron 0.16.1 names in its requirements, and the first that it does not."""
FLASHQLA = "--qwen-gdn-backend flashqla"
FLASHQLA_HEAD = 128
"""Channels of a head's keys and of its values: the kernels assert it."""
FLASHQLA_CAPABILITIES = ((9, 0), (10, 0), (10, 3), (12, 0))
"""GPUs that 0.1.3 has kernels for. (Its page names 12.1 too, but its import fails there.)"""
HOPPER = 9
TRITONS_WRONG_ON_HOPPER = ("3.4.0", "3.7.1")
"""The first one, and the first that is right again (flash-linear-attention's issue 640)."""


def kernel_problems(args: Args, hf_config: Mapping[str, Any] | None) -> Problems:
    """What is wrong with the choice of kernels of a run that has trainers.

    Args:
        args: after derivation.
        hf_config: the dict of --hf-checkpoint's config.json; None where it cannot be read.
    """
    problems = Problems()
    looks = args.accelerator == "cuda" and not args.dry_run  # a plan for GPUs can be made elsewhere
    if args.transformer_impl == "transformer_engine":
        problems.wrong += broken(_TRANSFORMER_ENGINE, args)
        problems.environment += MISSING_TRANSFORMER_ENGINE(args) if looks else ()
    elif args.attention_backend == "fused":
        problems.wrong.append(
            f"--attention-backend fused is TransformerEngine's; add {TRANSFORMER_ENGINE}, or use auto."
        )
    if args.qwen_gdn_backend == "flashqla":
        problems.wrong += broken(_FLASHQLA, args)
        problems.environment += MISSING_FLASHQLA(args) if looks else ()
    elif args.experimental_attention_variant == "gated_delta_net":
        problems.environment += _broken_fla() if looks else ()
    problems.extend(fp8_training_problems(args, hf_config, looks=looks))
    if given_flags(args):
        problems.wrong += check_fp8_forward(args, hf_config)
        problems.environment += MISSING_DEEP_GEMM(args) if looks else ()
    return problems


_USE_LOCAL = "give --transformer-impl local or leave it out"


def _own_layers(args: Args) -> list[str]:
    """Flags of layers that have kernels of their own."""
    given = {
        "--spec": args.spec and " ".join(args.spec),
        "--experimental-attention-variant": args.experimental_attention_variant,
        "--custom-model-provider-path": args.custom_model_provider_path,
    }
    return [*(f"{option} {value}" for option, value in given.items() if value is not None), *given_flags(args)]


_TRANSFORMER_ENGINE: tuple[Check, ...] = (
    Rule(
        lambda a: a.accelerator != "cuda",
        f"{TRANSFORMER_ENGINE} needs CUDA, and --accelerator is {{accelerator}}; {_USE_LOCAL}.",
    ),
    Rule(
        lambda a: a.accelerator == "cuda" and not (a.bf16 or a.fp16),
        f"{TRANSFORMER_ENGINE}: its attention takes packed samples in 16 bit alone; give --bf16, or {_USE_LOCAL}.",
    ),
    for_each(
        _own_layers,
        lambda a, layers: True,
        lambda a, layers: (
            f"{TRANSFORMER_ENGINE} with {layers}: those layers have kernels of their own, which it would not replace; "
            f"{_USE_LOCAL}."
        ),
    ),
)


_FIRST, _END = map(Version, TRANSFORMER_ENGINES)
_INSTALL_TE = (
    f'pip install --no-build-isolation "transformer-engine[pytorch,core_cu13]>={_FIRST},<{_END}", or leave it out'
)
MISSING_TRANSFORMER_ENGINE = first_of(
    Rule(
        lambda a: is_missing("transformer_engine"),
        f"{TRANSFORMER_ENGINE} needs TransformerEngine, which is not installed; {_INSTALL_TE}.",
    ),
    for_each(
        lambda a: _load_problems("transformer_engine.pytorch"),
        lambda a, why: True,
        lambda a, why: f"{TRANSFORMER_ENGINE} needs TransformerEngine, which does not load: {why}; {_INSTALL_TE}.",
    ),
    Rule(
        lambda a: not _FIRST <= (_version_of("transformer-engine") or _FIRST) < _END,
        lambda a: (
            f"{TRANSFORMER_ENGINE}: TransformerEngine {_version_of('transformer-engine')} is installed, and Megatron "
            f"0.16.1 goes with those from {_FIRST} until {_END}; {_INSTALL_TE}."
        ),
    ),
    Rule(
        lambda a: a.attention_backend == "flash" and is_missing("flash_attn"),
        f"--attention-backend flash with {TRANSFORMER_ENGINE} needs the package flash-attn, which is not installed; "
        "use auto or fused.",
    ),
)


_USE_FLA = "leave it out: fla takes flash-linear-attention where it is installed and torch's operations elsewhere"
_FLASHQLA: tuple[Check, ...] = (
    Rule(
        lambda a: a.accelerator != "cuda",
        f"{FLASHQLA} needs CUDA: its kernels are for GPUs, and --accelerator is {{accelerator}}; {_USE_FLA}.",
    ),
    WithoutEffect(
        lambda a: (
            a.experimental_attention_variant != "gated_delta_net"
            and not (a.spec or a.custom_model_provider_path)  # those may have such layers
        ),
        FLASHQLA,
        "without --experimental-attention-variant gated_delta_net, whose layers it computes",
        "leave it out",
    ),
    where(
        lambda a: a.experimental_attention_variant == "gated_delta_net",
        *each(
            "linear_key_head_dim linear_value_head_dim",
            lambda size: size != FLASHQLA_HEAD,
            f"{FLASHQLA} with {{option}} {{value}}: its kernels are for heads of {FLASHQLA_HEAD} channels; "
            f"{_USE_FLA}.",
        ),
        Rule(
            lambda a: not (a.bf16 or a.fp16),
            f"{FLASHQLA} computes in 16 bit, and the model is trained in fp32; give --bf16, or {_USE_FLA}.",
        ),
    ),
)


def _gpu() -> tuple[int, int] | None:
    """Compute capability of this machine's GPU; the driver's node may have none."""
    return accelerator.compute_capability()


_INSTALL_QLA = 'pip install "flash-qla>=0.1.3", or leave it out'
MISSING_FLASHQLA = first_of(
    for_each(
        lambda a: ("flash_qla", "tilelang"),
        lambda a, module: is_missing(module),
        lambda a, module: (
            f"{FLASHQLA} needs the package {module.replace('_', '-')}, which is not installed; {_INSTALL_QLA}."
        ),
    ),
    Rule(
        lambda a: _gpu() not in (None, *FLASHQLA_CAPABILITIES),
        lambda a: (
            f"{FLASHQLA} has no kernels for GPUs of compute capability {'.'.join(map(str, _gpu() or ()))}, which this "
            f"machine has (it has them for {', '.join(f'{n}.{m}' for n, m in FLASHQLA_CAPABILITIES)}); leave it out."
        ),
    ),
    for_each(
        lambda a: _load_problems("flash_qla") if _gpu() else (),
        lambda a, why: True,
        lambda a, why: f"{FLASHQLA} needs the package flash-qla, which does not load: {why}; {_INSTALL_QLA}.",
    ),
)


def _broken_fla() -> Iterator[str]:
    """What flash-linear-attention 0.6.0 says in the first backward pass, with a traceback."""
    if importlib.util.find_spec("fla") is None or importlib.util.find_spec("tilelang") is not None:
        return  # with tilelang it has another kernel
    capability, triton = accelerator.compute_capability(), _version_of("triton")
    if capability is None or capability[0] != HOPPER or triton is None:
        return
    first_wrong, first_right = map(Version, TRITONS_WRONG_ON_HOPPER)
    if first_wrong <= triton < first_right:
        yield (
            "flash-linear-attention is installed, and its backward pass of gated delta nets is wrong with triton "
            f"{triton} on Hopper GPUs (from {first_wrong} until {first_right}); pip install tilelang, whose kernel it "
            "takes then, or pip uninstall flash-linear-attention fla-core to compute with torch's operations."
        )


def _version_of(package: str) -> Version | None:
    try:
        return Version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


_NEEDS_GEMM = "needs the package sgl-deep-gemm (module deep_gemm), which"
_INSTALL_GEMM = "install the one that SGLang names in its requirements, or leave the flag out."
MISSING_DEEP_GEMM = first_of(
    Rule(
        lambda a: is_missing("deep_gemm"),
        lambda a: f"{' '.join(given_flags(a))} {_NEEDS_GEMM} is not installed; {_INSTALL_GEMM}",
    ),
    Rule(
        lambda a: (_gpu() or (HOPPER,))[0] != HOPPER,
        lambda a: (
            f"{' '.join(given_flags(a))} is for Hopper (compute capability {HOPPER}.0), and this machine's GPU has "
            f"{'.'.join(map(str, _gpu() or ()))}: elsewhere SGLang computes with other scales (on Blackwell powers of "
            "two), which are not built; leave the flag out."
        ),
    ),
    for_each(
        lambda a: _load_problems("deep_gemm") if _gpu() else (),
        lambda a, why: True,
        lambda a, why: (
            f"{' '.join(given_flags(a))} {_NEEDS_GEMM} does not load: {why} (it is built for one version of torch); "
            f"{_INSTALL_GEMM}"
        ),
    ),
)


def _load_problems(module: str) -> Iterator[str]:
    """Yield why a package that is installed cannot be imported, where it cannot."""
    _, error = attempt(importlib.import_module, module)
    if error is not None:
        cause = error.__cause__ or error
        yield f"{type(cause).__name__}: {cause}"
