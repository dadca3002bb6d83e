"""The prompt file: slices, chat template, and errors that name file and line."""

from __future__ import annotations

import json
from argparse import Namespace

import pyarrow
import pyarrow.parquet
import pytest

from slime.utils.data import Dataset, check_data_file, get_source, process_rollout_data, read_file
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer


@pytest.fixture
def write(tmp_path):
    def build(rows, name="data.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return build


def dataset(path, **options):
    options = {"prompt_key": "input", **options}
    return Dataset(path, LetterTokenizer(), None, options.pop("max_length", None), **options)


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [("", "abcde"), ("@[1:3]", "bc"), ("@[:2]", "ab"), ("@[3:]", "de"), ("@[-2:]", "de"), ("@[:-4]", "a")],
)
def test_a_slice_selects_rows(write, suffix, expected):
    path = write([{"input": letter} for letter in "abcde"]) + suffix
    assert "".join(row["input"] for row in read_file(path)) == expected
    assert check_data_file(path, prompt_key="input") == len(expected)


def test_parquet_reads_like_jsonl(tmp_path):
    path = tmp_path / "data.parquet"
    messages = [{"role": "user", "content": "hi"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"input": messages, "metadata": '{"a": 1}'}] * 3), path)
    samples = dataset(f"{path}@[1:]").samples
    assert [(s.prompt, s.metadata) for s in samples] == [(messages, {"a": 1})] * 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (['{"input": "a", "label": 1}', "", '{"input": '], r"data.jsonl:3: not valid JSON"),
        (["[1]"], r"data.jsonl:1: a list, but each line must be one JSON object"),
        ([{"question": "a", "answer": "b"}], r"data.jsonl:1: no key 'input'.*'question', 'answer'"),
        ([{"input": "a", "label": "b"}, {"input": "a"}], r"data.jsonl:2: no label under 'label'.*'input'"),
        ([{"input": "a", "label": None}], r"no label under 'label' \(--label-key\); it is null"),
        ([{"input": 5, "label": 1}], r"'input' must be a text or a list of messages"),
        ([{"input": "a", "label": 1, "metadata": "x"}], r"'metadata' is a text that is no JSON"),
        ([{"input": "a", "label": 1, "metadata": [1]}], r"'metadata' must be a JSON dict"),
        ([], "has no rows"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error_with_its_place(write, rows, message):
    path = write(rows)
    with pytest.raises(UsageError, match=message):
        check_data_file(path, prompt_key="input", label_key="label", metadata_key="metadata")
    with pytest.raises(UsageError, match=message):
        dataset(path, label_key="label")


def test_a_missing_file_and_an_unknown_type_are_errors(write):
    with pytest.raises(UsageError, match="nowhere.jsonl does not exist"):
        check_data_file("nowhere.jsonl", prompt_key="input")
    with pytest.raises(UsageError, match=r"ends with '.csv'"):
        check_data_file(write(["a"], "data.csv"), prompt_key="input")
    with pytest.raises(UsageError, match="is no parquet file"):
        check_data_file(write(["a"], "data.parquet"), prompt_key="input")


def test_the_chat_template_renders_text_and_messages_with_tools(write):
    tools = [{"type": "function"}]
    path = write([{"input": "hi"}, {"input": [{"role": "user", "content": "yo"}], "tools": json.dumps(tools)}])
    first, second = dataset(path, apply_chat_template=True, tool_key="tools").samples
    assert first.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert second.prompt == "[1 tools]<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"
    assert second.metadata == {"tools": tools}


def test_the_messages_of_a_rendered_prompt_are_kept_when_asked_for(write):
    messages = [{"role": "user", "content": "hi"}]
    path = write([{"input": "hi"}, {"input": messages, "metadata": {"messages": "mine"}}])
    kept = dataset(path, apply_chat_template=True, keep_messages=True).samples
    assert [sample.metadata["messages"] for sample in kept] == [messages, "mine"]
    assert "messages" not in dataset(path, apply_chat_template=True).samples[0].metadata
    assert "messages" not in dataset(path, keep_messages=True).samples[0].metadata, "the prompt is the list itself"


def test_without_a_chat_template_message_lists_stay_lists(write):
    messages = [{"role": "user", "content": "yo"}]
    assert dataset(write([{"input": messages}])).samples[0].prompt == messages


def test_over_long_prompts_are_left_out_and_all_of_them_is_an_error(write):
    path = write([{"input": "abc"}, {"input": "abcd"}, {"input": "ab"}])
    assert [s.prompt for s in dataset(path, max_length=3).samples] == ["abc", "ab"]
    with pytest.raises(UsageError, match="all 3 prompts .* longer than 1 tokens"):
        dataset(path, max_length=1)


def test_each_epoch_is_its_own_permutation_of_the_file(write):
    data = dataset(write([{"input": letter} for letter in "abcdefgh"]), seed=7)
    orders = []
    for epoch in (0, 1, 0):
        data.shuffle(epoch)
        orders.append("".join(s.prompt for s in data.samples))
    assert sorted(orders[0]) == sorted("abcdefgh")
    assert orders[0] == orders[2] != orders[1]


def test_the_source_of_a_sample():
    named = Sample(metadata={"source_name": "m"})
    assert get_source(named) == "m"
    named.source = "attribute"
    assert get_source(named) == "attribute"
    assert get_source(Sample()) == "unknown"


def test_a_share_for_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match="split into 1 shares, but there are 2"):
        process_rollout_data(Namespace(), [None], 0, 2)


def test_malformed_lines_are_skipped_with_one_warning_where_asked(write, caplog):
    path = write([{"input": "a"}, "{", "[1]", {"input": "b"}, "{"])
    with pytest.raises(UsageError, match="data.jsonl:2: not valid JSON"):
        dataset(path)
    with caplog.at_level("WARNING"):
        assert [s.prompt for s in dataset(path, skip_malformed=True).samples] == ["a", "b"]
    (record,) = caplog.records
    assert record.getMessage().startswith("3 malformed lines are skipped; the first: ")
    assert "data.jsonl:2: not valid JSON" in record.getMessage()
    assert check_data_file(path, prompt_key="input", skip_malformed=True) == 2
    assert [s.prompt for s in dataset(path + "@[1:]", skip_malformed=True).samples] == ["b"], "a slice counts rows"


def test_skipping_does_not_excuse_a_row_without_a_prompt_nor_a_file_without_rows(write):
    with pytest.raises(UsageError, match="data.jsonl:2: no key 'input'"):
        dataset(write([{"input": "a"}, {"question": "b"}]), skip_malformed=True)
    with pytest.raises(UsageError, match="has no rows but 2 malformed lines"):
        check_data_file(write(["{", "1"]), prompt_key="input", skip_malformed=True)
