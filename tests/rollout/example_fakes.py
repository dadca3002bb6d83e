"""The examples whose folders are no packages, loaded as their scripts load them, and a sample through their loops."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils import async_utils
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.rollout.test_multi_turn import ScriptedModel
from tests.unit.rollout_fakes import rollout_args
from tests.unit.script_fakes import ROOT


def load_example(folder: str, name: str, *, own_name: str = "") -> ModuleType:
    """A module of `examples/<folder>`, with that folder first on sys.path.

    Args:
        own_name: what it is called in sys.modules afterwards, where another example has a module of the same name.
    """
    sys.path.insert(0, str(ROOT / "examples" / folder))
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.pop(0)
    if own_name:
        sys.modules[own_name] = sys.modules.pop(name)
    return module


def play(
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[..., Any],
    sample: Any,
    replies: list[Any],
    *,
    before: Callable[[GenerateState], None] | None = None,
    evaluation: bool = False,
    custom: dict[str, Any] | None = None,
    **flags: Any,
) -> tuple[Any, SimpleNamespace]:
    """One sample through a generate function against a model that writes `replies`; (result, what the model saw)."""
    tokenizer = family_tokenizer("qwen2_5")
    GenerateState.clear_instances()
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: tokenizer)
    with ScriptedModel(tokenizer, replies).serve() as model:
        args = rollout_args(**{"sglang_router_port": model.port, "rollout_max_response_len": 300, **flags})
        vars(args).update(custom or {})

        async def one() -> Any:
            state = GenerateState(args)
            if before:
                before(state)
            return await function(args, sample, dict(state.sampling_params), evaluation)

        try:
            result = async_utils.run(one())
        finally:
            GenerateState.clear_instances()
    return result, SimpleNamespace(seen=model.seen, requests=model.requests, tokenizer=tokenizer)


def trained_text(tokenizer: Any, sample: Any) -> str:
    """What of a response has mask 1."""
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    return str(tokenizer.decode([token for token, bit in zip(response, sample.loss_mask, strict=True) if bit]))
