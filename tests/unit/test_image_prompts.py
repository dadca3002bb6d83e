"""Prompts with images (slime.rollout.sampling.images): two lists of tokens, their proof, and what does not fit."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from slime.rollout import eval as evaluation
from slime.rollout import on_policy_distillation
from slime.rollout.hooks.returns import HookReturnError, check_train_data
from slime.rollout.hooks.sample_errors import sample_problem, train_problem
from slime.rollout.rm_hub.service import RewardError
from slime.rollout.sampling.engine_request import check_count, engine_payload, set_response_text
from slime.rollout.sampling.images import (
    AnsweredImages,
    ImagePrompt,
    MediaTokens,
    collapsed,
    engine_ids,
    find_images,
    read_prompt,
)
from slime.rollout.sampling.scoring import fresh_copy
from slime.rollout.tool_calls import EnvError
from slime.rollout.train_data import samples_to_train_data
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.train_data import flatten_columns, restore_columns
from slime.utils.types import Sample
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

IMAGE, VIDEO, OPENING = ord("I"), ord("V"), ord("(")
MEDIA = MediaTokens(IMAGE, (VIDEO,), (OPENING,))


def picture(width: int = 4) -> Any:
    return Image.new("RGB", (width, 2))


class Processor:
    """Of each image a token for every column of its pixels; `around` is written before an image."""

    image_token_id, video_token_id = IMAGE, VIDEO
    tokenizer = SimpleNamespace(get_added_vocab=lambda: {"<|vision_start|>": OPENING})

    def __init__(self, around: str = "") -> None:
        self.around, self.image_processor = around, SimpleNamespace(merge_size=2)

    def __call__(self, text: list[str], images: list[Any], return_tensors: str) -> dict[str, Any]:
        widths = iter(images)
        whole = "".join(self.around + "I" * next(widths).width if c == "I" else c for c in text[0])
        return {
            "input_ids": [[ord(c) for c in whole]],
            "attention_mask": [[1] * len(whole)],
            "mm_token_type_ids": [[int(c == "I") for c in whole]],
            "pixel_values": np.ones((sum(4 * image.width for image in images), 3), np.float32),
            "image_grid_thw": np.array([[1, 4, image.width] for image in images]),
        }


def a_sample(**changes: Any) -> Sample:
    """A prompt "aIIIIb" with one image, and a response of two tokens."""
    prompt = read_prompt(Processor(), LetterTokenizer(), "aIb", [picture()])
    values: dict[str, Any] = {
        "index": 3,
        "prompt": "aIb",
        "tokens": [*prompt.tokens, 50, 51],
        "response_length": 2,
        "rollout_log_probs": [-0.5, -0.25],
        "image_spans": prompt.spans,
        "multimodal_train_inputs": prompt.inputs,
        "multimodal_inputs": {"images": [picture()], "videos": None},
        "status": Sample.Status.COMPLETED,
    }
    return Sample(**(values | changes))


def test_the_trainer_has_all_tokens_of_an_image_and_the_engine_one() -> None:
    prompt = read_prompt(Processor(), LetterTokenizer(), "aIbII", [picture(4), picture(1), picture(2)])
    assert prompt.tokens == [ord(c) for c in "aIIIIbIII"]
    assert prompt.spans == [[1, 4], [6, 1], [7, 2]], "neighbours are told apart by their sizes"
    assert prompt.inputs is not None and prompt.inputs.keys() == {"pixel_values", "image_grid_thw"}
    sample = Sample(tokens=[*prompt.tokens, 50], image_spans=prompt.spans, response_length=1)
    assert engine_ids(sample, MEDIA) == [*(ord(c) for c in "aIbII"), 50]
    text = read_prompt(Processor(), LetterTokenizer(), "ab", [])
    assert text == ImagePrompt([ord("a"), ord("b")], [], None)


@pytest.mark.parametrize(("text", "images"), [("aIbI", 1), ("ab", 1), ("aI", 2)])
def test_a_prompt_has_as_many_places_as_images(text: str, images: int) -> None:
    reason = f"{text.count('I')} tokens that stand for an image and {images} images"
    with pytest.raises(UsageError, match=reason):
        read_prompt(Processor(), LetterTokenizer(), text, [picture()] * images)


def test_a_prompt_with_images_has_no_place_for_a_video() -> None:
    reason = r"1 images, and 1 that stand for a video or a sound; does its text.* hold one of \['I', 'V'\]"
    with pytest.raises(UsageError, match=reason):
        read_prompt(Processor(), LetterTokenizer(), "aIV", [picture()])
    assert read_prompt(Processor(), LetterTokenizer(), "V", []).tokens == [VIDEO], "a word to a model of texts"


def test_a_processor_that_writes_more_than_tokens_of_images_is_refused() -> None:
    with pytest.raises(UsageError, match="Processor makes other tokens of a prompt with images"):
        read_prompt(Processor(around="\n"), LetterTokenizer(), "aIb", [picture()])


def test_a_processor_says_which_tokens_are_no_words() -> None:
    assert MediaTokens.of(Processor()) == MEDIA
    heard = SimpleNamespace(image_token_id=3, audio_token_id=4, video_token_id=None)
    assert MediaTokens.of(heard) == MediaTokens(3, (4,))
    with pytest.raises(UsageError, match="SimpleNamespace does not name a token of images"):
        MediaTokens.of(SimpleNamespace(video_token_id=4))


def test_the_token_before_an_image_is_found_without_reading_the_whole_vocabulary() -> None:
    """It takes a third of a second with 150,000 words."""
    tokenizer = family_tokenizer("qwen3_5")
    whole = tokenizer.get_vocab()["<|vision_start|>"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokenizer), "get_vocab", lambda self: pytest.fail("the whole vocabulary was read"))
        media = MediaTokens.of(SimpleNamespace(image_token_id=IMAGE, tokenizer=tokenizer))
    assert media.opening == (whole,)


def test_the_texts_of_tools_are_checked_by_what_the_process_knows_of_its_processor() -> None:
    """It is done on the event loop, for each text of each answer."""
    state = SimpleNamespace(processor=object(), tokenizer=LetterTokenizer(), media=MEDIA)
    answered = AnsweredImages(state, rollout_args(multimodal_keys={"image": "none"}))
    assert asyncio.run(answered.read("a text")) == "a text"
    with pytest.raises(EnvError, match="a tool answered with the text 'I'"):
        asyncio.run(answered.read("an I"))


def test_a_response_ends_with_a_token_of_images_or_videos_and_never_goes_on_from_one() -> None:
    sample, state = a_sample(), SimpleNamespace(args=rollout_args(), media=MEDIA)
    params = {"stop_token_ids": [7, VIDEO], "top_k": 1}
    stopped = {"stop_token_ids": [7, VIDEO, IMAGE, OPENING], "top_k": 1}
    assert engine_payload(sample, params, state)["sampling_params"] == stopped
    text = engine_payload(Sample(tokens=[1, VIDEO]), params, SimpleNamespace(args=rollout_args()))
    assert text["sampling_params"] is params and text["input_ids"] == [1, VIDEO]
    for token, reason in [
        (IMAGE, "2 tokens that stand for an image and 1 images"),
        (VIDEO, "1 tokens that stand for an image and 1 images, and 1 that stand for a video"),
    ]:
        sample.tokens[-1] = token  # a word: it is trained, as the last token
        assert MEDIA.end(sample) and sample_problem(rollout_args(), sample) is None
        with pytest.raises(ValueError, match=f"sample 3 has {reason}.*Leave --rollout-ignore-eos out"):
            engine_payload(sample, params, state)
    assert not MEDIA.end(a_sample()) and not MEDIA.end(Sample(tokens=[1, IMAGE], response_length=1))


def test_a_teacher_is_not_asked_about_a_last_token_of_videos(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is all that is made up: an engine refuses the token, so that what it is asked is what counts."""
    asked: list[dict[str, Any]] = []

    async def answer(service: Any, payload: dict[str, Any], sample: Sample) -> dict[str, Any]:
        asked.append(payload)
        return {"meta_info": {"input_token_logprobs": [[None, 6], [-0.5, 50]]}}

    monkeypatch.setattr(on_policy_distillation, "ask", answer)
    monkeypatch.setattr(on_policy_distillation, "GenerateState", lambda args: SimpleNamespace(media=MEDIA))
    sample = a_sample()
    sample.tokens[-1] = VIDEO
    asyncio.run(on_policy_distillation.reward_func(rollout_args(rm_url="http://teacher"), sample))
    assert [payload["input_ids"] for payload in asked] == [[*(ord(c) for c in "aIb"), 50]]
    assert sample.teacher_log_probs == [-0.5, 0.0] and sample.loss_mask == [1, 0]


def test_an_engine_that_saw_another_number_of_tokens_is_an_error_that_names_sample_and_image() -> None:
    sample = a_sample(tokens=[ord(c) for c in "aIIIIb"], response_length=0)
    check_count(sample, {"prompt_tokens": 6, "completion_tokens": 2})
    aborted = {"completion_tokens": 0, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    check_count(sample, aborted | {"prompt_tokens": 0})
    check_count(sample, aborted)  # SGLang's answer to a request that waited; it names no number
    check_count(sample, aborted | {"completion_tokens": 2})  # it waited again: retracted when the cache was full
    with pytest.raises(RuntimeError, match="the engine saw 0 prompt tokens of sample 3"):
        check_count(sample, aborted | {"prompt_tokens": 0, "completion_tokens": 2})
    with pytest.raises(RuntimeError, match="the engine saw None prompt tokens of sample 3"):
        check_count(sample, aborted | {"finish_reason": {"type": "stop"}})
    check_count(Sample(tokens=[1, 2]), {"prompt_tokens": 5})
    reason = r"the engine saw 3 prompt tokens of sample 3 and .* 6 .*image 1 \(4 x 2\) 4 of them"
    with pytest.raises(RuntimeError, match=reason):
        check_count(sample, {"prompt_tokens": 3, "completion_tokens": 2})


def test_arrays_of_a_prompt_travel_once_and_samples_without_images_have_none() -> None:
    inputs = {"pixel_values": np.ones((500, 3), np.float32), "image_grid_thw": np.array([[1, 4, 4]])}
    first, text = (
        a_sample(multimodal_train_inputs=inputs),
        Sample(index=5, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0]),
    )
    second = a_sample(index=4, multimodal_train_inputs=dict(inputs))
    data = samples_to_train_data([first, second, text], [0.0] * 3, [0.0] * 3)
    assert data["image_spans"] == [[[1, 4]], [[1, 4]], []]
    assert data["multimodal_train_inputs"][2] is None
    there: Any = restore_columns(pickle.loads(pickle.dumps(flatten_columns(data))))
    one, two, _ = there["multimodal_train_inputs"]
    assert one["pixel_values"] is two["pixel_values"]
    size = len(pickle.dumps(flatten_columns(data)))
    alone = len(pickle.dumps(flatten_columns(samples_to_train_data([first], [0.0], [0.0]))))
    assert size - alone < inputs["pixel_values"].nbytes / 2
    without = samples_to_train_data([text], [0.0], [0.0])
    assert "image_spans" not in without and "multimodal_train_inputs" not in without


def test_images_of_a_sample_that_user_code_tokenised_are_found_in_its_prompt() -> None:
    prompt = read_prompt(Processor(), LetterTokenizer(), "aIIb", [picture(4), picture(2)])
    inputs = {name: torch.from_numpy(value) for name, value in (prompt.inputs or {}).items()}
    sample = a_sample(tokens=[*prompt.tokens, IMAGE, 51], image_spans=None, multimodal_train_inputs=inputs)
    sample.multimodal_inputs = {"images": [picture(4), picture(2)]}
    find_images(sample, Processor())
    assert sample.image_spans == [[1, 4], [5, 2]] and sample_problem(rollout_args(), sample) is None
    assert sample.multimodal_train_inputs is not None
    assert isinstance(sample.multimodal_train_inputs["pixel_values"], np.ndarray)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"image_spans": None}, "1 images (multimodal_inputs), 0 image_spans and multimodal_train_inputs"),
        ({"multimodal_train_inputs": None}, "1 image_spans and no multimodal_train_inputs"),
        ({"multimodal_inputs": None}, "0 images (multimodal_inputs), 1 image_spans"),
        ({"multimodal_train_inputs": [1]}, "multimodal_train_inputs of the type list; it must be a dict"),
        ({"image_spans": [[1, 5]]}, "image_spans [[1, 5]], where the tokens are not all of one image"),
        ({"image_spans": [[40, 5]]}, "image_spans [[40, 5]], where the tokens are not all of one image"),
    ],
)
def test_a_sample_whose_images_do_not_fit_its_tokens_is_refused(changes: dict[str, Any], problem: str) -> None:
    assert problem in (sample_problem(rollout_args(), a_sample(**changes)) or "")
    assert sample_problem(rollout_args(), a_sample()) is None


def test_images_that_come_later_are_added_without_touching_those_of_other_samples() -> None:
    sample, other = a_sample(), a_sample()
    other.multimodal_inputs, other.multimodal_train_inputs = sample.multimodal_inputs, sample.multimodal_train_inputs
    state = SimpleNamespace(processor=Processor(), tokenizer=LetterTokenizer(), media=MEDIA)
    answered = AnsweredImages(state, rollout_args(multimodal_keys={"image": "none"}))
    parts = [{"type": "image", "image": picture(2)}, {"type": "text", "text": "see"}]
    assert asyncio.run(answered.read(parts)) == [{"type": "image"}, parts[1]]
    assert answered.num_more == 1, "two tokens in the place of one"
    new = answered.append_to(sample, [ord("c"), IMAGE])
    sample.append_response_tokens(tokens=new, trainable=False)
    assert sample.image_spans == [[1, 4], [9, 2]]
    assert engine_ids(sample, MEDIA) == [*(ord(c) for c in "aIb"), 50, 51, *(ord(c) for c in "cI")]
    assert sample_problem(rollout_args(), sample) is None and sample_problem(rollout_args(), other) is None
    assert sample.multimodal_train_inputs is not None and other.multimodal_train_inputs is not None
    grids = [s["image_grid_thw"].tolist() for s in (sample.multimodal_train_inputs, other.multimodal_train_inputs)]
    assert grids == [[[1, 4, 4], [1, 4, 2]], [[1, 4, 4]]]
    first = fresh_copy(sample)
    assert first.multimodal_inputs is not None and len(first.multimodal_inputs["images"]) == 1, "those of the prompt"
    asyncio.run(answered.read(parts))
    with pytest.raises(ValueError, match="1 images are answered; the chat template shows 0 of them"):
        answered.append_to(sample, [ord("c")])
    blind = AnsweredImages(SimpleNamespace(processor=None, tokenizer=LetterTokenizer()), rollout_args())
    with pytest.raises(UsageError, match="a tool answered with an image, and the model of --hf-checkpoint letters se"):
        asyncio.run(blind.read(parts))
    with pytest.raises(
        UsageError, match="a tool answered with an image; without --multimodal-keys a trainer sees not"
    ):
        asyncio.run(AnsweredImages(state, rollout_args()).read(parts))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("an I", "a tool answered with the text 'I', which stands for an image: 'an I'"),
        ("a V", "a tool answered with the text 'V', which stands for an image: 'a V'"),
        ([{"type": "text", "text": "I"}, {"type": "image", "image": picture()}], "a tool answered with the text 'I'"),
        ([{"type": "image", "image": "data:image/png;base64,AAAA"}], "a tool answered with an image that cannot be r"),
    ],
)
def test_an_answer_that_cannot_be_shown_ends_its_sample_and_not_the_run(answer: Any, reason: str) -> None:
    state = SimpleNamespace(processor=Processor(), tokenizer=LetterTokenizer(), media=MEDIA)
    answered = AnsweredImages(state, rollout_args(multimodal_keys={"image": "none"}))
    with pytest.raises(EnvError, match=reason):
        asyncio.run(answered.read(answer))
    assert asyncio.run(answered.read("a text")) == "a text" and answered.num_more == 0
    assert asyncio.run(AnsweredImages(state, rollout_args()).read("an I")) == "an I", "a word to a model of texts"


def test_a_teacher_has_ids_of_its_own_for_the_images_of_tools() -> None:
    sample = a_sample()
    sample.append_response_tokens(tokens=[IMAGE, IMAGE, 52], trainable=False)
    sample.image_spans = [*(sample.image_spans or []), [8, 2]]
    pairs = [[-1.0, 50, None], [-2.0, 51, None], [-9.0, 7777, None], [None, 8888, None], [-3.0, 52, None]]
    service = on_policy_distillation._teacher(rollout_args(rm_url="http://teacher"))
    read = partial(on_policy_distillation._response_log_probs, service, sample)
    assert read({"meta_info": {"input_token_logprobs": [[None, 6, None], *pairs]}}) == [-1.0, -2.0, 0.0, 0.0, -3.0]
    with pytest.raises(RewardError, match="log-probs of other tokens than those of the response"):
        read({"meta_info": {"input_token_logprobs": [*pairs[:4], [-3.0, 53, None]]}})


def test_the_text_of_a_response_has_one_word_for_each_image() -> None:
    sample = a_sample()
    sample.append_response_tokens(tokens=[ord(c) for c in "xIIIy"], trainable=False)
    sample.image_spans = [*(sample.image_spans or []), [9, 3]]
    set_response_text(LetterTokenizer(), sample, {})
    assert sample.response == "23xIy", "tokens 50 and 51 are digits"
    assert collapsed(sample) == [ord(c) for c in "aIb23xIy"]


def test_images_are_not_trained_on_by_a_trainer_that_sees_none() -> None:
    seeing = rollout_args(multimodal_keys={"image": "pictures"})
    assert train_problem(seeing, a_sample()) is None
    assert "images, of which a trainer sees nothing without --multimodal-keys" in (
        train_problem(rollout_args(), a_sample()) or ""
    )


def test_a_converter_keeps_the_images_of_its_samples() -> None:
    path = "my.mod.convert"
    args = rollout_args(multimodal_keys={"image": "pictures"}, custom_convert_samples_to_train_data_path=path)
    samples = [a_sample(), Sample(index=5, tokens=[1, 2], response_length=1, rollout_log_probs=[-1.0])]
    columns = dict(samples_to_train_data(samples, [0.0] * 2, [0.0] * 2))
    assert check_train_data(args, columns, samples)["image_spans"] == [[[1, 4]], []]

    def refused(args: Any = args, **changes: Any) -> str:
        kept = {name: value for name, value in {**columns, **changes}.items() if value is not ...}
        with pytest.raises(HookReturnError) as error:
            check_train_data(args, kept, samples)
        return str(error.value)

    both = {"image_spans": ..., "multimodal_train_inputs": ...}
    assert "my.mod:convert returned no image_spans and no multimodal_train_inputs of samples with" in refused(**both)
    assert "returned no image_spans of samples with images" in refused(image_spans=...)
    assert "returned 1 image_spans for 2 samples" in refused(image_spans=[[[1, 4]]])
    swapped = columns["image_spans"][::-1]
    assert "returned sample 0 with 0 images" in refused(image_spans=swapped)
    assert "where the tokens are not all of one image" in refused(image_spans=[[[0, 4]], []])
    blind = rollout_args(custom_convert_samples_to_train_data_path=path)
    assert "returned sample 0 with images, of which a trainer sees nothing" in refused(blind)


def test_an_evaluation_keeps_no_arrays_for_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def made(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        return sample

    monkeypatch.setattr(evaluation, "_until_not_aborted", made)
    asked = a_sample()
    bar = SimpleNamespace(update=lambda count: None)
    found = asyncio.run(evaluation._one(rollout_args(), asked, {}, bar))
    assert found is not None and found.multimodal_train_inputs is None and found.image_spans == [[1, 4]]
    assert found.multimodal_inputs is not None and found.multimodal_inputs["images"][0].size == (4, 2)
    assert asked.multimodal_train_inputs is not None, "the samples of other repetitions stay as they are"


class Drawn:
    """A data set of ten prompts with large images; counts those that are drawn and not evaluated yet."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def __len__(self) -> int:
        return 10

    def at(self, place: int) -> Sample:
        self.now += 1
        self.most = max(self.most, self.now)
        return a_sample(multimodal_inputs={"images": [Image.new("RGB", (1000, 500))]}, reward=float(place))


def test_an_evaluation_opens_images_when_their_prompt_is_evaluated_and_keeps_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = Drawn()

    async def made(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        await asyncio.sleep(0.01)
        drawn.now -= 0.5  # type: ignore[assignment]  # two samples of each prompt
        return sample

    monkeypatch.setattr(evaluation, "_until_not_aborted", made)
    monkeypatch.setattr(evaluation, "GenerateState", lambda args: SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(evaluation.EvalDatasets, "get", lambda *_: drawn)
    args = rollout_args(sglang_server_concurrency=3)
    config = EvalDatasetConfig("p", "p.jsonl", multimodal_keys={"image": "i"}, n_samples_per_eval_prompt=2)
    found = asyncio.run(evaluation.eval_rollout_single_dataset(args, 0, config))
    assert drawn.most == 3, "as many samples as two rounds of the engine, of two each"
    assert found["rewards"] == [float(place) for place in range(10) for _ in range(2)] and found["num_failed"] == 0
    assert {image.size for s in found["samples"] for image in s.multimodal_inputs["images"]} == {(320, 160)}
