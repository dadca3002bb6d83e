"""Agents on the real engine: thirty calls of a tool by a random model are one sample, on the tokens that it wrote.

A regular expression makes the model think and call, in the format of each family. So an engine's log-prob is that of
the distribution that the expression leaves; the reference masks transformers' logits by xgrammar's own matcher.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from slime.agent.gateway import Budget, Gateway
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.types import Sample
from tests.integration.conftest import make_engine
from tests.integration.launch import make_model
from tests.rollout.chat_tokenizers import SPECIAL, family_tokenizer

TURNS = 30
VOCAB = 1024
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {"type": "object"}}}]
TERM = r"[1-9][0-9]?\*[1-9][0-9]?"
JSON_CALL = rf'\{{"expression": "{TERM}"\}}'
# family -> (what it is made to write, the token that ends its turn, tool parser, reasoning parser)
FAMILIES = {
    "qwen3": (
        r"<think>\n[a-z]{3,9}\n</think>\n\n<tool_call>\n"
        rf'\{{"name": "calculator", "arguments": {JSON_CALL}\}}\n</tool_call>',
        "<|im_end|>",
        "qwen25",
        "qwen3",
    ),
    "glm4_5": (
        r"\n<think>[a-z]{3,9}</think>\n<tool_call>calculator\n<arg_key>expression</arg_key>\n"
        rf"<arg_value>{TERM}</arg_value>\n</tool_call>",
        "<|observation|>",
        "glm45",
        "glm45",
    ),
    "deepseek_r1_distill_qwen": (
        r"[a-z]{3,9}\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n"
        rf"```json\n{JSON_CALL}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜end▁of▁sentence｜>",
        "deepseekv3",
        "deepseek-r1",
    ),
}
ALL_TOKENS = tuple(dict.fromkeys(text for family in FAMILIES for text in SPECIAL[family]))
ENDS = [family_tokenizer("qwen3", ALL_TOKENS).convert_tokens_to_ids(end) for _, end, _, _ in FAMILIES.values()]


def other_ends(family: str) -> list[int]:
    return [end for name, end in zip(FAMILIES, ENDS, strict=True) if name != family]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer has the special tokens of all three families."""
    path = make_model(tmp_path_factory.mktemp("agents") / "model", "--vocab-multiple", VOCAB, "--max-positions", 16384)
    family_tokenizer("qwen3", ALL_TOKENS).save_pretrained(path)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(config | {"eos_token_id": ENDS}))
    return path


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    running = make_engine(model, tmp_path_factory.mktemp("agents") / "engine.log", max_total_tokens=32768)
    running.start(deadline_s=170)
    yield running
    running.shutdown()


def converse(engine: SGLangEngine, family: str) -> tuple[list[str], list[Sample]]:
    """An agent of thirty turns that drops thoughts; (expressions that it was to compute, samples of its session)."""
    pattern, _, tool_parser, reasoning_parser = FAMILIES[family]
    tokenizer = family_tokenizer(family, ALL_TOKENS)
    parsers: dict[str, Any] = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    gateway = Gateway(tokenizer=tokenizer, sglang_url=engine.url, **parsers).start()
    bias = {str(end): -1e9 for end in other_ends(family)}
    sampling = {"temperature": 1.0, "regex": pattern, "logit_bias": bias, "sampling_seed": 7, "max_new_tokens": 200}
    key = gateway.open_session(sampling=sampling, budget=Budget(turns=TURNS))
    expressions: list[str] = []
    messages: list[Any] = [{"role": "user", "content": "Compute."}]
    try:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)
        for turn in range(TURNS):
            answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0]  # type: ignore[call-overload]
            assert answer.finish_reason == "tool_calls", answer
            [call] = answer.message.tool_calls
            expressions.append(json.loads(call.function.arguments)["expression"])
            result = str(eval(expressions[-1]))  # noqa: S307  (two numbers, by the regular expression)
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
                {"role": "tool", "tool_call_id": call.id, "content": result},
            ]
            if turn % 10 == 9:
                messages.append({"role": "user", "content": "Go on."})  # now a template drops the thoughts before it
        with pytest.raises(openai.RateLimitError, match="30 turns"):
            client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        samples = asyncio.run(gateway.finish_session(key, base_sample=Sample(index=0), reward=1.0))
    finally:
        gateway.stop()
    return expressions, samples


def expected_log_probs(model: Any, family: str, sample: Sample) -> list[float]:
    """Of every trained token, from transformers, within what the regular expression and the bias allow."""
    import xgrammar

    tokenizer = family_tokenizer(family, ALL_TOKENS)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCAB, stop_token_ids=ENDS)
    grammar = xgrammar.GrammarCompiler(info).compile_regex(FAMILIES[family][0])
    with torch.no_grad():
        logits = model(torch.tensor([sample.tokens])).logits[0]
    logits[:, other_ends(family)] -= 1e9
    first, expected = len(sample.tokens) - sample.response_length, []
    matcher, mask = None, xgrammar.allocate_token_bitmask(1, VOCAB)
    for position, bit in enumerate(sample.loss_mask or (), start=first):
        if not bit:
            matcher = None
            continue
        matcher = matcher or xgrammar.GrammarMatcher(grammar)
        matcher.fill_next_token_bitmask(mask)
        row = logits[position - 1 : position]
        xgrammar.apply_token_bitmask_inplace(row, mask)
        token = sample.tokens[position]
        expected.append(row[0].log_softmax(-1)[token].item())
        assert matcher.accept_token(token), "the sample holds a token that the engine cannot have written here"
    return expected


@pytest.mark.timeout(400)
def test_thirty_calls_by_the_engine_are_one_sample_with_the_trainers_log_probs(
    model: Path, engine: SGLangEngine
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with ThreadPoolExecutor(len(FAMILIES)) as threads:
        runs = dict(zip(FAMILIES, threads.map(lambda family: converse(engine, family), FAMILIES), strict=True))
    for family, (expressions, [sample]) in runs.items():
        counts = sample.metadata["agent"]
        assert (counts["turns"], counts["breaks"], counts["forks"], counts["masked_tokens"]) == (TURNS, 0, 0, 0)
        assert counts["template_drift"] > 0, f"{family}: its template would have dropped thoughts"
        assert not sample.metadata["ill_formed"]
        assert (sample.end_reason, sample.status) == ("max_turns", Sample.Status.TRUNCATED)
        assert all(expression in sample.response for expression in expressions)
        expected = expected_log_probs(reference, family, sample)
        own = [p for p, bit in zip(sample.rollout_log_probs or (), sample.loss_mask or (), strict=True) if bit]
        assert len(own) > TURNS * 20 and min(own) < -1, "the model has a choice in each turn"
        assert max(abs(a - b) for a, b in zip(own, expected, strict=True)) < 1e-4, family
