"""What contradicts what among Megatron's flags of training: process groups, host memory, recomputation."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from slime.config.args import Args
from slime.config.megatron.derived import nearest_divisor
from slime.config.problems import Check, NoEffect, Problems, Rule, WithoutEffect, first_of, read_file, where
from slime.plan.layout import ParallelLayout
from slime.utils.pipeline_layout import stages_of_text
from slime.utils.yaml_config import LocatedYaml, load_yaml

if TYPE_CHECKING:
    from slime.config.megatron.derived import Layout

NCCL_FLAG = "--nccl-communicator-config-path"
SETTINGS: dict[str, type | tuple[type, ...]] = {
    "cga_cluster_size": int,
    "max_ctas": int,
    "min_ctas": int,
    "net_name": str,
    "is_high_priority_stream": bool,
}
"""What Megatron reads of a group, and its type."""
_GROUPS = """cp dp dp_cp embd ep ep_dp ep_tp hcp inter_ep_dp intra_dist_opt_instance intra_dp_cp intra_ep_dp mp
    pos_embd pp tp tp_cp tp_dp tp_dp_cp tp_ep_mp tp_ep_pp"""
GROUPS = tuple(_GROUPS.split())
"""Megatron's groups, by the names that it looks up."""
NETWORKS = ("ib", "socket")
SHARP_LIBRARY = "sharp_coll"


def check_instances(args: Args, layout: Layout) -> Iterator[str]:
    """The copies of the model divide into instances of the optimizer, and gradients can be reduced among these."""
    count = args.num_distributed_optimizer_instances
    if count <= 1:
        return
    copies = {"data-parallel x context-parallel": layout.data * layout.context}
    if args.num_moe_experts:
        copies["expert-data-parallel"] = layout.world // (layout.expert_tensor * layout.expert * layout.pipeline)
    for what, number in copies.items():
        if number % count:
            yield (
                f"the {number} {what} ranks do not divide into --num-distributed-optimizer-instances {count}; the "
                f"nearest that works: {max(n for n in range(1, min(count, number) + 1) if number % n == 0)}."
            )
    if args.reduce_scatter_with_fp32_accumulation:
        yield (
            f"--num-distributed-optimizer-instances {count} does not go with "
            "--ddp-reduce-scatter-with-fp32-accumulation, which Megatron does for one instance only; leave one out."
        )
    if args.overlap_grad_reduce and args.accelerator == "cpu":
        yield (
            f"--num-distributed-optimizer-instances {count} with --overlap-grad-reduce needs CUDA streams; leave one "
            "of the two out on --accelerator cpu."
        )


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
    elif path is not None and (located := read_file(problems, load_yaml, path, NCCL_FLAG)) is not None:
        problems.wrong += _wrong_settings(located)
    return problems


def _wrong_settings(located: LocatedYaml) -> Iterator[str]:
    if not isinstance(located.value, dict):
        yield located.sentence((), "it is no mapping of groups to their settings.")
        return
    for group, settings in located.value.items():
        if group not in GROUPS:
            yield located.sentence((group,), f"Megatron has no group of this name; it has {', '.join(GROUPS)}.")
        elif not isinstance(settings, dict):
            yield located.sentence((group,), f"{settings!r} is no mapping of settings to their values.")
        else:
            for name, value in settings.items():
                if problem := _wrong_setting(name, value):
                    yield located.sentence((group, name), problem)


def _wrong_setting(name: str, value: Any) -> str | None:
    kind = SETTINGS.get(name)
    if kind is None:
        return f"there is no such setting; there are {', '.join(SETTINGS)}."
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return f"{value!r} must be of type {kind.__name__}."  # type: ignore[union-attr]
    if name == "net_name" and str(value).lower() not in NETWORKS:
        return f"{value!r} must be IB or socket."
    return None


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


def _check_unpinned(args: Args, given: Collection[str]) -> Iterator[str]:
    unpinned = [f"--no-{name.replace('_', '-')}" for name in ("pin_cpu_grads", "pin_cpu_params") if name in given]
    if unpinned and not args.optimizer_cpu_offload:
        yield f"{', '.join(unpinned)} without --optimizer-cpu-offload: nothing is copied; leave it out."


def _check_modules(args: Args, given: Collection[str]) -> Iterator[str]:
    modules = args.offload_modules
    if not modules:
        yield f"--fine-grained-activation-offloading needs --offload-modules: choose from {', '.join(OFFLOADED)}."
    if of_experts := sorted(set(modules) & set(_OF_EXPERTS)):
        yield (
            f"--offload-modules {' '.join(of_experts)}: experts are offloaded with their layers alone; use "
            "--cpu-offloading --cpu-offloading-num-layers N."
        )
    if wrong := sorted(set(modules) - set(OFFLOADED) - set(_OF_EXPERTS)):
        yield f"--offload-modules {' '.join(wrong)}: choose from {', '.join(OFFLOADED)}."
    if "attn_proj" in modules and "core_attn" not in modules:
        yield "--offload-modules attn_proj needs core_attn, which keeps the same tensor; add core_attn."


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
    where(lambda a: a.fine_grained_activation_offloading, _check_modules),
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
    _check_unpinned,
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


def check_offloaded_layers(args: Args) -> Iterator[str]:
    """A stage has the layers that are offloaded and one more; the layout works."""
    if not (args.cpu_offloading or args.fine_grained_activation_offloading):
        return
    layout = ParallelLayout.of(args, args.num_layers)
    most = max(layers_of_chunks(args)) - 1
    name = "--cpu-offloading" if args.cpu_offloading else "--fine-grained-activation-offloading"
    if most < 1:
        yield NoEffect(
            name,
            "where every pipeline stage has one layer, which goes backward at once "
            f"(--num-layers {args.num_layers} in {layout.pp * layout.vpp} stages)",
            "leave it out",
            instead={
                "cpu_offloading": False,
                "cpu_offloading_num_layers": 0,
                "fine_grained_activation_offloading": False,
                "offload_modules": None,
            },
        )
    elif args.cpu_offloading and args.cpu_offloading_num_layers > most:
        yield (
            f"--cpu-offloading-num-layers {args.cpu_offloading_num_layers} with --cpu-offloading must be at most "
            f"{most}: the last of a stage's {most + 1} layers goes backward at once."
        )


def layers_of_chunks(args: Args) -> list[int]:
    """The different numbers of layers of virtual pipeline stages; the layout works."""
    if text := args.pipeline_model_parallel_layout:
        return sorted({stage.count("t") for stage in stages_of_text(text)})
    layout = ParallelLayout.of(args, args.num_layers)
    # where the embedding or the loss counts as a layer, one virtual stage has a layer less than the others
    return sorted(
        {(len(layers) + extra) // layout.vpp for layers in layout.stage_layers for extra in (0, layout.vpp - 1)}
    )


def check_recomputed_layers(args: Args) -> Iterator[str]:
    """Layers that are recomputed together divide those of every stage: Megatron counts on behind the last one."""
    if args.recompute_granularity != "full" or args.recompute_method != "uniform" or not args.recompute_num_layers:
        return
    together, numbers = args.recompute_num_layers, layers_of_chunks(args)
    if bad := [number for number in numbers if number % together]:
        yield (
            f"--recompute-num-layers {together} with --recompute-method uniform does not divide the {bad[-1]} layers "
            f"of a pipeline stage; the nearest that works is {nearest_divisor(together, numbers)}."
        )
