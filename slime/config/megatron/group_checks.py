"""Rules of what Megatron's process groups are made with: optimizer instances, NCCL's settings, SHARP.

Each check reads `args` and returns sentences. Files are read, nothing is started.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from slime.config.args import Args
from slime.config.problems import NoEffect, Problems, read_file
from slime.utils.yaml_config import LocatedYaml, load_yaml

if TYPE_CHECKING:
    from slime.config.megatron.layout import Layout

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


def check_sharp(args: Args) -> Iterator[str]:
    """Reductions in the switch are for groups that there are, which stay."""
    if args.sharp_enabled_group and not args.use_sharp:
        flag = f"--sharp-enabled-group {args.sharp_enabled_group}"
        yield NoEffect(flag, "without --use-sharp", instead={"sharp_enabled_group": None})
    if not args.use_sharp:
        return
    if args.sharp_enabled_group == "dp_replica" and args.num_distributed_optimizer_instances <= 1:
        yield (
            "--sharp-enabled-group dp_replica is the group between instances of the optimizer: give "
            "--num-distributed-optimizer-instances 2 or more."
        )
    if args.offload_train:
        yield (
            "--use-sharp does not go with --offload-train (--colocate): a switch holds few groups, and they would be "
            "made anew after each sleep; leave one of the two out."
        )


def check_sharp_library(args: Args) -> Iterator[str]:
    """NCCL reaches the switch through NVIDIA's SHARP library."""
    if not args.use_sharp:
        return
    if args.accelerator == "cpu":
        yield "--use-sharp needs NCCL; leave it out on --accelerator cpu."
    elif not has_sharp():
        yield (
            f"--use-sharp needs NVIDIA's SHARP library (lib{SHARP_LIBRARY}.so, of HPC-X) and NCCL's plugin for it, "
            "and this machine has no such library, where NCCL would reduce as without the flag; install it, or leave "
            "the flag out."
        )


def has_sharp() -> bool:
    """Whether the library is where the loader finds it."""
    if ctypes.util.find_library(SHARP_LIBRARY):
        return True
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any(os.path.isfile(os.path.join(folder, f"lib{SHARP_LIBRARY}.so")) for folder in folders if folder)
