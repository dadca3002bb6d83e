"""Write the data of the coding agent example: repositories of one file with one wrong operator and a failing test.

    python examples/coding_agent_rl/make_data.py --output outputs/coding-agent/data

Files: train.jsonl and eval.jsonl (held-out repositories: file, task and tests in the metadata), sft.jsonl
(demonstrations: three in ten write the right operator, seven nothing at all),
eval.yaml (the evaluation set) and agent.yaml (for --custom-config-path). The seed decides all but what is held out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import operator
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl
from slime.agent.harness.scripted_agent import SYSTEM

Message = dict[str, str]
HELD_OUT_SEED = 20261127  # fixed: every seed of a run is evaluated on the same repositories
OPERATORS: dict[str, Callable[[int, int], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
    "&": operator.and_,
    "|": operator.or_,
}
NAMES = {
    "add": "+",
    "plus": "+",
    "sub": "-",
    "minus": "-",
    "mul": "*",
    "times": "*",
    "div": "//",
    "mod": "%",
    "less": "<",
    "more": ">",
    "same": "==",
    "both": "&",
    "any": "|",
}
VARIABLES = ("ab", "xy")
PAIRS = ((7, 2), (2, 7), (6, 3), (5, 5), (12, 10))  # any two operators differ on one of them
# Pieces that the tiny tokenizer has as one token each, about as a large tokenizer does.
CALL, END = '<tool_call>\n{"name": "write_file", "arguments": {"path": "ops.py", "content": "', '"}}\n</tool_call>'
PIECES = [SYSTEM, CALL, END, "return", "def", "fails: ", "written", "done", "//", "==", *NAMES]
NUM_EVAL = 48
MAX_TURN_TOKENS = 32  # a call has 20 tokens at most


@dataclass(frozen=True)
class Bug:
    """A function whose name says what it must do, and whose operator is another one."""

    name: str
    wrong: str
    variables: str

    def source(self, symbol: str) -> str:
        """The function with an operator, in one line."""
        first, second = self.variables
        return f"def {self.name}({first},{second}): return {first}{symbol}{second}"

    @property
    def task(self) -> str:
        """The agent's prompt."""
        return f"{self.name} fails: {self.source(self.wrong)}"

    @property
    def test(self) -> str:
        """The test: what the right operator gives for every pair."""
        right = OPERATORS[NAMES[self.name]]
        checks = [f"    assert {self.name}({a}, {b}) == {right(a, b)!r}\n" for a, b in PAIRS]
        return f"from ops import {self.name}\n\n\ndef test_{self.name}():\n{''.join(checks)}"

    def row(self) -> dict[str, Any]:
        """A row of the data: `slime.agent.sandbox.grading.Task` in the metadata."""
        metadata = {
            "instance_id": f"{self.name}{self.wrong}{self.variables}",
            "problem_statement": self.task,
            "files": {"ops.py": self.source(self.wrong) + "\n"},
            "tests": {"test_ops.py": self.test},
            "expected": [f"test_ops.py::test_{self.name}"],
        }
        return {"prompt": self.task, "metadata": metadata}

    def demonstration(self, rng: random.Random) -> list[Message]:
        """A conversation of mixed quality, as the scripted agent leads it.

        What most of them do is no repair: a run that only becomes surer of what it does gains nothing.
        """
        edit = [
            {"role": "assistant", "content": CALL + self.source(NAMES[self.name]) + END},
            {"role": "tool", "content": "written"},
        ]
        return [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": self.task},
            *(edit if rng.random() < 0.3 else []),
            {"role": "assistant", "content": "done"},
        ]


def split_bugs(num_eval: int) -> tuple[list[Bug], list[Bug]]:
    """All bugs as (training, held out); no bug is in both."""
    found = [
        Bug(name, wrong, variables)
        for name, wrong, variables in itertools.product(NAMES, OPERATORS, VARIABLES)
        if wrong != NAMES[name]
    ]
    random.Random(HELD_OUT_SEED).shuffle(found)
    return found[num_eval:], found[:num_eval]


def agent_config() -> dict[str, Any]:
    """The settings of slime.agent.generate: the scripted agent, a small local sandbox, graded by the row's tests."""
    shown = sorted({sys.prefix, sys.base_prefix})  # a Python with pytest, which the sandbox shows
    return {
        "harness": "scripted",
        "at_a_time": 4,
        "sandbox": {"backend": "local", "options": {"memory_mb": 256, "disk_mb": 64, "show": shown}},
        "budgets": {"turns": 3, "seconds": 60},
        "grader": {"kind": "tests", "python": sys.executable, "seconds": 60},
    }


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output, (training, held_out) = args.output, split_bugs(NUM_EVAL)
    rng = random.Random(args.seed)
    shown = ({"messages": rng.choice(training).demonstration(rng)} for _ in range(args.num_demonstrations))
    counts = {"sft.jsonl": write_jsonl(output / "sft.jsonl", shown)}
    for name, bugs in (("train.jsonl", training), ("eval.jsonl", held_out)):
        counts[name] = write_jsonl(output / name, (bug.row() for bug in bugs))
    # JSON is YAML
    (output / "agent.yaml").write_text(json.dumps({"agent": agent_config()}, indent=2) + "\n")
    dataset = {"name": "bugs", "path": str(output / "eval.jsonl"), "input_key": "prompt"}
    write_eval_config(output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_TURN_TOKENS)
    return counts


if __name__ == "__main__":
    write_and_say(write_data, data_parser(__doc__))
