"""SFT data: whole conversations become tokens and masks, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from slime.rollout import sft_rollout
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args
from tools.make_tiny_model import build_parser, make_tiny_model

TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


class OnePromptSource:
    """Hands out the same conversation, so that the test knows every token."""

    def __init__(self, prompt):
        self.prompt = prompt

    def get_samples(self, num_samples):
        return [[Sample(prompt=self.prompt, index=i)] for i in range(num_samples)]


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    sft_rollout.MaskGenerator.clear_instances()
    monkeypatch.setattr(sft_rollout, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    yield
    sft_rollout.MaskGenerator.clear_instances()


def generate(prompt, **changes):
    args = rollout_args(n_samples_per_prompt=changes.pop("n_samples_per_prompt", 1), **changes)
    return sft_rollout.generate_rollout(args, 0, OnePromptSource(prompt))


def test_a_conversation_becomes_a_completed_sample():
    output = generate(TURNS, rollout_batch_size=3)
    assert [len(group) for group in output.samples] == [1, 1, 1]
    sample = output.samples[0][0]
    text = "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert sample.tokens == [ord(c) for c in text]
    assert sample.response == "2<|im_end|>\n"
    assert sample.response_length == len(sample.loss_mask) == len("2<|im_end|>\n")
    assert sample.loss_mask == [1] * len("2<|im_end|>\n")
    assert (sample.reward, sample.status) == (0.0, Sample.Status.COMPLETED)


def test_what_cannot_be_trained_is_an_error():
    with pytest.raises(ValueError, match="needs a message list"):
        generate("plain text")
    with pytest.raises(ValueError, match="no assistant turn"):
        generate(TURNS[:1])
    with pytest.raises(UsageError, match="--n-samples-per-prompt 2"):
        generate(TURNS, n_samples_per_prompt=2)
    with pytest.raises(UsageError, match="cannot evaluate"):
        sft_rollout.generate_rollout(rollout_args(), 0, OnePromptSource(TURNS), evaluation=True)


def test_the_chat_family_decides_which_turns_are_trained():
    turns = [*TURNS, {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    (every,) = generate(turns, rollout_batch_size=1).samples[0]
    sft_rollout.MaskGenerator.clear_instances()
    (last,) = generate(turns, rollout_batch_size=1, loss_mask_type="distill_qwen").samples[0]
    assert sum(every.loss_mask) == 2 * len("2<|im_end|>\n")
    assert sum(last.loss_mask) == len("4<|im_end|>\n"), "its template drops the reasoning of earlier turns"


def test_a_conversation_with_images_has_their_tokens_and_trains_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the assistant shows an image: the tokens of the turns are those of the processor."""
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor, AutoTokenizer

    flags = ["--output", str(tmp_path), "--family", "qwen3_vl", "--layers", "1", "--hidden-size", "64"]
    make_tiny_model(build_parser().parse_args(flags))
    monkeypatch.setattr(sft_rollout, "load_tokenizer", AutoTokenizer.from_pretrained)
    images = [Image.new("RGB", (32, 16), "red"), Image.new("RGB", (16, 16), "blue")]
    user, reply = ([{"type": "image"}, {"type": "text", "text": text}] for text in ("how many?", "this"))
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]

    class Source(OnePromptSource):
        def get_samples(self, num_samples: int) -> Any:
            groups = super().get_samples(num_samples)
            groups[0][0].multimodal_inputs = {"images": images, "videos": None}
            return groups

    keys = {"multimodal_keys": {"image": "images"}, "hf_checkpoint": str(tmp_path), "trust_remote_code": False}
    args = rollout_args(n_samples_per_prompt=1, rollout_batch_size=1, **keys)
    ((sample,),) = sft_rollout.generate_rollout(args, 0, Source(turns)).samples
    processor = AutoProcessor.from_pretrained(tmp_path)
    expected = processor(text=[processor.apply_chat_template(turns)], images=images, return_tensors="np")
    assert sample.tokens == expected["input_ids"][0].tolist()
    assert (sample.multimodal_train_inputs["pixel_values"] == expected["pixel_values"]).all()
    (first, two), (second, one) = sample.image_spans
    assert (two, one) == (2, 1) and sample.tokens[first : first + two] == sample.tokens[second : second + one] * 2
    mask = [0] * (len(sample.tokens) - sample.response_length) + sample.loss_mask
    shown = [token for token, trained in zip(sample.tokens, mask, strict=True) if trained]
    assert processor.tokenizer.decode(shown) == "<|vision_start|><|vision_end|>this<|im_end|>\n"
    with pytest.raises(ValueError, match="2 tokens that stand for an image and 1 images"):
        images.pop()
        sft_rollout.generate_rollout(args, 0, Source(turns))
