"""Loading tokenizers, and turning text and messages into token ids.

It imports transformers only when a tokenizer is loaded, and of it only AutoTokenizer: image classes need torchvision.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError

logger = logging.getLogger(__name__)


def load_tokenizer(name: str, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """Load the tokenizer of an HF checkpoint.

    Args:
        name: a local HF directory, or a hub name.
        trust_remote_code: run Python code that the checkpoint ships (--trust-remote-code).
        kwargs: passed on to `AutoTokenizer.from_pretrained`.

    Raises:
        UsageError: there is no tokenizer there.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)
    except (OSError, ValueError) as error:
        kind = "directory" if Path(name).is_dir() else "path"
        raise UsageError(f"no tokenizer could be loaded from the {kind} {name} (--hf-checkpoint): {error}") from error


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> str:
    """The text of a conversation under the tokenizer's chat template.

    Raises:
        UsageError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise UsageError("--apply-chat-template: this tokenizer has no chat template; give prompts as plain text")
    try:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **template_kwargs,
            )
        )
    except Exception as error:  # templates are programs: jinja2 raises its own errors, and any other
        raise UsageError(f"the chat template refuses the messages {str(messages)[:300]}: {error}") from error


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that already holds its special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))
