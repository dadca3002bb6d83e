"""The options that a package adds to a parser, written down so that they can be added again without importing it.

A package such as SGLang registers its options with argparse, and to be asked it has to be imported, which takes
seconds. `capture` asks it once (`capture_elsewhere`: in another process); `cached_table` keeps the answer in a JSON
file, by version; `OptionTable.add_to` adds the options to a parser. What only the package can do, such as its own
types and actions, is left to it: the package is asked again (so imported) when such an option is on the command line,
and not before. Types and actions of the standard library and of slime itself are used as they are.

It knows argparse and no package.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from slime.utils.errors import UsageError

IMPORT_S = 600.0

logger = logging.getLogger(__name__)

Fill = Callable[[argparse.ArgumentParser], Any]
_DIRECT = sys.stdlib_module_names | {__name__.partition(".")[0]}  # top-level packages that cost nothing to import
_DEFAULT_GROUPS = 2  # argparse makes "positional arguments" and "options" itself


# One option, as plain values: key -> what it is where the row does not say
_ROW: dict[str, Any] = {
    "names": [],  # option strings, without the `--no-...` ones that argparse adds itself
    "dest": "",
    "group": None,  # title of the option's group; None for none of its own
    "group_description": None,  # the line below that title
    "action": "argparse:_StoreAction",  # import path of the action class
    "type": None,  # import path of the function that reads a value, such as "builtins:int"; None for plain text
    "extra": {},  # what an action class of slime's takes besides, name -> value
    # as in argparse
    **dict.fromkeys(("default", "nargs", "choices", "const", "help", "metavar")),
    "required": False,
}
_KEYWORDS = ("default", "nargs", "choices", "const", "required", "metavar", "help")


class OptionTable:
    """Options in the order of their registration, and the way back to whoever registered them."""

    def __init__(self, options: list[dict[str, Any]], live: Callable[[], Mapping[str, argparse.Action]]) -> None:
        """`options` are rows, keys of `_ROW`; `live` asks the package again: option string -> its real action."""
        if unknown := {key for row in options for key in row} - _ROW.keys():
            raise TypeError(f"an option has no {', '.join(sorted(unknown))}")
        self.options = options
        self._live = functools.cache(live)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the options to a parser; an option string that it already has keeps the meaning it has there."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for row in (_ROW | option for option in self.options):
            free = [name for name in row["names"] if name not in parser._option_string_actions]
            title = row["group"]
            if free and title is not None and title not in groups:
                groups[title] = parser.add_argument_group(title, row["group_description"])
            if free:
                target = parser if title is None else groups[title]
                target.add_argument(*free, dest=row["dest"], **self._keywords(row))

    def _keywords(self, row: Mapping[str, Any]) -> dict[str, Any]:
        # argparse asks for the object SUPPRESS itself
        values = {name: argparse.SUPPRESS if row[name] == argparse.SUPPRESS else row[name] for name in _KEYWORDS}
        values["type"] = self._type_of(row["type"], row["names"][0])
        if not _is_direct(row["action"]):
            return values | {"action": functools.partial(_LazyAction, live=self._live)}
        action = _load(row["action"])
        accepted = {name: value for name, value in values.items() if _accepts(action, name)}
        return accepted | row["extra"] | {"action": action}

    def _type_of(self, path: str | None, option: str) -> Callable[[str], Any] | None:
        if path is None or _is_direct(path):
            return None if path is None else cast("Callable[[str], Any]", _load(path))
        return _LazyType(path, option, self._live)


class _LazyType:
    """Reads a value as the package does; imports it for that."""

    def __init__(self, path: str, option: str, live: Callable[[], Mapping[str, argparse.Action]]) -> None:
        self._name, self._live = option, live
        last = path.rpartition(":")[2].rpartition(".")[2]
        self.__name__ = last if last.isidentifier() else "value"  # "<lambda>"; argparse puts it into errors

    def __call__(self, text: str) -> Any:
        kind = self._live()[self._name].type
        return kind(text) if callable(kind) else text


class _LazyAction(argparse.Action):
    """Stands for an action class of the package; imports it to do what that does."""

    def __init__(self, *args: Any, live: Callable[[], Mapping[str, argparse.Action]], **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._live = live

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """As argparse's."""
        try:
            self._live()[option_string or self.option_strings[0]](parser, namespace, values, option_string)
        except (AssertionError, TypeError, ValueError) as error:  # how packages say that a value is wrong
            raise argparse.ArgumentError(self, f"invalid value: {error}") from error


def capture(fill: Fill) -> OptionTable:
    """Record the options that `fill` adds to the parser it is given.

    Raises:
        TypeError: an option cannot be written down: it is positional, excludes others, or its default, choices or
            constant are no plain values.
    """
    parser = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
    fill(parser)
    if parser._mutually_exclusive_groups:
        raise TypeError("options that exclude each other cannot be put into a table")
    options = []
    for number, group in enumerate(parser._action_groups):
        title = None if number < _DEFAULT_GROUPS else group.title
        options += [_option_of(action, title, group.description) for action in group._group_actions]
    return OptionTable(options, lambda: parser._option_string_actions)


def capture_elsewhere(fill: Fill) -> OptionTable:
    """As `capture`, in a process of its own: this one imports the package only to read a value that needs it.

    Args:
        fill: a module-level function.

    Raises:
        UsageError: that process failed, so the package cannot be imported.
    """
    module, name = fill.__module__, fill.__qualname__
    program = (
        f"import json; from {__name__} import capture; from {module} import {name}; "
        f"print('\\n' + json.dumps(capture({name}).options))"
    )
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    command, environment = [sys.executable, "-c", program], os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"the flags of an installed package cannot be read: importing {module} took longer than {IMPORT_S:g} s; "
            "try again on a machine that is less busy, or with the packages on a local disk."
        ) from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UsageError(
            f"the flags of an installed package cannot be read, for importing it fails: {reason}; repair the "
            "installation with scripts/setup_env.sh."
        )
    return OptionTable(json.loads(done.stdout.splitlines()[-1]), lambda: capture(fill)._live())


def _option_of(action: argparse.Action, group: str | None, description: str | None) -> dict[str, Any]:
    names, choices = action.option_strings, action.choices
    if not names:
        raise TypeError(f"positional argument {action.dest} cannot be put into a table")
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [name for name in names if not name.startswith("--no-")]
    row = {name: vars(action)[name] for name in ("dest", "default", "nargs", "const", "help", "required")} | {
        "names": list(names),
        "choices": None if choices is None else sorted(choices) if isinstance(choices, set) else list(choices),
        "action": _path_of(type(action)),
        "extra": _extra_of(action),
        "type": None if action.type is None else _path_of(action.type),
        "metavar": action.metavar if isinstance(action.metavar, str) else None,
        "group": group,
        "group_description": None if group is None else description,
    }
    for value in (row["default"], row["const"], row["choices"], row["extra"]):
        if json.loads(json.dumps(value, default=repr)) != value:
            raise TypeError(f"option {names[0]} cannot be put into a table: {value!r} is no plain value")
    return {name: value for name, value in row.items() if value != _ROW[name]}


def _path_of(thing: Any) -> str:
    """The import path of a class or function; a name to show for what has none (a lambda, a partial)."""
    return f"{getattr(thing, '__module__', '?')}:{getattr(thing, '__qualname__', '<unnamed>')}"


def _is_direct(path: str) -> bool:
    """Whether an import path names something of the standard library or of slime, and not a lambda in it."""
    module, _, name = path.partition(":")
    return module.partition(".")[0] in _DIRECT and "<" not in name


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


@functools.cache
def _accepts(action: Any, keyword: str) -> bool:
    known = inspect.signature(action).parameters
    return keyword in known or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())


def _extra_of(action: argparse.Action) -> dict[str, Any]:
    """What an action keeps of its own keywords; for classes of slime's, which keep each under its name."""
    if not _is_direct(_path_of(type(action))):
        return {}
    common = inspect.signature(argparse.Action).parameters
    return {
        name: vars(action)[name]
        for name, parameter in inspect.signature(type(action)).parameters.items()
        if name not in common and parameter.kind is not parameter.VAR_KEYWORD
    }


def cached_table(name: str, key: Mapping[str, str], fill: Fill, *, elsewhere: bool = False) -> OptionTable:
    """The table of the options that `fill` adds, from a file if an earlier run made it for the same key.

    The file depends on the source of `fill`'s module too. A cache that cannot be read or written costs time only.

    Args:
        name: of the table, for the file name.
        key: what the table depends on, usually package -> version.
        fill: a module-level function.
        elsewhere: ask in another process (`capture_elsewhere`).
    """
    build = functools.partial(capture_elsewhere if elsewhere else capture, fill)
    full_key = dict(key) | {"code": code_hash(fill)}
    directory = cache_dir()
    if directory is None:
        return build()
    digest = hashlib.sha256(json.dumps(full_key, sort_keys=True).encode()).hexdigest()[:16]
    path = directory / f"options-{name}-{digest}.json"
    if known := _read(path, full_key, lambda: build()._live()):
        return known
    logger.info("asking the installed %s for its options, which takes some seconds the first time", name)
    table = build()
    _write(path, {"key": full_key, "options": table.options})
    return table


def cache_dir() -> Path | None:
    """Where tables are kept: $SLIME_CACHE_DIR, $XDG_CACHE_HOME/slime or ~/.cache/slime; None without a home."""
    if given := os.environ.get("SLIME_CACHE_DIR"):
        return Path(given)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "slime"
    try:
        return Path.home() / ".cache" / "slime"
    except RuntimeError:
        return None


def code_hash(fill: Fill) -> str:
    """Return a digest of the source on which a table depends, and of the Python."""
    digest = hashlib.sha256(sys.version.encode())
    for source in (__file__, inspect.getsourcefile(fill)):
        if source is not None:
            digest.update(Path(source).read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path, key: Mapping[str, str], live: Callable[[], Mapping[str, argparse.Action]]) -> OptionTable | None:
    try:
        content = json.loads(path.read_text())
        if content["key"] != key:
            raise ValueError("it is another table")
        return OptionTable(content["options"], live)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the cached options in %s cannot be used and are made again: %s", path, error)
        return None


@functools.cache
def _warn_once(what: str) -> None:
    logger.warning("options of installed packages are not cached: %s; set SLIME_CACHE_DIR", what)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Write under another name first, so that no process ever reads half a file."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content))
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        _warn_once(f"{path.parent} cannot be written ({error.strerror}), so every start takes seconds longer")
