"""Prompts with images through a real engine: its tokens and log-probs are those of transformers on the same pixels."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from PIL import Image

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.multi_turn import Conversation, converse
from slime.rollout.on_policy_distillation import reward_func
from slime.rollout.sampling.generation import GenerateState, generate, generate_and_rm_group
from slime.rollout.tool_calls import ToolCall
from slime.rollout.train_data import samples_to_train_data
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.integration.conftest import make_engine
from tests.integration.launch import make_model
from tests.unit.rollout_fakes import rollout_args

COLORS = ["red", "green", "blue", "yellow", "black", "white"]
LENGTH = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "--family", "qwen3_vl", "--vocab-multiple", 4)


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    running = make_engine(model, tmp_path_factory.mktemp("engine") / "engine.log")
    running.start(deadline_s=170)
    yield running
    running.shutdown()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Rows with one image, with two of different sizes, and with none, where the word for one stands in the text."""
    for number, color in enumerate(COLORS):
        picture = Image.new("RGB", (32 + 16 * (number % 3), 48), color)
        picture.putpixel((3, 5), (number, 200, 10))
        picture.save(tmp_path / f"{number}.png")
    rows = [
        {"input": "<image>how many?", "pictures": [str(tmp_path / "0.png")]},
        {"input": "<image>or<image>?", "pictures": [str(tmp_path / "1.png"), str(tmp_path / "2.png")]},
        {"input": "no <|image_pad|> here", "pictures": []},  # a word to both
        {"input": "<image><image>!", "pictures": [str(tmp_path / "4.png"), str(tmp_path / "4.png")]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run_args(engine: SGLangEngine, model: Path, prompts: Path, **changes: Any) -> Any:
    flags = {
        "hf_checkpoint": str(model),
        "sglang_router_port": urlsplit(engine.url).port,
        "prompt_data": str(prompts),
        "multimodal_keys": {"image": "pictures"},
        "apply_chat_template": True,
        "rollout_max_response_len": LENGTH,
        "sglang_enable_deterministic_inference": True,
    }
    return rollout_args(**(flags | changes))


def generated(args: Any, num_groups: int) -> list[list[Sample]]:
    """Groups that the default rollout made of the first prompts."""
    groups = RolloutDataSourceWithBuffer(args).get_samples(num_groups)

    async def run() -> list[list[Sample]]:
        params = GenerateState(args).sampling_params
        try:
            return list(await asyncio.gather(*(generate_and_rm_group(args, g, dict(params)) for g in groups)))
        finally:
            await close_http_client()

    try:
        return asyncio.run(run())
    finally:
        GenerateState.clear_instances()


def log_probs(model: Any, sample: Sample) -> torch.Tensor:
    """[R] of transformers, on the trainer's tokens and tensors.

    The last token is nothing that the model reads: it may stand for an image, which transformers would miss.
    """
    ids = torch.tensor([sample.tokens[:-1]])
    kinds = torch.zeros_like(ids)
    for start, length in sample.image_spans or []:
        kinds[0, start : start + length] = 1
    tensors = {name: torch.from_numpy(value) for name, value in (sample.multimodal_train_inputs or {}).items()}
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **tensors).logits[0, -sample.response_length :]
    response = torch.tensor(sample.tokens[-sample.response_length :])
    return logits.log_softmax(-1).gather(1, response[:, None])[:, 0]


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def test_an_engine_and_the_trainer_see_the_same_tokens_of_prompts_with_images(
    engine: SGLangEngine, model: Path, prompts: Path, reference: Any
) -> None:
    groups = generated(run_args(engine, model, prompts), 4)
    samples = [sample for group in groups for sample in group]
    assert [len(sample.image_spans or []) for sample in samples] == [1, 1, 2, 2, 0, 0, 2, 2]
    assert all(sample.response_length for sample in samples)
    for sample in samples:
        assert sample.rollout_log_probs == pytest.approx(log_probs(reference, sample).tolist(), abs=1e-5)
    other = [sample for sample in samples if sample.image_spans][0]
    inputs = dict(other.multimodal_train_inputs or {})
    other.multimodal_train_inputs = inputs | {"pixel_values": inputs["pixel_values"] * -1}
    assert (log_probs(reference, other) - torch.tensor(other.rollout_log_probs)).abs().max() > 1e-3
    first, second = groups[0]
    data = samples_to_train_data([first, second, *groups[2]], [0.0] * 4, [0.0] * 4)
    assert data["image_spans"] == [first.image_spans, second.image_spans, [], []]
    assert second.multimodal_train_inputs is not None
    assert second.multimodal_train_inputs["pixel_values"] is inputs["pixel_values"], "once for each prompt"


def test_a_response_that_is_gone_on_with_and_its_teacher_keep_the_tokens_of_images(
    engine: SGLangEngine, model: Path, prompts: Path, reference: Any
) -> None:
    args = run_args(engine, model, prompts, rollout_max_response_len=4, rollout_ignore_eos=False)
    samples = [group[0] for group in generated(args, 3)]
    media = GenerateState(args).media
    begun = [sample for sample in samples if sample.status is Sample.Status.TRUNCATED and not media.end(sample)]
    assert begun, "all have ended by chance"
    before = [list(sample.tokens) for sample in begun]
    whole = samples[0]
    ((start, length),) = whole.image_spans or []
    prompt = [*whole.tokens[:start], *whole.tokens[start + 1 : len(whole.tokens) - whole.response_length]]
    broken = Sample(index=0, tokens=prompt, image_spans=[[start, length - 1]])
    broken.multimodal_inputs = whole.multimodal_inputs
    longer = run_args(engine, model, prompts, rm_url=f"{engine.url}/generate")

    async def go_on() -> None:
        try:
            for sample in begun:
                await generate(longer, sample, dict(GenerateState(longer).sampling_params))
            for sample in samples:
                await reward_func(longer, sample)
            with pytest.raises(
                RuntimeError, match=r"the engine saw 2\d prompt tokens of sample 0 .*image 1 \(32 x 48\) 5 of"
            ):
                await generate(longer, broken, dict(GenerateState(longer).sampling_params))
        finally:
            await close_http_client()

    asyncio.run(go_on())
    GenerateState.clear_instances()
    for sample, tokens in zip(begun, before, strict=True):
        assert sample.tokens[: len(tokens)] == tokens
    for sample in samples:
        assert sample.rollout_log_probs == pytest.approx(log_probs(reference, sample).tolist(), abs=1e-5)
        trained = [i for i in range(sample.response_length) if (sample.loss_mask or [])[i]]
        taught = [(sample.teacher_log_probs or [])[i] for i in trained]
        assert taught == pytest.approx([sample.rollout_log_probs[i] for i in trained], abs=2e-5)


async def camera(args: Any, sample: Sample, name: str, arguments: Any) -> list[dict[str, Any]]:
    """A tool that answers with an image."""
    return [{"type": "text", "text": "see"}, {"type": "image", "image": Image.new("RGB", (48, 32), "red")}]


class Camera(Conversation):
    """Every turn of the model calls the camera."""

    def calls(self, text: str) -> list[ToolCall]:
        return [ToolCall("camera", {})]


def test_images_in_the_answers_of_tools_are_seen_alike(
    engine: SGLangEngine, model: Path, prompts: Path, reference: Any
) -> None:
    args = run_args(engine, model, prompts, apply_chat_template=False, rollout_max_response_len=200, max_turns=3)
    args.tool_function_path, args.rm_url = f"{__file__}:camera", f"{engine.url}/generate"
    group = RolloutDataSourceWithBuffer(args).get_samples(2)

    async def run() -> None:
        try:
            for sample in (sample for samples in group for sample in samples):
                params = GenerateState(args).sampling_params | {"max_new_tokens": 200, "temperature": 1.0}
                conversation = Camera(args, sample)
                conversation.write_turn = partial(short_turn, conversation)  # type: ignore[method-assign]
                await converse(conversation, params)
                await reward_func(args, sample)
        finally:
            await close_http_client()

    asyncio.run(run())
    GenerateState.clear_instances()
    samples = [sample for samples in group for sample in samples]
    shown = [len(sample.image_spans or []) for sample in samples]
    assert max(shown) > 2 and sum(sample.metadata["tool_calls"] for sample in samples) > 1
    for sample in samples:
        trained = [i for i, kept in enumerate(sample.loss_mask or []) if kept]
        mine = log_probs(reference, sample)[trained].tolist()
        assert [sample.rollout_log_probs[i] for i in trained] == pytest.approx(mine, abs=1e-5)  # type: ignore[index]
        taught = [(sample.teacher_log_probs or [])[i] for i in trained]
        assert taught == pytest.approx(mine, abs=2e-5), "the teacher sees the images of tools, too"
        assert (sample.multimodal_train_inputs or {})["image_grid_thw"].shape == (len(sample.image_spans or []), 3)


async def short_turn(conversation: Conversation, params: dict[str, Any], evaluation: bool, *, length: int = 4) -> str:
    """A turn of few tokens, which a random model would not end by itself."""
    sample = conversation.sample
    done = sample.response_length
    text = await Conversation.write_turn(conversation, {**params, "max_new_tokens": done + length}, evaluation)
    if sample.status is Sample.Status.TRUNCATED:
        sample.status = Sample.Status.COMPLETED
    return text


async def photograph(args: Any, sample: Sample, params: dict[str, Any], evaluation: bool = False) -> Sample:
    """A generate function: a conversation with the camera, whose turns are long enough to be aborted."""
    conversation = Camera(args, sample)
    conversation.write_turn = partial(short_turn, conversation, length=40)  # type: ignore[method-assign]
    return await converse(conversation, params, evaluation)
