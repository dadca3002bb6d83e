"""Rewards of a group for mathematics: graders of slime's, less for an answer that the group repeats."""

from __future__ import annotations

import asyncio
from collections import Counter

import torch

from slime.rollout.rm_hub import (
    compute_score_dapo,
    extract_boxed_answer,
    get_deepscaler_rule_based_reward,
    grade_answer_verl,
)
from slime.utils.types import Sample


async def reward_one(args, sample: Sample, **kwargs):
    kind = sample.metadata.get("kind", "boxed")
    if kind == "dapo":
        return compute_score_dapo(sample.response, sample.label)["score"]
    if kind == "thinking":
        return get_deepscaler_rule_based_reward(sample.response, sample.label)
    return await asyncio.to_thread(grade_answer_verl, sample.response, sample.label)


async def reward_func(args, samples, **kwargs):
    if isinstance(samples, Sample):
        return await reward_one(args, samples, **kwargs)
    scores = await asyncio.gather(*(reward_one(args, sample, **kwargs) for sample in samples))
    answers = [extract_boxed_answer(sample.response) for sample in samples]
    times = Counter(answers)
    return [float(score) / times[answer] for score, answer in zip(scores, answers, strict=True)]


def post_process_rewards(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    rewards = torch.tensor(raw, dtype=torch.float).reshape(-1, args.n_samples_per_prompt)
    rewards = rewards - rewards.mean(dim=-1, keepdim=True)
    return raw, rewards.flatten().tolist()
