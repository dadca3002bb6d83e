"""Loading tokenizers and processors, and turning text, messages and images into what an engine takes.

Images, videos and sounds of a data row become content parts of its messages: where the text has the placeholder of
their kind ("<image>"), or a message has a part of their kind without content. transformers is imported only when a
tokenizer or a processor is loaded, and PIL only for images: a text-only run needs neither.
"""

from __future__ import annotations

import base64
import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.misc import attempt
from slime.utils.types import MultimodalTypes

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def load_tokenizer(name_or_path: str, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """Load the tokenizer of an HF checkpoint.

    Args:
        name_or_path: a local HF directory, or a hub name.
        trust_remote_code: run Python code that the checkpoint ships (--trust-remote-code).
        kwargs: passed on to `AutoTokenizer.from_pretrained`.

    Raises:
        UsageError: there is no tokenizer there.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)  # nosec B615
    except (OSError, ValueError) as error:
        kind = "directory" if Path(name_or_path).is_dir() else "path"
        raise UsageError(
            f"no tokenizer could be loaded from the {kind} {name_or_path} (--hf-checkpoint): {error}"
        ) from error


def load_processor(name_or_path: str, *, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The processor of an HF checkpoint (it expands images into placeholder tokens and pixels); None if it has none.

    Args:
        name_or_path: a local HF directory, or a hub name.
        trust_remote_code: run Python code that the checkpoint ships (--trust-remote-code).
        kwargs: passed on to `AutoProcessor.from_pretrained`.

    Raises:
        UsageError: there is one, but it cannot be loaded here.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    if Path(name_or_path).is_dir() and not has_processor(name_or_path):
        return None
    try:
        processor = AutoProcessor.from_pretrained(  # nosec B615
            name_or_path, trust_remote_code=trust_remote_code, **kwargs
        )
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"the processor of --hf-checkpoint {name_or_path} could not be loaded: {error}") from error
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def has_processor(directory: str) -> bool:
    """Whether a local HF directory ships a processor."""
    return any((Path(directory) / file).is_file() for file in PROCESSOR_FILES)


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments for calling a processor: what is there of images and videos, and tensors as the result."""
    given = {kind: value for kind, value in (multimodal_inputs or {}).items() if value}
    return {**given, "return_tensors": "pt"}


def process_vision_info(prompt: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """The images and videos of a conversation, in order.

    Args:
        prompt: messages; their contents are texts, or lists of parts such as {"type": "image", "image": ...}.
        processor: unused by images; part of the public signature.

    Returns:
        {"images": list of PIL images or None, "videos": list as given or None}.
    """
    parts = [part for m in prompt if isinstance(m["content"], list) for part in m["content"]]
    images = [open_image(part["image"]) for part in parts if part.get("type") == "image"]
    videos = [part["video"] for part in parts if part.get("type") == "video"]
    return {"images": images or None, "videos": videos or None}


def open_image(value: Any) -> Any:
    """A PIL image from what a data row may hold: a path, a data URI, bytes, {"bytes", "path"}, or an image.

    Raises:
        UsageError: it is no image, or the file is missing.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    try:
        if isinstance(value, str) and value.startswith("data:"):
            value = base64.b64decode(value.partition(",")[2])
        if isinstance(value, bytes):
            return Image.open(io.BytesIO(value)).convert("RGB")
        if isinstance(value, str):
            with Image.open(value.removeprefix("file://")) as image:
                return image.convert("RGB")
    except (OSError, ValueError, UnidentifiedImageError) as error:
        raise UsageError(f"an image could not be read: {str(error)[:200]}") from error
    if isinstance(value, Image.Image):
        return value
    raise UsageError(f"an image must be a path, a data URI or bytes, not {str(value)[:80]!r}")


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as a PNG data URI, as SGLang's `image_data` takes it."""
    buffer = io.BytesIO()
    (image.convert("RGB") if image.mode not in ("RGB", "L") else image).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


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
    text, error = attempt(  # templates are programs: jinja2 raises its own errors, and any other
        tokenizer.apply_chat_template,
        messages,
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **template_kwargs,
    )
    if error is not None:
        raise UsageError(f"the chat template refuses the messages {str(messages)[:300]}: {error}") from error
    return str(text)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that already holds its special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def with_parts(
    messages: list[dict[str, Any]], row: Mapping[str, Any], keys: Mapping[str, str], where: str
) -> list[dict[str, Any]]:
    """The messages with what the row holds beside its text.

    Args:
        messages: contents are texts, or lists of parts; they are not changed.
        row: its fields named by `keys` hold one thing, a list of things, or nothing.
        keys: kind ("image", "video", "audio") -> field (--multimodal-keys).
        where: "file:line", for error messages.

    Raises:
        UsageError: there are more placeholders than things, or fewer.
    """
    left = {kind: _things(row.get(field)) for kind, field in keys.items()}
    found = [{**message, "content": _parts(message.get("content"), left, where)} for message in messages]
    for kind, things in left.items():
        if things:
            raise UsageError(
                f"{where}: {len(things)} of {keys[kind]!r} (--multimodal-keys {kind}) have no {placeholder(kind)} in "
                "the prompt"
            )
    return found


def placeholder(kind: str) -> str:
    """What stands for a kind in a prompt's text."""
    known = MultimodalTypes.get(kind)
    return known.placeholder if known else f"<{kind}>"


def _things(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _parts(content: Any, left: dict[str, list[Any]], where: str) -> Any:
    if isinstance(content, list):
        return [_filled(part, left, where) for part in content]
    if not isinstance(content, str):
        return content
    kinds = {placeholder(kind): kind for kind in left}
    pieces = re.split("(" + "|".join(map(re.escape, kinds)) + ")", content)
    if len(pieces) == 1:
        return content
    return [
        _next(kinds[piece], left, where) if piece in kinds else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def _filled(part: Any, left: dict[str, list[Any]], where: str) -> Any:
    """A part that only names its kind gets the next thing of that kind."""
    kind = part.get("type") if isinstance(part, dict) else None
    return _next(kind, left, where) if kind in left and part.get(kind) is None else part


def _next(kind: str, left: dict[str, list[Any]], where: str) -> dict[str, Any]:
    if not left[kind]:
        raise UsageError(f"{where}: the prompt has more {placeholder(kind)} than the row has of them")
    return {"type": kind, kind: left[kind].pop(0)}
