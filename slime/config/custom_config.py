"""The files that stand for flags: what `--custom-config-path` and `--megatron-config-path` set goes into args.

A key that is a flag is read as the flag is on the command line (the same types, choices and actions) and goes before
it, as in upstream; any other key of a custom config is for the user's hooks, as it stands. The flags are set before
anything is derived from them, the others last.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.args import Args
from slime.utils.errors import UsageError, did_you_mean, nearest
from slime.utils.files.yaml_config import LocatedYaml, load_yaml

_PLAIN_TYPES = (None, str, int, float)


@dataclass(frozen=True)
class Found:
    """The flag that a key of a file names.

    Attributes:
        option: its option string.
        action: what the parser does with it.
        is_attribute: the key is the attribute (`rewards_normalization: false`), not the option
            (`disable-rewards-normalization: true`).
    """

    option: str
    action: argparse.Action
    is_attribute: bool


class FlagReader:
    """Finds flags by the keys of a file and reads their values.

    Args:
        options: option string -> action, of the parser.
    """

    def __init__(self, options: Mapping[str, argparse.Action]) -> None:
        no_attribute = ("help", argparse.SUPPRESS)
        self._options = {name: action for name, action in options.items() if action.dest not in no_attribute}
        self._by_attribute: dict[str, str] = {}
        for name, action in self._options.items():
            earlier = self._by_attribute.setdefault(action.dest, name)
            if _clumsiness(action) < _clumsiness(self._options[earlier]):
                self._by_attribute[action.dest] = name

    def find(self, key: str) -> Found | None:
        """The flag of an attribute's name, or of an option's with or without its dashes in front."""
        name = key.removeprefix("--").replace("-", "_")
        option = self._by_attribute.get(name, "--" + name.replace("_", "-"))
        return Found(option, self._options[option], name in self._by_attribute) if option in self._options else None

    def names(self) -> list[str]:
        """The attributes that there are flags for."""
        return list(self._by_attribute)

    def did_you_mean(self, key: str) -> str:
        """The end of the sentence about a key that names no flag."""
        return did_you_mean(key.removeprefix("--").replace("-", "_"), self._by_attribute)


def _clumsiness(action: argparse.Action) -> tuple[bool, bool]:
    """For several options that set one attribute: the current one that takes a value can set all of its values."""
    return getattr(action, "new_flag", None) is not None, action.nargs == 0


def read_flag(found: Found, value: Any) -> dict[str, Any]:
    """What a value in a file sets, attribute -> value (nearly always one).

    Args:
        found: the flag.
        value: as it stands in the file.

    Raises:
        ValueError: with the reason why the flag cannot have this value.
    """
    action = found.action
    if value is None and action.default is not None:
        raise ValueError("null is no value for it; leave the key out for the default")
    if value is None:
        return {action.dest: None}
    if action.nargs == 0:
        return _read_switch(found, value)
    takes_one = action.nargs is None and not isinstance(action, argparse._AppendAction)
    given = [_read_one(action, item) for item in (value if isinstance(value, list) and not takes_one else [value])]
    if action.nargs is not None:
        _check_count(action, len(given))
        given = given if action.nargs == argparse.OPTIONAL else [given]
    namespace = argparse.Namespace()
    for item in given:  # one, or as many as the flag is given times
        _run(found, namespace, item)
    return vars(namespace)


def _read_switch(found: Found, value: Any) -> dict[str, Any]:
    """A flag without a value on the command line: true or false in a file."""
    action = found.action
    if not isinstance(value, bool):
        raise ValueError(f"{_short(value)} is not true or false")
    is_bool = isinstance(action, argparse.BooleanOptionalAction)
    if found.is_attribute and (is_bool or isinstance(action.const, bool)):
        return {action.dest: value}
    if is_bool:  # the option may be the --no-... one
        return {action.dest: value != found.option.startswith("--no-")}
    if not value:
        return {action.dest: not action.const if isinstance(action.const, bool) else action.default}
    namespace = argparse.Namespace()
    _run(found, namespace, [])
    return vars(namespace)


def _run(found: Found, namespace: argparse.Namespace, values: Any) -> None:
    try:
        found.action(argparse.ArgumentParser(add_help=False), namespace, values, found.option)
    except argparse.ArgumentError as error:
        raise ValueError(error.message) from error


def _check_count(action: argparse.Action, count: int) -> None:
    wanted = 1 if action.nargs == argparse.OPTIONAL else action.nargs
    if isinstance(wanted, int) and count != wanted:
        raise ValueError(f"it takes {wanted} value{'s' if wanted != 1 else ''}, not {count}")
    if wanted == argparse.ONE_OR_MORE and not count:
        raise ValueError("it takes at least one value")


def _read_one(action: argparse.Action, value: Any) -> Any:
    """One value, by way of the text that would stand for it on the command line."""
    parser, text = argparse.ArgumentParser(add_help=False), _text(value, is_plain=action.type in _PLAIN_TYPES)
    try:
        read = parser._get_value(action, text)
        parser._check_value(action, read)
    except argparse.ArgumentError as error:
        raise ValueError(error.message) from error
    except RecursionError as error:
        raise ValueError(f"{_short(value)} is nested too deeply") from error
    return read


def _text(value: Any, *, is_plain: bool) -> str:
    if isinstance(value, str):
        return value
    if not is_plain:  # a JSON text, or a type of its own that reads one value
        return json.dumps(value)
    if isinstance(value, bool):
        raise ValueError("it takes no true or false; put it in quotes if it is a text")
    if isinstance(value, list | dict):
        raise ValueError(f"it takes one value, not a {'list' if isinstance(value, list) else 'mapping'}")
    return repr(value)


def _short(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | list | dict) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
    value = functools.reduce(lambda part, key: part[key], at, located.value)
    found = reader.find(str(at[-1]))
    if found is None:
        values.problems.append(located.sentence(at, f"there is no such attribute; {reader.did_you_mean(str(at[-1]))}"))
        return
    try:
        read = read_flag(found, value)
    except ValueError as error:
        values.problems.append(located.sentence(at, f"{error}."))
        return
    values.problems += [
        located.sentence(at, f"{found.option} is set already in {values.places[attribute]}; keep one.")
        for attribute in read
        if attribute in values.known
    ]
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
