"""Images in requests to the gateway: what the engine gets, what the trainer gets, and what is refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from slime.agent.pictures import Picture, Pictures, Widened, spans_within
from slime.rollout.hooks.sample_errors import sample_problem
from slime.rollout.sampling.images import engine_ids
from slime.utils.processing_utils import ImageOptions, open_image
from slime.utils.types import Sample
from tests.unit.agent_fakes import (
    CHAT,
    FakeTokenizer,
    anthropic_client,
    finish,
    gateway,
    openai_client,
    opened,
    send,
)
from tests.unit.rollout_fakes import rollout_args
from tests.unit.test_image_prompts import IMAGE, MEDIA, VIDEO, Processor


class PartsTokenizer(FakeTokenizer):
    """Shows an "I" for each image."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return super().encode(text)

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> list[int]:
        def shown(content: Any) -> Any:
            parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
            return "".join("I" if part["type"] == "image" else part["text"] for part in parts)

        return super().apply_chat_template([{**m, "content": shown(m["content"])} for m in messages], **kwargs)


def png(width: int, colour: str = "red") -> str:
    data = io.BytesIO()
    Image.new("RGB", (width, 2), colour).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


def uri(width: int, colour: str = "red") -> str:
    return "data:image/png;base64," + png(width, colour)


def seeing(texts: list[str], **kwargs: Any) -> Any:
    tokenizer = PartsTokenizer()
    return gateway(texts, tokenizer=tokenizer, pictures=Pictures(Processor(), tokenizer, ImageOptions()), **kwargs)


def image_of(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def block_of(width: int, colour: str) -> dict[str, Any]:
    """As Anthropic has it."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": png(width, colour)}}


def test_images_of_both_protocols_reach_engine_and_trainer_alike() -> None:
    with seeing(["one", "two"]) as (server, engine):
        key = opened(server)
        engine.meta = {"prompt_tokens": (first := len("<user>seeIII<assistant>"))}
        asked: Any = [{"role": "user", "content": [{"type": "text", "text": "see"}, image_of(uri(3))]}]
        said = openai_client(server, key).chat.completions.create(model="m", messages=asked)
        assert said.usage is not None and said.usage.prompt_tokens == first, "with all tokens of the image"
        engine.meta = {"prompt_tokens": len("<user>seeIII<assistant>one<tool>II<assistant>")}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [block_of(2, "blue")]}
        messages: Any = [
            {"role": "user", "content": [{"type": "text", "text": "see"}, block_of(3, "red")]},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": [result]},
        ]
        anthropic_client(server, key).messages.create(model="m", max_tokens=50, messages=messages)
        [sample] = finish(server, key)
    request = engine.requests[-1]
    assert request["input_ids"] == [ord(c) for c in "<user>seeI<assistant>one<tool>I<assistant>"]
    shown = [open_image(data) for data in request["image_data"]]
    assert [(image.width, image.getpixel((0, 0))) for image in shown] == [(3, (255, 0, 0)), (2, (0, 0, 255))]
    assert sample.tokens == [ord(c) for c in "<user>seeIII<assistant>one<tool>II<assistant>two"]
    assert sample.image_spans == [[9, 3], [len("<user>seeIII<assistant>one<tool>"), 2]]
    assert engine_ids(sample, MEDIA) == request["input_ids"] + engine.outputs[-1]
    assert sample.response == "one<tool>I<assistant>two" and sum(sample.loss_mask or ()) == len("onetwo")
    inputs = sample.multimodal_train_inputs or {}
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 3], [1, 4, 2]]
    assert sample.metadata["agent"]["breaks"] == 0 and sample.metadata["agent"]["ignored_fields"] == []
    assert sample_problem(rollout_args(), sample) is None


def test_the_input_of_responses_may_hold_images() -> None:
    with seeing(["one"]) as (server, engine):
        key = opened(server)
        engine.meta = {"prompt_tokens": len("<user>IIII<assistant>")}
        content = [{"type": "input_image", "image_url": uri(4), "detail": "auto"}]
        answer = openai_client(server, key).responses.create(model="m", input=[{"role": "user", "content": content}])  # type: ignore
        assert answer.output_text == "one"
        [sample] = finish(server, key)
        assert sample.image_spans == [[6, 4]]


def test_an_engine_that_saw_other_tokens_than_the_trainer_fails_the_turn() -> None:
    with seeing(["one"]) as (server, engine):
        key = opened(server)
        engine.meta = {"prompt_tokens": 5}
        body = {"messages": [{"role": "user", "content": [image_of(uri(4))]}]}
        status, answer = send(server, CHAT, key, body)
        assert status == 503 and "saw 5 prompt tokens; with the processor" in answer["error"]["message"]
        assert "images 4 x 2 4 of them" in answer["error"]["message"]
        assert server.end_reason(key) == "transport" and finish(server, key) == []


def test_a_turn_with_an_image_that_the_engine_aborts_goes_on_and_is_one_answer() -> None:
    """The first call is aborted before it is read, as one that waits is: SGLang names no number of prompt tokens."""
    with seeing(["", "one ", "two"], keeps_aborted=True) as (server, engine):
        key, length = opened(server), len("<user>III<assistant>")
        meta = {"completion_tokens": 0}, {"prompt_tokens": length}, {"prompt_tokens": length + len("one ")}
        engine.finishes, engine.metas = ["abort", "abort", "stop"], list(meta)
        ask = [{"role": "user", "content": [image_of(uri(3))]}]
        status, answer = send(server, CHAT, key, {"messages": ask})
        assert status == 200 and answer["choices"][0]["message"]["content"] == "one two"
        assert [len(request["image_data"]) for request in engine.requests] == [1, 1, 1]
        assert engine.requests[2]["input_ids"] == engine.requests[0]["input_ids"] + engine.outputs[1]
        [sample] = finish(server, key)
        assert sample.image_spans == [[6, 3]] and sample.loss_mask == [1] * len("one two")
        assert sample_problem(rollout_args(), sample) is None


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (image_of("http://127.0.0.1:9/a.png"), "only fetched with --allow-image-url"),
        (image_of("/etc/passwd"), "an image must be a data URI, base64 or an http"),
        (image_of("file:///etc/passwd"), "an image must be a data URI, base64 or a"),
        ({"type": "input_image", "file_id": "f"}, "an image must be a data URI"),
        (image_of("data:image/png;base64,AAAA"), "image 1: an image could not be r"),
        ({"type": "text", "text": "an I"}, "the conversation has 2 tokens that stand for an image and 1 images"),
    ],
)
def test_an_image_that_cannot_be_shown_is_refused_before_the_engine_is_asked(block: Any, reason: str) -> None:
    with seeing([]) as (server, engine):
        good = image_of(uri(2))
        status, answer = send(server, CHAT, opened(server), {"messages": [{"role": "user", "content": [good, block]}]})
        assert status == 400 and reason in answer["error"]["message"] and engine.requests == []


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (IMAGE, "2 tokens that stand for an image and 1 images"),
        (VIDEO, "1 images, and 1 that stand for a video or a sound"),
    ],
)
def test_a_conversation_ends_where_the_model_writes_a_token_of_images_or_videos(token: int, reason: str) -> None:
    written = f"o{chr(token)}"
    with seeing([written]) as (server, engine):
        key = opened(server)
        ask = [{"role": "user", "content": [image_of(uri(2))]}]
        engine.meta = {"prompt_tokens": len("<user>II<assistant>")}
        assert send(server, CHAT, key, {"messages": ask})[0] == 200
        assert engine.requests[0]["sampling_params"]["stop_token_ids"] == list(MEDIA.stops)
        more = [*ask, {"role": "assistant", "content": written}, {"role": "user", "content": "on"}]
        status, answer = send(server, CHAT, key, {"messages": more})
        assert status == 400 and reason in answer["error"]["message"]
        [sample] = finish(server, key)
        assert sample.image_spans == [[6, 2]] and sample.tokens[-1] == token and sample.loss_mask == [1, 1]


def test_all_tokens_of_images_count_for_the_context() -> None:
    ask = [{"role": "user", "content": [image_of(uri(60))]}]
    with seeing([]) as (server, engine):
        key = opened(server, max_context_tokens=50)
        status, answer = send(server, CHAT, key, {"messages": ask})
        assert status == 400 and f"resulted in {len('<user><assistant>') + 60} tokens" in answer["error"]["message"]
        assert engine.requests == [] and server.end_reason(key) == "length"


def test_a_sample_is_cut_before_an_image_that_does_not_fit() -> None:
    picture = Picture(Image.new("RGB", (3, 2)), "", 9, 3, {"image_grid_thw": np.array([[1, 4, 3]])})
    wide = Widened([picture, picture])
    assert wide.segment([5, 9, 6], 0) == [5, 9, 9, 9, 6] and wide.segment([9, 9], 5) == [9, 9, 9, 9]
    assert wide.spans == [[1, 3], [5, 3]], "the last one is a word of the model's"
    assert [spans_within(wide.spans, length) for length in (9, 8, 7, 4)] == [
        ([[1, 3], [5, 3]], 9), ([[1, 3], [5, 3]], 8), ([[1, 3]], 5), ([[1, 3]], 4)]  # fmt: skip
    sample = Sample(image_spans=[[1, 3]])
    wide.give(sample)
    assert (sample.multimodal_train_inputs or {})["image_grid_thw"].tolist() == [[1, 4, 3]]
