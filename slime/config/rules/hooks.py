"""Checks of hook flags: each path loads, names something callable, and can be called the way slime will call it.

It knows no hook: which flags are hooks, and their call, come in as a table. Loading runs the user's module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime.config.args import Args
from slime.utils.misc import try_to_load

SignatureProblem = Callable[[Any, type], str | None]
_MULTI_TURN = "slime.rollout.multi_turn"


def check_hooks(
    values: dict[str, Any],
    defaults: dict[str, Any],
    hooks: dict[str, type],
    signature_problem: SignatureProblem,
) -> Iterator[str]:
    """Check every hook flag that is not at its default.

    Args:
        values: attribute -> value of the flags.
        defaults: attribute -> default; slime's own functions need no check.
        hooks: attribute -> Protocol of its function.
        signature_problem: why a function does not fit a Protocol, or None.
    """
    for attribute, protocol in hooks.items():
        value = values.get(attribute)
        if value is None or value == defaults.get(attribute):
            continue
        for path in value if isinstance(value, list) else [value]:
            yield from check_hook("--" + attribute.replace("_", "-"), path, protocol, signature_problem)


def check_hook(option: str, path: str, protocol: type, signature_problem: SignatureProblem) -> Iterator[str]:
    """Check one hook path; `option` names where it was given."""
    function, problem = try_to_load(path)
    if problem:
        yield f"{option}{problem}."
    elif problem := signature_problem(function, protocol):
        yield f"{option} {path} does not fit: {problem}."


def form_notes(option: str, path: str | None, is_batch: Callable[[Any], bool]) -> Iterator[str]:
    """Show the recommended form of a generate function that is given in another one.

    Args:
        option: names where it was given.
        path: of the function; None where there is none.
        is_batch: whether a function takes a list of samples.
    """
    function = try_to_load(path)[0] if path else None
    if function is None:  # check_hook says why
        return
    name = getattr(function, "__name__", "generate")
    if str(path).endswith(".py"):
        yield f"{option} {path} is taken as its only public coroutine; write {path}:{name}."
    if is_batch(function):
        yield (
            f"{option} {path}: {name} takes a list of samples, and gets each one in a list of its own; write async "
            f"def {name}(args, sample, sampling_params, evaluation=False), which returns the sample."
        )


def check_settings(values: dict[str, Any], hooks: Iterable[str]) -> Iterator[str]:
    """Ask each function that has a `check_args(args)` of its own what is wrong with its settings.

    Args:
        values: attribute -> value, with everything that the custom config sets.
        hooks: attributes of the hook flags.
    """
    for attribute in hooks:
        path = values.get(attribute)
        for each in path if isinstance(path, list) else [path] if path else []:
            if check_args := getattr(try_to_load(each)[0], "check_args", None):
                yield from check_args(Args.of(values))


def check_tool_function(
    generate_paths: Iterable[str | None],
    path: str | None,
    protocol: type,
    signature_problem: SignatureProblem,
    *,
    has_servers: bool,
) -> Iterator[str]:
    """slime.rollout.multi_turn, where a run uses it, has a tool function, or servers that have tools.

    Args:
        generate_paths: the run's custom generate functions.
        path: `tool_function_path` of the custom config.
        protocol: of the tool function.
        has_servers: the custom config has `mcp`.
    """
    if not any(generate and generate.startswith(_MULTI_TURN) for generate in generate_paths):
        return
    if path is None and not has_servers:
        yield (
            f"{_MULTI_TURN} needs a --custom-config-path file with tool_function_path: the path of "
            "fn(args, sample, name, arguments), which makes the model's tool calls; or with mcp, a list of servers."
        )
    if path is None:
        return
    yield from check_hook("tool_function_path in --custom-config-path", path, protocol, signature_problem)
