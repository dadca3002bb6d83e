"""Values that follow from other flags: small pure functions, and `derive_flags`, which applies them.

Nothing here reads a file or judges a value: where the input is inconsistent a function passes it through, and
validate.py says why it is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def derive_flags(
    args: argparse.Namespace, explicit: set[str], *, kind_of: Callable[[str | None], str | None], now: str
) -> dict[str, Any]:
    """All derived values, attribute -> value.

    Args:
        args: parsed flags; `args.accelerator` is resolved already.
        explicit: attributes whose flags are on the command line.
        kind_of: "megatron", "hf" or None for a checkpoint path.
        now: time stamp for the default output directory.
    """
    actor_gpus_per_node = trainer_slots(
        args.accelerator, args.actor_num_gpus_per_node, is_explicit="actor_num_gpus_per_node" in explicit
    )
    return {
        "actor_num_gpus_per_node": actor_gpus_per_node,
        "rollout_num_gpus": engine_slots(
            args.rollout_num_gpus,
            colocate=args.colocate,
            debug_train_only=args.debug_train_only,
            actor_gpus=args.actor_num_nodes * actor_gpus_per_node,
        ),
        **offloads(args.offload, args.offload_train, args.offload_rollout),
        **checkpoint_source(
            load_kind=kind_of(args.load),
            ref_load=args.ref_load,
            ref_ckpt_step=args.ref_ckpt_step,
            hf_checkpoint=args.hf_checkpoint,
            start_rollout_id=args.start_rollout_id,
        ),
        "global_batch_size": samples_per_step(
            args.global_batch_size,
            num_steps=args.num_steps_per_rollout,
            num_samples=(args.rollout_batch_size or 0) * args.n_samples_per_prompt,
        ),
        # A group of one has no standard deviation to divide by.
        "grpo_std_normalization": args.grpo_std_normalization and args.n_samples_per_prompt > 1,
        "over_sampling_batch_size": first(args.over_sampling_batch_size, args.rollout_batch_size),
        "eps_clip_high": first(args.eps_clip_high, args.eps_clip),
        "log_probs_max_tokens_per_gpu": first(args.log_probs_max_tokens_per_gpu, args.max_tokens_per_gpu),
        **checkpoint_contents(args.checkpoint_contents, no_save_optim=args.no_save_optim),
        "use_pytorch_profiler": args.use_pytorch_profiler or args.profile or "profile_target" in explicit,
        "eval_reward_key": first(args.eval_reward_key, args.reward_key),
        "eval_function_path": first(args.eval_function_path, args.rollout_function_path),
        "eval_max_context_len": first(args.eval_max_context_len, args.rollout_max_context_len),
        "rollout_max_prompt_len": longest_prompt(args.rollout_max_prompt_len, context=args.rollout_max_context_len),
        "rollout_global_dataset": True,
        "output_dir": args.output_dir or args.save or f"outputs/{now}",
    }


def first(given: Any, fallback: Any) -> Any:
    """`given`, unless it is None."""
    return fallback if given is None else given


def trainer_slots(accelerator: str, given: int, *, is_explicit: bool) -> int:
    """Trainer GPUs per node; without a GPU one process is the default, for eight would share a few cores."""
    return 1 if accelerator == "cpu" and not is_explicit else given


def engine_slots(given: int | None, *, colocate: bool, debug_train_only: bool, actor_gpus: int) -> int | None:
    """GPUs of all engines: none without engines, the trainer's when they are shared, else as given."""
    if debug_train_only:
        return 0
    return actor_gpus if given is None and colocate else given


def offloads(both: bool, train: bool | None, rollout: bool | None) -> dict[str, bool]:
    """Whether trainer and engines release their memory; unset is False (releasing is not built yet)."""
    return {"offload_train": both or bool(train), "offload_rollout": both or bool(rollout)}


def checkpoint_source(
    *,
    load_kind: str | None,
    ref_load: str | None,
    ref_ckpt_step: int | None,
    hf_checkpoint: str | None,
    start_rollout_id: int | None,
) -> dict[str, Any]:
    """What the trainer loads: --load if it is a checkpoint, else --ref-load, else --hf-checkpoint.

    Only a Megatron checkpoint under --load is a run to resume (optimizer, random state, rollout id after the saved
    one: None here);
    everything else is a set of initial weights for a run that starts at rollout 0.
    """
    if load_kind == "megatron":
        return {"start_rollout_id": start_rollout_id}
    fresh = {
        "no_load_optim": True,
        "no_load_rng": True,
        "finetune": True,
        "start_rollout_id": first(start_rollout_id, 0),
    }
    if load_kind == "hf":
        return fresh
    fresh["load"] = ref_load or hf_checkpoint
    return fresh if ref_ckpt_step is None else fresh | {"ckpt_step": ref_ckpt_step}


def samples_per_step(given: int | None, *, num_steps: int | None, num_samples: int) -> int:
    """The global batch size: as given, else a rollout's samples split evenly over its train steps (default: one)."""
    return given if given is not None else num_samples // max(1, num_steps or 1)


def checkpoint_contents(given: list[str] | None, *, no_save_optim: bool) -> dict[str, Any]:
    """The parts of a checkpoint, each once, from words that may hold several between commas."""
    if given is None:
        parts = ["model", "rng"] if no_save_optim else ["model", "optimizer", "rng"]
    else:
        parts = list(dict.fromkeys(part.strip() for word in given for part in word.split(",") if part.strip()))
    return {"checkpoint_contents": parts, "no_save_optim": no_save_optim or "optimizer" not in parts}


def longest_prompt(given: int | None, *, context: int | None) -> int | None:
    """The longest prompt to keep; a context limit leaves room for at least one response token."""
    return context - 1 if given is None and context is not None else given


def raw_eval_datasets(eval_prompt_data: list[str] | None) -> list[dict[str, Any]]:
    """NAME PATH pairs as one mapping per data set; a single value is the path of a set named "aime"."""
    values = eval_prompt_data or []
    if len(values) == 1:
        values = ["aime", *values]
    return [{"name": name, "path": path} for name, path in zip(values[::2], values[1::2], strict=False)]
