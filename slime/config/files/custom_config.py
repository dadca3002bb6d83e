"""`--custom-config-path`: a YAML file whose keys become attributes of args.

A key that is a flag is read as that flag (and goes before the command line, as in upstream); any other key is for the
user's hooks, as it stands. Values are returned, not set: parse.py does that, the flags before anything is derived from
them, the others last.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.args import Args
from slime.config.files.file_values import FlagReader, read_flag
from slime.utils.errors import UsageError
from slime.utils.names import nearest
from slime.utils.yaml_config import LocatedYaml, load_yaml

FLAG = "--custom-config-path"
# What slime sets itself, and what to use instead. (What it derives is found by parse.py, which sees it.)
OWNED = {
    "custom_config_path": "one file is read; put all keys into it",
    "eval_datasets": "use --eval-config",
    "rank": "each process gets its own",
    "world_size": "use --actor-num-nodes and --actor-num-gpus-per-node",
    "sglang_model_routers": "use --sglang-config",
}
_PREFIXES = ("sglang_", "router_")  # every name of these is checked, as on the command line


@dataclass
class FileValues:
    """What a file sets.

    Attributes:
        known: attribute -> value of a flag.
        extra: attribute -> value that no flag has, for hooks.
        places: attribute -> flag, file and line, for sentences.
        problems: sentences about keys that cannot be used; they are in neither mapping.
        warnings: sentences about keys that are probably meant otherwise.
    """

    known: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def custom_config_values(
    path: str, options: Mapping[str, argparse.Action], *, explain_unknown: Callable[[str], str | None]
) -> FileValues:
    """Read a file of attributes.

    Args:
        path: YAML or JSON with a mapping at its root; an empty file sets nothing.
        options: option string -> action, of the parser.
        explain_unknown: gives the sentence for an option that deserves another than "did you mean".

    Raises:
        FileUnusable: it is not there or cannot be read.
        UsageError: it is no YAML, or no mapping.
    """
    located = load_yaml(path, FLAG)
    if located.value is None:
        return FileValues()
    if not isinstance(located.value, dict):
        raise UsageError(located.sentence((), "must be a mapping from attributes to values."))
    values, reader = FileValues(), FlagReader(options)
    for key, value in located.value.items():
        attribute = key.removeprefix("--").replace("-", "_")
        if attribute in OWNED:
            values.problems.append(located.sentence((key,), f"is set by slime: {OWNED[attribute]}."))
        elif reader.find(key):
            read_known(values, located, reader, (key,))
        elif reason := _why_no_attribute(attribute, reader, explain_unknown):
            values.problems.append(located.sentence((key,), reason))
        else:
            values.extra[attribute] = value
            values.places[attribute] = located.where((key,))
            if near := nearest(attribute, reader.names(), likeness=0.85):
                text = f"is no flag and is passed to hooks as args.{attribute}; did you mean {' or '.join(near)}?"
                values.warnings.append(located.sentence((key,), text))
    return values


def read_known(values: FileValues, located: LocatedYaml, reader: FlagReader, at: tuple[str | int, ...]) -> None:
    """Read the flag that the key at a path names into `values.known` (or say in `values.problems` why not)."""
    key, value = str(at[-1]), located.value
    for part in at:
        value = value[part]
    found = reader.find(key)
    if found is None:
        values.problems.append(located.sentence(at, f"there is no such attribute; {reader.did_you_mean(key)}"))
        return
    try:
        read = read_flag(found, value)
    except ValueError as error:
        values.problems.append(located.sentence(at, f"{error}."))
        return
    for attribute in read:
        if attribute in values.known:
            text = f"{found.option} is set already in {values.places[attribute]}; keep one."
            values.problems.append(located.sentence(at, text))
    values.known |= read
    values.places |= dict.fromkeys(read, located.where(at))


def _why_no_attribute(attribute: str, reader: FlagReader, explain_unknown: Callable[[str], str | None]) -> str | None:
    """Why hooks could not get a value under this name."""
    if not attribute.isidentifier() or attribute.startswith("_") or hasattr(Args, attribute):
        return "cannot be an attribute of args; choose another name."
    if attribute.startswith(_PREFIXES):
        return explain_unknown("--" + attribute.replace("_", "-")) or f"no flag; {reader.did_you_mean(attribute)}"
    return None


def apply_known(args: Args, explicit: set[str], values: FileValues) -> list[str]:
    """Set the flags of a file in `args`, as if they had been given; they go before the command line.

    Args:
        args: the parsed flags; changed.
        explicit: attributes whose flags are on the command line; changed.
        values: what the file sets.

    Returns:
        One sentence per flag that both set to different values.
    """
    replaced = []
    for attribute, value in values.known.items():
        earlier = vars(args).get(attribute)
        if attribute in explicit and earlier != value:
            place = values.places[attribute]
            replaced.append(f"{place}: {attribute} {_shown(value)} replaces {_shown(earlier)} of the command line.")
    vars(args).update(values.known)
    explicit -= {attribute for attribute, value in values.known.items() if value is None}
    explicit |= {attribute for attribute, value in values.known.items() if value is not None}
    return replaced


def apply_extra(args: Args, values: FileValues) -> list[str]:
    """Set the other keys of a file in `args`, for hooks; one sentence for each that slime sets itself.

    Args:
        args: with everything that is derived; changed.
        values: what the file sets.
    """
    taken = [attribute for attribute in values.extra if attribute in vars(args)]
    vars(args).update({name: value for name, value in values.extra.items() if name not in taken})
    return [f"{values.places[name]}: {name}: is derived from other flags and cannot be set." for name in taken]


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
