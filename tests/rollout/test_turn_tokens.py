"""Tokens between turns, for every template family: appended turn by turn they are those of the whole conversation, or
the difference is counted and the model's own tokens stay as they were.
"""

from __future__ import annotations

import copy
import json

import pytest
from transformers import PreTrainedTokenizerFast

from slime.rollout.multi_turn import count_drift, next_turn_tokens, turn_content, turn_markers
from slime.rollout.sampling import turn_text
from slime.utils.errors import UsageError
from slime.utils.processing_utils import decode_ids, encode_text, render_chat
from slime.utils.types import Sample
from tests.rollout.chat_tokenizers import SPECIAL, family_tokenizer
from tools.make_tiny_model import build_tokenizer

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "84*18"}}</tool_call>'
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "What is 84*18?"}
RESULT = {"role": "tool", "content": "1512"}
AGAIN = {"role": "user", "content": "And 12*12?"}
THOUGHT = "Let me think.\n</think>\n\n"
THINKERS = ("qwen3", "qwen3_5", "deepseek_r1_distill_qwen", "glm4_5")
ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseek_r1_distill_qwen": "<｜end▁of▁sentence｜>",
}


def written(family: str, text: str, next_role: str = "user") -> str:
    """What a model of the family writes in a turn, its end included."""
    if family in ("glm4", "glm4_5"):
        return "\n" + text + ("<|observation|>" if next_role == "tool" else "<|user|>")
    return text + ENDS[family]


def play(tokenizer, prompt, turns, *, tools=None, **kwargs):
    """Flow of a multi-turn generate function with a scripted model: (sample, messages, prompts that the engine saw).

    turns: (what the model writes, the messages that follow).
    """
    template = {"tools": tools, "template_kwargs": kwargs}
    messages = list(prompt)
    sample = Sample(tokens=encode_text(tokenizer, render_chat(tokenizer, messages, tools=tools, **kwargs)))
    prompts = []
    for text, following in turns:
        prompts.append(list(sample.tokens))
        own = encode_text(tokenizer, text)
        sample.append_response_tokens(tokens=own, log_probs=[-1.0] * len(own))
        messages.append({"role": "assistant", "content": turn_content(tokenizer, own, kwargs)})
        if following:
            new = next_turn_tokens(tokenizer, messages, following, tokens=sample.tokens, **template)
            sample.append_response_tokens(tokens=new, trainable=False)
            messages += following
    return sample, messages, prompts


@pytest.mark.parametrize("family", [family for family in SPECIAL if family not in THINKERS])
@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no system", "system"])
@pytest.mark.parametrize("following", [[RESULT], [RESULT, RESULT], [AGAIN]], ids=["tool", "two tools", "user"])
def test_families_without_thoughts_render_turn_by_turn_as_a_whole(family, system, following):
    tokenizer, tools = family_tokenizer(family), TOOLS if family != "smollm2" else None
    first = written(family, CALL, following[0]["role"])
    turns = [(first, following), (written(family, "It is 1512."), [])]
    sample, messages, prompts = play(tokenizer, [*system, QUESTION], turns, tools=tools)
    whole = render_chat(tokenizer, messages, tools=tools, add_generation_prompt=False)
    own = tokenizer.decode(sample.tokens)
    assert own.removesuffix("<|user|>") == whole.rstrip()
    assert count_drift(tokenizer, messages, tokens=sample.tokens, tools=tools) == 0
    assert sample.tokens[: len(prompts[1])] == prompts[1], "the engine's second prompt is part of what is trained"
    trained = [
        token for token, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if bit
    ]
    assert tokenizer.decode(trained) == first + written(family, "It is 1512.")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_thoughts_before_a_tools_answer_stay_and_nothing_drifts(family):
    tokenizer = family_tokenizer(family)
    opening = "<think>\n" if family == "qwen3" else ""  # the other's prompt opens the thought
    turns = [(opening + THOUGHT + CALL + "<|im_end|>", [RESULT]), (opening + THOUGHT + "1512<|im_end|>", [])]
    sample, messages, _ = play(tokenizer, [QUESTION], turns, tools=TOOLS)
    assert messages[1]["content"] == "<think>\n" + THOUGHT + CALL
    assert count_drift(tokenizer, messages, tokens=sample.tokens, tools=TOOLS) == 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_thought_that_the_template_drops_is_kept_and_counted(family):
    tokenizer = family_tokenizer(family)
    opening = "<think>\n" if family == "qwen3" else ""
    turns = [(opening + THOUGHT + "1512<|im_end|>", [AGAIN]), (opening + THOUGHT + "144<|im_end|>", [])]
    sample, messages, prompts = play(tokenizer, [QUESTION], turns)
    dropped = encode_text(tokenizer, "<think>\n" + THOUGHT)
    assert count_drift(tokenizer, messages, tokens=sample.tokens) == len(dropped)
    assert sample.tokens[: len(prompts[1])] == prompts[1]
    assert tokenizer.decode(sample.tokens).count("Let me think.") == 2, "what the engine saw is what is trained"


def test_a_family_that_drops_every_thought_drifts_by_all_of_them():
    tokenizer = family_tokenizer("deepseek_r1_distill_qwen")
    turns = [(THOUGHT + "1512" + ENDS["deepseek_r1_distill_qwen"], [RESULT])]
    turns += [(THOUGHT + "144" + ENDS["deepseek_r1_distill_qwen"], [])]
    sample, messages, _ = play(tokenizer, [QUESTION], turns)
    whole = encode_text(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=False))
    thought = encode_text(tokenizer, "<think>\n" + THOUGHT)
    assert len(sample.tokens) == len(whole) + 2 * len(thought)
    # From the first thought to the end of the second: all that lies between counts as one stretch.
    between = encode_text(tokenizer, "1512" + ENDS["deepseek_r1_distill_qwen"]) + encode_text(
        tokenizer,
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>1512<｜tool▁output▁end｜><｜tool▁outputs▁end｜><｜Assistant｜>",
    )
    drift = count_drift(tokenizer, messages, tokens=sample.tokens)
    assert drift == len(thought) + len(between) + len(thought)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_arguments_of_the_template_count_for_every_turn(family):
    tokenizer = family_tokenizer(family)
    assert turn_markers(tokenizer, {"enable_thinking": False}).prefill == "<think>\n\n</think>\n\n"
    sample, messages, _ = play(tokenizer, [QUESTION], [("1512<|im_end|>", [])], enable_thinking=False)
    kwargs = {"enable_thinking": False}
    assert count_drift(tokenizer, messages, tokens=sample.tokens, template_kwargs=kwargs) == 0
    new = next_turn_tokens(tokenizer, messages, [AGAIN], tokens=sample.tokens, template_kwargs=kwargs)
    assert tokenizer.decode(new).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_newline_that_the_model_wrote_after_the_headers_is_drift_of_tokens_with_the_same_text():
    tokenizer = family_tokenizer("qwen2_5")
    assert len(encode_text(tokenizer, "\n\n")) == 1, "the tokenizer joins newlines"
    sample, messages, _ = play(tokenizer, [QUESTION], [("\n1512<|im_end|>", [])])
    assert tokenizer.decode(sample.tokens) == render_chat(tokenizer, messages, add_generation_prompt=False).rstrip()
    assert count_drift(tokenizer, messages, tokens=sample.tokens) == 2, "two newlines in place of one token"


def test_another_spelling_of_the_same_text_is_drift():
    tokenizer = family_tokenizer("qwen2_5")
    prompt = encode_text(tokenizer, render_chat(tokenizer, [QUESTION]))
    letters = [encode_text(tokenizer, letter)[0] for letter in "calculator"]
    joined = encode_text(tokenizer, "calculator")
    assert len(joined) == 1
    messages = [QUESTION, {"role": "assistant", "content": "calculator"}]
    assert count_drift(tokenizer, messages, tokens=prompt + joined) == 0, "closed or not"
    assert count_drift(tokenizer, messages, tokens=prompt + letters) == len(letters)


@pytest.mark.parametrize("family", SPECIAL)
def test_a_turn_that_was_cut_off_is_closed_for_the_model(family):
    tokenizer = family_tokenizer(family)
    cut, closed = (
        next_turn_tokens(
            tokenizer,
            [QUESTION, {"role": "assistant", "content": "1512"}],
            [AGAIN],
            tokens=encode_text(tokenizer, text),
        )
        for text in ("1512", written(family, "1512"))
    )
    end = "<|user|>" if family in ("glm4", "glm4_5") else ENDS[family]
    assert tokenizer.decode(cut) == end + tokenizer.decode(closed)


def test_new_messages_may_not_follow_anything_but_the_models_turn():
    tokenizer = family_tokenizer("qwen2_5")
    with pytest.raises(ValueError, match="must end with the assistant message"):
        next_turn_tokens(tokenizer, [QUESTION], [RESULT], tokens=[])


def test_a_template_that_leaves_the_turn_out_is_refused():
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="0 times instead of once"):
        next_turn_tokens(tokenizer, [QUESTION, {"role": "assistant", "content": "x"}], [RESULT], tokens=[])


SCHEMA = [{"type": "function", "function": {"name": "calculator", "description": "It counts.", "parameters": {}}}]
ANSWERED = [QUESTION, {"role": "assistant", "content": "1512"}]


def test_schemas_before_the_models_turn_are_not_written_again(monkeypatch):
    shown = []
    monkeypatch.setattr(
        turn_text, "render_chat", lambda *args, **kwargs: shown.append(render_chat(*args, **kwargs)) or shown[-1]
    )
    tokenizer = copy.deepcopy(family_tokenizer("qwen2_5"))  # nothing is known of it yet
    new = next_turn_tokens(tokenizer, ANSWERED, [AGAIN], tokens=[], tools=SCHEMA)
    assert len(shown) == 1 and "<tools>" in shown[0] and "It counts." not in shown[0]
    whole = render_chat(tokenizer, [*ANSWERED, AGAIN], tools=SCHEMA)
    assert "It counts." in whole and whole.endswith("1512" + tokenizer.decode(new))


def test_a_template_that_shows_tools_behind_the_models_turn_shows_them_as_they_are():
    """As Mistral's does: before the last message of the user's."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
        "[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    new = tokenizer.decode(next_turn_tokens(tokenizer, ANSWERED, [AGAIN], tokens=[], tools=SCHEMA))
    assert new == "</s>[TOOLS]" + json.dumps(SCHEMA) + "[/TOOLS][user]And 12*12?</s>[assistant]"


def test_the_tiny_models_tokens_between_turns_are_those_of_its_demonstrations():
    tokenizer = build_tokenizer(["<tool_call>", "</tool_call>"])
    sample, messages, _ = play(tokenizer, [QUESTION], [(CALL + "<|im_end|>", [RESULT]), ("1512<|im_end|>", [])])
    demonstration = encode_text(tokenizer, render_chat(tokenizer, messages, add_generation_prompt=False))
    assert sample.tokens == demonstration[:-1], "without the newline after the end"


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2's real tokenizer, out of the package that carries the model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    from slime.utils.errors import UsageError
    from tools.convert_gguf_to_hf import find_bundled_gguf

    try:
        gguf = find_bundled_gguf()
    except UsageError as error:
        pytest.skip(str(error))
    return transformers.AutoTokenizer.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, clean_up_tokenization_spaces=False
    )


def test_smollm2s_own_tokenizer_and_template_do_not_drift(smollm2):
    turns = [(CALL + "<|im_end|>", [RESULT]), ("It is 1512.<|im_end|>", [AGAIN]), ("144 — done ✓<|im_end|>", [])]
    sample, messages, _ = play(smollm2, [QUESTION], turns)
    assert count_drift(smollm2, messages, tokens=sample.tokens) == 0
    assert sample.tokens == encode_text(smollm2, render_chat(smollm2, messages, add_generation_prompt=False))[:-1]
    assert family_tokenizer("smollm2").apply_chat_template(messages, tokenize=False) == smollm2.apply_chat_template(
        messages, tokenize=False
    ), "the fixture behaves as the real template"


TEXTS = ["", " ", "\n\n\n", "<|im_end|>\n<|im_start|>user\n", "e\u0301\u200d 😀犬 \x00", "12 times\t12 = 144  !" * 50]


@pytest.mark.parametrize("family", SPECIAL)
@pytest.mark.parametrize("splits", [False, True])
def test_the_short_way_to_tokens_gives_those_of_the_tokenizer(family, splits, monkeypatch):
    tokenizer = family_tokenizer(family)
    monkeypatch.setattr(tokenizer, "split_special_tokens", splits)
    for text in TEXTS * 2:  # twice: `encode` sets the backend's own switch
        assert encode_text(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


def test_a_tokenizer_with_an_encode_of_its_own_or_a_limit_in_its_file_is_asked_itself():
    class Reversed(PreTrainedTokenizerFast):
        def encode(self, text, **kwargs):
            return super().encode(text[::-1], **kwargs)

    plain = build_tokenizer()
    expected = plain.encode("abc def", add_special_tokens=False)
    own = Reversed(tokenizer_object=plain.backend_tokenizer)
    assert encode_text(own, "fed cba") == expected
    plain.backend_tokenizer.enable_truncation(2)
    plain.backend_tokenizer.enable_padding(length=50)
    assert encode_text(plain, "abc def") == expected, "transformers takes both off"


@pytest.mark.parametrize("family", SPECIAL)
def test_ids_are_decoded_as_their_tokenizer_does(family):
    tokenizer = family_tokenizer(family)
    ids = [*encode_text(tokenizer, written(family, " It 's 1512 , é!\n")), 10**5]  # the last is no token of it
    assert decode_ids(tokenizer, ids) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_tokenizer_that_decodes_otherwise_is_asked_itself():
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **kwargs):
            return "its own"

    own = Own(tokenizer_object=family_tokenizer("qwen3").backend_tokenizer)
    assert decode_ids(own, [1, 2]) == "its own"


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_may_never_do_what_the_sandbox_refuses(template):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=family_tokenizer("qwen3").backend_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match="the chat template refuses the messages"):
        render_chat(tokenizer, [QUESTION])
    tokenizer.chat_template = "{{ messages[0].content.strip() }}"
    assert render_chat(tokenizer, [QUESTION]) == QUESTION["content"]
