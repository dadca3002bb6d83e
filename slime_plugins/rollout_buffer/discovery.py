"""Finds the generators: Python files with TASK_TYPE and run_rollout, in this package's folder and in others named.

    TASK_TYPE = "math"                                       what --rollout-task-type names
    def run_rollout(data: dict) -> None                      generate, and write records, until done
    def is_valid_group(group, min_valid_group_size, task_type) -> bool      optional; group = (instance_id, [record])
    def transform_group(group, task_type) -> group                          optional
    def get_group_data_meta_info(groups: {instance_id: [record]}) -> dict   optional; numbers are logged

It calls none of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.misc import load_function
from slime_plugins.rollout_buffer.store import GroupRules

HERE = Path(__file__).parent / "generators"
_OPTIONAL = {"is_valid_group": 3, "transform_group": 2, "get_group_data_meta_info": 1}


@dataclass(frozen=True)
class Generator:
    """One task."""

    task_type: str
    run_rollout: Callable[[dict[str, Any]], Any]
    rules: GroupRules
    path: Path


def find_generators(folders: Iterable[Path] = ()) -> dict[str, Generator]:
    """Task type -> generator, of this package and of `folders`.

    Raises:
        UsageError: a file does not load, two files have the same task, or a function has the wrong parameters.
    """
    found: dict[str, Generator] = {}
    for folder in [HERE, *folders]:
        if not folder.is_dir():
            raise UsageError(f"--generators {folder}: there is no such directory")
        for path in sorted(folder.glob("*.py")):
            generator = _load(path)
            if generator is None:
                continue
            if generator.task_type in found:
                other = found[generator.task_type].path
                raise UsageError(f"{path} and {other} both have TASK_TYPE {generator.task_type!r}; rename one")
            found[generator.task_type] = generator
    return found


def _load(path: Path) -> Generator | None:
    """The generator of a file; None for a file that has no TASK_TYPE, such as a base class."""
    if not re.search(r"^TASK_TYPE\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
        return None
    try:
        task_type = load_function(f"{path}:TASK_TYPE")
        run_rollout = load_function(f"{path}:run_rollout")
    except (
        Exception,
        SystemExit,
    ) as error:  # the user's module is code like any other: what it raises is bad input here
        raise UsageError(f"{path} is no generator: {type(error).__name__}: {error}") from error
    if not isinstance(task_type, str) or not task_type:
        raise UsageError(f"{path}: TASK_TYPE is {task_type!r}; it must be a name")
    _check(path, run_rollout, "run_rollout", 1)
    given = {name: _optional(path, name) for name in _OPTIONAL}
    rules = GroupRules(task_type=task_type, **{name: fn for name, fn in given.items() if fn is not None})
    return Generator(task_type, run_rollout, rules, path)


def _optional(path: Path, name: str) -> Callable[..., Any] | None:
    try:
        function = load_function(f"{path}:{name}")
    except ImportError:  # the module has no such function: it was loaded before
        return None
    _check(path, function, name, _OPTIONAL[name])
    return function


def _check(path: Path, function: Any, name: str, num_arguments: int) -> None:
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except TypeError as error:
        raise UsageError(f"{path}: {name} is called with {num_arguments} arguments: {error}") from error
