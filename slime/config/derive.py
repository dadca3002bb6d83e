"""Values that follow from other flags: small pure functions, and `derive_flags`, which applies them.

Nothing here reads a file or judges a value: where the input is inconsistent a function passes it through, and the
rules say why it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from slime.algorithms.estimators import ESTIMATORS
from slime.config.args import Args

GPUS_OF_A_ROLLOUT_ONLY_NODE = 8
FULLY_ASYNC_ROLLOUT = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def derive_flags(
    args: Args, explicit: set[str], *, kind_of: Callable[[str | None], str | None], now: str
) -> dict[str, Any]:
    """All derived values, attribute -> value.

    Args:
        args: parsed flags; `args.accelerator` is resolved already.
        explicit: attributes whose flags are on the command line.
        kind_of: "megatron", "hf" or None for a checkpoint path.
        now: time stamp for the default output directory.
    """
    evaluation = evaluation_only(args)
    args = Args.of(vars(args) | evaluation)
    return {
        **evaluation,
        # each tracker has two names: its switch, and its value of --tracker
        "use_wandb": args.use_wandb or "wandb" in args.tracker,
        "use_tensorboard": args.use_tensorboard or "tensorboard" in args.tracker,
        **devices(args, explicit),
        **checkpoint_source(
            load_kind=kind_of(args.load),
            ref_load=args.ref_load,
            # --ckpt-step is of what training starts from, also where that is --ref-load
            ref_ckpt_step=first(args.ckpt_step, args.ref_ckpt_step),
            hf_checkpoint=args.hf_checkpoint,
            start_rollout_id=args.start_rollout_id,
        ),
        **batches(args),
        **losses(args, explicit),
        **dump_templates(args.dump_details, rollout=args.save_debug_rollout_data, train=args.save_debug_train_data),
        "log_probs_max_tokens_per_gpu": first(args.log_probs_max_tokens_per_gpu, args.max_tokens_per_gpu),
        **checkpoint_contents(args.checkpoint_contents, no_save_optim=args.no_save_optim),
        "use_pytorch_profiler": args.use_pytorch_profiler or args.profile or "profile_target" in explicit,
        "eval_reward_key": first(args.eval_reward_key, args.reward_key),
        "eval_function_path": first(args.eval_function_path, args.rollout_function_path),
        "eval_max_context_len": first(args.eval_max_context_len, args.rollout_max_context_len),
        "update_weights_in_flight": first(
            args.update_weights_in_flight,
            keeps_requests_in_flight(args.rollout_function_path) and not args.deterministic,
        ),
        "rollout_max_prompt_len": longest_prompt(args.rollout_max_prompt_len, context=args.rollout_max_context_len),
        "save_interval": first(args.save_interval, 1 if args.release_train else None),
        "output_dir": args.output_dir or args.save or f"outputs/{now}",
    }


def first(given: Any, fallback: Any) -> Any:
    """`given`, unless it is None."""
    return fallback if given is None else given


def keeps_requests_in_flight(rollout_function_path: str) -> bool:
    """Whether a rollout function leaves requests in the engines when it returns."""
    return rollout_function_path.replace(":", ".") == FULLY_ASYNC_ROLLOUT


def evaluation_only(args: Args) -> dict[str, Any]:
    """What --eval-only sets, and --num-rollout 0, which is its other name.

    Nothing is trained, so batch sizes are only a formality, and of a checkpoint only the weights are read.
    """
    if not args.eval_only and args.num_rollout != 0:
        return {}
    return {
        "eval_only": True,
        "num_rollout": 0,
        "eval_interval": first(args.eval_interval, 1),
        "rollout_batch_size": first(args.rollout_batch_size, 1),
        "num_steps_per_rollout": None,
        "no_load_optim": True,
        "no_load_rng": True,
    }


# ---- devices


def devices(args: Args, explicit: set[str]) -> dict[str, Any]:
    """Who runs, on how many GPUs (slots), and who gives memory back."""
    train_only = args.debug_train_only or args.load_debug_rollout_data is not None
    use_critic = ESTIMATORS[args.advantage_estimator].needs_critic and not (args.eval_only or args.debug_rollout_only)
    nodes, per_node = (
        args.actor_num_nodes,
        trainer_slots(
            args.accelerator, args.actor_num_gpus_per_node, is_explicit="actor_num_gpus_per_node" in explicit
        ),
    )
    external = args.rollout_external_engine_addrs
    if external:
        rollout_gpus: int | None = len(external) * args.rollout_num_gpus_per_engine
    else:
        rollout_gpus = engine_slots(
            args.rollout_num_gpus,
            colocate=args.colocate,
            debug_train_only=train_only,
            actor_gpus=nodes * per_node,
        )
    if args.debug_rollout_only and not external and rollout_gpus is not None:
        # nodes that stand for the trainer where only engines run
        per_node = min(GPUS_OF_A_ROLLOUT_ONLY_NODE, rollout_gpus)
        nodes, per_node = (rollout_gpus // per_node, per_node) if per_node > 0 else (0, 0)
    return {
        "debug_train_only": train_only,
        "colocate": args.colocate and not args.debug_rollout_only,
        "rollout_external": bool(external),
        "rollout_num_gpus": rollout_gpus,
        "actor_num_nodes": nodes,
        "actor_num_gpus_per_node": per_node,
        "use_critic": use_critic,
        "critic_num_nodes": nodes,
        "critic_num_gpus_per_node": per_node,
        "distributed_backend": first(args.distributed_backend, backend_of(args.accelerator)),
        **offloads(args, use_critic=use_critic, has_engines=not train_only),
    }


def trainer_slots(accelerator: str, given: int, *, is_explicit: bool) -> int:
    """Trainer GPUs per node; without a GPU one process is the default, for eight would share a few cores."""
    return 1 if accelerator == "cpu" and not is_explicit else given


def engine_slots(given: int | None, *, colocate: bool, debug_train_only: bool, actor_gpus: int) -> int | None:
    """GPUs of all engines: none without engines, the trainer's when they are shared, else as given."""
    if debug_train_only:
        return 0
    return actor_gpus if given is None and colocate else given


def backend_of(accelerator: str) -> str:
    """What torch's collectives run on."""
    return "gloo" if accelerator == "cpu" else "nccl"


def offloads(args: Args, *, use_critic: bool, has_engines: bool) -> dict[str, bool]:
    """Whether trainer and engines release their memory for each other.

    Unset means: where they share GPUs, yes; actor and critic always do. On a CPU nothing could be freed, so it stays
    off there.
    """
    on_gpu = args.accelerator != "cpu"
    is_useful = args.colocate and has_engines and on_gpu
    train = args.offload or first(args.offload_train, is_useful or (use_critic and on_gpu))
    rollout = args.offload or first(args.offload_rollout, is_useful)
    # ended trainers hold no memory
    train = train and not (args.debug_rollout_only or (args.colocate and args.release_train))
    return {
        "offload_train": train,
        "offload_rollout": rollout and not args.debug_rollout_only,
        # What is paused is kept by slime; Megatron's own copies in host memory would double it.
        "disable_grad_buffers_cpu_backup": train,
        "disable_param_buffers_cpu_backup": train,
    }


# ---- checkpoints and dumps


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
    one: None here); everything else is a set of initial weights for a run that starts at rollout 0.
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


def checkpoint_contents(given: list[str] | None, *, no_save_optim: bool) -> dict[str, Any]:
    """The parts of a checkpoint, each once, from words that may hold several between commas."""
    if given is None:
        parts = ["model", "rng"] if no_save_optim else ["model", "optimizer", "rng"]
    else:
        parts = list(dict.fromkeys(part.strip() for word in given for part in word.split(",") if part.strip()))
    return {"checkpoint_contents": parts, "no_save_optim": no_save_optim or "optimizer" not in parts}


def dump_templates(directory: str | None, *, rollout: str | None, train: str | None) -> dict[str, str | None]:
    """Where samples and trainer inputs are dumped: --dump-details is short for both."""
    root = directory and directory.rstrip("/")
    return {
        "save_debug_rollout_data": f"{root}/rollout_data/{{rollout_id}}.pt" if directory else rollout,
        "save_debug_train_data": f"{root}/train_data/{{rollout_id}}.pt" if directory else train,
    }


# ---- batches


def batches(args: Args) -> dict[str, Any]:
    """Batch arithmetic."""
    return {
        "global_batch_size": samples_per_step(
            args.global_batch_size,
            num_steps=args.num_steps_per_rollout,
            num_samples=(args.rollout_batch_size or 0) * args.n_samples_per_prompt,
        ),
        "over_sampling_batch_size": first(args.over_sampling_batch_size, args.rollout_batch_size),
        "balance_data": args.balance_data or (args.balance_by_flops and args.use_dynamic_batch_size),
        # A group of one has no standard deviation to divide by.
        "grpo_std_normalization": args.grpo_std_normalization and args.n_samples_per_prompt > 1,
    }


def samples_per_step(given: int | None, *, num_steps: int | None, num_samples: int) -> int:
    """The global batch size: as given, else a rollout's samples split evenly over its train steps (default: one)."""
    return given if given is not None else num_samples // max(1, num_steps or 1)


def rollouts_of_epochs(num_epoch: int | None, *, num_rows: int | None, rollout_batch_size: int | None) -> int | None:
    """Rollouts of so many passes over the prompts, of which each has at least one; None where a number is missing."""
    if num_epoch is None or not num_rows or not rollout_batch_size or rollout_batch_size < 0:
        return None
    return num_epoch * max(1, num_rows // rollout_batch_size)


def longest_prompt(given: int | None, *, context: int | None) -> int | None:
    """The longest prompt to keep; a context limit leaves room for at least one response token."""
    return context - 1 if given is None and context is not None else given


# ---- losses and data sets


def losses(args: Args, explicit: Collection[str]) -> dict[str, Any]:
    """Parameters of losses that follow from others."""
    return {
        "eps_clip_high": first(args.eps_clip_high, args.eps_clip),
        "use_routing_replay": args.use_routing_replay or args.use_rollout_routing_replay,
        **aggregation(
            per_token=args.calculate_per_token_loss,
            mode=args.loss_agg_mode,
            are_both_given={"calculate_per_token_loss", "loss_agg_mode"} <= set(explicit),
        ),
    }


def aggregation(*, per_token: bool, mode: str, are_both_given: bool) -> dict[str, Any]:
    """How tokens become one number; --calculate-per-token-loss is another name of --loss-agg-mode token-mean."""
    if not are_both_given:
        per_token = per_token or mode == "token-mean"
        mode = "token-mean" if per_token else mode
    return {"calculate_per_token_loss": per_token, "loss_agg_mode": mode}


def raw_eval_datasets(eval_prompt_data: list[str] | None) -> list[dict[str, Any]]:
    """NAME PATH pairs as one mapping per data set; a single value is the path of a set named "aime"."""
    values = eval_prompt_data or []
    if len(values) == 1:
        values = ["aime", *values]
    return [{"name": name, "path": path} for name, path in zip(values[::2], values[1::2], strict=False)]
