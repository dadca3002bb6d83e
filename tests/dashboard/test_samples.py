"""Lists of samples and single ones: filters, order, search, long and hostile texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from starlette.testclient import TestClient

from benchmarks.viewer import GROUP, sample_rows, trainer_rows, write_rollout
from slime.checkpoints.rollout_files import samples_path, trainer_path, write_tables
from slime.dashboard.records import LONGEST_IMAGE, SHOWN_TEXT
from slime.observability.rollout_records.schema import PLAIN, PLAIN_TRAINER, SAMPLES, TRAINER
from tests.dashboard.run_files import client_of, only_run, write_run

NUM_SAMPLES = 300


class Reader:
    """Asks for the samples of one rollout of the only run below a directory."""

    def __init__(self, directory: Path, name: str = "00000") -> None:
        self._client: TestClient = client_of(directory)
        self._base = f"/api/runs/{only_run(self._client)}/rollouts"
        self.name = name

    def raw(self, rest: str = "", **asked: Any) -> Any:
        return self._client.get(f"{self._base}/{self.name}{rest}", params=asked)

    def __call__(self, rest: str = "", **asked: Any) -> Any:
        answer = self.raw(rest, **asked)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    directory = write_run(tmp_path_factory.mktemp("run"), 1)
    write_rollout(directory, 0, samples=NUM_SAMPLES, tokens=40)
    return Reader(directory)


def write_samples(directory: Path, *changes: dict[str, Any]) -> Reader:
    """A run of samples that differ from usual ones."""
    import random

    rows = sample_rows(0, len(changes), tokens=8, random_=random.Random(0))
    rows = [row | changed for row, changed in zip(rows, changes, strict=True)]
    write_tables(
        samples_path(directory / "rollouts", 0), SAMPLES, [pa.Table.from_pylist(rows, schema=SAMPLES)], plain=PLAIN
    )
    write_run(directory, 1)
    return Reader(directory)


def rewards_of_group(group: int) -> list[float]:
    """As benchmarks.viewer makes them."""
    return [float(place < group % (GROUP + 1)) for place in range(GROUP)]


def test_samples_are_listed_in_pages(reader: Reader) -> None:
    found = reader(start=120, count=7)
    assert (found["total"], found["found"]) == (NUM_SAMPLES, NUM_SAMPLES)
    assert [row["row"] for row in found["rows"]] == list(range(120, 127))
    assert len(reader(count=10**6)["rows"]) == 200
    assert reader(start=10**6)["rows"] == []


def test_samples_are_sorted_and_rows_break_ties(reader: Reader) -> None:
    found = reader(sort="reward", desc=1, count=NUM_SAMPLES)["rows"]
    keys = [(-row["reward"], row["row"]) for row in found]
    assert keys == sorted(keys)
    lengths = [row["response_length"] for row in reader(sort="response_length")["rows"]]
    assert lengths == sorted(lengths)
    assert reader.raw(sort="response").status_code == 400
    assert reader.raw(low="x").status_code == 400


def test_samples_are_filtered_by_group_status_data_set_and_reward(reader: Reader) -> None:
    assert [row["row"] for row in reader(group_index=3)["rows"]] == list(range(3 * GROUP, 4 * GROUP))
    assert {row["dataset"] for row in reader(dataset="words")["rows"]} == {"words"}
    truncated = reader(status="truncated")
    assert truncated["found"] == truncated["statuses"]["truncated"]
    right = reader(low=0.5, high=1.5)
    groups = [rewards_of_group(group) for group in range(NUM_SAMPLES // GROUP + 1)]
    rewards = [reward for group in groups for reward in group][:NUM_SAMPLES]
    assert right["found"] == rewards.count(1.0)
    assert right["histogram"] == {"values": [0.0, 1.0], "counts": [rewards.count(0.0), rewards.count(1.0)]}


def test_samples_are_filtered_by_why_they_ended_and_whether_the_reward_is_trusted(tmp_path: Path) -> None:
    lost = {"end_reason": "env_error", "reward_is_trusted": False, "group_index": 0, "reward": 1.0}
    right = {"group_index": 0, "reward": 0.0, "end_reason": "done"}
    reader = write_samples(tmp_path, lost, right, right)
    found = reader(end_reason="env_error")
    assert [row["row"] for row in found["rows"]] == [0] and not found["rows"][0]["reward_is_trusted"]
    assert [row["row"] for row in reader(reward_is_trusted="true")["rows"]] == [1, 2]
    assert found["end_reasons"] == {"env_error": 1, "done": 2} and found["trusted"] == {"false": 1, "true": 2}
    assert found["flat_groups"] == 1, "the untrusted reward is no spread"


def test_groups_whose_rewards_are_all_the_same_are_counted_and_found(reader: Reader) -> None:
    found = reader(flat=1, count=200)
    sizes = [min(GROUP, NUM_SAMPLES - start) for start in range(0, NUM_SAMPLES, GROUP)]
    flat = [group for group, size in enumerate(sizes) if len(set(rewards_of_group(group)[:size])) == 1]
    assert found["flat_groups"] == len(flat)
    assert {row["group_index"] for row in found["rows"]} == set(flat)


def test_search_looks_into_whole_texts_whatever_their_case(reader: Reader) -> None:
    assert [row["row"] for row in reader(q="SAMPLE 217 of")["rows"]] == [217]
    assert reader(q="no such text")["found"] == 0
    prompts = reader(q="what is 3 + 3?")
    assert {row["group_index"] for row in prompts["rows"]} == {3}


def test_a_sample_has_its_parts_and_its_group(reader: Reader) -> None:
    sample = reader("/20")
    assert sample["group_rows"] == list(range(16, 24))
    assert sample["response"]["text"].startswith("sample 20 of 2: ")
    assert sample["metadata"] == {} and sample["messages"] is None
    for row in (NUM_SAMPLES, 10**12):
        assert reader.raw(f"/{row}").status_code == 404


def test_tokens_stand_with_the_engines_and_the_trainers_values(reader: Reader) -> None:
    found = reader("/20/tokens")
    prompt, total = found["prompt_length"], found["total"]
    assert prompt == 10 and len(found["ids"]) == total
    for values in found["values"].values():
        assert values[:prompt] == [None] * prompt and None not in values[prompt:] and len(values) == total
    engine, trainer = found["values"]["rollout_log_probs"], found["values"]["log_probs"]
    gaps = [b - a for a, b in zip(engine[prompt:], trainer[prompt:], strict=True)]
    assert gaps == pytest.approx([-0.01] * len(gaps), abs=1e-6)
    part = reader("/20/tokens", start=8, count=5)
    assert part["ids"] == found["ids"][8:13]
    assert part["values"]["log_probs"] == trainer[8:13]
    assert found["texts"] is None  # the run did not say which checkpoint it has


def test_samples_without_a_trainer_yet_are_shown(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    write_rollout(tmp_path, 0, samples=8, tokens=8, has_trainer=False)
    reader = Reader(tmp_path)
    assert reader()["has_trainer_columns"] is False
    assert set(reader("/0/tokens")["values"]) == {"loss_mask", "rollout_log_probs"}


def test_what_the_trainer_writes_later_appears(tmp_path: Path) -> None:
    import random

    write_run(tmp_path, 1)
    write_rollout(tmp_path, 0, samples=8, tokens=8, has_trainer=False)
    reader = Reader(tmp_path)
    assert "log_probs" not in reader("/0/tokens")["values"]
    rows = trainer_rows(sample_rows(0, 8, tokens=8, random_=random.Random(0)))
    path = trainer_path(tmp_path / "rollouts", 0, 0)
    write_tables(path, TRAINER, [pa.Table.from_pylist(rows, schema=TRAINER)], plain=PLAIN_TRAINER)
    assert "log_probs" in Reader(tmp_path)("/0/tokens")["values"]


def test_the_tokenizer_of_the_run_gives_tokens_their_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (tmp_path / "hf").mkdir()
    Tokenizer(WordLevel({f"word{i}": i for i in range(250)}, unk_token="word0")).save(
        str(tmp_path / "hf" / "tokenizer.json")
    )
    write_run(tmp_path / "run", 1, flags={"hf_checkpoint": str(tmp_path / "hf")})
    write_rollout(tmp_path / "run", 0, samples=1, tokens=8)
    found = Reader(tmp_path / "run")("/0/tokens")
    assert found["texts"] == [f"word{token}" for token in found["ids"]]
    (tmp_path / "hf" / "tokenizer.json").write_text("nonsense")
    assert Reader(tmp_path / "run")("/0/tokens")["texts"] is None


# ---- hostile


def test_a_text_of_10_mb_is_shown_part_by_part(tmp_path: Path) -> None:
    text = "".join(f"{i:08}\n" for i in range(10 << 20 >> 3))[: 10 << 20]
    reader = write_samples(tmp_path, {"response": text})
    answer = reader.raw("/0")
    assert len(answer.content) < 3 * SHOWN_TEXT
    assert answer.json()["response"] == {"text": text[:SHOWN_TEXT], "start": 0, "length": len(text)}
    assert reader("/0/text", text="response", start=SHOWN_TEXT)["text"] == text[SHOWN_TEXT : 2 * SHOWN_TEXT]
    assert reader.raw("/0/text", text="metadata").status_code == 404


def test_texts_that_are_no_utf_8_and_no_json_are_shown(tmp_path: Path) -> None:
    reader = write_samples(tmp_path, {"response": "<script>alert(1)</script>", "messages": "[" * 100_000}, {})
    path = samples_path(tmp_path / "rollouts", 0)
    table = parquet.read_table(path)
    bad = pa.array([b"\xff\xfe<b>\x00", b"fine"]).view(pa.string())
    for name in ("prompt", "prompt_preview", "status"):
        table = table.set_column(table.column_names.index(name), name, bad)
    parquet.write_table(table, path)
    [first, _] = reader()["rows"]
    assert first["prompt_preview"] == first["status"] == "\ufffd\ufffd<b>\0"
    sample = reader("/0")
    assert (sample["prompt"]["text"], sample["messages"]) == ("\ufffd\ufffd<b>\0", None)
    assert sample["response"]["text"] == "<script>alert(1)</script>"
    assert reader(q="<SCRIPT>")["found"] == 1


def test_only_pixels_are_handed_out_as_images(tmp_path: Path) -> None:
    good = f"data:image/jpeg;base64,{'A' * 40}="
    bad = ["javascript:alert(1)", "data:image/svg+xml;base64,AAAA", "data:text/html;base64,AAAA", "https://a.b/c.png"]
    bad += [f'{good}" onerror=', f"data:image/png;base64,{'A' * LONGEST_IMAGE}", ""]
    reader = write_samples(tmp_path, {"thumbnails": [*bad, good]}, {})
    assert (reader("/0")["thumbnails"], reader("/1")["thumbnails"]) == ([good], [])
    path = samples_path(tmp_path / "rollouts", 0)
    parquet.write_table(parquet.read_table(path).drop_columns(["thumbnails"]), path)
    assert Reader(tmp_path)("/0")["thumbnails"] == [], "a run that was written before there were any"


def test_messages_are_bounded_and_of_any_form(tmp_path: Path) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "x" * (SHOWN_TEXT + 5)},
        {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "what is it?"}, 7]},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}], "reasoning_content": "hm"},
        "no message",
        {"role": {"a": 1}, "content": {"b": 2}},
    ]
    reader = write_samples(tmp_path, {"messages": json.dumps({"messages": messages, "tools": None})})
    found = reader("/0")["messages"]
    assert found[0]["content"]["length"] == SHOWN_TEXT + 5 and len(found[0]["content"]["text"]) == SHOWN_TEXT
    assert found[1]["content"]["text"] == "[image_url]\nwhat is it?\n7"
    assert (found[2]["tool_calls"], found[2]["reasoning"]["text"]) == ('[\n {\n  "name": "look"\n }\n]', "hm")
    assert [message["content"]["text"] for message in found[3:]] == ["no message", '{"b": 2}']
    assert reader("/0/text", text="message:0", start=SHOWN_TEXT)["text"] == "x" * 5
    for wrong in ("message:9", "message:x", "message:"):
        assert reader.raw("/0/text", text=wrong).status_code == 404


def test_files_that_are_no_samples_are_an_answer_and_not_a_crash(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "00000.parquet").write_bytes(b"nonsense")
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "rollouts" / "00001.parquet")
    for name in ("00000", "00001"):
        assert Reader(tmp_path, name).raw().status_code == 422
    assert Reader(tmp_path, "00002").raw().status_code == 404
    (tmp_path / "rollouts" / "00000.parquet").unlink()
    assert Reader(tmp_path, "00000").raw().status_code == 404
