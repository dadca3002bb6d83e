"""rollouts/*.parquet as lists and samples, on top of slime.observability.rollout_records.

A list reads the columns that it shows once, and keeps those of the file that was looked at last. Everything long
(texts, tokens, log-probs) is read a row group at a time, when somebody opens a sample or searches. Texts are read as
bytes: whoever writes files may write what is no UTF-8. pyarrow is imported on first use.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.dashboard.series import is_inside

if TYPE_CHECKING:
    from slime.observability.rollout_records import RolloutFile

DIRECTORY = "rollouts"
NAME = re.compile(r"(eval_)?(\d{5,12})\.parquet")
IMAGE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+=*")  # of an SVG more than pixels would come
LONGEST_IMAGE = 400_000
BINS = 24
MOST_ROWS, MOST_TOKENS = 200, 4000
SHOWN_TEXT = 20_000
MOST_MESSAGES = 400
SORTABLE = ("sample_id", "reward", "response_length", "prompt_length", "num_turns", "group_index")
EXACT = ("status", "end_reason", "reward_is_trusted", "dataset", "group_index")
TEXTS = ("prompt", "response")
TICK_NS = 2_000_000_000  # some file systems tell times apart by a second: what was changed since is looked at again


@dataclass(frozen=True)
class SampleFile:
    """One file of samples.

    Attributes:
        name: without its ending: "00012" or "eval_00012".
        rollout_id: the rollout, or the step of an evaluation.
        is_eval: its samples are answers of an evaluation.
        path, size, changed: where it is, bytes, and when it was written.
        trainer_paths: what the trainer's ranks wrote about the same samples.
    """

    name: str
    rollout_id: int
    is_eval: bool
    path: Path
    size: int
    changed: float
    trainer_paths: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Query:
    """Which samples of a file, and in which order.

    Attributes:
        text: must be in the prompt or the response; case does not count.
        exact: column -> value that it must have.
        low, high: bounds of the reward.
        only_flat: only of groups whose rewards are all the same.
        sort: one of `SORTABLE`.
    """

    text: str = ""
    exact: Mapping[str, str] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    only_flat: bool = False
    sort: str = "sample_id"
    is_descending: bool = False


class SampleFiles:
    """The files of samples of one run.

    Args:
        directory: of the run.
        root: files that lead out of it are left out.
    """

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory, self._root = directory / DIRECTORY, root
        self.files: dict[str, SampleFile] = {}
        self.version = 0
        self._changed: int | None = None  # when the directory was, if it was looked at long enough after that
        self._opened: OrderedDict[SampleFile, Samples] = OrderedDict()
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Look which files there are, if the directory has changed: files come, and go, under whole names."""
        changed = changed_ns(self._directory)
        if changed is not None and changed == self._changed:
            return
        self._changed = changed if changed is not None and time.time_ns() - changed > TICK_NS else None
        paths = sorted(self._directory.glob("*.parquet")) if is_inside(self._directory, self._root) else []
        paths = [path for path in paths if is_inside(path, self._root)]
        found = {}
        for path in paths:
            if match := NAME.fullmatch(path.name):
                ranks = [other for other in paths if other.name.startswith(f"{path.stem}.train")]
                try:
                    status = path.stat()
                except OSError:  # removed meanwhile (--keep-rollouts)
                    continue
                sizes = path.stem, int(match[2]), bool(match[1]), path, status.st_size, status.st_mtime
                found[path.stem] = SampleFile(*sizes, tuple(ranks))
        if found != self.files:
            self.files = found
            self.version += 1

    def open(self, name: str) -> Samples:
        """Return the samples of a file.

        Raises:
            LookupError: there is no such file, or no longer.
            ValueError: it is no file of samples.
        """
        file = self.files.get(name)
        if file is None:
            raise LookupError(f"there are no samples {name} (--keep-rollouts says which are kept)")
        with self._lock:
            if file not in self._opened:
                self._opened[file] = Samples(file)
                while len(self._opened) > 1:
                    self._opened.popitem(last=False)
            return self._opened[file]


class Samples:
    """The samples of one file.

    Args:
        file: which.

    Raises:
        LookupError: it was removed.
        ValueError: it is no file of samples.
    """

    def __init__(self, file: SampleFile) -> None:
        from slime.observability.rollout_records import LIST_COLUMNS, RolloutFile

        try:
            self._file: RolloutFile = RolloutFile(file.path, trainer_paths=file.trainer_paths)
            names = [name for name in LIST_COLUMNS if name != "weight_versions"]
            self._table = self._file.table(names).combine_chunks()
        except FileNotFoundError:
            raise LookupError(f"{file.name} was removed (--keep-rollouts)") from None
        except OSError as error:
            raise ValueError(f"{file.path.name} cannot be read: {error}") from None
        if lacking := set(names) - set(self._table.column_names):
            raise ValueError(f"{file.path.name} is no file of samples: it lacks {', '.join(sorted(lacking))}")
        self._found: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        # Where each sample is in the trainer's files takes a while to know: whoever opens one shall not wait for it.
        threading.Thread(target=self._file.of_trainer, args=(0, None), daemon=True).start()

    @property
    def num_rows(self) -> int:
        """Samples in the file."""
        return self._file.num_rows

    # ---- a list

    def page(self, query: Query, *, start: int, count: int) -> dict[str, Any]:
        """Return rows `start` to `start + count` of those that a query finds, and what their list is headed by."""
        import numpy as np
        import pyarrow as pa
        import pyarrow.compute as pc

        # Rows are found and sorted by the columns that decide; the others are taken for one page alone.
        columns = {
            "row": pa.array(np.arange(self.num_rows)),
            "by": self._table[query.sort],
            "of": self._table["reward"],
        }
        keys = pa.table(columns)
        if (mask := self._mask(query)) is not None:
            keys = keys.filter(mask)
        histogram = _histogram(keys["of"])
        if query.low is not None:
            keys = keys.filter(pc.fill_null(pc.greater_equal(keys["of"], query.low), False))
        if query.high is not None:
            keys = keys.filter(pc.fill_null(pc.less_equal(keys["of"], query.high), False))
        order = [("by", "descending" if query.is_descending else "ascending"), ("row", "ascending")]
        places = pc.sort_indices(keys, sort_keys=order)[start : start + min(count, MOST_ROWS)]
        rows = keys["row"].take(places)
        return {
            "total": self.num_rows,
            "found": keys.num_rows,
            "rows": plain_rows(self._table.take(rows).append_column("row", rows)),
            "histogram": histogram,
            "flat_groups": len(self._flat_groups),
            **self._whole,
            "has_trainer_columns": self._file.has_trainer_columns,
        }

    def problems(self) -> list[dict[str, Any]]:
        """Return what tells problems apart, with rewards, of all rows."""
        names = ["dataset", "prompt_preview", "label", "reward"]
        return [row | {"row": number} for number, row in enumerate(plain_rows(self._table.select(names)))]

    def times(self, most: int) -> list[tuple[int, str | None, float | None]]:
        """Return (row, times as JSON, reward) of samples that are spread over the file, at most about so many."""
        rows = plain_rows(self._file.table(["times", "reward"]))
        step = -(-len(rows) // most) if rows else 1
        return [(row, rows[row]["times"], rows[row]["reward"]) for row in range(0, len(rows), step)]

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """What does not depend on a query."""
        import pyarrow as pa
        import pyarrow.compute as pc

        return {
            "statuses": _counts(self._table["status"]),
            "end_reasons": _counts(self._table["end_reason"]),
            "trusted": _counts(self._table["reward_is_trusted"].cast(pa.string())),
            "datasets": _counts(self._table["dataset"]),
            "groups": pc.count_distinct(self._table["group_index"]).as_py(),
        }

    @cached_property
    def _flat_groups(self) -> Any:
        """Groups of at least two samples whose trusted rewards are all the same: they give no gradient."""
        import pyarrow.compute as pc

        found = (
            self._table.filter(self._table["reward_is_trusted"])
            .group_by("group_index")
            .aggregate([("reward", "min"), ("reward", "max"), ("reward", "count")])
        )
        is_flat = pc.equal(found["reward_min"], found["reward_max"])
        return found.filter(pc.and_(is_flat, pc.greater(found["reward_count"], 1)))["group_index"]

    def _mask(self, query: Query) -> Any:
        """Which rows a query finds, but for the bounds of the reward; None: all."""
        import pyarrow as pa
        import pyarrow.compute as pc

        masks = [
            pc.fill_null(pc.equal(pc.cast(self._table[name], pa.string()), value), False)
            for name, value in query.exact.items()
        ]
        if query.only_flat:
            masks.append(pc.is_in(self._table["group_index"], value_set=self._flat_groups.combine_chunks()))
        if query.text:
            masks.append(self._search(query.text))
        return functools.reduce(pc.and_, masks) if masks else None

    def _search(self, text: str) -> Any:
        """Which samples hold a text; row group by row group, and kept for the next page of the same search."""
        import pyarrow as pa
        import pyarrow.compute as pc

        with self._lock:
            if text not in self._found:
                parts = []
                for start in range(0, self.num_rows, 128):
                    table = self._file.rows(start, start + 128, TEXTS)
                    has = [
                        pc.match_substring(table[name].cast(pa.binary()), text.encode(), ignore_case=True)
                        for name in TEXTS
                    ]
                    parts += pc.fill_null(pc.or_kleene(*has), False).chunks
                self._found[text] = pa.chunked_array(parts, pa.bool_())
                while len(self._found) > 4:
                    self._found.popitem(last=False)
            return self._found[text]

    # ---- one sample

    def sample(self, row: int) -> dict[str, Any]:
        """Return everything of a sample but its tokens; of long texts the beginning, with the whole length.

        Raises:
            LookupError: there is no such row.
        """
        import pyarrow.compute as pc

        found = self._row(row, ("tokens", "loss_mask", "rollout_log_probs"))
        for name in ("reward_parts", "times", "metadata"):
            found[name] = parsed(found.get(name))
        conversation = parsed(found.pop("messages", None))
        conversation = conversation if isinstance(conversation, dict) else {}
        messages = conversation.get("messages")
        found["messages"] = _shown_messages(messages) if isinstance(messages, list) else None
        found["tools"] = conversation.get("tools")
        uris = found.get("thumbnails") or ()  # absent in files of earlier runs
        found["thumbnails"] = [uri for uri in uris if uri and len(uri) <= LONGEST_IMAGE and IMAGE.fullmatch(uri)]
        for name in TEXTS:
            found[name] = shown(found[name] or "")
        group = found["group_index"]
        is_of_group = pc.equal(self._table["group_index"], group) if group is not None else None
        others = [] if is_of_group is None else pc.indices_nonzero(is_of_group).to_pylist()
        return found | {"row": row, "num_rows": self.num_rows, "group_rows": others[:MOST_ROWS]}

    def text(self, row: int, name: str, start: int) -> dict[str, Any]:
        """Return more of a text: "prompt", "response", or "message:3", from a character on.

        Raises:
            LookupError: there is no such row or text.
        """
        kind, _, number = name.partition(":")
        if kind == "message":
            conversation = parsed(self._row(row, ())["messages"])
            try:
                text = message_text(conversation["messages"][int(number)])
            except (TypeError, ValueError, LookupError):
                raise LookupError(f"sample {row} has no message {number}") from None
        elif name in TEXTS:
            text = self._row(row, ())[name] or ""
        else:
            raise LookupError(f"a sample has no text {name}")
        return shown(text, start)

    def tokens(self, row: int, *, start: int, count: int) -> dict[str, Any]:
        """Return a part of the tokens, with what is known of each; values of the response stand at its places.

        Raises:
            LookupError: there is no such row.
        """
        from slime.observability.rollout_records import PER_TOKEN

        found = self._row(row, ())
        ids = found["tokens"] or []
        length = len(ids) - (found["response_length"] or 0)
        stop = min(len(ids), start + min(count, MOST_TOKENS))
        columns = {name: found[name] for name in ("loss_mask", "rollout_log_probs")}
        columns |= {name: self._file.of_trainer(found["sample_id"], found["index"]).get(name) for name in PER_TOKEN}
        part = slice(max(0, start - length), max(0, stop - length))
        shift = max(0, min(length, stop) - start)  # tokens of the prompt, which have no values
        values = {
            name: [None] * shift + [_finite(value) for value in column[part]]
            for name, column in columns.items()
            if column is not None and len(column) == len(ids) - length
        }
        return {"total": len(ids), "prompt_length": length, "start": start, "ids": ids[start:stop], "values": values}

    def _row(self, row: int, without: tuple[str, ...]) -> dict[str, Any]:
        from slime.observability.rollout_records import SAMPLES

        if not 0 <= row < self.num_rows:
            raise LookupError(f"there is no row {row}: the file has {self.num_rows} samples")
        names = [name for name in SAMPLES.names if name not in without]
        return plain_rows(self._file.rows(row, row + 1, names))[0]


def changed_ns(directory: Path) -> int | None:
    """Return when a directory was changed, in ns since 1970; None where there is none."""
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return None


def plain_rows(table: Any) -> list[dict[str, Any]]:
    """Return rows as plain values; what is no UTF-8 is replaced, and what is not finite is None."""
    import pyarrow as pa

    columns = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            values = column.cast(pa.binary()).to_pylist()
            columns[name] = [None if value is None else value.decode(errors="replace") for value in values]
        else:
            columns[name] = [_finite(value) for value in column.to_pylist()]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def parsed(text: str | None) -> Any:
    """Return the JSON of a column; what is none stays a text."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text[:SHOWN_TEXT] if text else text


def shown(text: str, start: int = 0) -> dict[str, Any]:
    """Return a bounded part of a text, with its whole length."""
    return {"text": text[start : start + SHOWN_TEXT], "start": start, "length": len(text)}


def message_text(message: Any) -> str:
    """Return what a message says, as text: parts that are images are named."""
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"text": str(part)} for part in content]
        return "\n".join(str(part.get("text") or f"[{part.get('type', 'part')}]") for part in parts)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False) if content else ""


def _shown_messages(messages: list[Any]) -> list[dict[str, Any]]:
    found = []
    for message in messages[:MOST_MESSAGES]:
        values = message if isinstance(message, dict) else {}
        calls = values.get("tool_calls")
        found.append(
            {
                "role": str(values.get("role", "?"))[:40],
                "name": str(values["name"])[:200] if values.get("name") else None,
                "content": shown(message_text(message)),
                "reasoning": shown(str(values["reasoning_content"])) if values.get("reasoning_content") else None,
                "tool_calls": json.dumps(calls, ensure_ascii=False, indent=1)[:SHOWN_TEXT] if calls else None,
            }
        )
    return found


def _histogram(rewards: Any) -> dict[str, Any]:
    """Counts of equal parts of the range of rewards; few distinct values get a bar each."""
    import numpy as np

    values = rewards.drop_null().to_numpy()
    values = values[np.isfinite(values)]
    if not len(values):
        return {"edges": [], "counts": []}
    distinct = np.unique(values)
    if len(distinct) <= BINS // 2:
        counts = [int((values == value).sum()) for value in distinct]
        return {"values": [float(value) for value in distinct], "counts": counts}
    found, edges = np.histogram(values, bins=BINS)
    return {"edges": [float(edge) for edge in edges], "counts": [int(count) for count in found]}


def _counts(column: Any) -> dict[str, int]:
    import pyarrow as pa

    counts = column.cast(pa.binary()).value_counts().to_pylist()
    named = [(entry["values"], entry["counts"]) for entry in counts if entry["values"] is not None]
    return {value.decode(errors="replace"): count for value, count in named[:50]}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
