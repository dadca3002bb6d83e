"""Rules of devices, of the trainer's processes and of weight transport.

No device is looked at: a layout for machines that are not here is judged all the same. Only packages are looked for on
this machine.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Mapping

from slime.config.args import Args
from slime.config.derive import backend_of
from slime.config.problems import Check, Rule, WithoutEffect, each, first_of, for_each, where
from slime.utils.errors import UsageError, did_you_mean
from slime.weights.transports import WeightTransport, transport_of

_ADDRESS = re.compile(r"(?:https?://)?(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d+)/?")

TRAINER = Rule(
    lambda a: a.tensor_model_parallel_size < 1,
    "--tensor-model-parallel-size {tensor_model_parallel_size} must be at least 1.",
)
"""A size that others divide by (that it divides the trainer's GPUs is checked with Megatron's flags)."""


def _fewer_gpus(args: Args) -> str:
    """The sentence on nodes that give the trainer more GPUs than they have."""
    each, per_node = args.actor_num_gpus_per_node, args.num_gpus_per_node
    nodes, rest = divmod(args.actor_num_nodes * each, per_node)
    fewer = f"--actor-num-gpus-per-node {per_node}" + (f" with --actor-num-nodes {nodes}" if not rest else "")
    return (
        f"--actor-num-gpus-per-node {each} is more than a node has (--num-gpus-per-node {per_node}); give {fewer}, "
        f"or --num-gpus-per-node {each}."
    )


# Where it is not said of nodes that engines share with the trainer, it may be said of the engines' nodes alone, and
# slots of one machine have no bound.
check_nodes = Rule(
    lambda a: a.colocate and a.accelerator != "cpu" and 0 < a.num_gpus_per_node < a.actor_num_gpus_per_node,
    _fewer_gpus,
    given="num_gpus_per_node",
)


def _is_address(address: str) -> bool:
    match = _ADDRESS.fullmatch(address)
    return match is not None and 0 < int(match[1]) < 65536


check_external_engines = for_each(
    lambda a: a.rollout_external_engine_addrs or [],
    lambda a, address: not _is_address(address),
    lambda a, address: (
        f"--rollout-external-engine-addrs {address} is no address; write host:port, http://host:port or [IPv6]:port, "
        "with a port from 1 to 65535."
    ),
)
"""Addresses of engines that run already have a host and a port."""


def check_memory_saver(args: Args, environment: Mapping[str, str]) -> Iterable[str]:
    """What releases GPU memory is installed here, and goes with how torch allocates.

    Args:
        environment: of this process, which the trainers get, too.
    """
    from slime.utils.accelerator import memory_saver

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


def no_engines_flag(args: Args) -> str:
    """The flag that says that no engines are started."""
    return "--debug-train-only" if args.load_debug_rollout_data is None else "--load-debug-rollout-data"


def way_of(args: Args) -> WeightTransport:
    """How weights get to engines, as far as files matter."""
    return transport_of(args.update_weight_transport, args.update_weight_mode)


def is_missing(package: str) -> bool:
    """Whether a package is not installed."""
    return importlib.util.find_spec(package) is None


def _missing_parts(args: Args) -> list[str]:
    """What a checkpoint that trainers start again from would lack."""
    return [part for part in ("optimizer", "rng") if part not in args.checkpoint_contents]


MISSING_TRANSPORT = Rule(
    lambda a: a.rollout_data_transport == "nixl" and is_missing("nixl"),
    "--rollout-data-transport nixl needs the package nixl, which is not installed; install it on every node, or leave "
    "it out (object-store).",
)
DEVICE_CHECKS: tuple[Check, ...] = (
    Rule(
        lambda a: a.accelerator in ("cuda", "cpu") and a.distributed_backend != backend_of(a.accelerator),
        lambda a: (
            f"--distributed-backend {a.distributed_backend} does not work with --accelerator {a.accelerator}, whose "
            f"trainers need {backend_of(a.accelerator)}; leave it out."
        ),
    ),
    where(
        lambda a: not (a.debug_train_only or a.rollout_external),
        Rule(
            lambda a: a.rollout_num_gpus is None,
            "--rollout-num-gpus is required without --colocate: the GPUs (slots) of all engines together.",
        ),
        Rule(
            lambda a: (
                a.sglang_config is None
                and a.rollout_num_gpus_per_engine > 0
                and (a.rollout_num_gpus or 0) % a.rollout_num_gpus_per_engine
            ),
            "--rollout-num-gpus {rollout_num_gpus} does not divide into engines of --rollout-num-gpus-per-engine "
            "{rollout_num_gpus_per_engine}.",
        ),
    ),
    check_external_engines,
    where(
        lambda a: a.accelerator == "cpu",
        *each(
            "offload_train offload_rollout",
            bool,
            "{option} (or --offload) is refused with --accelerator cpu: nothing could be freed; leave it out.",
        ),
    ),
    WithoutEffect(
        lambda a: a.compile_cache_dir and a.accelerator == "cpu",
        "--compile-cache-dir",
        "with --accelerator cpu, where no kernels are compiled",
        "leave it out",
    ),
    Rule(
        lambda a: a.debug_rollout_only and a.debug_train_only,
        lambda a: (
            f"--debug-rollout-only starts no trainers and {no_engines_flag(a)} no engines, so nothing is left; keep "
            "one of them."
        ),
    ),
    # weights on disk, and their deltas
    Rule(
        lambda a: way_of(a).is_over_files and not a.update_weight_disk_dir,
        "--update-weight-transport disk needs --update-weight-disk-dir, a directory that all hosts share.",
    ),
    Rule(
        lambda a: a.update_weight_local_checkpoint_dir and a.rollout_external,
        "--update-weight-local-checkpoint-dir {update_weight_local_checkpoint_dir} does not go with "
        "--rollout-external-engine-addrs: what keeps it runs in engines that the run starts; leave it out, with "
        "--update-weight-mode full.",
    ),
    where(
        lambda a: a.elastic_rollout,
        Rule(
            lambda a: a.colocate,
            "--elastic-rollout does not go with --colocate, whose engines read the trainer's memory, which one on "
            "another machine cannot; leave one of the two out (--rollout-num-gpus gives engines places of their own).",
        ),
        Rule(
            lambda a: a.update_weight_local_checkpoint_dir,
            "--elastic-rollout does not go with --update-weight-local-checkpoint-dir: an engine that joins has no "
            "copy of the earlier weights; leave one of the two out.",
        ),
        Rule(
            lambda a: a.prefill_num_servers or a.sglang_config,
            "--elastic-rollout does not go with --sglang-config or --prefill-num-servers: engines of one kind can "
            "join; leave it out.",
        ),
    ),
    where(
        lambda a: way_of(a).sends_changes,
        Rule(
            lambda a: a.update_weight_delta_checksum == "blake3" and is_missing("blake3"),
            "--update-weight-delta-checksum blake3 needs the package blake3, which is not installed; install it here "
            "and on the engines' hosts, or give xxh3-128.",
        ),
        Rule(
            lambda a: not way_of(a).is_over_files,
            "--update-weight-mode delta needs --update-weight-transport disk, not {update_weight_transport}: only "
            "files can hold changed bytes.",
        ),
        Rule(
            lambda a: a.colocate,
            "--update-weight-mode delta does not go with --colocate, where engines read the trainer's memory; leave "
            "one of the two out.",
        ),
        Rule(
            lambda a: not a.update_weight_local_checkpoint_dir,
            "--update-weight-mode delta needs --update-weight-local-checkpoint-dir, where each engine's host applies "
            "the deltas.",
        ),
    ),
    where(  # trainers that end while engines generate have everything on disk
        lambda a: a.release_train,
        Rule(
            lambda a: a.use_critic,
            "--release-train does not go with a critic (--advantage-estimator ppo); leave one of the two out.",
        ),
        Rule(
            lambda a: a.keep_old_actor,
            "--release-train does not go with --keep-old-actor, whose weights would be lost; leave one of them out.",
        ),
        Rule(
            lambda a: not a.save,
            "--release-train needs --save: the trainers start again from the checkpoint.",
        ),
        Rule(
            lambda a: a.save_interval not in (None, 1),
            "--release-train needs --save-interval 1, not {save_interval}: what is not saved ends with the trainers.",
        ),
        Rule(
            lambda a: a.async_save,
            "--release-train does not go with --async-save: the next trainers need what is saved.",
        ),
        Rule(
            _missing_parts,
            lambda a: (
                f"--release-train needs --checkpoint-contents with {' and '.join(_missing_parts(a))}: the trainers "
                "start again from the checkpoint in the middle of the run."
            ),
        ),
        Rule(
            lambda a: not way_of(a).versions_are_whole,
            "--release-train needs --update-weight-transport disk and --update-weight-mode full, not "
            "{update_weight_transport} and {update_weight_mode}.",
        ),
    ),
    where(  # copies in memory are of use where trainers stay, and the data source's state is on disk
        lambda a: a.peer_checkpoint_interval is not None,
        Rule(
            lambda a: not a.save,
            "--peer-checkpoint-interval needs --save, where the state of the data source is kept.",
        ),
        Rule(
            lambda a: a.release_train,
            "--peer-checkpoint-interval does not go with --release-train, whose trainers end after every rollout with "
            "everything saved; leave one of the two out.",
        ),
    ),
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


def _variable(args: Args, name: str) -> str:
    """The start of a sentence on a variable."""
    return f"--train-env-vars: {name}={args.train_env_vars[name]!r}"


TRAIN_ENV_VARS: tuple[Check, ...] = (
    for_each(
        lambda a: a.train_env_vars,
        lambda a, name: not name or "=" in name or "\0" in name,
        lambda a, name: f"--train-env-vars: {name!r} cannot be the name of a variable; use letters, digits and _.",
    ),
    for_each(
        lambda a: a.train_env_vars,
        lambda a, name: not isinstance(a.train_env_vars[name], str),
        lambda a, name: (
            f"{_variable(a, name)} is no text; write the value in double quotes, as in "
            f"{json.dumps({name: str(a.train_env_vars[name])})}."
        ),
    ),
    for_each(
        lambda a: a.train_env_vars,
        lambda a, name: "\0" in str(a.train_env_vars[name]),
        lambda a, name: f"{_variable(a, name)} holds a null character; leave it out.",
    ),
    for_each(
        lambda a: a.train_env_vars,
        lambda a, name: name in OWNED_ENV_VARS,
        lambda a, name: f"{_variable(a, name)} cannot be set: {OWNED_ENV_VARS[name]}; leave it out.",
    ),
)
"""Names and values can be an environment, and contradict nothing that slime sets itself."""


def _contents(args: Args) -> str:
    return ",".join(args.checkpoint_contents)


def _trainer_ranks(args: Args) -> range:
    return range(args.actor_num_nodes * args.actor_num_gpus_per_node)


check_indexers = Rule(
    lambda a: a.freeze_indexer and a.experimental_attention_variant != "dsa",
    "--freeze-indexer: the model has no sparse attention (--experimental-attention-variant dsa), so there is no "
    "indexer to freeze; leave it out.",
)
TRAINER_CHECKS: tuple[Check, ...] = (
    *TRAIN_ENV_VARS,
    for_each(
        lambda a: a.checkpoint_contents,
        lambda a, part: part not in CHECKPOINT_PARTS,
        lambda a, part: (
            f"--checkpoint-contents {part!r} is no part of a checkpoint: {did_you_mean(part, CHECKPOINT_PARTS)}"
        ),
    ),
    Rule(
        lambda a: "model" not in a.checkpoint_contents,
        lambda a: f"--checkpoint-contents {_contents(a)!r} lacks model: nothing could be loaded from it; add model.",
    ),
    Rule(
        lambda a: a.no_save_optim and "optimizer" in a.checkpoint_contents,
        lambda a: f"--no-save-optim contradicts --checkpoint-contents {_contents(a)}; leave one of the two out.",
    ),
    Rule(
        lambda a: a.save_hf and "hf" in a.checkpoint_contents,
        lambda a: (
            f"--checkpoint-contents {_contents(a)} and --save-hf {a.save_hf} would export the same weights twice; "
            "leave hf or --save-hf out."
        ),
    ),
    where(
        lambda a: a.use_pytorch_profiler,
        first_of(
            Rule(
                lambda a: a.profile_step_start >= a.profile_step_end,
                "--profile-step-start {profile_step_start} must be less than --profile-step-end {profile_step_end}: "
                "the rollouts from the first up to, without, the second are recorded.",
            ),
            Rule(
                lambda a: a.num_rollout and a.profile_step_start >= a.num_rollout,
                lambda a: (
                    f"--profile-step-start {a.profile_step_start} is never reached with --num-rollout "
                    f"{a.num_rollout}, whose last rollout is {(a.num_rollout or 0) - 1}; lower it."
                ),
            ),
        ),
        for_each(
            lambda a: a.profile_ranks,
            lambda a, rank: rank not in _trainer_ranks(a),
            lambda a, rank: (
                f"--profile-ranks {rank}: there are {len(_trainer_ranks(a))} trainer ranks, 0 to "
                f"{len(_trainer_ranks(a)) - 1}; choose among them."
            ),
        ),
        Rule(
            lambda a: "train_overall" in a.profile_target and len(set(a.profile_target)) > 1,
            lambda a: (
                f"--profile-target {' '.join(a.profile_target)}: train_overall holds the others already, and a "
                "process has one profiler; give it alone, or only the parts."
            ),
        ),
    ),
    check_indexers,
)
