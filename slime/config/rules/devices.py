"""Rules of devices, of the trainer's processes and of weight transport.

No device is looked at: a layout for machines that are not here is judged all the same. Only packages are looked for on
this machine.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Collection, Iterable, Mapping

from slime.config.args import Args
from slime.config.derive import backend_of
from slime.utils.errors import UsageError
from slime.utils.names import nearest

_ADDRESS = re.compile(r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d+)/?")


def check_trainer(args: Args) -> Iterable[str]:
    """A size that others divide by (that it divides the trainer's GPUs is checked with Megatron's flags)."""
    if args.tensor_model_parallel_size < 1:
        yield f"--tensor-model-parallel-size {args.tensor_model_parallel_size} must be at least 1."


def check_backend(args: Args) -> Iterable[str]:
    """The collectives are those of the device."""
    expected = backend_of(args.accelerator)
    if args.accelerator in ("cuda", "cpu") and args.distributed_backend != expected:
        yield (
            f"--distributed-backend {args.distributed_backend} does not work with --accelerator {args.accelerator}, "
            f"whose trainers need {expected}; leave it out."
        )


def check_nodes(args: Args, explicit: Collection[str]) -> Iterable[str]:
    """A node gives the trainer no more GPUs than it has, where that is said of nodes that engines share with it.

    Elsewhere it may be said of the engines' nodes alone, and slots of one machine have no bound.
    """
    each, per_node = args.actor_num_gpus_per_node, args.num_gpus_per_node
    is_said = args.colocate and args.accelerator != "cpu" and "num_gpus_per_node" in explicit
    if not is_said or not 0 < per_node < each:
        return
    nodes, rest = divmod(args.actor_num_nodes * each, per_node)
    fewer = f"--actor-num-gpus-per-node {per_node}" + (f" with --actor-num-nodes {nodes}" if not rest else "")
    yield (
        f"--actor-num-gpus-per-node {each} is more than a node has (--num-gpus-per-node {per_node}); give {fewer}, "
        f"or --num-gpus-per-node {each}."
    )


def check_engines(args: Args) -> Iterable[str]:
    """There are engines, and each gets its GPUs."""
    if args.debug_train_only or args.rollout_external:
        return
    gpus, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if gpus is None:
        yield "--rollout-num-gpus is required without --colocate: the GPUs (slots) of all engines together."
    elif args.sglang_config is None and per_engine > 0 and gpus % per_engine:
        yield f"--rollout-num-gpus {gpus} does not divide into engines of --rollout-num-gpus-per-engine {per_engine}."


def check_external_engines(args: Args) -> Iterable[str]:
    """Addresses of engines that run already have a host and a port (V14)."""
    for address in args.rollout_external_engine_addrs or []:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[1]) < 65536:
            yield (
                f"--rollout-external-engine-addrs {address} is no address; write host:port, http://host:port or "
                "[IPv6]:port, with a port from 1 to 65535."
            )


def check_offload(args: Args) -> Iterable[str]:
    """Releasing memory is refused where it cannot do anything (V16, V17)."""
    for name in ("offload-train", "offload-rollout"):
        if args.accelerator == "cpu" and vars(args)[name.replace("-", "_")]:
            yield f"--{name} (or --offload) is refused with --accelerator cpu: nothing could be freed; leave it out."


def check_memory_saver(args: Args, environment: Mapping[str, str]) -> Iterable[str]:
    """What releases GPU memory is installed here, and goes with how torch allocates.

    Args:
        environment: of this process, which the trainers get, too.
    """
    from slime.utils import memory_saver

    if args.offload_train:
        try:
            memory_saver.environment({**environment, **args.train_env_vars})
        except UsageError as error:
            yield from error.messages
    if args.offload_rollout and not memory_saver.is_installed():
        yield (
            f"--offload-rollout needs the package {memory_saver.PACKAGE}, which is not installed; install it, or give "
            "--no-offload-rollout."
        )


def check_debug_modes(args: Args) -> Iterable[str]:
    """A run starts trainers or engines or both (V16)."""
    if args.debug_rollout_only and args.debug_train_only:
        other = "--debug-train-only" if args.load_debug_rollout_data is None else "--load-debug-rollout-data"
        yield f"--debug-rollout-only starts no trainers and {other} no engines, so nothing is left; keep one of them."


def check_transport(args: Args) -> Iterable[str]:
    """What weights on disk and their deltas need (V27)."""
    if args.update_weight_transport == "disk" and not args.update_weight_disk_dir:
        yield "--update-weight-transport disk needs --update-weight-disk-dir, a directory that all hosts share."
    if args.update_weight_local_checkpoint_dir and args.rollout_external:
        yield (
            f"--update-weight-local-checkpoint-dir {args.update_weight_local_checkpoint_dir} does not go with "
            "--rollout-external-engine-addrs: what keeps it runs in engines that the run starts; leave it out, with "
            "--update-weight-mode full."
        )
    if args.update_weight_mode != "delta":
        return
    if args.update_weight_delta_checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        yield (
            "--update-weight-delta-checksum blake3 needs the package blake3, which is not installed; install it here "
            "and on the engines' hosts, or give xxh3-128."
        )
    if args.update_weight_transport != "disk":
        yield (
            f"--update-weight-mode delta needs --update-weight-transport disk, not {args.update_weight_transport}: "
            "only files can hold changed bytes."
        )
    if args.colocate:
        yield (
            "--update-weight-mode delta does not go with --colocate, where engines read the trainer's memory; leave "
            "one of the two out."
        )
    if not args.update_weight_local_checkpoint_dir:
        yield (
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, where each engine's host applies "
            "the deltas."
        )


def check_release_train(args: Args) -> Iterable[str]:
    """Trainers that end while engines generate have everything on disk (V27)."""
    if not args.release_train:
        return
    if args.use_critic:
        yield "--release-train does not go with a critic (--advantage-estimator ppo); leave one of the two out."
    if args.keep_old_actor:
        yield "--release-train does not go with --keep-old-actor, whose weights would be lost; leave one of them out."
    if not args.save:
        yield "--release-train needs --save: the trainers start again from the checkpoint."
    if args.save_interval not in (None, 1):
        yield (
            f"--release-train needs --save-interval 1, not {args.save_interval}: what is not saved ends with the "
            "trainers."
        )
    if args.async_save:
        yield "--release-train does not go with --async-save: the next trainers need what is saved."
    missing = [part for part in ("optimizer", "rng") if part not in args.checkpoint_contents]
    if missing:
        yield (
            f"--release-train needs --checkpoint-contents with {' and '.join(missing)}: the trainers start again from "
            "the checkpoint in the middle of the run."
        )
    if (args.update_weight_transport, args.update_weight_mode) != ("disk", "full"):
        yield (
            f"--release-train needs --update-weight-transport disk and --update-weight-mode full, not "
            f"{args.update_weight_transport} and {args.update_weight_mode}."
        )


def check_peer_copies(args: Args) -> Iterable[str]:
    """Copies of trainers in memory are of use where trainers stay, and the data source's state is on disk."""
    if args.peer_checkpoint_interval is None:
        return
    if not args.save:
        yield "--peer-checkpoint-interval needs --save, where the state of the data source is kept."
    if args.release_train:
        yield (
            "--peer-checkpoint-interval does not go with --release-train, whose trainers end after every rollout with "
            "everything saved; leave one of the two out."
        )


def missing_transport(args: Args) -> Iterable[str]:
    """Say that what carries training data is not installed."""
    if args.rollout_data_transport == "nixl" and importlib.util.find_spec("nixl") is None:
        yield (
            "--rollout-data-transport nixl needs the package nixl, which is not installed; install it on every node, "
            "or leave it out (object-store)."
        )


DEVICE_CHECKS = (
    check_backend,
    check_engines,
    check_external_engines,
    check_offload,
    check_debug_modes,
    check_transport,
    check_release_train,
    check_peer_copies,
)


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
