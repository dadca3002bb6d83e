"""Loading tokenizers and processors, and turning text, messages and images into what an engine takes.

Images, videos and sounds of a data row become content parts of its messages: where the text has the placeholder of
their kind ("<image>"), or a message has a part of their kind without content. transformers is imported only when a
tokenizer or a processor is loaded, and PIL only for images: a text-only run needs neither.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.utils.errors import UsageError
from slime.utils.misc import attempt
from slime.utils.types import MultimodalTypes

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MOST_PIXELS = 50_000_000
"""Of an image that is opened at all: more is a mistake, or a file made to fill the memory."""
MOST_BYTES = 50 * 2**20
"""Of an image that is fetched."""
_FETCH_S = 30.0
_LONGEST_PATH = 4096
_UNREADABLE = (OSError, ValueError, SyntaxError, RuntimeError)  # as PIL says that a file is broken


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


@dataclass(frozen=True)
class ImageOptions:
    """How images of data rows and of tools are opened.

    Attributes:
        min_pixels, max_pixels: an image is scaled until it has this many pixels; None leaves it to the processor.
        allow_urls: fetch http addresses, which makes this machine send requests that a data file names.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    allow_urls: bool = False


def image_options(args: Args) -> ImageOptions:
    """How a run's images are opened, by its flags."""
    return ImageOptions(args.image_min_pixels, args.image_max_pixels, args.allow_image_urls)


def process_vision_info(
    prompt: list[dict[str, Any]], processor: Any, options: ImageOptions = ImageOptions()
) -> dict[str, Any]:
    """The images and videos of a conversation, in order.

    Args:
        prompt: messages; their contents are texts, or lists of parts such as {"type": "image", "image": ...}. A part
            may have `min_pixels` and `max_pixels` of its own.
        processor: says of which size patches are; images keep a multiple of it when they are scaled.
        options: of the run.

    Returns:
        {"images": list of PIL images or None, "videos": list as given or None}.

    Raises:
        UsageError: an image cannot be read; it says which of the conversation's.
    """
    images = _of_each_image(prompt, lambda part: _scaled_image(part, processor, options))
    parts = [part for m in prompt if isinstance(m["content"], list) for part in m["content"]]
    videos = [part["video"] for part in parts if part.get("type") == "video"]
    return {"images": images or None, "videos": videos or None}


def num_image_tokens(prompt: list[dict[str, Any]], processor: Any, options: ImageOptions = ImageOptions()) -> int:
    """By how many tokens the processor lengthens a prompt for its images; only their headers are read.

    Args and errors as for `process_vision_info`.
    """
    sizes = _of_each_image(prompt, lambda part: _image_and_size(part, processor, options)[1])
    if not sizes:
        return 0
    counts, error = attempt(processor._get_num_multimodal_tokens, image_sizes=[size[::-1] for size in sizes])
    if counts is None:
        raise UsageError(f"the processor takes no images of {sizes} (width, height): {error}")
    return sum(counts["num_image_tokens"]) - len(sizes)


def image_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content parts of a conversation that are images."""
    return [
        part
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and part.get("type") in ("image", "image_url")
    ]


def _of_each_image(prompt: list[dict[str, Any]], read: Callable[[dict[str, Any]], T]) -> list[T]:
    found: list[T] = []
    for part in image_parts(prompt):
        try:
            found.append(read(part))
        except UsageError as error:
            raise UsageError(f"image {len(found) + 1}: {error}") from error
    return found


def _scaled_image(part: dict[str, Any], processor: Any, options: ImageOptions) -> Any:
    image, size = _image_and_size(part, processor, options)
    upright = _rgb(image)
    if upright.size != image.size:  # it lay on its side
        size = size[::-1]
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    _, error = attempt(count, image_sizes=[size[::-1]]) if count else (None, None)
    if error is not None:  # here, where the row is known
        raise UsageError(f"the processor takes no image of {size[0]} x {size[1]} pixels: {error}")
    return upright if size == upright.size else upright.resize(size)


def _image_and_size(part: dict[str, Any], processor: Any, options: ImageOptions) -> tuple[Any, tuple[int, int]]:
    """The image of a content part, whose pixels are not read yet, and the (width, height) that it shall have.

    It is scaled here and not by the processor: the engine's has bounds of its own, and must find nothing to scale.
    """
    value = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    image = _open(value, allow_urls=options.allow_urls)
    hints = {**part, **value} if isinstance(value, dict) else part
    least, most = (hints.get(name) or vars(options)[name] for name in ("min_pixels", "max_pixels"))
    if least is None and most is None:
        return image, image.size
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    settings = getattr(processor, "image_processor", None)
    factor = (getattr(settings, "patch_size", None) or 1) * (getattr(settings, "merge_size", None) or 1)
    size = dict(getattr(settings, "size", None) or {})
    least = least or size.get("shortest_edge") or 1
    most = most or max(size.get("longest_edge") or MOST_PIXELS, least)
    try:
        height, width = smart_resize(image.height, image.width, factor, min_pixels=least, max_pixels=most)
    except ValueError as error:
        raise UsageError(f"it cannot be scaled: {error}") from error
    return image, (width, height)


def open_image(value: Any, *, allow_urls: bool = False) -> Any:
    """A PIL image (RGB) from what a data row may hold: a path, a data URI, base64, an http address, bytes, an image,
    or a dict that holds one of these under "bytes", "path", "image" or "url". It is upright, and opaque on white.

    Raises:
        UsageError: it is no image, it has more than `MOST_PIXELS`, the file is missing, or addresses are not fetched.
    """
    return _rgb(_open(value, allow_urls=allow_urls))


def _rgb(image: Any) -> Any:
    from PIL import Image, ImageOps

    if image.mode in ("I", "F"):
        raise UsageError(f"an image of mode {image.mode} does not say which numbers are black and white; use 8 bits")
    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):  # PIL would cut every number above 255
            return image.convert("I").point(lambda number: number / 257).convert("RGB")
        if not image.has_transparency_data:
            return image.convert("RGB")
        image = image.convert("RGBA")  # PIL would show the colours of what is not to be seen, often black
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        raise UsageError(f"an image could not be read: {str(error)[:200]}") from error


def _open(value: Any, *, allow_urls: bool) -> Any:
    """A PIL image whose pixels may not have been read yet."""
    from PIL import Image

    if isinstance(value, dict):
        value = next((value[key] for key in ("bytes", "path", "image", "url") if value.get(key)), None)
    if isinstance(value, Image.Image):
        return value
    shown = f"{len(value)} bytes" if isinstance(value, bytes) else repr(str(value)[:80])
    try:
        image = Image.open(_image_source(value, shown, allow_urls))
    except (*_UNREADABLE, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <_io.")[0][:200]  # PIL names its file in memory
        raise UsageError(f"an image could not be read from {shown}: {reason}") from error
    if image.format == "EPS":
        raise UsageError(f"{shown} is a program (EPS), which is not run; save its picture as PNG")
    if image.width * image.height > MOST_PIXELS:
        raise UsageError(
            f"{shown} is too large: {image.width} x {image.height} pixels, and at most {MOST_PIXELS:,} are read"
        )
    return image


def _image_source(value: Any, shown: str, allow_urls: bool) -> Any:
    """What PIL opens: a path or a file in memory."""
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str):
        raise UsageError(f"an image must be a path, a data URI, base64 or bytes, not {shown}")
    if value.startswith(("http://", "https://")):
        if not allow_urls:
            raise UsageError(f"{shown} is an address, which is only fetched with --allow-image-urls")
        return io.BytesIO(_fetch(value, shown))
    path = value.removeprefix("file://")
    is_data = value.startswith("data:")
    if not is_data and (len(path) <= _LONGEST_PATH and os.path.exists(path)):
        return path
    try:
        return io.BytesIO(base64.b64decode(value.partition(",")[2] if is_data else value, validate=True))
    except ValueError as error:
        found = "is no base64" if is_data else "does not exist, and is no base64"
        raise UsageError(f"an image could not be read: {shown} {found}") from error


def _fetch(url: str, shown: str) -> bytes:
    import requests

    try:
        with requests.get(url, timeout=_FETCH_S, stream=True) as answer:
            answer.raise_for_status()
            data = answer.raw.read(MOST_BYTES + 1, decode_content=True)
    except (requests.RequestException, OSError) as error:
        raise UsageError(f"an image could not be fetched from {shown}: {str(error)[:200]}") from error
    if len(data) > MOST_BYTES:
        raise UsageError(f"an image could not be fetched from {shown}: it has more than {MOST_BYTES} bytes")
    return bytes(data)


def missing_image(value: Any) -> str | None:
    """The path that an image of a data row names, where there is no such file; found without opening anything."""
    if isinstance(value, dict):
        value = None if value.get("bytes") else value.get("path") or value.get("image")
    if not isinstance(value, str) or value.startswith(("data:", "http://", "https://")) or len(value) > _LONGEST_PATH:
        return None
    path = value.removeprefix("file://")
    is_name = "." in os.path.basename(path)  # base64 has no dot
    return path if is_name and not os.path.exists(path) else None


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
    if (backend := _plain_backend(tokenizer)) is not None:  # 0.6 of the time: no offsets, no `BatchEncoding`
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    return list(tokenizer.encode(text, add_special_tokens=False))


def decode_ids(tokenizer: Any, ids: list[int]) -> str:
    """The text of token ids, special tokens kept; in half the time where the tokenizer would do no more than that."""
    is_plain = _is_plain(tokenizer.__class__) and not tokenizer.clean_up_tokenization_spaces
    return str((tokenizer.backend_tokenizer if is_plain else tokenizer).decode(ids, skip_special_tokens=False))


def _plain_backend(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer that would call it and do nothing else; None for any other."""
    if not _is_plain(tokenizer.__class__):
        return None
    backend = tokenizer.backend_tokenizer
    if backend.truncation is not None or backend.padding is not None:  # transformers takes them off
        return None
    return backend if backend.encode_special_tokens == tokenizer.split_special_tokens else None


@functools.cache
def _is_plain(kind: type) -> bool:
    if not hasattr(kind, "backend_tokenizer"):
        return False
    from transformers import PreTrainedTokenizerFast as Fast

    names = ("encode", "_encode_plus", "decode", "_decode")
    return issubclass(kind, Fast) and all(getattr(kind, name) is getattr(Fast, name) for name in names)


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
