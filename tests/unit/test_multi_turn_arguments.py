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


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("{command: [ls], tool: [a]}", "tools.yaml:1: mcp[0].tool: unknown key; did you mean tools?"),
        ("{tools: [a]}", "mcp[0]: give either command (a program that speaks over stdin and stdout) or url"),
        ("{command: [ls], url: 'http://x'}", "mcp[0]: give either command"),
        ("{url: 'x:80/mcp'}", "mcp[0]: url x:80/mcp is no http:// or https:// address"),
        ("{url: 'http://x', env: {A: b}}", "mcp[0]: env has no effect with url; leave it out"),
        ("{command: ls -l}", "mcp[0].command: 'ls -l' is not a list"),
        ("{command: []}", "mcp[0].command: is empty"),
        ("{command: [no-such-program]}", "mcp[0]: command: there is no program no-such-program (on PATH)"),
        ("{command: [ls], cwd: /no/such}", "mcp[0]: cwd: there is no directory /no/such"),
        ("{command: [ls], env: {KEY: $NOT_SET}}", "mcp[0]: the environment variable NOT_SET is not set"),
        ("{command: [ls], timeout_s: 0}", "mcp[0].timeout_s: 0 must be > 0"),
        ("{command: [ls], max_calls: 0}", "mcp[0].max_calls: 0 must be >= 1"),
        ("{command: [ls]}, {command: [ls]}", "mcp[1]: ls is there twice; name one otherwise"),
    ],
)
def test_a_server_of_mcp_that_cannot_be_used_is_refused(check: Check, server: str, message: str) -> None:
    has(check(tools(f"mcp: [{server}]\n")).problems.environment, message)


def test_servers_of_mcp_are_enough_tools_and_others_read_the_key_as_they_like(check: Check) -> None:
    assert check(tools("mcp: [{command: [ls]}, {url: 'http://x/mcp', headers: {A: $HOME}}]\n")).problems == Problems()
    has(check(tools("mcp: []\n")).problems.environment, "mcp: must be a list of servers, each with command or url")
    Path("own.yaml").write_text("mcp: mine\n")
    own = "--custom-generate-function-path tests.unit.test_multi_turn_arguments:own_generate"
    assert check(f"{own} --custom-config-path own.yaml").problems == Problems()


async def own_generate(args, sample, sampling_params):
    return sample


def short(args):
    return ""
