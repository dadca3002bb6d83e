"""A rollout function for supervised fine-tuning: prompts are whole conversations, nothing is generated.

Use: --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only. Each
prompt is a message list (no --apply-chat-template); `metadata["tools"]` is rendered too. Rewards are 0.
"""

from __future__ import annotations

from typing import Any

from slime.config.args import Args
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.hooks.returns import draw_groups
from slime.rollout.sampling.images import collapsed, expand, has_images, image_token_id, read_prompt
from slime.utils.errors import UsageError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample


class MaskGenerator(metaclass=SingletonMeta):
    """Owner of this process's mask generator: the tokenizer is loaded once."""

    def __init__(self, args: Args) -> None:
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.masks = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type)
        trust = {"trust_remote_code": args.trust_remote_code}
        self.processor = load_processor(args.hf_checkpoint, **trust) if args.multimodal_keys else None


def generate_rollout(args: Args, rollout_id: int, data_buffer: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Tokenise and mask rollout_batch_size conversations.

    Raises:
        UsageError: asked to evaluate, or for several samples per prompt.
        ValueError: a prompt is no message list, or has nothing to train on.
    """
    if evaluation:
        raise UsageError(
            "sft_rollout generates nothing, so it cannot evaluate; "
            "set --eval-function-path slime.rollout.sglang_rollout.generate_rollout, or drop the evaluation flags"
        )
    if args.n_samples_per_prompt != 1:
        raise UsageError(f"--n-samples-per-prompt {args.n_samples_per_prompt}: sft_rollout needs 1")
    generator = MaskGenerator(args)
    groups = draw_groups(args, data_buffer, args.rollout_batch_size)
    for group in groups:
        for sample in group:
            tokenize_conversation(generator.masks, sample, generator.processor)
    return RolloutFnTrainOutput(samples=groups)


def tokenize_conversation(generator: MultiTurnLossMaskGenerator, sample: Sample, processor: Any = None) -> None:
    """Fill in tokens, mask and response of a sample whose prompt is a message list; the response starts at the first
    trained token. With a processor its images, too.
    """
    if not isinstance(sample.prompt, list):
        raise ValueError(
            f"sample {sample.index}: SFT needs a message list as prompt, not {str(sample.prompt)[:80]!r}; "
            "point --input-key at the messages and leave --apply-chat-template off"
        )
    token_ids, mask = generator.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
    if processor is not None and has_images(sample):
        token_ids, mask = _with_images(processor, generator.tokenizer, sample, token_ids, mask)
    length = generator.get_response_lengths([mask])[0]
    if not length:
        raise ValueError(f"sample {sample.index} has no assistant turn to train on: {str(sample.prompt)[:200]}")
    sample.tokens = token_ids
    sample.response_length = length
    sample.loss_mask = mask[-length:]
    sample.response = generator.tokenizer.decode(collapsed(sample, len(token_ids) - length))
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED


def _with_images(
    processor: Any, tokenizer: Any, sample: Sample, token_ids: list[int], mask: list[int]
) -> tuple[list[int], list[int]]:
    """Put each image's tokens, none of which is trained, in the place of the one that stands for it."""
    images, image = (sample.multimodal_inputs or {})["images"], image_token_id(processor)
    if token_ids.count(image) != len(images):
        raise ValueError(
            f"sample {sample.index}: the conversation has {token_ids.count(image)} tokens that stand for an image "
            f"and {len(images)} images; does its text hold {tokenizer.decode([image])!r} by itself?"
        )
    seen = read_prompt(processor, tokenizer, tokenizer.decode([image]) * len(images), images)
    counts = [count for _, count in seen.spans]
    tokens, sample.image_spans = expand(token_ids, counts, image)
    sample.multimodal_train_inputs, trained = seen.inputs, []
    for token, value in zip(token_ids, mask, strict=True):
        trained += [0] * counts.pop(0) if token == image else [value]
    return tokens, trained
