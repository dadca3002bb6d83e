"""Flags for running a part of the system, for looking inside, and for asking instead of running. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag
from slime.plan.devices import DEFAULT_GPU, DEVICE_CHOICES


@dataclass
class AskFlags:
    """Instead of a run. Nothing is started; --help GROUP has the flags of one group."""

    dry_run: bool = flag(False, "check everything, print the plan of the run, and end with status 0 or 2")
    dry_run_json: str | None = flag(None, "also write the plan to this JSON file", needs="dry_run")
    plan_device: str | None = flag(
        None,
        f"GPU that the plan is for (default: this machine's, without one {DEFAULT_GPU})",
        choices=DEVICE_CHOICES,
        needs="dry_run",
    )
    explain: str | None = flag(None, "say what a flag is, whether it works, and its value on this command line")
    list_unsupported: bool = flag(False, "list the flags that are declared but not built yet")
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
