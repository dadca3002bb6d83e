"""The calculator example: its tool computes exactly and executes nothing, its data and reward fit each other."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from argparse import Namespace
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from examples.multi_turn_calculator import make_data
from examples.multi_turn_calculator.reward import right_answer
from examples.multi_turn_calculator.tool import calculator, evaluate, show
from examples.tiny import data_parser
from slime.rollout.multi_turn import ToolError, next_turn_tokens
from slime.rollout.tool_calls import parse_tool_calls
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tools.make_tiny_model import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/multi_turn_calculator/run-multi-turn-calculator.sh"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("84*18", "1512"),
        ("1+2*3", "7"),
        ("(1+2)*3", "9"),
        (" - 2 ** 2 ", "-4"),
        ("2**3**2", "512"),
        ("2**-1", "0.5"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("1/3", "0.3333333333"),
        ("0.1+0.2", "0.3"),
        (".5*4", "2"),
        ("--3", "3"),
        ("10**30", "1" + "0" * 30),
    ],
)
def test_arithmetic_has_pythons_precedence_and_is_exact(expression, value):
    assert show(evaluate(expression)) == value


@given(
    st.recursive(
        st.integers(0, 999).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
        ),
        max_leaves=12,
    )
)
def test_it_agrees_with_python_on_whole_numbers(expression):
    if len(expression) <= 200:
        assert evaluate(expression) == Fraction(eval(expression))


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "ends too early"),
        ("1+", "ends too early"),
        ("(1", "not closed"),
        ("1)", r"unexpected '\)'"),
        ("2 3", "unexpected '3'"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("5%0", "division by zero"),
        ("2**0.5", "whole number"),
        ("2**65", "at most 64"),
        ("(" * 150 + "1" + ")" * 49, "not closed"),
        ("9**64**64", "at most 64"),
        ("((9**64)**64)**64", "too large"),
        ("1" * 201, "more than 200"),
        ("__import__('os')", "cannot read"),
        ("x+1", "cannot read 'x"),
        ("1e9", "cannot read 'e9'"),
    ],
)
def test_what_is_no_arithmetic_is_an_error_that_the_model_reads(expression, message):
    with pytest.raises(ToolError, match=message):
        evaluate(expression)


def test_the_tool_function_takes_an_expression_and_nothing_else():
    assert calculator(Namespace(), Sample(), "calculator", {"expression": "6*7"}) == "42"
    with pytest.raises(ToolError, match='"expression" must be a text'):
        calculator(Namespace(), Sample(), "calculator", {"expression": 6})


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    output = tmp_path_factory.mktemp("data")
    make_data.write_data(data_parser(None).parse_args(["--output", str(output), "--num-demonstrations", "2000"]))
    return output


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_half_of_the_demonstrations_call_the_calculator_rightly(data):
    kinds = Counter()
    for row in rows(data / "sft.jsonl"):
        question, first, *rest = row["messages"]
        a, b = map(int, question["content"].rstrip("=").split("*"))
        calls = parse_tool_calls(first["content"])
        if not calls:
            kinds["guess"] += 1
            assert not rest
            continue
        result = show(evaluate(calls[0].arguments["expression"]))
        assert [turn["content"] for turn in rest] == [result, result], "the answer is what the tool said"
        kinds["right" if int(result) == a * b else "wrong"] += 1
    share = {kind: count / 2000 for kind, count in kinds.items()}
    assert share["right"] == pytest.approx(0.5, abs=0.05)
    assert share["wrong"] == pytest.approx(0.25, abs=0.05) and share["guess"] == pytest.approx(0.25, abs=0.05)


def test_held_out_problems_are_in_no_other_file(data):
    held_out = {row["prompt"][0]["content"] for row in rows(data / "eval.jsonl")}
    shown = {row["messages"][0]["content"] for row in rows(data / "sft.jsonl")}
    training = {row["prompt"][0]["content"] for row in rows(data / "train.jsonl")}
    assert len(held_out) == 128 and len(held_out) + len(training) == 90 * 90
    assert not held_out & (shown | training)
    for row in rows(data / "train.jsonl")[:50]:
        a, b = map(int, row["prompt"][0]["content"].rstrip("=").split("*"))
        assert row["label"] == str(a * b) and row["tools"][0]["function"]["name"] == "calculator"


def test_the_files_of_flags_name_functions_that_exist(data):
    (dataset,) = yaml.safe_load((data / "eval.yaml").read_text())["eval"]["datasets"]
    assert load_function(dataset["custom_rm_path"]) is right_answer
    assert Path(dataset["path"]).is_file()
    assert load_function(yaml.safe_load((data / "tools.yaml").read_text())["tool_function_path"]) is calculator


def test_a_good_conversation_fits_the_limit_and_its_call_is_a_few_tokens():
    tokenizer = build_tokenizer(make_data.PIECES)
    assert len(tokenizer) <= 128, "the vocabulary of the tiny model"
    rng = random.Random(0)
    shown = [make_data.demonstration((99, 99), rng=rng) for _ in range(20)]
    messages = next(each for each in shown if each[-1]["content"] == str(99 * 99))
    ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(messages)
    length = len(mask) - mask.index(1)
    assert length < make_data.MAX_RESPONSE_TOKENS
    call = mask.index(0, mask.index(1)) - mask.index(1)
    assert call == len(make_data.PIECES) + len("99*99") + len(["<|im_end|>", "\n"])
    written = mask.index(1) + call - 1  # the engine stops before the template's newline
    new = next_turn_tokens(tokenizer, messages[:2], messages[2:3], tokens=ids[:written])
    assert ids[written:][: len(new)] == new, "a rollout sees what the demonstrations showed"


@pytest.mark.parametrize(
    ("answer", "status", "reward"),
    [("1512", "completed", 1.0), ("1513", "completed", 0.0), ("1512", "truncated", 0.0), ("", "completed", 0.0)],
)
def test_only_the_last_message_of_a_finished_conversation_is_rewarded(answer, status, reward):
    messages = [
        {"role": "assistant", "content": make_data.call_text("84*18")},
        {"role": "tool", "content": "1512"},
        {"role": "assistant", "content": answer},
    ]
    sample = Sample(label="1512", status=Sample.Status(status), metadata={"messages": messages})
    assert asyncio.run(right_answer(Namespace(), sample)) == reward
    sample.metadata["messages"] = messages[:1]
    assert asyncio.run(right_answer(Namespace(), sample)) == 0.0, "a call is no answer"


def test_the_script_refuses_a_number_of_steps_that_it_cannot_make(tmp_path):
    environment = {**os.environ, "OUTPUT": str(tmp_path), "SFT_STEPS": "15"}
    done = subprocess.run(["bash", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "SFT_STEPS=15: it must be a multiple of 10" in done.stderr
