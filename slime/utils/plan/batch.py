"""How prompts become samples, train steps and micro-batches, and how long they are taken to be.

Lengths are not known before a run: the longest sample is the longest prompt plus the longest response; the expected
one has the measured mean prompt where the data could be read, and `MEAN_SHARE` of the longest response. It reads no
data and schedules nothing (slime.utils.dp_schedule does, with the real lengths).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slime.utils.misc import needed
from slime.utils.plan.layout import ParallelLayout

if TYPE_CHECKING:
    from slime.config.args import Args


MEAN_SHARE = 0.5
"""A response is expected to have this share of --rollout-max-response-len: between the runs where all are cut and
those where most end early."""
DEFAULT_PROMPT = 512
"""Tokens of a prompt where neither the data nor --rollout-max-prompt-len says."""
DEFAULT_RESPONSE = 2048
"""Tokens of the longest response where --rollout-max-response-len does not say."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sample: expected and longest."""

    mean_prompt: int
    max_prompt: int
    mean_response: int
    max_response: int

    @property
    def mean(self) -> int:
        """Prompt and response, expected."""
        return self.mean_prompt + self.mean_response

    @property
    def longest(self) -> int:
        """Prompt and response, the longest."""
        return self.max_prompt + self.max_response


@dataclass(frozen=True)
class DataFacts:
    """What reading the prompt file told: rows, and tokens of their prompts (None: no tokenizer)."""

    num_rows: int
    num_measured: int = 0
    """Rows at the start whose prompts were measured."""
    mean_prompt: int | None = None
    max_prompt: int | None = None


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of one rollout, and of the run."""

    prompts_per_rollout: int
    samples_per_prompt: int
    samples_per_rollout: int
    samples_per_step: int
    steps_per_rollout: int
    samples_dropped: int
    """Left over after the last whole train step of a rollout."""
    lengths: Lengths
    tokens_per_rollout: int
    """Expected, prompts included."""
    response_tokens_per_rollout: int
    micro_batch_tokens: int
    """Most tokens of a micro-batch on one GPU, its share of a sequence under context parallelism."""
    micro_batch_response_tokens: int
    """Of these, response tokens at most."""
    log_prob_tokens: int
    """The same of a pass without gradients (--log-probs-max-tokens-per-gpu)."""
    log_prob_response_tokens: int
    micro_batches_per_rank: int
    """Expected in each train step."""
    num_rollouts: int | None
    """None: only the data source's length can tell."""
    epochs: float | None
    """Passes over the prompts in the whole run; None where the data could not be read."""


def lengths_of(args: Args, facts: DataFacts | None) -> Lengths:
    """Expected and longest tokens; a context limit bounds both together."""
    facts = facts or DataFacts(0)
    is_whole = facts.max_prompt is not None and facts.num_measured == facts.num_rows
    limit = args.rollout_max_prompt_len
    max_prompt = (None if limit and not is_whole else facts.max_prompt) or limit or DEFAULT_PROMPT
    max_prompt = min(max_prompt, limit or max_prompt)
    context = args.rollout_max_context_len
    max_response = args.rollout_max_response_len or (context - 1 if context else DEFAULT_RESPONSE)
    is_demonstration = args.loss_type == "sft_loss"
    if is_demonstration and args.rollout_max_response_len is None:
        max_response = 0  # the whole conversation is the prompt
    if context:
        max_prompt, max_response = min(max_prompt, context - 1), min(max_response, context)
        max_response = min(max_response, max(context - max_prompt, 1))
    return Lengths(
        mean_prompt=min(facts.mean_prompt or max_prompt, max_prompt),
        max_prompt=max_prompt,
        mean_response=math.ceil(max_response * MEAN_SHARE),
        max_response=max_response,
    )


def batch_plan(args: Args, layout: ParallelLayout, facts: DataFacts | None) -> BatchPlan:
    """The batch arithmetic of a command line whose --rollout-batch-size is given."""
    prompts, per_prompt = args.rollout_batch_size, args.n_samples_per_prompt
    samples = prompts * per_prompt
    per_step = max(1, min(args.global_batch_size or samples, samples))
    lengths = lengths_of(args, facts)
    tokens, response_tokens = _tokens(args, layout, lengths, args.max_tokens_per_gpu, num_samples=per_step)
    forward_budget = args.log_probs_max_tokens_per_gpu or args.max_tokens_per_gpu
    forward_tokens, forward_responses = _tokens(args, layout, lengths, forward_budget, num_samples=samples)
    micro_batches = _num_micro_batches(args, layout, lengths, per_step)
    num_rollouts = _num_rollouts(args, facts)
    return BatchPlan(
        prompts_per_rollout=prompts,
        samples_per_prompt=per_prompt,
        samples_per_rollout=samples,
        samples_per_step=per_step,
        steps_per_rollout=samples // per_step,
        samples_dropped=samples % per_step,
        lengths=lengths,
        tokens_per_rollout=samples * lengths.mean,
        response_tokens_per_rollout=samples * lengths.mean_response,
        micro_batch_tokens=tokens,
        micro_batch_response_tokens=response_tokens,
        log_prob_tokens=forward_tokens,
        log_prob_response_tokens=forward_responses,
        micro_batches_per_rank=micro_batches,
        num_rollouts=num_rollouts,
        epochs=num_rollouts * prompts / facts.num_rows if facts and num_rollouts is not None else None,
    )


def _is_dynamic(args: Args) -> bool:
    return bool(args.use_dynamic_batch_size and args.max_tokens_per_gpu)


def _tokens(
    args: Args, layout: ParallelLayout, lengths: Lengths, budget: int | None, *, num_samples: int
) -> tuple[int, int]:
    """(most tokens of a micro-batch on a GPU, response tokens among them) under a token budget per GPU."""
    if _is_dynamic(args) and budget:
        # A sample longer than the budget is a micro-batch by itself.
        tokens = max(min(budget * layout.cp, num_samples * lengths.longest), lengths.longest)
        responses = math.ceil(tokens * lengths.max_response / max(lengths.longest, 1))
    else:
        tokens, responses = args.micro_batch_size * lengths.longest, args.micro_batch_size * lengths.max_response
    padded = _round_up(math.ceil(tokens / layout.cp), layout.tp * args.data_pad_size_multiplier)
    if lengths.max_response == 0:
        responses = tokens  # a demonstration may be trained on every token
    return padded, math.ceil(responses / layout.cp)


def _num_micro_batches(args: Args, layout: ParallelLayout, lengths: Lengths, per_step: int) -> int:
    """Expected number per rank and train step."""
    if _is_dynamic(args):
        size = max(1, needed(args.max_tokens_per_gpu) * layout.cp // max(lengths.mean, 1))
    else:
        size = args.micro_batch_size
    count = math.ceil(math.ceil(per_step / size) / layout.dp)
    # interleaved stages take so many at a time
    return _round_up(count, layout.group_size) if layout.vpp > 1 else count


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _num_rollouts(args: Args, facts: DataFacts | None) -> int | None:
    if args.num_rollout is not None:
        return int(args.num_rollout)
    if args.num_epoch is None or facts is None:
        return None
    return int(args.num_epoch * max(1, facts.num_rows // args.rollout_batch_size))
