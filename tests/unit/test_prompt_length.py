"""Over-long prompts: found by any number of threads, and dropped, refused or cut."""

from __future__ import annotations

import json
import threading

import pytest

from slime.rollout import data_source, eval
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.eval import EvalDatasets
from slime.utils.data import Dataset, cut_text, fit_prompts, prompt_lengths
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.files import prompt_length
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args


@pytest.fixture
def path(tmp_path):
    """Prompts of 3, 6 and 2 letters, in lines 1 to 3."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"input": text}) + "\n" for text in ("abc", "ABCDEF", "xy")))
    return str(file)


def prompts_of(path, truncation, max_length=4):
    data = Dataset(path, LetterTokenizer(), None, max_length, prompt_key="input", truncation=truncation)
    return [sample.prompt for sample in data.samples]


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        ("drop", ["abc", "xy"]),
        ("left", ["abc", "CDEF", "xy"]),
        ("right", ["abc", "ABCD", "xy"]),
        ("middle", ["abc", "ABEF", "xy"]),
    ],
)
def test_a_long_prompt_is_dropped_or_loses_the_tokens_on_the_named_side(path, truncation, expected):
    assert prompts_of(path, truncation) == expected


def test_an_odd_number_of_tokens_around_the_middle_favours_the_beginning(path):
    assert prompts_of(path, "middle", max_length=3) == ["abc", "ABF", "xy"]


def test_a_long_prompt_is_an_error_with_its_line_where_asked(path):
    with pytest.raises(UsageError, match=r"prompts.jsonl:2: the prompt has 6 tokens, the limit is 4 \(the first of 1"):
        prompts_of(path, "error")
    assert prompts_of(path, "error", max_length=6) == ["abc", "ABCDEF", "xy"]


@pytest.mark.parametrize("truncation", ["drop", "error", "right"])
def test_the_flag_reaches_training_prompts_and_evaluation_prompts(path, truncation, monkeypatch):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    flags = {"prompt_truncation": truncation, "rollout_max_prompt_len": 4, "eval_max_prompt_len": 5}
    args = rollout_args(prompt_data=path, **flags)
    EvalDatasets.clear_instances()

    def train():
        return [s.prompt for s in RolloutDataSource(args).dataset.samples]

    def evaluate():
        return [s.prompt for s in EvalDatasets().get(args, EvalDatasetConfig("e", path), LetterTokenizer()).samples]

    for read, cut in ((train, "ABCD"), (evaluate, "ABCDE")):
        if truncation == "error":
            with pytest.raises(UsageError, match="prompts.jsonl:2: the prompt has 6 tokens"):
                read()
        else:
            assert read() == ["abc", *([cut] if truncation == "right" else []), "xy"]
    EvalDatasets.clear_instances()


def test_a_message_list_cannot_be_cut_but_dropped():
    messages = [{"role": "user", "content": "hello"}]
    samples = [Sample(prompt="ab"), Sample(prompt=messages)]
    assert fit_prompts(samples, LetterTokenizer(), 5) == samples[:1]
    with pytest.raises(UsageError, match=r"line 2: --prompt-truncation left cuts text.*--apply-chat-template"):
        fit_prompts(samples, LetterTokenizer(), 5, truncation="left", places=["line 1", "line 2"])


class PairTokenizer(LetterTokenizer):
    """UTF-8 bytes, except that "ab" is one token: what is cut may be tokenised anew, or end in half a letter."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode().replace(b"ab", b"\x01"))

    def decode(self, ids: list[int], **kwargs) -> str:
        return bytes(ids).replace(b"\x01", b"ab").decode(errors="replace")


def test_the_tokens_of_the_text_that_is_left_are_counted_and_half_letters_are_left_out():
    tokenizer = PairTokenizer()
    assert cut_text(tokenizer, "xabyz", 2, side="right") == "xab"
    assert cut_text(tokenizer, "xéé", 2, side="right") == "x", (
        "two of the three bytes that fit are a letter and a half"
    )
    assert cut_text(tokenizer, "ééx", 2, side="left") == "x"
    with pytest.raises(UsageError, match="nothing is left"):
        cut_text(tokenizer, "éé", 1, side="left")


class MeetingTokenizer(LetterTokenizer):
    """Measures the first two chunks only when two threads measure at once."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=5)
        self.calls = 0

    def __call__(self, texts, add_special_tokens=False):
        self.calls += 1
        if self.calls <= 2:
            self.barrier.wait()
        return super().__call__(texts)


def test_workers_measure_at_the_same_time_and_keep_the_order(monkeypatch):
    monkeypatch.setattr(prompt_length, "CHUNK", 3)
    samples = [Sample(prompt="x" * (i * 7 % 10 + 1)) for i in range(20)]
    serial = prompt_lengths(samples, LetterTokenizer())
    assert serial == [i * 7 % 10 + 1 for i in range(20)]
    assert prompt_lengths(samples, MeetingTokenizer(), num_workers=2) == serial
    alone = MeetingTokenizer()
    alone.barrier.abort()
    with pytest.raises(threading.BrokenBarrierError):
        prompt_lengths(samples, alone, num_workers=1)


def test_the_number_of_workers_comes_from_its_flag(path, monkeypatch):
    seen = []
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    monkeypatch.setattr(
        "slime.utils.data.fit_prompts", lambda samples, *_, **options: seen.append(options["num_workers"]) or samples
    )
    RolloutDataSource(rollout_args(prompt_data=path, filter_prompts_workers=3))
    EvalDatasets.clear_instances()
    eval.EvalDatasets().get(
        rollout_args(filter_prompts_workers=5), EvalDatasetConfig("e", path, "input"), LetterTokenizer()
    )
    EvalDatasets.clear_instances()
    assert seen == [3, 5]
