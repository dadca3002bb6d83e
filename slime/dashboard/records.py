"""rollouts/*.parquet as lists and samples, on top of slime.observability.rollout_records.

A list reads the columns that it shows once, and keeps those of the file that was looked at last. Everything long
(texts, tokens, log-probs) is read a row group at a time, when somebody opens a sample or searches. Texts are read as
bytes: whoever writes files may write what is no UTF-8. It imports pyarrow (a second, 30 MB), and is itself
imported when somebody looks.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slime.observability.rollout_records import LIST_COLUMNS, PER_TOKEN, SAMPLES, RolloutFile

if TYPE_CHECKING:
    from slime.dashboard.runs import SampleFile

IMAGE = re.compile(r"data:image/(jpeg|png);base64,[A-Za-z0-9+/]+=*")  # of an SVG more than pixels would come
LONGEST_IMAGE = 400_000
BINS = 24
MOST_ROWS, MOST_TOKENS = 200, 4000
SHOWN_TEXT = 20_000
MOST_MESSAGES, MOST_SAMPLES = 400, 600
SORTABLE = ("sample_id", "reward", "response_length", "prompt_length", "num_turns", "group_index")
EXACT = ("status", "end_reason", "reward_is_trusted", "dataset", "group_index")
TEXTS = ("prompt", "response")


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


class Samples:
    """The samples of one file.

    Args:
        file: which.

    Raises:
        LookupError: it was removed.
        ValueError: it is no file of samples.
    """

    def __init__(self, file: SampleFile) -> None:
        try:
            self._file = RolloutFile(file.path, trainer_paths=file.trainer_paths)
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

    def lanes(self) -> dict[str, Any]:
        """Return when samples that are spread over the file were generated, and what each did meanwhile."""
        rows, found = plain_rows(self._file.table(["times", "reward"])), []
        for row in range(0, len(rows), max(1, -(-len(rows) // MOST_SAMPLES))):
            times = parsed(rows[row]["times"])
            if isinstance(times, dict) and _is_number(times.get("begin")) and _is_number(times.get("end")):
                spans = [span for span in times.get("spans") or () if isinstance(span, list) and len(span) == 3]
                kept = {k: times[k] for k in ("begin", "end", "generation_s", "reward_s", "tool_s") if k in times}
                found.append(kept | {"row": row, "reward": rows[row]["reward"], "spans": spans[:50]})
        return {"lanes": sorted(found, key=lambda lane: lane["begin"]), "of": self.num_rows}

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """What does not depend on a query."""
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
        found = (
            self._table.filter(self._table["reward_is_trusted"])
            .group_by("group_index")
            .aggregate([("reward", "min"), ("reward", "max"), ("reward", "count")])
        )
        is_flat = pc.equal(found["reward_min"], found["reward_max"])
        return found.filter(pc.and_(is_flat, pc.greater(found["reward_count"], 1)))["group_index"]

    def _mask(self, query: Query) -> Any:
        """Which rows a query finds, but for the bounds of the reward; None: all."""
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
        if not 0 <= row < self.num_rows:
            raise LookupError(f"there is no row {row}: the file has {self.num_rows} samples")
        names = [name for name in SAMPLES.names if name not in without]
        return plain_rows(self._file.rows(row, row + 1, names))[0]


def plain_rows(table: Any) -> list[dict[str, Any]]:
    """Return rows as plain values; what is no UTF-8 is replaced, and what is not finite is None."""

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
    counts = column.cast(pa.binary()).value_counts().to_pylist()
    named = [(entry["values"], entry["counts"]) for entry in counts if entry["values"] is not None]
    return {value.decode(errors="replace"): count for value, count in named[:50]}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
