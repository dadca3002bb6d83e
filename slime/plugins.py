"""Tables of named rows that installed packages add to.

A package adds a row by an entry point of its metadata (docs/plugins.md):

    [project.entry-points."slime.estimators"]
    mine = "my_package.estimators:MINE"

Names of rows are read from the metadata of what is installed, once in a process; a package is imported when one of its
rows is asked for, and not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar

from slime.utils.errors import UsageError
from slime.utils.misc import load_function, try_to_load

Row = TypeVar("Row")


@functools.cache
def installed() -> Any:
    """Return the entry points of every installed package, which `select(group=...)` chooses from."""
    return entry_points()


class Table(Mapping[str, Row]):
    """Rows of slime, and those of installed packages.

    Args:
        group: of the entry points ("slime.estimators").
        kind: what a row is an instance of.
        own: slime's rows.
        check: says what is wrong with a row of a package, in words that follow its path; None where nothing is.

    Raises:
        UsageError: on access to a row that cannot be imported, is of another kind, or has the name of another.
    """

    def __init__(
        self,
        group: str,
        kind: Any,
        own: Mapping[str, Row],
        *,
        check: Callable[[str, Row], str | None] = lambda name, row: None,
    ) -> None:
        self.own = own
        self._group, self._kind, self._check = group, kind, check
        self._rows: dict[str, Row] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.own, *(point.name for point in self._points()))))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in list(self)  # `Mapping` would import the row

    def __getitem__(self, name: str) -> Row:
        if name not in self._rows:
            self._rows[name] = self._find(name)
        return self._rows[name]

    def problems(self, name: str) -> list[str]:
        """Return why a row of this table cannot be used, as sentences."""
        try:
            self[name]
        except UsageError as error:
            return error.messages
        return []

    def _points(self) -> EntryPoints:
        points: EntryPoints = installed().select(group=self._group)
        return points

    def _find(self, name: str) -> Row:
        points = [point for point in self._points() if point.name == name]
        owners = [*(["slime"] if name in self.own else []), *map(_package, points)]
        if len(owners) > 1:
            raise UsageError(
                f"{self._group}: {name} is the name of {len(owners)} rows, of {' and '.join(owners)}; have one of the "
                "packages name it otherwise, or uninstall it."
            )
        return self._load(points[0]) if points else self.own[name]

    def _load(self, point: EntryPoint) -> Row:
        where = f"{self._group}: {point.name} of package {_package(point)}"
        row, problem = try_to_load(point.value)
        if problem:
            raise UsageError(f"{where}{problem}.")
        if not isinstance(row, self._kind):
            raise UsageError(f"{where}: {point.value} is of type {type(row).__name__}, not {self._kind.__name__}.")
        if problem := self._check(point.name, row):
            raise UsageError(f"{where}: {point.value} {problem}.")
        return row


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "unknown"


def function_of(functions: Mapping[str, Any], name: str) -> Any:
    """Return the function that a row names: one of a table, or that at a path of its own ("package.module:name")."""
    return load_function(name) if ":" in name else functions[name]


TRACKER_PACKAGES = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
OWN_TRACKERS = ("jsonl", *TRACKER_PACKAGES)
TRACKER_METHODS = ("open", "log", "log_samples", "log_alarm", "finish")


def problem_of_tracker(row: Any) -> str | None:
    """Return why an object cannot make trackers, in words that follow its name; None where nothing is seen."""
    if isinstance(row, type) and (lacks := [name for name in TRACKER_METHODS if not hasattr(row, name)]):
        return f"has no method {lacks[0]!r}: see slime.observability.trackers.Tracker"
    return None if callable(row) else "cannot be called with args: see slime.observability.trackers.Tracker"


TRACKERS: Table[Callable[[Any], Any]] = Table(
    "slime.trackers",
    Callable,
    {},
    check=lambda name, row: (
        "has the name of a tracker of slime; name it otherwise" if name in OWN_TRACKERS else problem_of_tracker(row)
    ),
)
"""Name -> fn(args) -> a `slime.observability.trackers.Tracker`; slime's own are in `trackers.CLASSES`."""
