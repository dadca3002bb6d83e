"""The example of a task of one's own: its data, reward, filter, generate function and command line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from examples.bring_your_own_task import make_data, task
from slime.config.parse import CommandLine
from slime.utils.types import Sample

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/bring_your_own_task"
ARGS = Namespace(
    partial_credit=0.5, sglang_router_ip="127.0.0.1", sglang_router_port=1, sglang_speculative_algorithm=None
)


def score(text: str, label: str = "68") -> float:
    return asyncio.run(task.reward(ARGS, Sample(response=text, label=label)))


def test_every_question_has_the_larger_number_as_label_and_none_comes_twice() -> None:
    rows = make_data.rows()
    asked = [row["prompt"][0]["content"] for row in rows]
    assert len(set(asked)) == len(rows) == 100 * 99
    assert all(row["label"] == max(text.rstrip("=").split("?")) for text, row in zip(asked, rows, strict=True))


def test_the_reward_is_one_for_the_answer_and_half_the_share_of_right_characters_otherwise() -> None:
    assert score("68<|im_end|>") == 1.0
    assert score("67") == 0.5 * 1 / 2
    assert score("681") == 0.5 * 2 / 3
    assert score("") == 0.0


def test_a_group_without_spread_is_dropped_and_counted() -> None:
    group = [Sample(reward=0.5), Sample(reward=0.5)]
    assert (task.keep(ARGS, group).keep, task.keep(ARGS, group).reason) == (False, "all_equal")
    group[0].reward = 1.0
    assert task.keep(ARGS, group).keep


def test_generate_trains_on_the_ids_that_the_engine_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [ord(character) for character in text]

    async def post(url: str, request: dict) -> dict:
        assert request["input_ids"] == [ord("5"), ord("=")]
        drawn = [(-0.5, 70, "6"), (-0.25, 71, "8")]
        return {"text": "68", "meta_info": {"output_token_logprobs": drawn, "finish_reason": {"type": "stop"}}}

    monkeypatch.setattr(task, "GenerateState", lambda args: Namespace(tokenizer=Tokenizer()))
    monkeypatch.setattr(task, "post", post)
    sample = asyncio.run(task.generate(ARGS, Sample(prompt="5="), {}))
    assert sample.tokens == [ord("5"), ord("="), 70, 71] and sample.response == "68"
    assert sample.rollout_log_probs == [-0.5, -0.25] and sample.status == Sample.Status.COMPLETED


def test_the_command_line_is_refused_for_nothing_but_the_missing_model(tmp_path: Path) -> None:
    """A stand-in for Python writes the data with the real one and shows the flags that train.py would get."""
    shown = tmp_path / "flags"
    stand_in = tmp_path / "python"
    stand_in.write_text(
        f'#!/bin/sh\ncase "$1" in *train.py) shift; printf "%s\\n" "$@" > {shown} ;;\n'
        f'*) exec {sys.executable} "$@" ;; esac\n'
    )
    stand_in.chmod(0o755)
    environment = {**os.environ, "SLIME_PYTHON": str(stand_in), "MODEL": "no-model", "OUTPUT": str(tmp_path / "out")}
    subprocess.run(["bash", str(EXAMPLE / "run.sh")], env=environment, check=True, capture_output=True, timeout=60)
    assert json.loads((tmp_path / "out/data/eval.jsonl").read_text().splitlines()[0])["label"]
    problems = CommandLine().check(shown.read_text().splitlines()).problems
    of_the_model = ("no-model", "--num-layers")  # its sizes are in the config.json that is missing
    assert [text for text in problems.wrong if not any(part in text for part in of_the_model)] == []
    assert problems.unsupported == []


def test_the_example_stays_short() -> None:
    lines = [path.read_text().count("\n") for path in EXAMPLE.iterdir() if path.suffix in (".py", ".sh", ".yaml")]
    assert sum(lines) <= 150
