"""Tokenizers for tests of chat templates: a small byte-level BPE with the special tokens and the template of a family.

It is trained here, on a few sentences, and joins letters and newlines as the families' tokenizers do.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent.parent / "fixtures" / "chat_templates"
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_TAGS = ("<think", "</", "<tool_", "<arg_", "<｜tool")
SPECIAL = {
    "qwen2_5": [*_CHATML, *_QWEN_TAGS[:2]],
    "qwen3": [*_CHATML, *_QWEN_TAGS],
    "qwen3_5": [*_CHATML, *_QWEN_TAGS, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
    "deepseek_r1_distill_qwen": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        *("<think>", "</think>"),
    ],
    "glm4_5": [
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        *(*_QWEN_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    "glm4": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "smollm2": _CHATML,
}
# Words with the space before them, single digits, punctuation, newlines together: the scheme of Qwen and Llama 3.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEXT = [
    "The assistant answers the user, and the user asks again.\n\nWhat is 12 times 12? It is 144.\n",
    "Let me think about it first.\n\nThe tool says 1512, so the answer is 1512.\n\n\n",
    "The user\n\nThe tool\n\nThe assistant\n\n",
    '{"name": "calculator", "arguments": {"expression": "84*18"}}\n{"name": "calculator"}\n',
] * 20


@functools.cache
def family_tokenizer(family: str, special: tuple[str, ...] = ()) -> Any:
    """The tokenizer of a family of tests/fixtures/chat_templates; `special` are other special tokens than its own.

    Tags are no special tokens: as in the real tokenizers a model may be made to write them.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    for text in special or SPECIAL[family]:
        add = tokenizer.add_tokens if text.startswith(_TAGS) else tokenizer.add_special_tokens
        add([AddedToken(text, normalized=False, special=not text.startswith(_TAGS))])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
    wrapped.chat_template = (TEMPLATES / f"{family}.jinja").read_text()
    return wrapped
