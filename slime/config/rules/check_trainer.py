"""Checks of the flags of the trainer's processes: their environment, what a checkpoint holds, what is profiled.

One small function per rule, as in validate.py; each reads `args` after derivation and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from slime.config.args import Args
from slime.utils.names import nearest

CHECKPOINT_PARTS = ("model", "optimizer", "rng", "hf")

_PROCESS_GROUP = "slime gives every rank its own"
_BOTH_ENDS = "the engines run with the same value, and the weight sync fails where the two differ"
_SAVER = "it follows from --offload-train"
OWNED_ENV_VARS = {
    "RANK": _PROCESS_GROUP,
    "WORLD_SIZE": _PROCESS_GROUP,
    "LOCAL_RANK": _PROCESS_GROUP,
    "MASTER_ADDR": _PROCESS_GROUP,
    "MASTER_PORT": _PROCESS_GROUP,
    "CUDA_VISIBLE_DEVICES": "Ray shows every rank the GPU of its slot",
    "CUDA_DEVICE_MAX_CONNECTIONS": "tensor parallelism counts on kernels being queued in one order, which needs 1",
    "NCCL_CUMEM_ENABLE": _BOTH_ENDS,
    "NCCL_NVLS_ENABLE": _BOTH_ENDS,
    "PYTHONPATH": "slime passes on the driver's; set it where train.py is started",
    "HF_HUB_OFFLINE": "slime fetches nothing from a model hub during a run",
    "TOKENIZERS_PARALLELISM": "tokenizer threads and worker processes lock each other up",
    "PYTHONUNBUFFERED": "the logs are read while the run goes on",
    "TMS_INIT_ENABLE": _SAVER,
    "TMS_INIT_ENABLE_CPU_BACKUP": _SAVER,
}
"""Variables that slime sets for a trainer process -> why they cannot be changed."""


def check_train_env_vars(args: Args) -> Iterable[str]:
    """Names and values can be an environment, and contradict nothing that slime sets itself."""
    for name, value in args.train_env_vars.items():
        given = f"--train-env-vars: {name}={value!r}"
        if not name or "=" in name or "\0" in name:
            yield f"--train-env-vars: {name!r} cannot be the name of a variable; use letters, digits and _."
        elif not isinstance(value, str):
            yield f"{given} is no text; write the value in double quotes, as in {json.dumps({name: str(value)})}."
        elif "\0" in value:
            yield f"{given} holds a null character; leave it out."
        if name in OWNED_ENV_VARS:
            yield f"{given} cannot be set: {OWNED_ENV_VARS[name]}; leave it out."


def check_checkpoint_contents(args: Args) -> Iterable[str]:
    """Parts that exist, the weights among them, and no flag that says the opposite."""
    parts, given = args.checkpoint_contents, ",".join(args.checkpoint_contents)
    for part in parts:
        if part not in CHECKPOINT_PARTS:
            near = nearest(part, CHECKPOINT_PARTS)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(CHECKPOINT_PARTS)}."
            yield f"--checkpoint-contents {part!r} is no part of a checkpoint: {hint}"
    if "model" not in parts:
        yield f"--checkpoint-contents {given!r} lacks model: nothing could be loaded from it; add model."
    if args.no_save_optim and "optimizer" in parts:
        yield f"--no-save-optim contradicts --checkpoint-contents {given}; leave one of the two out."
    if args.save_hf and "hf" in parts:
        yield (
            f"--checkpoint-contents {given} and --save-hf {args.save_hf} would export the same weights twice; leave "
            "hf or --save-hf out."
        )


def check_profile(args: Args) -> Iterable[str]:
    """Something is recorded, by ranks that exist, in rollouts that the run has."""
    if not args.use_pytorch_profiler:
        return
    start, end = args.profile_step_start, args.profile_step_end
    if start >= end:
        yield (
            f"--profile-step-start {start} must be less than --profile-step-end {end}: the rollouts from the first up "
            "to, without, the second are recorded."
        )
    elif args.num_rollout and start >= args.num_rollout:
        yield (
            f"--profile-step-start {start} is never reached with --num-rollout {args.num_rollout}, whose last rollout "
            f"is {args.num_rollout - 1}; lower it."
        )
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    for rank in args.profile_ranks:
        if not 0 <= rank < world:
            yield f"--profile-ranks {rank}: there are {world} trainer ranks, 0 to {world - 1}; choose among them."
    if "train_overall" in args.profile_target and len(set(args.profile_target)) > 1:
        yield (
            f"--profile-target {' '.join(args.profile_target)}: train_overall holds the others already, and a process "
            "has one profiler; give it alone, or only the parts."
        )


def check_indexers(args: Args) -> Iterable[str]:
    """Indexers are frozen where there are some; the error is one of the flag, not of the run."""
    if args.freeze_indexer and args.experimental_attention_variant != "dsa":
        yield (
            "--freeze-indexer: the model has no sparse attention (--experimental-attention-variant dsa), so there is "
            "no indexer to freeze; leave it out."
        )


INT4_FLAG = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"


def check_int4_training(args: Args, environment: Mapping[str, str]) -> Iterable[str]:
    """Say that weights are not rounded to int4 in training, where the environment asks for it.

    Args:
        environment: of this process, which the trainers get, too.
    """
    if str((dict(environment) | args.train_env_vars).get(INT4_FLAG, "0")).strip() in ("", "0"):
        return
    yield (
        f"the environment variable {INT4_FLAG} asks for training with weights rounded to int4, which is not supported "
        "yet: engines in int4 would be trained as if they were in 16 bit; unset it for that."
    )


TRAINER_CHECKS = (check_train_env_vars, check_checkpoint_contents, check_profile, check_indexers)
