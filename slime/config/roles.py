"""`--megatron-config-path`: a YAML file with arguments that only one role of the trainer has.

    megatron:
      - {name: policy, role: actor, overrides: {lr: 1e-6}}
      - {name: value, role: critic, overrides: {lr: 1e-5}}

What the actor's entry sets goes into args before anything is derived, as if it were on the command line, and is
checked like that. A critic's stands by until `parse_megatron_role_args` is asked for it, which also says where the
critic's checkpoints are: in `critic` below --save and --load, unless its entry names other places. It starts no role
and opens no weights.
"""

from __future__ import annotations

import argparse
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime.algorithms.estimators import ESTIMATORS
from slime.checkpoints.paths import adapters_in, classify_checkpoint, latest_iteration
from slime.config.args import Args
from slime.config.custom_config import FileValues, FlagReader, apply_known, custom_config_values, read_known
from slime.config.derive import aggregation, first
from slime.config.problems import NoEffect, Problems, read_file
from slime.utils.errors import UsageError
from slime.utils.files.yaml_config import LocatedYaml, load_yaml, validate

logger = logging.getLogger(__name__)

FLAG = "--megatron-config-path"
Role = Literal["actor", "critic"]
CRITIC_DIR = "critic"
"""Below --save and --load."""
# A value model is no policy: it has its own loss and nothing to distil, its output layer is a head of its own, the KL
# is in the returns that the actor makes for it, and no engine runs it in fp8. What a run writes once, the actor does.
CRITIC_FORCED: dict[str, Any] = {
    "loss_type": "value_loss",
    "kl_coef": 0.0,
    "use_kl_loss": False,
    "use_opd": False,
    "keep_old_actor": False,
    "ref_update_interval": None,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": None,
    "enable_mtp_training": False,
    "megatron_deepgemm_forward_layers": None,
    "megatron_deepgemm_moe_forward_layers": None,
    "fp8": None,
    "recompute_loss_function": False,
    "save_hf": None,
    "keep_checkpoints": None,
    "save_retain_interval": None,
    "save_debug_train_data": None,
    "use_pytorch_profiler": False,
}
# The ranks of both roles hand columns to each other, so they share the layout and the schedule of a rollout.
SHARED = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "global_batch_size", "micro_batch_size"),
    *("sequence_parallel", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage", "pipeline_model_parallel_layout"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("use_dynamic_batch_size", "max_tokens_per_gpu", "advantage_estimator", "gamma", "lambd"),
    *("num_critic_only_steps", "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "accelerator"),
    *("hf_checkpoint", "output_dir", "save_interval", "start_rollout_id", "bf16", "fp16"),
)
# A list for the policy says nothing about a value model, which may have to learn as a whole.
NOT_INHERITED: dict[str, Any] = {"only_train_params_name_list": None, "freeze_params_name_list": None}
CHECKPOINTS = ("load", "ckpt_step", "save")
# Upstream ignores these too: a role's size is said by --actor-num-nodes and --actor-num-gpus-per-node.
IGNORED = ("num_nodes", "num_gpus_per_node")


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    role: Role
    overrides: dict[str, Any] | None = None
    args: dict[str, Any] | None = None
    num_nodes: Any = None
    num_gpus_per_node: Any = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    megatron: list[_Entry] = Field(min_length=1)


def role_overrides(path: str, options: Mapping[str, argparse.Action]) -> dict[Role, FileValues]:
    """What a file sets for each role that it has an entry for.

    Args:
        path: YAML or JSON.
        options: option string -> action, of the parser.

    Raises:
        FileUnusable: it is not there or cannot be read.
        UsageError: it has not the form above. (What is wrong with a single argument is in `FileValues.problems`.)
    """
    located = load_yaml(path, FLAG)
    file, reader = validate(_File, located), FlagReader(options)
    roles: dict[Role, FileValues] = {}
    for number, entry in enumerate(file.megatron):
        where: tuple[str | int, ...] = ("megatron", number)
        if entry.role in roles:
            raise UsageError(located.sentence((*where, "role"), f"there are two entries for the {entry.role}."))
        if entry.overrides is not None and entry.args is not None:
            raise UsageError(located.sentence((*where, "args"), "is the same as overrides; keep one."))
        roles[entry.role] = _read_entry(entry, located, where, reader)
    return roles


def _read_entry(entry: _Entry, located: LocatedYaml, where: tuple[str | int, ...], reader: FlagReader) -> FileValues:
    values = FileValues()
    inside = "overrides" if entry.overrides is not None else "args"
    ignored = [(*where, key) for key in IGNORED if vars(entry)[key] is not None]
    for key in entry.overrides or entry.args or {}:
        at = (*where, inside, key)
        if key in IGNORED:
            ignored.append(at)
            continue
        read_known(values, located, reader, at)
    for name, forced in CRITIC_FORCED.items():
        if entry.role == "critic" and values.known.get(name, forced) != forced:
            values.problems.append(f"{values.places[name]}: {name}: is always {forced} for the critic; leave it out.")
    if entry.role == "critic":
        values.problems += _shared_or_alone(values)
    for at in ignored:
        text = "is ignored: --actor-num-nodes and --actor-num-gpus-per-node give the size of both roles."
        values.warnings.append(located.sentence(at, text))
    return values


def _shared_or_alone(values: FileValues) -> list[str]:
    """What is wrong with a critic's entry apart from what is forced."""
    problems = [
        f"{values.places[name]}: {name}: actor and critic have it in common; set it on the command line."
        for name in SHARED
        if name in values.known
    ]
    if "ckpt_step" in values.known and "load" not in values.known:
        problems.append(
            f"{values.places['ckpt_step']}: ckpt_step without load would be an iteration of the actor's --load; give "
            "load, too, or leave it out."
        )
    return problems


def critic_problems(roles: Mapping[Role, FileValues], advantage_estimator: str) -> list[str]:
    """A sentence if the file has an entry for a critic and the algorithm has none."""
    if "critic" not in roles or ESTIMATORS[advantage_estimator].needs_critic:
        return []
    return [NoEffect(f"{FLAG}: the entry of the critic", "without --advantage-estimator ppo", "leave it out")]


def missing_critic(roles: Mapping[Role, FileValues]) -> list[str]:
    """A sentence if the critic is to be loaded from where no checkpoint is."""
    values = roles.get("critic", FileValues())
    path = values.known.get("load")
    if path is None or classify_checkpoint(path) is not None:
        return []
    return [f"{values.places['load']}: load: {path} is no checkpoint, neither Megatron's nor HF's; correct the path."]


def role_values(args: Args, roles: Mapping[Role, FileValues]) -> dict[Role, dict[str, Any]]:
    """What to change in args for each role, once the actor's values are in them.

    Args:
        args: the parsed flags without any role's values.
        roles: what the file sets.

    Returns:
        role -> attribute -> value. The critic's undo the actor's first, except what both have in common and where
        checkpoints are, and lists of trained parameters on the command line.
    """
    actor = roles["actor"].known if "actor" in roles else {}
    critic = roles["critic"].known if "critic" in roles else {}
    before = {name: vars(args)[name] for name in actor if name not in SHARED + CHECKPOINTS}
    own = before | NOT_INHERITED | _own_base({**vars(args), **before, **critic}, critic) | critic
    return {"actor": dict(actor), "critic": {**own, **_derived(args, own, critic), **CRITIC_FORCED}}


def _own_base(values: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """What lies under the adapters (--lora-rank) of a critic whose entry has a `load`: that, unless it is adapters.

    Args:
        values: the critic's, with those that it inherits.
        entry: those of them that its entry gives.
    """
    if "load" not in entry or values.get("lora_rank") is None:
        return {}
    base: dict[str, Any] = {"lora_adapter_path": None}  # that of the command line is over the actor's base
    step = entry.get("ckpt_step")
    if adapters_in(entry["load"], step) is None and "ref_load" not in entry:
        base |= {"ref_load": entry["load"], "ref_ckpt_step": step}
    return base


def _derived(args: Args, own: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from a critic's own values and would else be the actor's.

    Args:
        args: the parsed flags without any role's values.
        own: the critic's values.
        entry: those of them that its entry gives.
    """
    values, derived = {**vars(args), **own}, dict[str, Any]()
    ends, pair = ("start_weight_decay", "end_weight_decay"), ("calculate_per_token_loss", "loss_agg_mode")
    if own.keys() & {"weight_decay", *ends}:
        derived |= {name: first(values[name], values["weight_decay"]) for name in ends}
    if own.keys() & set(pair):
        # An entry's mode replaces the switch of the command line.
        per_token = values[pair[0]] and (pair[0] in entry or pair[1] not in entry)
        are_both_given = entry.keys() >= set(pair)
        derived |= aggregation(per_token=per_token, mode=values[pair[1]], are_both_given=are_both_given)
    return derived


def critic_entry(args: Args, roles: Mapping[Role, FileValues]) -> tuple[Args, frozenset[str]] | None:
    """The args of a critic whose entry sets something, to be checked as the actor's are, and what the entry gives.

    None where they are the actor's, or where what is wrong is known already. Without what every critic has
    (`CRITIC_FORCED`), which contradicts flags of the actor's on purpose. Flags of the command line are the actor's:
    one that has no effect beside the entry is no mistake.
    """
    entry = roles.get("critic", FileValues())
    own, flags = args.megatron_role_values["critic"], vars(args)
    values = {name: own[name] for name in own if name not in CRITIC_FORCED and own[name] != flags[name]}
    if not (values and args.use_critic) or entry.problems:
        return None
    return args.replace(**values), frozenset(entry.known)


def parse_megatron_role_args(args: Args, role: Role) -> Args:
    """The args of one role of the trainer: a copy with what --megatron-config-path and the role itself set.

    Values that derive from others are those of the actor.
    """
    values = (
        args.megatron_role_values[role] | _critic_checkpoints(args)
        if role == "critic"
        else args.megatron_role_values[role]
    )
    return args.replace(**values)


def critic_save_dir(args: Args) -> str | None:
    """The root of the critic's checkpoints; None without --save."""
    own: str | None = args.megatron_role_values["critic"].get("save")
    return args.save and (own or str(Path(args.save) / CRITIC_DIR))


def _critic_checkpoints(args: Args) -> dict[str, Any]:
    """What the critic loads and saves.

    Of a run that is resumed, its part of the same iteration; else the weights of its entry's `load`, else those that
    the actor starts from.
    """
    values: dict[str, Any] = {
        "save": critic_save_dir(args),
        "checkpoint_contents": [part for part in args.checkpoint_contents if part != "hf"],
    }
    own = args.megatron_role_values["critic"]
    is_resumed = classify_checkpoint(args.load) == "megatron" and not args.finetune
    if is_resumed:
        continues = args.save is not None and Path(args.save) == Path(args.load)
        root = critic_save_dir(args) if continues else str(Path(args.load) / CRITIC_DIR)
        if classify_checkpoint(root) == "megatron":
            step = latest_iteration(args.load) if args.ckpt_step is None else args.ckpt_step
            return values | {"load": root, "ckpt_step": step}
    values |= {"no_load_optim": True, "no_load_rng": True, "finetune": True}
    if "load" in own:
        return values | {"load": own["load"], "ckpt_step": own.get("ckpt_step")}
    if is_resumed:
        logger.warning("--load %s holds no critic: it starts from the actor's weights, with a fresh head", args.load)
    return values


def apply_config_files(
    args: Args,
    explicit: set[str],
    problems: Problems,
    *,
    options: Mapping[str, argparse.Action],
    explain_unknown: Callable[[str], str | None],
) -> tuple[FileValues, dict[Role, FileValues]]:
    """Set what the files say, as if it were on the command line; warnings are logged.

    Args:
        args: the parsed flags; changed. `megatron_role_values` is added: role -> attribute -> value.
        explicit: attributes whose flags are given; changed.
        problems: gets what is wrong with the files.
        options: option string -> action, of the parser.
        explain_unknown: gives the sentence for an option that deserves another than "did you mean".

    Returns:
        What the custom config sets, whose `extra` goes into args by `apply_extra` once everything is derived; and what
        the entries of roles set.
    """

    read_custom = functools.partial(custom_config_values, options=options, explain_unknown=explain_unknown)
    path = args.custom_config_path
    custom = (read_file(problems, read_custom, path) if path else None) or FileValues()
    warnings = [*custom.warnings, *apply_known(args, explicit, custom)]
    path = args.megatron_config_path
    by_role = (read_file(problems, role_overrides, path, options) if path else None) or {}
    vars(args)["megatron_role_values"] = role_values(args, by_role)
    if "actor" in by_role:
        warnings += apply_known(args, explicit, by_role["actor"])
    for values in (custom, *by_role.values()):
        problems.wrong += values.problems
    for warning in [*warnings, *(text for values in by_role.values() for text in values.warnings)]:
        logger.warning("%s", warning)
    problems.wrong += critic_problems(by_role, args.advantage_estimator)
    problems.environment += missing_critic(by_role)
    return custom, by_role
