"""Prompts as streams: every kind of file, the order of an epoch, resume at the row, an index of 100 M rows, URLs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSource
from slime.utils.errors import UsageError
from slime.utils.files.streams import JsonlBlocks, Stream
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args
from tests.unit.s3_server import s3 as s3

__all__ = ["check", "command_line"]  # fixtures
ROWS = [{"input": f"p{i}", "label": str(i)} for i in range(2000)]


def jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def saved_by_datasets(directory: Path) -> None:
    """The files that `datasets.Dataset.save_to_disk` writes."""
    directory.mkdir()
    table = pa.Table.from_pylist(ROWS)
    for number, part in enumerate((table.slice(0, 1200), table.slice(1200))):
        path = str(directory / f"data-0000{number}-of-00002.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part, max_chunksize=100)
    names = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (directory / "state.json").write_text(json.dumps({"_data_files": names, "_indices_data_files": None}))
    (directory / "dataset_info.json").write_text("{}")


def many_files(directory: Path) -> None:
    directory.mkdir()
    (directory / "a.jsonl").write_text(jsonl(ROWS[:700]).rstrip("\n"))  # no newline at its end
    pq.write_table(pa.Table.from_pylist(ROWS[700:1500]), directory / "b.parquet", row_group_size=90)
    (directory / "c").mkdir()
    (directory / "c" / "d.jsonl").write_text(jsonl(ROWS[1500:]))
    (directory / "README.md").write_text("no data")


def make(kind: str, root: Path) -> str:
    path = root / kind
    if kind == "a.jsonl":
        path.write_text(jsonl(ROWS))
    elif kind == "a.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=128)
    elif kind == "directory":
        many_files(path)
    elif kind == "saved":
        saved_by_datasets(path)
    else:
        with fsspec.open("memory://prompts/a.jsonl", "w") as file:
            file.write(jsonl(ROWS))
        return "memory://prompts/a.jsonl"
    return str(path)


KINDS = ["a.jsonl", "a.parquet", "directory", "saved", "memory"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_each_row_once_in_every_epoch(kind: str, tmp_path: Path) -> None:
    stream = Stream(make(kind, tmp_path), window_rows=500)
    assert [stream.row(i)[1] for i in range(len(stream))] == ROWS
    orders = []
    for seed in (7, 8):
        stream.order(seed)
        orders.append([int(needed(stream.row(i)[1])["label"]) for i in range(len(stream))])
        assert sorted(orders[-1]) == list(range(2000))
    assert orders[0] != orders[1]
    again = Stream(make(kind, tmp_path) if kind == "memory" else str(tmp_path / kind), window_rows=500)
    again.order(7)
    assert int(needed(again.row(1234)[1])["label"]) == orders[0][1234], "a row is found without those before it"


def needed(fields: dict[str, Any] | None) -> dict[str, Any]:
    assert fields is not None
    return fields


def test_a_shuffle_is_uniform_over_blocks_and_inside_a_window(tmp_path: Path) -> None:
    """The stated quality: blocks anywhere, rows of a block a window apart at most, no trace of the file's order."""
    (tmp_path / "a.jsonl").write_text(jsonl([{"n": i} for i in range(256 * 64)]))
    stream, window = Stream(str(tmp_path / "a.jsonl"), window_rows=2048), 2048
    stream.order(0)
    order = np.array([needed(stream.row(i)[1])["n"] for i in range(len(stream))])
    place = np.argsort(order).reshape(64, 256)  # where the rows of each block are
    assert (place.max(axis=1) - place.min(axis=1) < window).all()
    assert len(np.unique(place // window, axis=1).T) and (np.ptp(place // window, axis=1) == 0).all()
    # as many neighbours of the file are neighbours in the epoch as chance has it: 2 / window of them
    neighbours = np.abs(np.diff(order)) == 1
    assert neighbours.mean() < 4 * 2 / window
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.3


def source(path: str, **changes: Any) -> RolloutDataSource:
    return RolloutDataSource(rollout_args(prompt_data=path, label_key="label", **changes))


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())


def drawn(data: RolloutDataSource, count: int) -> list[str]:
    return [str(group[0].label) for group in data.get_samples(count)]


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_goes_on_at_the_very_row(mixed: bool, tmp_path: Path) -> None:
    many_files(tmp_path / "many")
    path: Any = str(tmp_path / "many")
    if mixed:
        (tmp_path / "other.jsonl").write_text(jsonl(ROWS[:30]))
        path = [path, str(tmp_path / "other.jsonl")]
    flags = {
        "rollout_shuffle": True,
        "stream_shuffle_rows": 300,
        "save": str(tmp_path / "s"),
        "load": str(tmp_path / "s"),
    }
    first = source(path, **flags)
    drawn(first, 1234)
    first.save(3)
    expected = drawn(first, 3000)  # into the next epoch
    second = source(path, **flags)
    second.load(3)
    assert drawn(second, 3000) == expected


def test_rows_that_cannot_be_used_are_passed_by_or_named(tmp_path: Path) -> None:
    lines = [json.dumps({"input": "p" * n, "label": str(n)}) for n in (3, 9, 4)]
    (tmp_path / "a.jsonl").write_text("\n".join([lines[0], "", lines[1], "no json", lines[2]]))
    flags = {"stream_prompts": True, "rollout_max_prompt_len": 5}
    assert drawn(source(str(tmp_path / "a.jsonl"), skip_malformed_data=True, **flags), 4) == ["3", "4", "3", "4"]
    with pytest.raises(UsageError, match=r"a\.jsonl:4: not valid JSON"):
        drawn(source(str(tmp_path / "a.jsonl"), **flags), 2)
    with pytest.raises(UsageError, match="no row has a prompt of at most 2 tokens"):
        flags["rollout_max_prompt_len"] = 2
        drawn(source(str(tmp_path / "a.jsonl"), skip_malformed_data=True, **flags), 1)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_an_index_that_cannot_be_read_is_made_again(tmp_path: Path, content: bytes) -> None:
    path = make("a.jsonl", tmp_path)
    Path(path + ".index.npz").write_bytes(content)
    assert len(Stream(path)) == len(ROWS)
    assert Path(path + ".index.npz").read_bytes() != content


def test_an_index_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(jsonl(ROWS))
    Stream(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(JsonlBlocks, "_indexed", lambda self: pytest.fail("it is read again"))
        assert len(Stream(str(path))) == 2000
    path.write_text(jsonl(ROWS[:300]))
    assert len(Stream(str(path))) == 300


PEAK = """
import re, sys
import fsspec
import numpy as np
from slime.utils.files import streams
def peak():  # of this program, in MB
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
base = peak()
starts = np.load(sys.argv[2])
streams.JsonlBlocks._indexed = lambda self: (starts, 100_000_000)
streams.JsonlBlocks._keep = lambda self, *given: None
real = streams.JsonlBlocks.rows
def rows(self, block):  # every block is one of the 40 that the file has
    kept, self._starts = self._starts, starts[:41]
    try:
        return real(self, block % 40)
    finally:
        self._starts = kept
streams.JsonlBlocks.rows = rows
stream = streams.Stream(sys.argv[1])
assert len(stream) == 100_000_000
for seed in (0, 1):
    stream.order(seed)
    for index in range(0, 100_000_000, 9_999_999):
        assert stream.row(index)[1]["label"]
print(peak() - base, peak())
"""


def test_100_million_rows_take_less_than_200_mb(tmp_path: Path) -> None:
    """With a generated index, of which 40 blocks are there: lines of 600 bytes."""
    path = tmp_path / "a.jsonl"
    line = json.dumps({"input": "p" * 570, "label": "12345"}) + "\n"
    path.write_text(line * (256 * 40))
    np.save(tmp_path / "starts.npy", np.arange(100_000_000 // 256 + 1, dtype=np.int64) * 256 * len(line))
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "starts.npy")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    more, whole = map(float, run.stdout.split())
    assert more > 0 and whole < 200, run.stdout


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("s4://bucket/a.jsonl", "--prompt-data: s4://bucket/a.jsonl cannot be read: Protocol not known: s4"),
        ("memory://nothing/here.jsonl", "--prompt-data: memory://nothing/here.jsonl cannot be read: there is no such"),
        ("prompts.txt --stream-prompts", "prompts.txt cannot be read: its name ends with neither .jsonl nor .parquet"),
        ("empty", "the directory has no .jsonl and no .parquet file"),
        ("splits", "it holds several splits; add the name of one of train, test"),
    ],
)
def test_what_cannot_be_read_is_named_before_anything_starts(check: Check, path: str, reason: str) -> None:
    Path("empty").mkdir()
    Path("prompts.txt").touch()
    Path("splits").mkdir()
    Path("splits/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    has(check(f"--prompt-data {path}").problems.all(), reason)


def test_a_url_without_credentials_is_named_before_anything_starts(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's error is of no class that Python knows."""
    import fsspec

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    has(
        check("--prompt-data s3://bucket/a.jsonl").problems.all(),
        "--prompt-data: s3://bucket/a.jsonl cannot be read: Unable to locate credentials; see docs/remote_files.md",
    )


def test_the_first_row_of_a_stream_is_looked_at_before_anything_starts(check: Check) -> None:
    Path("many").mkdir()
    Path("many/a.jsonl").write_text('{"text": "x", "label": "1"}\n')
    has(check("--prompt-data many").problems.all(), "many/a.jsonl:1: no key 'input' (--input-key)")
    sets = "--eval-interval 1 --eval-prompt-data one many two memory://none.jsonl"
    problems = check(f"{sets} --eval-input-key input").problems.all()
    has(problems, "many/a.jsonl:1: no key 'input'")
    has(problems, "evaluation data set two: memory://none.jsonl cannot be read: there is no such file")
    assert not check("--prompt-data many --input-key text").problems.all()


def test_a_stream_reads_from_an_s3_compatible_service(s3: Any, tmp_path: Path) -> None:
    with s3.open("bucket/data/a.jsonl", "w") as file:
        file.write(jsonl(ROWS[:900]))
    pq.write_table(pa.Table.from_pylist(ROWS[900:]), tmp_path / "b.parquet", row_group_size=100)
    s3.put(str(tmp_path / "b.parquet"), "bucket/data/b.parquet")
    stream = Stream("s3://bucket/data", window_rows=400)
    assert [stream.row(i)[1] for i in range(len(stream))] == ROWS
    stream.order(1)
    assert sorted(int(needed(stream.row(i)[1])["label"]) for i in range(2000)) == list(range(2000))
    with pytest.raises(UsageError, match="--prompt-data s3://bucket/none.jsonl cannot be read"):
        Stream("s3://bucket/none.jsonl")
