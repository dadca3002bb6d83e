"""Records of rollouts: what is in a file, what a reader gets back, and which files stay."""

from __future__ import annotations

import base64
import io
import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from slime.checkpoints.rollout_files import (
    ROWS_PER_GROUP,
    KeepRule,
    RecordFile,
    forget,
    prune,
    record_files,
    samples_path,
    trainer_path,
    write_tables,
)
from slime.config.args import Args
from slime.config.flags.run import ObservabilityFlags
from slime.observability.rollout_records import LIST_COLUMNS, RolloutRecords
from slime.observability.rollout_records.recorder import MOST_AT_ONCE, RecordWriter, SampleRecorder, chosen, index_of
from slime.observability.rollout_records.schema import (
    MAX_TEXT,
    PER_TOKEN,
    PLAIN,
    PLAIN_TRAINER,
    SAMPLES,
    TRAINER,
    sample_tables,
    times_of,
)
from slime.utils.types import Sample


def a_sample(index: int, **changes: Any) -> Sample:
    """Two prompt tokens and three of a response, the second of which a tool wrote."""
    values: dict[str, Any] = {
        "group_index": index // 2,
        "index": index,
        "rollout_id": index,
        "prompt": f"question {index}",
        "response": f"answer {index}",
        "tokens": [1, 2, 10 + index, 4, 5],
        "response_length": 3,
        "loss_mask": [1, 0, 1],
        "rollout_log_probs": [-0.5, 0.0, -0.25],
        "reward": float(index % 2),
        "status": Sample.Status.COMPLETED,
        "weight_versions": ["3"],
    }
    return Sample(**values | changes)


def write(output_dir: Path, rollout_id: int, samples: list[Sample], **options: Any) -> None:
    reward_key, evaluation = options.get("reward_key"), options.get("evaluation", False)
    path = samples_path(output_dir / "rollouts", rollout_id, evaluation=evaluation)
    placed = [(i, sample, options.get("dataset")) for i, sample in enumerate(samples)]
    write_tables(path, SAMPLES, sample_tables(placed, reward_key=reward_key), plain=PLAIN)


def read_back(output_dir: Path, sample: Sample, **options: Any) -> dict[str, Any]:
    write(output_dir, 0, [sample], **options)
    return RolloutRecords(output_dir).open(0).sample(0)


def write_trainer(output_dir: Path, rollout_id: int, rank: int, places: list[tuple[int, int]]) -> None:
    """For (place, index) log-probs that say the index."""
    rows = [
        {"sample_id": place, "index": index, "rank": rank, **dict.fromkeys(PER_TOKEN)}
        | {"log_probs": np.full(3, -index, np.float32)}
        for place, index in places
    ]
    path = trainer_path(output_dir / "rollouts", rollout_id, rank)
    write_tables(path, TRAINER, [pa.Table.from_pylist(rows, schema=TRAINER)], plain=PLAIN_TRAINER)


def test_a_sample_comes_back_as_it_was(tmp_path: Path) -> None:
    sample = a_sample(1, label="42", metadata={"source_name": "sums", "depth": 3})
    sample.end_reason, sample.reward_is_trusted = "env_error", False
    found = read_back(tmp_path, sample)
    expected = {
        **{name: vars(sample)[name] for name in ("group_index", "index", "rollout_id", "prompt", "response")},
        **{name: vars(sample)[name] for name in ("tokens", "response_length", "loss_mask", "weight_versions")},
        "rollout_log_probs": sample.rollout_log_probs,
        "sample_id": 0,
        "reward": 1.0,
        "reward_parts": None,
        "dataset": "sums",
        "status": "completed",
        "num_turns": 2,  # a tool's token lies between two of the model
        "label": "42",
        "metadata": sample.metadata,
        "messages": None,
        "tools": None,
        "prompt_length": 2,
        "thumbnails": None,
        "removed": False,
        "end_reason": "env_error",
        "reward_is_trusted": False,
        "images": 0,
    }
    assert {name: found[name] for name in expected} == expected
    assert all(found[name] is None for name in ("rank", *PER_TOKEN))  # no trainer wrote anything


READERS = """
import sys, threading
from slime.observability.rollout_records import RolloutRecords
from slime.observability.rollout_records.schema import SAMPLES

def read(file, barrier):
    barrier.wait()
    for _ in range(10):
        assert len(file.rows(0, 4, SAMPLES.names)) == 4 and len(file.table()) == 4
        assert file.of_trainer(0, 0)["rank"] == 0

for _ in range(12):
    file, barrier = RolloutRecords(sys.argv[1]).open(0), threading.Barrier(16)
    threads = [threading.Thread(target=read, args=(file, barrier)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_read_a_file_at_once(tmp_path: Path) -> None:
    """As those of the pages do; pyarrow's own file ended the process, which is another one here."""
    write(tmp_path, 0, [a_sample(index) for index in range(4)])
    write_trainer(tmp_path, 0, 0, [(index, index) for index in range(4)])
    read = subprocess.run([sys.executable, "-c", READERS, str(tmp_path)], timeout=120, capture_output=True, text=True)
    assert (read.returncode, read.stderr) == (0, "")


def test_a_sample_without_mask_log_probs_and_indices_is_recorded(tmp_path: Path) -> None:
    sample = Sample(prompt="p", tokens=[1, 2], response_length=1)
    found = read_back(tmp_path, sample)
    assert found["loss_mask"] == [1] and found["rollout_log_probs"] is None
    assert found["index"] is None and found["group_index"] is None and found["reward"] is None
    assert found["status"] == "pending" and found["weight_versions"] == []


def test_a_reward_of_parts_keeps_them_beside_its_number(tmp_path: Path) -> None:
    parts = {"format": 0.25, "exact": 1.0, "why": "equal"}
    found = read_back(tmp_path, a_sample(0, reward=parts), reward_key="exact")
    assert found["reward"] == parts["exact"] and found["reward_parts"] == parts


def test_a_conversation_is_kept_with_its_tools(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "2+2?"}]
    tools = [{"type": "function", "function": {"name": "calculator"}}]
    turns = [*asked, {"role": "assistant", "content": "4"}]
    found = read_back(tmp_path, a_sample(0, prompt=asked, metadata={"tools": tools}))
    assert (found["messages"], found["tools"]) == (asked, tools)
    assert json.loads(found["prompt"]) == asked
    several = read_back(tmp_path, a_sample(0, prompt=asked, metadata={"messages": turns, "round_number": 7}))
    assert several["messages"] == turns and several["num_turns"] == 7
    assert "messages" not in several["metadata"]  # not twice


def test_long_texts_are_cut_and_their_length_is_kept(tmp_path: Path) -> None:
    length = MAX_TEXT + 1000
    found = read_back(tmp_path, a_sample(0, response="x" * length, metadata={"log": "y" * length, "kept": 1}))
    assert len(found["response"]) == MAX_TEXT and found["response_chars"] == length
    assert found["metadata"]["kept"] == 1 and len(found["metadata"]["log"]) < 100


class _Unwritable:
    def __str__(self) -> str:
        return "an object of the user's"


def test_values_of_user_code_never_refuse_a_record(tmp_path: Path) -> None:
    odd = a_sample(
        0,
        response="half a character \ud83d",
        loss_mask=[1],  # not as long as the response
        rollout_log_probs=[None, -1.0, 0.0],
        reward=math.nan,
        label={"answer": _Unwritable()},
        metadata={"object": _Unwritable(), ("a", "tuple"): 1, "number": math.inf},
    )
    found = read_back(tmp_path, odd)
    assert found["response"].startswith("half a character ")
    assert found["loss_mask"] is None and math.isnan(found["rollout_log_probs"][0])
    assert math.isnan(found["reward"])
    assert json.loads(found["label"]) == {"answer": "an object of the user's"}
    assert found["metadata"]["object"] == "an object of the user's"


def test_times_are_those_noted_and_those_of_the_trace() -> None:
    sample = a_sample(0, non_generation_time=1.5)
    sample.times = {"begin": 10.0, "end": 14.0}  # type: ignore[attr-defined]
    sample.trace = {  # type: ignore[attr-defined]
        "events": [
            {"type": "span_start", "span_id": "a", "name": "generate", "ts": 10.0},
            {"type": "span_start", "span_id": "b", "name": "tool", "ts": 11.0},
            {"type": "span_end", "span_id": "b", "ts": 12.5},
            {"type": "span_end", "span_id": "a", "ts": 14.0},
            {"type": "span_start", "span_id": "c", "name": "never ended", "ts": 14.0},
        ]
    }
    spans = [["generate", 10.0, 14.0], ["tool", 11.0, 12.5]]
    assert times_of(sample) == {"begin": 10.0, "end": 14.0, "tool_s": 1.5, "spans": spans}


def test_a_list_needs_no_token_column_and_a_row_only_its_group(tmp_path: Path) -> None:
    count = 2 * ROWS_PER_GROUP + 10
    write(tmp_path, 3, [a_sample(i) for i in range(count)])
    file = RolloutRecords(tmp_path).open(3)
    groups = parquet.ParquetFile(file.path).metadata
    assert [groups.row_group(i).num_rows for i in range(3)] == [ROWS_PER_GROUP, ROWS_PER_GROUP, 10]
    assert file.table().column_names == list(LIST_COLUMNS) and not {"tokens", "response"} & set(LIST_COLUMNS)
    assert file.table(["index"])["index"].to_pylist() == list(range(count))
    across = file.rows(ROWS_PER_GROUP - 1, ROWS_PER_GROUP + 2, ["index"])["index"].to_pylist()
    assert across == [ROWS_PER_GROUP - 1, ROWS_PER_GROUP, ROWS_PER_GROUP + 1]
    assert file.sample(count - 1)["tokens"] == a_sample(count - 1).tokens
    with pytest.raises(IndexError, match=f"no row {count}"):
        file.sample(count)


def test_columns_of_all_trainer_ranks_are_joined_by_sample(tmp_path: Path) -> None:
    write(tmp_path, 5, [a_sample(i) for i in range(4)])
    write_trainer(tmp_path, 5, 0, [(0, 0), (2, 2)])
    write_trainer(tmp_path, 5, 1, [(3, 3)])
    write_trainer(tmp_path, 4, 0, [(1, 1)])  # of another rollout
    file = RolloutRecords(tmp_path).open(5)
    assert file.has_trainer_columns
    assert [file.sample(i)["rank"] for i in range(4)] == [0, None, 0, 1]
    assert file.sample(3)["log_probs"] == [-3.0] * 3 and file.sample(1)["log_probs"] is None


def test_a_sample_that_a_hook_moved_is_found_by_its_index(tmp_path: Path) -> None:
    write(tmp_path, 0, [a_sample(i) for i in range(3)])
    write_trainer(tmp_path, 0, 0, [(0, 2), (1, 2), (2, 0)])  # drawn again by reward: sample 1 was not
    file = RolloutRecords(tmp_path).open(0)
    assert [file.sample(i)["log_probs"] for i in range(3)] == [[0.0] * 3, None, [-2.0] * 3]


def test_rollouts_and_evaluations_are_listed_apart(tmp_path: Path) -> None:
    records = RolloutRecords(tmp_path)
    assert records.rollouts() == records.evals() == []
    for rollout_id in (10, 2, 123456):
        write(tmp_path, rollout_id, [a_sample(0)])
    write(tmp_path, 2, [a_sample(0)], evaluation=True, dataset="held out")
    (records.directory / ".00099.parquet.1.partial").touch()  # being written
    assert records.rollouts() == [2, 10, 123456] and records.evals() == [2]
    assert records.open(2, evaluation=True).sample(0)["dataset"] == "held out"
    with pytest.raises(FileNotFoundError):
        records.open(3)


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = samples_path(tmp_path / "rollouts", 1)
    path.parent.mkdir()
    path.write_text("half")
    with pytest.raises(ValueError, match="00001.parquet is no record"):
        RolloutRecords(tmp_path).open(1)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def tables() -> Any:
        yield from sample_tables([(0, a_sample(0), None)], reward_key=None)
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_tables(samples_path(tmp_path, 0), SAMPLES, tables(), plain=PLAIN)
    assert list(tmp_path.iterdir()) == []


def files_of(*rollouts: int, evals: tuple[int, ...] = ()) -> dict[RecordFile, int]:
    """Of each rollout 100 bytes of samples and 50 of the trainer; 10 of an evaluation."""
    sizes = {}
    for i in rollouts:
        sizes[RecordFile(Path(f"{i}"), i, "samples")] = 100
        sizes[RecordFile(Path(f"{i}.train"), i, "train")] = 50
    return sizes | {RecordFile(Path(f"eval_{i}"), i, "eval"): 10 for i in evals}


@pytest.mark.parametrize(
    ("rule", "gone"),
    [
        (KeepRule(), []),
        (KeepRule(last=2), [0, 1, 2, 3, 5]),
        (KeepRule(last=2, every=5), [1, 2, 3]),
        (KeepRule(last=100), []),
        (KeepRule(max_bytes=7 * 150 + 10), []),
        (KeepRule(max_bytes=2 * 150 + 10), [0, 1, 2, 3, 5]),
        (KeepRule(last=2, every=5, max_bytes=200), [0, 1, 2, 3, 5, 6]),
        (KeepRule(max_bytes=1), [0, 1, 2, 3, 5, 6]),  # the newest stays, whatever it takes
    ],
)
def test_the_rule_says_which_rollouts_go(rule: KeepRule, gone: list[int]) -> None:
    sizes = files_of(0, 1, 2, 3, 5, 6, 10, evals=(0,))
    removed = [file for file in rule.surplus(sizes) if file.kind == "samples"]
    assert sorted(file.rollout_id for file in removed) == gone
    assert len(rule.surplus(sizes)) == 2 * len(gone)  # with what the trainer wrote of them


def test_evaluations_go_last_and_only_for_want_of_room() -> None:
    sizes = files_of(1, 2, evals=(0, 1, 2))
    assert not [file for file in KeepRule(last=1).surplus(sizes) if file.kind == "eval"]
    tight = KeepRule(last=1, max_bytes=150 + 20).surplus(sizes)
    assert [file.rollout_id for file in tight if file.kind == "eval"] == [0]


def test_pruning_removes_files_and_a_rollout_made_again_forgets_its_first_attempt(tmp_path: Path) -> None:
    for rollout_id in range(4):
        write(tmp_path, rollout_id, [a_sample(0)])
        write_trainer(tmp_path, rollout_id, 0, [(0, 0)])
    directory = tmp_path / "rollouts"
    prune(directory, KeepRule(last=2))
    assert sorted({file.rollout_id for file in record_files(directory)}) == [2, 3]
    write(tmp_path, 3, [a_sample(0)], evaluation=True)
    forget(directory, 3)
    assert [(file.rollout_id, file.kind) for file in record_files(directory) if file.rollout_id == 3] == [(3, "eval")]


@pytest.mark.parametrize(
    "text", ["", "last", "last:0", "last:x", "newest:3", "last:1,last:2", "max-gb:-1", "last:1.5"]
)
def test_a_rule_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        KeepRule.parse(text)


def recorder_of(output_dir: Path, **flags: Any) -> SampleRecorder:
    """A recorder of a run with these flags."""
    defaults = {field.name: field.default for field in fields(ObservabilityFlags) if field.default is not MISSING}
    values = defaults | {"output_dir": str(output_dir), "reward_key": None} | flags
    return SampleRecorder(cast(Args, SimpleNamespace(**values)))


def record(recorder: SampleRecorder, rollout_id: int, samples: list[Sample]) -> frozenset[int] | None:
    """Record a rollout of which nothing is made meanwhile; the indices of those that are recorded."""
    with recorder.rollout(rollout_id, samples) as indices:
        return indices


def test_rollouts_and_evaluations_are_recorded_next_to_the_run(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    assert record(recorder, 0, [a_sample(i) for i in range(4)]) is None  # all of them
    recorder.evaluation(0, {"sums": [a_sample(0)], "products": [a_sample(1), a_sample(2)]})
    recorder.finish(60)
    records = RolloutRecords(tmp_path)
    assert records.open(0).table(["index"])["index"].to_pylist() == [0, 1, 2, 3]
    shown = records.open(0, evaluation=True).table(["sample_id", "dataset"]).to_pylist()
    assert [(row["sample_id"], row["dataset"]) for row in shown] == [(0, "sums"), (1, "products"), (2, "products")]


def test_a_share_of_the_groups_is_recorded_whole_and_again_the_same(tmp_path: Path) -> None:
    samples = [a_sample(i) for i in range(20)]  # ten groups of two
    recorder = recorder_of(tmp_path, rollout_record_fraction=0.25)
    indices = record(recorder, 7, samples)
    recorder.finish(60)
    rows = RolloutRecords(tmp_path).open(7).table(["sample_id", "group_index"]).to_pylist()
    groups = [row["group_index"] for row in rows]
    assert len(set(groups)) == math.ceil(0.25 * 10) and len(rows) == 2 * len(set(groups))
    assert indices == {row["sample_id"] for row in rows}
    assert chosen(samples, 0.25) == chosen(samples, 0.25) == sorted(indices or ())


def test_with_none_nothing_is_written(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path, keep_rollouts="none")
    assert record(recorder, 0, [a_sample(0)]) is None
    recorder.evaluation(0, {"sums": [a_sample(0)]})
    recorder.finish(1)
    assert not (tmp_path / "rollouts").exists()


def test_old_rollouts_go_while_the_run_goes_on(tmp_path: Path) -> None:
    for rollout_id in range(4):
        recorder = recorder_of(tmp_path, keep_rollouts="last:2")
        record(recorder, rollout_id, [a_sample(0)])
        recorder.finish(60)
    assert RolloutRecords(tmp_path).rollouts() == [2, 3]


def test_a_rollout_is_written_once_its_shares_are_made_and_also_where_that_fails(tmp_path: Path) -> None:
    recorder = recorder_of(tmp_path)
    with pytest.raises(ValueError, match="a hook failed"), recorder.rollout(0, [a_sample(0)]):
        time.sleep(0.1)
        assert RolloutRecords(tmp_path).rollouts() == []
        raise ValueError("a hook failed")
    recorder.finish(60)
    assert RolloutRecords(tmp_path).rollouts() == [0]


def test_a_writer_that_falls_behind_leaves_out_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, go_on, written = RecordWriter(tmp_path, KeepRule()), threading.Event(), []

    def write(number: int) -> None:
        go_on.wait(60)
        written.append(number)

    for number in range(MOST_AT_ONCE + 2):
        writer.submit("rollout", f"rollout {number}", partial(write, number))
    go_on.set()
    writer.finish(60)
    assert written == list(range(MOST_AT_ONCE))
    assert [f"rollout {MOST_AT_ONCE} is not recorded" in record.getMessage() for record in caplog.records] == [True]


def test_a_full_disk_costs_a_line_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    writer = RecordWriter(tmp_path, KeepRule())
    for number in range(2):
        writer.submit("rollout", f"rollout {number}", fail)
    writer.finish(60)
    first, total = (record.getMessage() for record in caplog.records)
    assert "rollout 0 is not recorded" in first and "No space left" in first and "2 records" in total


def test_rollouts_of_a_lost_attempt_do_not_push_out_those_made_now(tmp_path: Path) -> None:
    for rollout_id in range(480, 500):
        write(tmp_path, rollout_id, [a_sample(0)])
        write_trainer(tmp_path, rollout_id, 0, [(0, 0)])
    for step in (400, 480):
        write(tmp_path, step, [a_sample(0)], evaluation=True)
    recorder = recorder_of(tmp_path, keep_rollouts="last:20")
    for rollout_id in (400, 401):
        record(recorder, rollout_id, [a_sample(0)])
    recorder.finish(60)
    left = sorted((file.rollout_id, file.kind) for file in record_files(tmp_path / "rollouts"))
    assert left == [(400, "eval"), (400, "samples"), (401, "samples")]


def test_what_cannot_be_removed_ends_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(directory: Path, rollout_id: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("slime.observability.rollout_records.recorder.forget", refuse)
    recorder = recorder_of(tmp_path)
    for rollout_id in range(2):
        record(recorder, rollout_id, [a_sample(0)])
    recorder.finish(60)
    assert RolloutRecords(tmp_path).rollouts() == [0, 1]
    assert ["Permission denied" in record.getMessage() for record in caplog.records] == [True]


def test_a_write_that_fails_makes_room_all_the_same(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    for rollout_id in range(3):
        write(tmp_path, rollout_id, [a_sample(0)])
    writer = RecordWriter(tmp_path / "rollouts", KeepRule(last=1))
    writer.submit("rollout", "rollout 3", fail)
    writer.finish(60)
    assert RolloutRecords(tmp_path).rollouts() == [2]


def test_an_index_that_is_no_number_is_the_place() -> None:
    assert [index_of(3, index) for index in (7, np.int64(7), None, "x")] == [7, 7, 3, 3]


def uri_of(image: Any, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def test_a_sample_has_small_pictures_of_its_images_and_its_conversation_stays_short(tmp_path: Path) -> None:
    shared = Image.new("RGB", (1280, 640), "red")
    noise = Image.effect_noise((900, 900), 90)
    content = [{"type": "image_url", "image_url": {"url": uri_of(noise)}}, {"type": "text", "text": "what is it?"}]
    bad = ["data:image/png;base64,AAAA", "data:image/svg+xml,<svg onload=alert(1)>", uri_of(noise, "JPEG")[:-4000]]
    samples = [
        a_sample(0, multimodal_inputs={"images": [shared] * 9}),
        a_sample(1, prompt=[{"role": "user", "content": content}]),
        a_sample(2, multimodal_inputs={"images": [*bad, 7]}),
        a_sample(3),
    ]
    path = samples_path(tmp_path, 0)
    write_tables(
        path, SAMPLES, sample_tables([(i, s, None) for i, s in enumerate(samples)], reward_key=None), plain=PLAIN
    )
    rows = parquet.read_table(path).to_pylist()
    assert [len(row["thumbnails"] or ()) for row in rows] == [8, 1, 0, 0]
    small = Image.open(io.BytesIO(base64.b64decode(rows[0]["thumbnails"][0].partition(",")[2])))
    assert (small.format, small.size) == ("JPEG", (320, 160)), "1,280 by 640, four times as small"
    assert len(rows[1]["thumbnails"][0]) < 100_000 < len(uri_of(noise))
    assert json.loads(rows[1]["messages"])["messages"][0]["content"][0]["image_url"]["url"] == "(image 1)"
    assert "base64" not in rows[1]["prompt"]
