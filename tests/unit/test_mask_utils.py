"""The loss mask is 1 on what the assistant wrote, whatever the chat template looks like."""

from __future__ import annotations

import jinja2
import pytest

from slime.rollout.multi_turn import next_turn_tokens
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.unit.rollout_fakes import LetterTokenizer
from tools.make_tiny_model import build_tokenizer

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]

# Reasoning models: the last turn is rendered with an (empty) thought, earlier ones without; the prompt opens it.
QWEN3_5_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
DISTILL_LIKE = (
    "<BOS>{% for m in messages %}{% if m.role == 'assistant' %}"
    "<A>{{ m.content.split('</think>')[-1] }}<EOS>{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
SMOLLM2_LIKE = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are SmolLM<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateTokenizer(LetterTokenizer):
    """One token per character under any template, so that masks can be read as text."""

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, messages, tools=None, tokenize=False, add_generation_prompt=False, **kwargs):
        template = jinja2.Environment().from_string(self.chat_template)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt, tools=tools)


def trained_texts(tokenizer, messages, kind="qwen"):
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages)
    assert len(ids) == len(mask)
    return generator.get_text_from_loss_mask(ids, mask)


def test_every_assistant_turn_is_trained_with_its_end_marker():
    assert trained_texts(LetterTokenizer(), TURNS) == ["2<|im_end|>\n", "4<|im_end|>\n"]


@pytest.mark.parametrize(
    ("template", "kind", "expected"),
    [
        (SMOLLM2_LIKE, "qwen", ["2<|im_end|>\n", "4<|im_end|>\n"]),
        (QWEN3_5_LIKE, "qwen3_5", ["2<|im_end|>\n", "\n</think>\n\n4<|im_end|>\n"]),
        (DISTILL_LIKE, "distill_qwen", ["4<EOS>"]),
    ],
)
def test_the_markers_are_learned_from_the_template(template, kind, expected):
    assert trained_texts(TemplateTokenizer(template), TURNS, kind) == expected


def test_the_tokens_are_those_of_the_whole_conversation():
    tokenizer = LetterTokenizer()
    ids, _ = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(TURNS, tools=[{"type": "function"}])
    assert ids == tokenizer.encode(tokenizer.apply_chat_template(TURNS, tools=[{}]))


def test_step_loss_mask_leaves_a_turn_out():
    turns = [dict(turn) for turn in TURNS]
    turns[2]["step_loss_mask"] = 0
    assert trained_texts(LetterTokenizer(), turns) == ["4<|im_end|>\n"]


def test_response_lengths_run_from_the_first_trained_token_to_the_end():
    generator = MultiTurnLossMaskGenerator(LetterTokenizer())
    assert generator.get_response_lengths([[0, 1, 0, 1], [0, 0], [1, 0]]) == [3, 0, 2]


def test_a_marker_inside_a_message_is_an_error_not_a_wrong_mask():
    turns = [{"role": "user", "content": "say <|im_start|>assistant\nx"}, TURNS[2]]
    with pytest.raises(ValueError, match="2 assistant turns for 1 assistant messages"):
        trained_texts(LetterTokenizer(), turns)


def test_an_unknown_family_and_a_template_without_marks_are_refused():
    with pytest.raises(ValueError, match="--loss-mask-type gemma: known are qwen"):
        MultiTurnLossMaskGenerator(LetterTokenizer(), "gemma")
    with pytest.raises(ValueError, match="does not mark assistant turns"):
        MultiTurnLossMaskGenerator(TemplateTokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"))


def test_the_tiny_models_real_tokenizer_gives_the_prompt_the_engine_would_see():
    tokenizer = build_tokenizer()
    generator = MultiTurnLossMaskGenerator(tokenizer)
    user, reply = {"role": "user", "content": "12+7="}, {"role": "assistant", "content": "19"}
    ids, mask = generator.get_loss_mask([user, reply])
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    assert ids[: len(prompt)] == prompt
    assert mask[: len(prompt)] == [0] * len(prompt)
    assert mask[len(prompt) :] == [1, 1, 1, 1], "two digits, the end marker and the template's newline"
    assert generator.get_text_from_loss_mask(ids, mask) == ["19<|im_end|>\n"]


CALLS = [
    {"role": "user", "content": "84*18"},
    {"role": "assistant", "content": "<think>\nHard.\n</think>\n\n<tool_call>{}</tool_call>"},
    {"role": "tool", "content": "1512"},
    {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n1512"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\n2"},
]
PLAIN = [{**turn, "content": turn["content"].split("</think>\n\n")[-1]} for turn in CALLS]


@pytest.mark.parametrize(
    ("family", "kind", "messages", "expected"),
    [
        ("qwen2_5", "qwen", PLAIN, ["<tool_call>{}</tool_call><|im_end|>\n", "1512<|im_end|>\n", "2<|im_end|>\n"]),
        ("smollm2", "qwen", PLAIN, ["<tool_call>{}</tool_call><|im_end|>\n", "1512<|im_end|>\n", "2<|im_end|>\n"]),
        ("llama3", "qwen", PLAIN, ["<tool_call>{}</tool_call><|eot_id|>", "1512<|eot_id|>", "2<|eot_id|>"]),
        # The model ends its turn by naming who speaks next; after the last turn nobody does.
        ("glm4", "qwen", PLAIN, ["\n<tool_call>{}</tool_call><|observation|>", "\n1512<|user|>", "\n2"]),
        # The template does not show thoughts before the last question; so they are not trained with this type.
        (
            "qwen3",
            "qwen",
            CALLS,
            ["<tool_call>{}</tool_call><|im_end|>\n", "1512<|im_end|>\n", "<think>\nHm.\n</think>\n\n2<|im_end|>\n"],
        ),
        (
            "qwen3",
            "qwen3",
            CALLS[:4],
            [
                "<think>\nHard.\n</think>\n\n<tool_call>{}</tool_call><|im_end|>\n",
                "<think>\nEasy.\n</think>\n\n1512<|im_end|>\n",
            ],
        ),
        # The prompt opens the thought, so the model writes what follows. Earlier thoughts are not shown.
        (
            "qwen3_5",
            "qwen3_5",
            CALLS[2:],
            ["1512<|im_end|>\n", "Hm.\n</think>\n\n2<|im_end|>\n"],
        ),
        ("qwen3_5", "qwen3_5", CALLS[4:], ["Hm.\n</think>\n\n2<|im_end|>\n"]),
    ],
)
def test_real_families_train_what_the_model_would_have_written(family, kind, messages, expected):
    tools = None if family == "smollm2" else [{"type": "function", "function": {"name": "calculator"}}]
    tokenizer = family_tokenizer(family)
    generator = MultiTurnLossMaskGenerator(tokenizer, kind)
    ids, mask = generator.get_loss_mask(messages, tools=tools)
    assert generator.get_text_from_loss_mask(ids, mask) == expected
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert tokenizer.decode(ids) == whole, "nothing is lost or added"
    assert generator.get_loss_mask_with_multimodal_alignment(messages, ids, tools=tools) == (ids, mask)


@pytest.mark.parametrize(
    ("content", "trained"),
    [
        ("<think>\nHm.\n</think>\n\n2", "Hm.\n</think>\n\n2<｜end▁of▁sentence｜>"),
        ("<think>Hm.</think>2<｜end▁of▁sentence｜>", "Hm.</think>2<｜end▁of▁sentence｜>"),
        ("2", "2<｜end▁of▁sentence｜>"),
    ],
)
def test_distill_qwen_trains_the_last_turn_as_it_is_written_behind_the_prompt(content, trained):
    tokenizer = family_tokenizer("deepseek_r1_distill_qwen")
    generator = MultiTurnLossMaskGenerator(tokenizer, "distill_qwen")
    messages = [*CALLS[:5], {"role": "assistant", "content": content}]
    ids, mask = generator.get_loss_mask(messages)
    prompt = tokenizer.apply_chat_template(CALLS[:5], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == prompt + trained, "the template alone would drop the thought"
    assert generator.get_text_from_loss_mask(ids, mask) == [trained]
    _, untrained = generator.get_loss_mask([*CALLS[:5], messages[-1] | {"step_loss_mask": 0}])
    assert set(untrained) == {0}


def test_type_qwen3_trains_the_thoughts_of_every_turn():
    tokenizer = family_tokenizer("qwen3")
    ids, mask = MultiTurnLossMaskGenerator(tokenizer, "qwen3").get_loss_mask(CALLS)
    turns = [turn["content"] for turn in CALLS if turn["role"] == "assistant"]
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3")
    assert generator.get_text_from_loss_mask(ids, mask) == [f"{turn}<|im_end|>\n" for turn in turns]
    shown = tokenizer.apply_chat_template(CALLS, tokenize=False)
    for thought in ("Hard.", "Easy."):
        said = turns[0] if thought == "Hard." else turns[1]
        shown = shown.replace("assistant\n" + said.split("</think>\n\n")[1], f"assistant\n{said}")
    assert tokenizer.decode(ids) == shown, "all else is as the template renders it"
    turn = [CALLS[0], {"role": "assistant", "content": "<think>\nx\n</think>\n\ny", "step_loss_mask": 0}, *CALLS[4:]]
    ids, mask = generator.get_loss_mask(turn)
    assert "<think>\nx\n</think>" in tokenizer.decode(ids), "an untrained turn is shown with its thought"
    assert generator.get_text_from_loss_mask(ids, mask) == [f"{turns[2]}<|im_end|>\n"]


def test_every_type_agrees_with_the_chat_template_on_one_turn():
    """What the template renders after the generation prompt is the response; it is trained as a whole."""
    for family, kind in (("qwen2_5", "qwen"), ("qwen3", "qwen3"), ("qwen3_5", "qwen3_5")):
        tokenizer, messages = family_tokenizer(family), PLAIN[4:]
        prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        generator = MultiTurnLossMaskGenerator(tokenizer, kind)
        ids, mask = generator.get_loss_mask(messages)
        assert generator.get_text_from_loss_mask(ids, mask) == [whole.removeprefix(prompt)], family


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "glm4"])
def test_the_mask_agrees_with_the_flow_of_a_rollout(family):
    tokenizer = family_tokenizer(family)
    ids, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(PLAIN)
    prompt = tokenizer.apply_chat_template(PLAIN[:1], tokenize=False, add_generation_prompt=True)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert mask[:start] == [0] * start and mask[start] == 1, "the response begins where the prompt ends"
    end = mask.index(0, start)
    is_newline = tokenizer.decode(ids[end - 1 : end]) == "\n" and family == "qwen2_5"
    written = end - is_newline  # the engine stops before the template's newline, which is trained here
    new = next_turn_tokens(tokenizer, PLAIN[:2], PLAIN[2:3], tokens=ids[:written])
    assert ids[written:][: len(new)] == new
    assert mask[written:][: len(new)] == [int(is_newline)] + [0] * (len(new) - 1)


def test_images_that_a_processor_lengthened_do_not_shift_the_mask():
    tokenizer = family_tokenizer("qwen3_5")
    image, text = {"type": "image"}, {"type": "text", "text": "What is it?"}
    messages = [
        {"role": "user", "content": [image, text]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [text, image]},
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA dog."},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    (pad,) = tokenizer.encode("<|image_pad|>", add_special_tokens=False)
    short = tokenizer.encode(rendered, add_special_tokens=False)
    long = [token for i in short for token in ([pad] * 7 if i == pad else [i])]
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    ids, mask = generator.get_loss_mask_with_multimodal_alignment(messages, long)
    assert ids == long and len(mask) == len(short) + 2 * 6
    assert generator.get_text_from_loss_mask(ids, mask) == [
        "A cat.<|im_end|>\n",
        "Hm.\n</think>\n\nA dog.<|im_end|>\n",
    ]
    messages[1]["step_loss_mask"] = 0
    _, mask = generator.get_loss_mask_with_multimodal_alignment(messages, long)
    assert generator.get_text_from_loss_mask(ids, mask) == ["Hm.\n</think>\n\nA dog.<|im_end|>\n"]
    with pytest.raises(ValueError, match="2 assistant turns for 1 assistant messages"):
        generator.get_loss_mask_with_multimodal_alignment(messages[:2], long)


def test_an_empty_thought_whose_newlines_are_one_token_is_trained_after_its_tag():
    tokenizer = family_tokenizer("qwen3_5")
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen3_5")
    ids, mask = generator.get_loss_mask_with_multimodal_alignment(messages, ids)
    assert generator.get_text_from_loss_mask(ids, mask) == ["\n\n</think>\n\n2<|im_end|>\n"]
