"""Flags that say how many devices the trainer and the engines get.

Declarations only: the rules are in derive.py and check_devices.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag

MOST_GPUS = 1_000_000
"""A typing error, not a cluster."""


@dataclass
class ClusterFlags:
    """Cluster. Without a GPU, "GPUs" are slots: processes that share the CPU."""

    accelerator: str = flag(
        "auto", "device of trainer and engines; auto = cuda where there is one", choices=("auto", "cuda", "cpu")
    )
    actor_num_nodes: int = flag(1, "nodes given to the trainer", at_least=1, at_most=MOST_GPUS)
    actor_num_gpus_per_node: int = flag(
        8, "trainer GPUs (slots) per node (default: 8; with --accelerator cpu 1)", at_least=1, at_most=MOST_GPUS
    )
    rollout_num_gpus: int | None = flag(
        None,
        "GPUs (slots) of all engines together, 0 = only a router; with --colocate default: the trainer's",
        at_least=0,
        at_most=MOST_GPUS,
    )
    rollout_num_gpus_per_engine: int = flag(1, "GPUs per SGLang engine", at_least=1, at_most=MOST_GPUS)
    num_gpus_per_node: int = flag(8, "GPUs of one physical node, for placing engines", at_least=1, at_most=MOST_GPUS)
    colocate: bool = flag(False, "trainer and engines share the same GPUs (slots)")
    ignore_plan: bool = flag(
        False,
        "start a run that takes more than 10%% more memory than this machine has, as the plan of --dry-run says; "
        "without this it is refused",
    )
    offload: bool = flag(False, "short for --offload-train --offload-rollout")
    offload_train: bool | None = flag(None, "release the trainer's GPU memory while engines generate")
    offload_rollout: bool | None = flag(None, "release the engines' GPU memory while the trainer works")
    distributed_backend: str | None = flag(
        None, "the trainer's collectives (default: nccl; with --accelerator cpu gloo)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "time limit of a collective operation", at_least=1)


@dataclass
class FaultToleranceFlags:
    """Fault tolerance."""

    use_fault_tolerance: bool = flag(
        False, "watch the engines; go on without one that does not answer, and start another in its place"
    )
    rollout_health_check_interval: float = flag(
        30.0, "seconds between two health checks of an engine", needs="use_fault_tolerance", at_least=0
    )
    rollout_health_check_timeout: float = flag(
        30.0, "seconds after which a health check has failed", needs="use_fault_tolerance", at_least=0
    )
    rollout_health_check_first_wait: float = flag(
        0, "seconds without checks after the engines were resumed", needs="use_fault_tolerance", at_least=0
    )
    max_engine_restarts_per_hour: int = flag(
        10,
        "engines that are started in place of lost ones within an hour; those lost after that stay away",
        needs="use_fault_tolerance",
        at_least=0,
    )
    max_restarts: int = flag(
        0,
        "times that a run goes on from its newest checkpoint, or begins again where it has none, with new trainers, "
        "after a trainer process, a node of theirs or the rollout manager was lost; the engines stay",
        at_least=0,
    )
    peer_checkpoint_interval: int | None = flag(
        None,
        "with --max-restarts: copy the trainers' states to the memory of other processes every N rollouts, and go on "
        "from there where that is newer than the checkpoint; every node needs host memory for the weights and "
        "optimizer states of its ranks, twice while they are copied, and with several nodes for as much of another "
        "node's",
        needs="max_restarts",
        at_least=1,
    )
    elastic_dp: bool = flag(
        False,
        "with --max-restarts: on fewer trainer GPUs where lost ones do not come back; fewer data-parallel ranks share "
        "the same global batch",
        needs="max_restarts",
    )
    resume: str | None = flag(
        None,
        "auto: go on from what --save holds, if it holds an iteration, else begin as the other flags say; never: of a "
        "run's checkpoint load the weights alone; or the checkpoint root of a run to go on from",
    )
    fresh_output: bool = flag(
        False,
        "where --output-dir or --save holds an earlier run, move it to <dir>.1 (.2, ...) and begin anew; without it, "
        "--resume auto or --load of that directory such a run is refused",
    )
    stall_timeout: float = flag(
        1800.0,
        "seconds without any progress after which a phase is stalled, if that is more than six times its median: the "
        "stacks of all processes are written to stall_report.txt; 0 = never",
        at_least=0,
    )
    on_stall: str = flag("abort", "what then becomes of the run: it ends, or waits on", choices=("abort", "report"))
    max_group_retries: int = flag(
        3, "times that a group whose generation failed is tried again (--on-sample-error retry)", at_least=0
    )
