"""SFT data: whole conversations become tokens and masks, without an engine."""

from __future__ import annotations

import pytest

from slime.rollout import sft_rollout
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

TURNS = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


class OnePromptSource:
    """Hands out the same conversation, so that the test knows every token."""

    def __init__(self, prompt):
        self.prompt = prompt

    def get_samples(self, num_samples):
        return [[Sample(prompt=self.prompt, index=i)] for i in range(num_samples)]


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    sft_rollout._MaskGenerator.clear_instances()
    monkeypatch.setattr(sft_rollout, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    yield
    sft_rollout._MaskGenerator.clear_instances()


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
    sft_rollout._MaskGenerator.clear_instances()
    (last,) = generate(turns, rollout_batch_size=1, loss_mask_type="distill_qwen").samples[0]
    assert sum(every.loss_mask) == 2 * len("2<|im_end|>\n")
    assert sum(last.loss_mask) == len("4<|im_end|>\n"), "its template drops the reasoning of earlier turns"
