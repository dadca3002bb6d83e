"""The reward of rm_type classify: the score of a reward model that an SGLang engine serves (/classify).

The conversation is rendered by the reward model's own tokenizer and chat template, because its words and turns are not
those of the policy. It does not start the engine: the run does (--reward-model-path), under the model name "reward".
"""

from __future__ import annotations

from typing import Any

from slime.config.args import Args
from slime.rollout.model_urls import required_model_url
from slime.rollout.rm_hub.service import Service, ask, unusable
from slime.utils.misc import SingletonMeta, needed
from slime.utils.processing_utils import encode_text, load_tokenizer, render_chat
from slime.utils.types import Sample

MODEL_NAME = "reward"
MAX_IN_FLIGHT = 512  # the engine batches
TIMEOUT_S = 600.0  # one forward pass, behind those of the others


class RewardTokenizer(metaclass=SingletonMeta):
    """The reward model's tokenizer, read once per process."""

    def __init__(self, args: Args) -> None:
        self.tokenizer = load_tokenizer(needed(args.reward_model_path), trust_remote_code=args.trust_remote_code)


def conversation(sample: Sample, response: str) -> list[dict[str, Any]]:
    """The sample as messages: the prompt's (metadata["messages"], else the prompt itself), then the response.

    A prompt that is text counts as one user turn.
    """
    prompt = sample.metadata.get("messages") or sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": response}]


def conversation_ids(tokenizer: Any, sample: Sample, response: str) -> list[int]:
    """Token ids of the whole conversation under the reward model's chat template."""
    text = render_chat(tokenizer, conversation(sample, response), add_generation_prompt=False)
    return encode_text(tokenizer, text)


async def classify_reward(args: Args, response: str, sample: Sample) -> float:
    """The reward model's score of the sample with `response`, which has no stop token: the template closes the turn.

    Raises:
        RewardError: the engine failed, refused the sample (longer than its context, say), or answered more than one
            score.
        ValueError: no reward model runs.
    """
    url = required_model_url(args, MODEL_NAME, "/classify", remedy="--reward-model-path starts one")
    service = Service(
        "the reward model of --reward-model-path",
        url,
        max_in_flight=MAX_IN_FLIGHT,
        timeout_s=TIMEOUT_S,
    )
    payload = {"input_ids": conversation_ids(RewardTokenizer(args).tokenizer, sample, response)}
    answer = await ask(service, payload, sample)
    entry = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    scores = entry.get("embedding") if isinstance(entry, dict) else None
    if not isinstance(scores, list) or len(scores) != 1:
        raise unusable(service, sample, f"{len(scores)} scores, not 1" if isinstance(scores, list) else answer)
    return float(scores[0])
