"""Values of a YAML file read as the flags of a parser would read them: the same types, choices and actions.

It knows argparse's actions and no flag. Sizes (`at_least`) are checked later, with those of the command line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.utils.names import did_you_mean

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
        bare = key.removeprefix("--")
        if option := self._by_attribute.get(bare.replace("-", "_")):
            return Found(option, self._options[option], True)
        option = "--" + bare.replace("_", "-")
        return Found(option, self._options[option], False) if option in self._options else None

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
    if value is None:
        if action.default is not None:
            raise ValueError("null is no value for it; leave the key out for the default")
        return {action.dest: None}
    if action.nargs == 0:
        return _read_switch(found, value)
    repeats = isinstance(action, argparse._AppendAction) and action.nargs is None
    if repeats:
        given = [_read_one(action, item) for item in _as_list(value)]
    elif action.nargs is None:
        given = _read_one(action, value)
    else:
        given = [_read_one(action, item) for item in _as_list(value)]
        _check_count(action, given)
        given = given[0] if action.nargs == argparse.OPTIONAL else given
    namespace = argparse.Namespace()
    for item in given if repeats else [given]:
        _run(found, namespace, item)
    return vars(namespace)


def _read_switch(found: Found, value: Any) -> dict[str, Any]:
    """A flag without a value on the command line: true or false in a file."""
    action = found.action
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is not true or false")
    is_bool = isinstance(action, argparse.BooleanOptionalAction)
    if is_bool and found.is_attribute:
        return {action.dest: value}
    if is_bool:  # the option may be the --no-... one
        return {action.dest: value != found.option.startswith("--no-")}
    if found.is_attribute and isinstance(action.const, bool):
        return {action.dest: value}
    if value:
        namespace = argparse.Namespace()
        _run(found, namespace, [])
        return vars(namespace)
    return {action.dest: not action.const if isinstance(action.const, bool) else action.default}


def _run(found: Found, namespace: argparse.Namespace, values: Any) -> None:
    try:
        found.action(argparse.ArgumentParser(add_help=False), namespace, values, found.option)
    except argparse.ArgumentError as error:
        raise ValueError(error.message) from error


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_count(action: argparse.Action, given: list[Any]) -> None:
    count = len(given)
    if isinstance(action.nargs, int) and count != action.nargs:
        raise ValueError(f"it takes {action.nargs} values, not {count}")
    if action.nargs == argparse.ONE_OR_MORE and not count:
        raise ValueError("it takes at least one value")
    if action.nargs == argparse.OPTIONAL and count != 1:
        raise ValueError(f"it takes one value, not {count}")


def _read_one(action: argparse.Action, value: Any) -> Any:
    """One value, by way of the text that would stand for it on the command line."""
    kind: Callable[[str], Any] = action.type if callable(action.type) else str
    text = _text(value, is_plain=action.type in _PLAIN_TYPES)
    try:
        read = kind(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from error
    except (TypeError, ValueError, RecursionError) as error:
        wanted = {int: "a whole number", float: "a number"}.get(kind, "a value for it")  # type: ignore[call-overload]
        raise ValueError(f"{_shown(value)} is not {wanted}") from error
    if action.choices is not None and read not in action.choices:
        raise ValueError(f"{_shown(value)} is none of {', '.join(map(str, action.choices))}")
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


def _shown(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, bool | list | dict) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
