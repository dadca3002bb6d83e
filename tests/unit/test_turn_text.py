"""The text behind a model's turn is that of the whole rendering, also where only its frame is rendered."""

from __future__ import annotations

import copy
import itertools

import pytest

from slime.rollout.sampling import turn_text
from slime.rollout.sampling.turn_text import text_after_turn
from slime.utils.processing_utils import render_chat
from tests.rollout.chat_tokenizers import SPECIAL, family_tokenizer
from tools.make_tiny_model import build_tokenizer

TOOLS = [{"type": "function", "function": {"name": "calc", "description": "It counts.", "parameters": {}}}]
SO_FAR = [{"role": "user", "content": "What is 84*18?\n"}, {"role": "assistant", "content": "The-turn"}]
TEXTS = (
    *("1512", "a\nb", " 1512 \n", "", "\n", "say \"x\" \\ 'y' < z & é", "\u00a0x", "user", "{{ messages }}"),
    *("x</think>y", "</think>\n\nx", "<tool_response>\nx\n</tool_response>", "<think>", "a /no_think", "<|im_end|>"),
)
END = "</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
TEMPLATES = {
    "escapes": "{% for m in messages %}[{{ m.role }}]{{ m.content | e }}",
    "writes what tools say as JSON": "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}",
    "drops thoughts": "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1].lstrip('\\n') }}",
    "looks at the head": "{% for m in messages %}[{{ m.role }}]"
    "{{ 'R' if m.content.startswith('<tool_response>') }}{{ m.content }}",
    "looks for a word": "{% for m in messages %}[{{ 'N' if '/no_think' in m.content }}]{{ m.content }}",
    "looks for words": "{% for m in messages %}[{{ 'N' if 'x' in m.content }}]{{ m.content }}",
    "counts words": "{% for m in messages %}[{{ m.content.count('512') }}]{{ m.content }}",
    "knows a text": "{% for m in messages %}[{{ 'N' if m.content == 'user' }}]{{ m.content }}",
    "looks for nothing": "{% for m in messages %}[{{ m.role }}]{{ m.content or 'nothing' }}",
    "goes by lines": "{% for m in messages %}[{{ m.role }}]{% for l in m.content.split('\\n') %}{{ l }}|{% endfor %}",
}


def news():
    """One new message or two, of a tool or of the user, with every text."""
    for text in TEXTS:
        yield [{"role": "user", "content": text}]
        yield [{"role": "tool", "content": text}, {"role": "tool", "content": "1512"}]
        yield [{"role": "tool", "name": "calc", "content": "12\n"}, {"role": "user", "content": text}]


def assert_is_rendering(tokenizer):
    for new, tools in itertools.product(news(), (None, TOOLS)):
        expected = render_chat(tokenizer, [*SO_FAR, *new], tools=tools).partition("The-turn")[2]
        for _ in range(2):  # the frame is new, and it is known
            assert text_after_turn(tokenizer, SO_FAR, new, tools=tools) == expected, new


@pytest.mark.parametrize("family", SPECIAL)
def test_the_text_is_that_of_the_rendering_for_every_family(family):
    assert_is_rendering(family_tokenizer(family))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_the_rendering_where_a_template_looks_at_texts(name):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATES[name] + END
    assert_is_rendering(tokenizer)


def test_a_conversation_is_rendered_once_for_all_its_turns(monkeypatch):
    shown = []
    monkeypatch.setattr(
        turn_text, "render_chat", lambda *args, **kwargs: shown.append(args) or render_chat(*args, **kwargs)
    )
    tokenizer = copy.deepcopy(family_tokenizer("qwen3"))  # nothing is known of it yet
    for number in range(9):
        text_after_turn(tokenizer, SO_FAR, [{"role": "tool", "content": f"line {number}\n"}], tools=TOOLS)
    assert len(shown) == 1
    text_after_turn(tokenizer, SO_FAR, [{"role": "tool", "content": "</think>"}], tools=TOOLS)
    assert len(shown) == 2, "the template may look for it"


def test_another_template_of_the_same_tokenizer_is_rendered_anew():
    tokenizer = build_tokenizer()
    for mark in "ab":
        tokenizer.chat_template = "{% for m in messages %}" + mark + "{{ m.content }}{% endfor %}"
        assert text_after_turn(tokenizer, SO_FAR, [{"role": "user", "content": "x"}]) == mark + "x"


def test_texts_that_json_does_not_take_are_rendered_as_they_are():
    so_far = [{"role": "user", "content": "\ud800"}, SO_FAR[1]]
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert text_after_turn(tokenizer, so_far, [{"role": "user", "content": "x"}]) == "][x]"
