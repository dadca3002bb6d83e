"""`--megatron-config-path`: a YAML file with arguments that only one role of the trainer has.

    megatron:
      - {name: policy, role: actor, overrides: {lr: 1e-6}}
      - {name: value, role: critic, overrides: {lr: 1e-5}}

What the actor's entry sets goes into args before anything is derived, as if it were on the command line, and is
checked like that. A critic's stands by until `parse_megatron_role_args` is asked for it. It starts no role and
derives nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from slime.utils.arguments.args import Args
from slime.utils.arguments.custom_config import FileValues, read_known
from slime.utils.arguments.file_values import FlagReader
from slime.utils.errors import UsageError
from slime.utils.yaml_config import LocatedYaml, load_yaml, validate

FLAG = "--megatron-config-path"
Role = Literal["actor", "critic"]
# A value model is no policy: there is nothing to distil and no KL, and its output layer is a head of its own.
CRITIC_FORCED: dict[str, Any] = {
    "kl_coef": 0.0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
}
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
    for at in ignored:
        text = "is ignored: --actor-num-nodes and --actor-num-gpus-per-node give the size of both roles."
        values.warnings.append(located.sentence(at, text))
    return values


def critic_problems(roles: Mapping[Role, FileValues], advantage_estimator: str) -> list[str]:
    """A sentence if the file has an entry for a critic and the algorithm has none."""
    if "critic" not in roles or advantage_estimator == "ppo":
        return []
    return [f"{FLAG}: the entry of the critic has no effect without --advantage-estimator ppo; leave it out."]


def role_values(args: argparse.Namespace, roles: Mapping[Role, FileValues]) -> dict[Role, dict[str, Any]]:
    """What to change in args for each role, once the actor's values are in them.

    Args:
        args: the parsed flags without any role's values.
        roles: what the file sets.

    Returns:
        role -> attribute -> value. The critic's undo the actor's first.
    """
    actor = roles["actor"].known if "actor" in roles else {}
    critic = roles["critic"].known if "critic" in roles else {}
    before = {name: vars(args)[name] for name in actor}
    return {"actor": dict(actor), "critic": {**before, **critic, **CRITIC_FORCED}}


def parse_megatron_role_args(args: Args, role: Role) -> Args:
    """The args of one role of the trainer: a copy with what --megatron-config-path and the role itself set.

    Values that derive from others are those of the actor.
    """
    return args.replace(**args.megatron_role_values[role])
