"""The reward of rm_type ifbench: whether a response follows every instruction of its prompt, checked strictly.

Our own checks of all instruction ids of IFEval and IFBench, so that nothing is fetched or installed. They read a
response and the metadata of its prompt: `instruction_id_list` and, per instruction, `kwargs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from slime.rollout.rm_hub.ifbench import formats, ifeval, words
from slime.utils.names import nearest

__all__ = ["CHECKERS", "follows", "ifbench_reward"]

CHECKERS: dict[str, Callable[..., Any]] = ifeval.CHECKERS | words.CHECKERS | formats.CHECKERS


def ifbench_reward(response: str | None, metadata: Mapping[str, Any]) -> float:
    """1.0 when a response that is not blank follows every instruction, else 0.0.

    Args:
        response: as the model gave it.
        metadata: `instruction_id_list` (names in `CHECKERS`) and `kwargs` (a dict or None for each).

    Raises:
        ValueError: no instructions, an unknown one, or arguments that it does not have.
    """
    ids, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"the ifbench reward needs metadata['instruction_id_list'], a list of names, got {ids!r}")
    arguments = [None] * len(ids) if arguments is None else arguments
    if not isinstance(arguments, list) or len(arguments) != len(ids):
        raise ValueError(f"metadata['kwargs'] needs one entry for each of the {len(ids)} instructions: {arguments!r}")
    # Every instruction is looked at, so that a mistake in the data shows whatever the model wrote.
    followed = [follows(response or "", name, given) for name, given in zip(ids, arguments, strict=True)]
    return float(all(followed))


def follows(response: str, name: str, arguments: Mapping[str, Any] | None = None) -> bool:
    """Whether a response follows one instruction; a blank one follows none.

    Args:
        response: as the model gave it.
        name: the instruction's id.
        arguments: the instruction's; entries that are None (data sets have a column per argument) do not count.
    """
    if name not in CHECKERS:
        near = nearest(name, CHECKERS)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown instruction {name!r}: {hint}known are {', '.join(sorted(CHECKERS))}")
    given = {key: _whole(value) for key, value in (arguments or {}).items() if value is not None}
    try:
        inspect.signature(CHECKERS[name]).bind(response, **given)
    except TypeError as error:
        raise ValueError(f"the instruction {name} was given {given!r}: {error}") from error
    return bool(response.strip() and CHECKERS[name](response, **given))


def _whole(value: Any) -> Any:
    """A whole number as int: tables hold optional integers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
