"""--max-turns and the tool function are checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config.problems import Problems
from slime.rollout import multi_turn
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

GENERATE = "--custom-generate-function-path slime.rollout.multi_turn.generate"


def tools(text: str) -> str:
    Path("tools.yaml").write_text(text)
    return f"{GENERATE} --custom-config-path tools.yaml"


def test_max_turns_reaches_the_generate_function_with_its_tool(check: Check) -> None:
    checked = check("--max-turns 3 " + tools("tool_function_path: examples.multi_turn_calculator.tool:calculator\n"))
    assert checked.problems == Problems()
    assert checked.args.max_turns == 3
    assert multi_turn.tool_function(checked.args).__name__ == "calculator"
    assert multi_turn.tool_timeout_s(checked.args) == 60
    assert check().args.max_turns is None


def test_max_turns_is_refused_where_no_function_reads_it(check: Check) -> None:
    has(check("--max-turns 3").problems.wrong, "--max-turns 3 has no effect without --custom-generate-function-path:")
    has(check("--max-turns 0 " + GENERATE).problems.wrong, "--max-turns 0")
    own = "--max-turns 3 --custom-generate-function-path tests.unit.test_multi_turn_arguments:own_generate"
    assert check(own).problems == Problems()
    evaluated = "eval:\n  datasets:\n    - {name: e, path: data.jsonl, rm_type: math, label_key: label, "
    evaluated += "custom_generate_function_path: tests.unit.test_multi_turn_arguments:own_generate}\n"
    Path("eval.yaml").write_text(evaluated)
    assert not check("--max-turns 3 --eval-config eval.yaml --eval-interval 1").problems.wrong, (
        "an evaluation reads it"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("other: 1\n", "slime.rollout.multi_turn needs a --custom-config-path file with tool_function_path"),
        (
            "tool_function_path: no.such:thing\n",
            "tool_function_path in --custom-config-path: cannot load 'no.such:thing'",
        ),
        (
            "tool_function_path: tests.unit.test_multi_turn_arguments:short\n",
            "does not fit: it is called as (args, sample, name, arguments), but its signature is (args)",
        ),
    ],
)
def test_a_tool_function_that_cannot_be_called_is_refused(check: Check, config: str, message: str) -> None:
    has(check(tools(config)).problems.environment, message)


async def own_generate(args, sample, sampling_params):
    return sample


def short(args):
    return ""
