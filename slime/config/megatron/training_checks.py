"""What contradicts what among Megatron's flags of training: process groups, host memory, recomputation."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, create_model

from slime.config.args import Args
from slime.config.megatron.derived import Layout, divisors, nearest_divisor
from slime.config.problems import Check, NoEffect, Problems, Rule, WithoutEffect, first_of, for_each, read_file, where
from slime.plan.layout import ParallelLayout
from slime.plan.pipeline_layout import stages_of_text
from slime.utils.files.yaml_config import load_yaml, validate
from slime.utils.misc import needed

NCCL_FLAG = "--nccl-communicator-config-path"
SETTINGS: dict[str, Any] = {
    "cga_cluster_size": int,
    "max_ctas": int,
    "min_ctas": int,
    "net_name": Annotated[Literal["ib", "socket"], BeforeValidator(lambda name: str(name).lower())],  # as Megatron
    "is_high_priority_stream": bool,
}
"""What Megatron reads of a group, and its type."""
_GROUPS = """cp dp dp_cp embd ep ep_dp ep_tp hcp inter_ep_dp intra_dist_opt_instance intra_dp_cp intra_ep_dp mp
    pos_embd pp tp tp_cp tp_dp tp_dp_cp tp_ep_mp tp_ep_pp"""
GROUPS = tuple(_GROUPS.split())
"""Megatron's groups, by the names that it looks up."""


def _optional(name: str, kinds: Mapping[str, Any]) -> type[BaseModel]:
    """Return a model with fields of these types, each of which may be left out."""
    fields: dict[str, Any] = {key: (kind, None) for key, kind in kinds.items()}
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **fields)


_NcclFile = _optional("_NcclFile", dict.fromkeys(GROUPS, _optional("_NcclGroup", SETTINGS)))
SHARP_LIBRARY = "sharp_coll"


def _copies(args: Args) -> list[tuple[str, int]]:
    """Kinds of ranks that hold the same of the model, and how many there are."""
    layout = Layout.of(args)
    copies = [("data-parallel x context-parallel", layout.data * layout.context)]
    spread = layout.expert_tensor * layout.expert * layout.pipeline
    return [*copies, ("expert-data-parallel", layout.world // spread)] if args.num_moe_experts else copies


check_instances = where(
    lambda a: a.num_distributed_optimizer_instances > 1,
    for_each(
        _copies,
        lambda a, copies: copies[1] % a.num_distributed_optimizer_instances,
        lambda a, copies: (
            f"the {copies[1]} {copies[0]} ranks do not divide into --num-distributed-optimizer-instances "
            f"{a.num_distributed_optimizer_instances}; the nearest that works: "
            f"{max(n for n in divisors(copies[1]) if n <= a.num_distributed_optimizer_instances)}."
        ),
    ),
    Rule(
        lambda a: a.reduce_scatter_with_fp32_accumulation,
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} does not go with "
        "--ddp-reduce-scatter-with-fp32-accumulation, which Megatron does for one instance only; leave one out.",
    ),
    Rule(
        lambda a: a.overlap_grad_reduce and a.accelerator == "cpu",
        "--num-distributed-optimizer-instances {num_distributed_optimizer_instances} with --overlap-grad-reduce needs "
        "CUDA streams; leave one of the two out on --accelerator cpu.",
    ),
)
"""The copies of the model divide into instances of the optimizer, and gradients can be reduced among these."""


def nccl_problems(args: Args) -> Problems:
    """What is wrong with the file: it has to have settings that Megatron reads, of groups that it makes."""
    path, problems = args.nccl_communicator_config_path, Problems()
    if path is not None and args.accelerator == "cpu":
        problems.environment.append(
            NoEffect(
                f"{NCCL_FLAG} {path}",
                "with --accelerator cpu, whose groups are gloo's",
                "leave it out",
                instead={"nccl_communicator_config_path": None},
            )
        )
    elif path is not None:
        read_file(problems, lambda: validate(_NcclFile, load_yaml(path, NCCL_FLAG)))
    return problems


def has_sharp() -> bool:
    """Whether the library is where the loader finds it."""
    if ctypes.util.find_library(SHARP_LIBRARY):
        return True
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(os.path.isfile(os.path.join(folder, f"lib{SHARP_LIBRARY}.so")) for folder in folders if folder)


check_sharp = where(  # reductions in the switch are for groups that there are, which stay
    lambda a: a.use_sharp,
    Rule(
        lambda a: a.sharp_enabled_group == "dp_replica" and a.num_distributed_optimizer_instances <= 1,
        "--sharp-enabled-group dp_replica is the group between instances of the optimizer: give "
        "--num-distributed-optimizer-instances 2 or more.",
    ),
    Rule(
        lambda a: a.offload_train,
        "--use-sharp does not go with --offload-train (--colocate): a switch holds few groups, and they would be made "
        "anew after each sleep; leave one of the two out.",
    ),
)
check_sharp_library = where(  # NCCL reaches the switch through NVIDIA's SHARP library
    lambda a: a.use_sharp,
    first_of(
        Rule(
            lambda a: a.accelerator == "cpu",
            "--use-sharp needs NCCL; leave it out on --accelerator cpu.",
        ),
        Rule(
            lambda a: not has_sharp(),
            f"--use-sharp needs NVIDIA's SHARP library (lib{SHARP_LIBRARY}.so, of HPC-X) and NCCL's plugin for it, "
            "and this machine has no such library, where NCCL would reduce as without the flag; install it, or leave "
            "the flag out.",
        ),
    ),
)

# ---- activations and optimizer states in host memory, layers that are computed again

OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
"""Values of --offload-modules; model/activation_offload.py knows their modules."""
_OF_EXPERTS = ("expert_fc1", "moe_act")


def _offloads(args: Args) -> str | None:
    """The flag that keeps activations in host memory."""
    if args.cpu_offloading:
        return "--cpu-offloading"
    return "--fine-grained-activation-offloading" if args.fine_grained_activation_offloading else None


def _offloads_weights(args: Args) -> bool:
    of_modules = args.fine_grained_activation_offloading and set(args.offload_modules) & {"qkv_linear", "attn_proj"}
    return bool(args.cpu_offloading or of_modules)


def _unknown_offloads(args: Args) -> list[str]:
    return sorted(set(args.offload_modules) - set(OFFLOADED) - set(_OF_EXPERTS))


def _offloaded_experts(args: Args) -> list[str]:
    return sorted(set(args.offload_modules) & set(_OF_EXPERTS))


OFFLOADING: tuple[Check, ...] = (
    Rule(
        lambda a: a.cpu_offloading and a.fine_grained_activation_offloading,
        "--cpu-offloading and --fine-grained-activation-offloading exclude each other; give one.",
    ),
    Rule(
        lambda a: _offloads(a) and a.recompute_granularity is not None,
        lambda a: (
            f"{_offloads(a)} and --recompute-granularity {a.recompute_granularity} exclude each other: what is "
            "computed again need not be kept anywhere; give one."
        ),
    ),
    Rule(
        lambda a: a.cpu_offloading and a.cpu_offloading_num_layers < 1,
        "--cpu-offloading-num-layers {cpu_offloading_num_layers} with --cpu-offloading must be at least 1.",
    ),
    Rule(
        lambda a: a.min_offloaded_tensor_size < 1,
        "--min-offloaded-tensor-size {min_offloaded_tensor_size} must be at least 1.",
    ),
    where(
        lambda a: a.fine_grained_activation_offloading,
        Rule(
            lambda a: not a.offload_modules,
            f"--fine-grained-activation-offloading needs --offload-modules: choose from {', '.join(OFFLOADED)}.",
        ),
        Rule(
            _offloaded_experts,
            lambda a: (
                f"--offload-modules {' '.join(_offloaded_experts(a))}: experts are offloaded with their layers "
                "alone; use --cpu-offloading --cpu-offloading-num-layers N."
            ),
        ),
        Rule(
            _unknown_offloads,
            lambda a: f"--offload-modules {' '.join(_unknown_offloads(a))}: choose from {', '.join(OFFLOADED)}.",
        ),
        Rule(
            lambda a: "attn_proj" in a.offload_modules and "core_attn" not in a.offload_modules,
            "--offload-modules attn_proj needs core_attn, which keeps the same tensor; add core_attn.",
        ),
    ),
    Rule(
        # autograd's hooks hand a weight back as another object, which does not say that its gradient is added already
        lambda a: _offloads_weights(a) and a.overlap_grad_reduce and a.gradient_accumulation_fusion,
        lambda a: (
            f"{_offloads(a)} with --overlap-grad-reduce needs --no-gradient-accumulation-fusion: Megatron would not "
            "see when gradients of offloaded layers are there; add it, or leave --overlap-grad-reduce out."
        ),
    ),
    Rule(
        lambda a: not 0 < a.optimizer_offload_fraction <= 1,
        "--optimizer-offload-fraction {optimizer_offload_fraction} must lie in (0, 1]; leave --optimizer-cpu-offload "
        "out for 0.",
    ),
    Rule(
        lambda a: not a.optimizer_cpu_offload,
        "--no-pin-cpu-grads without --optimizer-cpu-offload: nothing is copied; leave it out.",
        given="pin_cpu_grads",
    ),
    Rule(
        lambda a: not a.optimizer_cpu_offload,
        "--no-pin-cpu-params without --optimizer-cpu-offload: nothing is copied; leave it out.",
        given="pin_cpu_params",
    ),
    where(
        lambda a: a.optimizer_cpu_offload or a.use_precision_aware_optimizer,
        Rule(
            lambda a: a.use_stateless_adam,
            lambda a: (
                f"{'--optimizer-cpu-offload' if a.optimizer_cpu_offload else '--use-precision-aware-optimizer'} has "
                "no moments to hold with --use-stateless-adam; leave one out."
            ),
        ),
        first_of(
            Rule(
                lambda a: a.main_grads_dtype == "bf16" and a.fp16,
                "--main-grads-dtype bf16 and --fp16 exclude each other; leave one out.",
            ),
            Rule(
                lambda a: a.main_grads_dtype == "bf16",
                "--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; leave one out.",
                given="grad_reduce_in_fp32",
            ),
        ),
    ),
    WithoutEffect(
        lambda a: a.sharp_enabled_group and not a.use_sharp,
        "--sharp-enabled-group {sharp_enabled_group}",
        "without --use-sharp",
        instead={"sharp_enabled_group": None},
    ),
    check_sharp,
)
"""Rows that take the given attributes, too."""


def _most_offloaded(args: Args) -> int:
    """Layers of a stage that can be offloaded: all but the last, which goes backward at once."""
    return max(layers_of_chunks(args)) - 1


check_offloaded_layers = where(
    lambda a: a.cpu_offloading or a.fine_grained_activation_offloading,
    WithoutEffect(
        lambda a: _most_offloaded(a) < 1,
        lambda a: "--cpu-offloading" if a.cpu_offloading else "--fine-grained-activation-offloading",
        lambda a: (
            "where every pipeline stage has one layer, which goes backward at once "
            f"(--num-layers {a.num_layers} in {a.pipeline_model_parallel_size * Layout.of(a).virtual} stages)"
        ),
        "leave it out",
        {
            "cpu_offloading": False,
            "cpu_offloading_num_layers": 0,
            "fine_grained_activation_offloading": False,
            "offload_modules": None,
        },
    ),
    Rule(
        lambda a: a.cpu_offloading and 1 <= _most_offloaded(a) < a.cpu_offloading_num_layers,
        lambda a: (
            f"--cpu-offloading-num-layers {a.cpu_offloading_num_layers} with --cpu-offloading must be at most "
            f"{_most_offloaded(a)}: the last of a stage's {_most_offloaded(a) + 1} layers goes backward at once."
        ),
    ),
)
"""A stage has the layers that are offloaded and one more; the layout works."""


def layers_of_chunks(args: Args) -> list[int]:
    """The different numbers of layers of virtual pipeline stages; the layout works."""
    if text := args.pipeline_model_parallel_layout:
        return sorted({stage.count("t") for stage in stages_of_text(text)})
    layout = ParallelLayout.of(args, args.num_layers)
    # where the embedding or the loss counts as a layer, one virtual stage has a layer less than the others
    return sorted(
        {(len(layers) + extra) // layout.vpp for layers in layout.stage_layers for extra in (0, layout.vpp - 1)}
    )


def _cut_recomputation(args: Args) -> list[int]:
    """Layers of the stages that do not divide into those that are recomputed together."""
    return [number for number in layers_of_chunks(args) if number % needed(args.recompute_num_layers)]


check_recomputed_layers = where(
    lambda a: a.recompute_granularity == "full" and a.recompute_method == "uniform" and a.recompute_num_layers,
    Rule(
        _cut_recomputation,
        lambda a: (
            f"--recompute-num-layers {a.recompute_num_layers} with --recompute-method uniform does not divide the "
            f"{_cut_recomputation(a)[-1]} layers of a pipeline stage; the nearest that works is "
            f"{nearest_divisor(needed(a.recompute_num_layers), layers_of_chunks(a))}."
        ),
    ),
)
"""Layers that are recomputed together divide those of every stage: Megatron counts on behind the last one."""
