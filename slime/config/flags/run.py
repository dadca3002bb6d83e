"""Flags of the run as a whole: devices, faults, metrics, profiles, debugging, and questions instead of a run."""

from __future__ import annotations

from dataclasses import dataclass

from slime.checkpoints.rollout_files import DEFAULT_KEEP
from slime.config.parser import flag
from slime.plan.times import DEFAULT_GPU, DEVICE_CHOICES
from slime.plugins import OWN_TRACKERS, TRACKERS

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
    offload_train: bool | None = flag(
        None, "release the trainer's GPU memory while engines generate; unset, where both do not fit"
    )
    offload_rollout: bool | None = flag(None, "release the engines' GPU memory while the trainer works")
    distributed_backend: str | None = flag(
        None, "the trainer's collectives (default: nccl; with --accelerator cpu gloo)", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "time limit of a collective operation", at_least=1)
    compile_cache_dir: str | None = flag(
        None,
        "directory, of the same name on every host, where trainers and engines keep compiled kernels, by the versions "
        "of what compiled them; tools/prewarm.py fills one for an image",
    )


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
    elastic_rollout: bool = flag(
        False,
        "let engines join and leave while the run goes on: those that `python -m slime.backends.sglang_utils.join` "
        "brings, and one on each place of the run's Ray that is free, on new nodes too",
        needs="use_fault_tolerance",
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
        3,
        "times that a group whose generation failed (--on-sample-error retry), or a sample whose reward is untrusted "
        "(--on-untrusted-reward retry), is tried again",
        at_least=0,
    )


@dataclass
class ObservabilityFlags:
    """Metrics and trackers. metrics.jsonl is always written."""

    output_dir: str | None = flag(
        None, "directory of metrics.jsonl, logs/ and curves.png (default: --save, else outputs/<time>)"
    )
    dashboard_port: int = flag(
        0,
        "port of the pages over the run (docs/dashboard.md), whose URL is logged at the start; 0 = a free one, "
        "-1 = no pages",
        at_least=-1,
    )
    dashboard_host: str = flag("127.0.0.1", "address that the pages are served at; the URL holds a token")
    prometheus_port: int | None = flag(
        None,
        "port of /metrics, one Prometheus target for driver, trainer, routers and engines (docs/prometheus.md)",
        at_least=1,
        at_most=65535,
    )
    prometheus_host: str = flag("127.0.0.1", "address that /metrics is served at", needs="prometheus_port")
    tracker: list[str] = flag(
        [],
        "where metrics go besides metrics.jsonl (repeatable): "
        f"{', '.join(dict.fromkeys((*OWN_TRACKERS, *TRACKERS)))}, or your own by its path module:Class; wandb = "
        "--use-wandb, tensorboard = --use-tensorboard",
        repeatable=True,
    )
    log_passrate: bool = flag(False, "also log pass@k")
    log_multi_turn: bool = flag(False, "also log turns, and response lengths with and without what tools wrote")
    log_reward_category: str | None = flag(
        None,
        "key of a dict reward: log the share of the samples with each of its values",
        needs=("reward_key", "custom_reward_post_process_path"),
    )
    log_correct_samples: bool = flag(False, "also log the share and the lengths of the samples with reward 1")
    log_eval_samples: int = flag(
        0,
        "prompts of each evaluation set whose responses are written to eval_samples.jsonl and shown by trackers",
        needs="eval_interval",
        at_least=0,
    )
    keep_rollouts: str = flag(
        DEFAULT_KEEP,
        "which rollouts keep their samples in <output-dir>/rollouts/*.parquet: all, none, or a list of last:N (the "
        "newest), every:N (and each whose id is a multiple of N) and max-gb:X (of all of them)",
    )
    rollout_record_fraction: float = flag(
        1.0, "share of a rollout's groups whose samples are recorded there", at_least=0, at_most=1
    )
    alarms_config: str | None = flag(
        None, "YAML file of thresholds of alarms (docs/alarms.md), or off for none (default: those of the page)"
    )
    use_wandb: bool = flag(False, "log to Weights & Biases")
    wandb_mode: str | None = flag(
        None, "overrides WANDB_MODE", choices=("online", "offline", "disabled"), needs="use_wandb"
    )
    wandb_dir: str | None = flag(None, "directory of W&B's files", needs="use_wandb")
    wandb_key: str | None = flag(None, "W&B API key", needs="use_wandb")
    wandb_host: str | None = flag(None, "W&B server", needs="use_wandb")
    wandb_team: str | None = flag(None, "W&B entity", needs="use_wandb")
    wandb_group: str | None = flag(None, "W&B group, also the start of the run's name", needs="use_wandb")
    wandb_project: str | None = flag(None, "W&B project", needs="use_wandb")
    wandb_random_suffix: bool = flag(True, "no random suffix on the run's name", needs="use_wandb")
    wandb_run_id: str | None = flag(
        None,
        "go on with this W&B run (default: a run that is resumed from its own --save goes on with its own)",
        needs="use_wandb",
    )
    wandb_always_use_train_step: bool = flag(False, "count rollout and eval metrics in train steps", needs="use_wandb")
    use_tensorboard: bool = flag(False, "log to TensorBoard")
    tb_project_name: str | None = flag(
        None, "directory of TensorBoard files (default: TENSORBOARD_DIR)", needs="use_tensorboard"
    )
    tb_experiment_name: str | None = flag(
        None, "name of the run in TensorBoard (default: the time)", needs="use_tensorboard"
    )


PROFILE_TARGETS = ("train_overall", "train_actor", "train_log_probs")


@dataclass
class ProfileFlags:
    """Profile."""

    use_pytorch_profiler: bool = flag(
        False, "record the trainer with torch's profiler: <output-dir>/profile/*.json.gz, for chrome://tracing"
    )
    profile: bool = flag(False, "the same as --use-pytorch-profiler (nsys is not used)")
    profile_target: list[str] = flag(
        ["train_overall"],
        "what of a rollout's training to record: all of it, its train steps, its log-prob passes; turns profiling on",
        choices=PROFILE_TARGETS,
        nargs="+",
    )
    profile_ranks: list[int] = flag([0], "trainer ranks that record", nargs="+", needs="use_pytorch_profiler")
    profile_step_start: int = flag(
        10, "id of the first rollout that is recorded", needs="use_pytorch_profiler", at_least=0
    )
    profile_step_end: int = flag(
        12, "id of the first rollout that is no longer recorded", needs="use_pytorch_profiler", at_least=1
    )
    ray_timeline_path: str | None = flag(
        None, "JSON file that gets the timeline of all Ray actors' calls at the end, for chrome://tracing"
    )


@dataclass
class AskFlags:
    """Instead of a run. Nothing is started; --help GROUP has the flags of one group."""

    dry_run: bool = flag(False, "check everything, print the plan of the run, and end with status 0 or 2")
    dry_run_json: str | None = flag(None, "also write the plan to this JSON file", needs="dry_run")
    tune: bool = flag(
        False,
        "also look for the layout, micro-batches, recomputation, offloading and engines with the shortest rollout by "
        "the plan, and print that command line",
        needs="dry_run",
    )
    plan_device: str | None = flag(
        None,
        f"GPU that the plan is for (default: this machine's, without one {DEFAULT_GPU})",
        choices=DEVICE_CHOICES,
        needs="dry_run",
    )
    explain: str | None = flag(None, "say what a flag is, whether it works, and its value on this command line")
    list_unsupported: bool = flag(False, "list the flags of Megatron's that a run refuses, with the reason")
    completion: str | None = flag(
        None, 'print a completion script: eval "$(python train.py --completion bash)"', choices=("bash", "zsh", "tcsh")
    )


@dataclass
class DebugFlags:
    """Debug."""

    strict_flags: bool = flag(False, "flags without an effect on this command line are errors, not one warning")
    debug_train_only: bool = flag(False, "start no engines (supervised fine-tuning, replay)")
    debug_rollout_only: bool = flag(False, "start no trainers: generate, score, evaluate, dump")
    save_debug_rollout_data: str | None = flag(None, "template with {rollout_id}: file that gets a rollout's samples")
    load_debug_rollout_data: str | None = flag(
        None, "template with {rollout_id}: train on these samples instead of generating; starts no engines"
    )
    load_debug_rollout_data_subsample: float | None = flag(
        None,
        "share of the samples to take, half from each end",
        needs=("load_debug_rollout_data", "load_forge_rollout_data"),
    )
    load_forge_rollout_data: str | None = flag(
        None,
        "template with {rollout_id}: train on these samples, with live engines (slime.rollout.forge_load)",
        needs="rollout_function_path=slime.rollout.forge_load.generate_rollout",
    )
    save_debug_train_data: str | None = flag(
        None,
        "template with {rollout_id} (and {rank}, the writer's): file that gets every rank's samples as they were "
        "trained, with log-probs and advantages",
    )
    dump_details: str | None = flag(None, "directory of both kinds of dump, the tokenizer and the processor")
    memory_recorder: str = flag(
        "torch",
        "what records memory: torch (CUDA's allocator) or memray (host memory; pip install memray)",
        choices=("torch", "memray"),
        needs="record_memory_history",
    )
    record_memory_history: bool = flag(
        False, "record every allocation of the trainers, with stacks; a snapshot is written at the end"
    )
    memory_snapshot_dir: str = flag(".", "directory of memory snapshots", needs="record_memory_history")
    memory_snapshot_num_steps: int | None = flag(
        None, "rollouts to record before the snapshot is written", at_least=1, needs="record_memory_history"
    )


@dataclass
class CiFlags:
    """Checks during a run, which end it at the first number that cannot be right."""

    ci_test: bool = flag(
        False,
        "check each rollout and train step: finite numbers, entropy within its bounds, ppo_kl 0 at the first step of "
        "a rollout, KL 0 to an equal reference, trainer close to engine",
    )
    ci_disable_kl_checker: bool = flag(False, "do not check that ppo_kl and kl_loss begin at 0", needs="ci_test")
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, "largest mean difference of log-probs between trainer and engine", at_least=0, needs="ci_test"
    )
    ci_save_grad_norm: str | None = flag(
        None, "template with {role}, {rollout_id} and {step_id}: files that get the gradient norms", needs="ci_test"
    )
    ci_load_grad_norm: str | None = flag(
        None, "template of such files to compare the gradient norms with (within 1%%)", needs="ci_test"
    )
