"""Solvers, rewriters that see all solutions, and a selector: one policy in three roles, each call a sample.

Every agent's prompt is a user turn of the chat template. Nothing is shared between executions, nothing sleeps, and an
error of an engine or of the grader is an error of the sample (--on-sample-error).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from examples.multi_agent import prompts
from slime.rollout.rm_hub import async_rm
from slime.rollout.sampling.generation import GenerateState, fresh_copy, gather_or_cancel
from slime.rollout.sampling.generation import generate as generate_once
from slime.utils.errors import UsageError
from slime.utils.processing_utils import render_chat
from slime.utils.types import Sample

Status = Sample.Status
_JUDGMENT = re.compile(r"Judgment:\s*(\d+)")
END_OF_THOUGHT = "</think>"


class Aborted(Exception):
    """The rollout ended while an agent wrote."""


class Agent:
    """Asks the policy in one role.

    Args:
        origin: its prompt is a message list, whose last message is the problem.
        template: of the prompt, `multi_agent: {templates: {ROLE: ...}}` or the one in `prompts`.
    """

    role = ""
    template = ""

    def __init__(self, args: Any, origin: Sample, sampling_params: dict[str, Any], evaluation: bool) -> None:
        if not isinstance(origin.prompt, list):
            raise UsageError(
                f"examples.multi_agent needs a prompt that is a list of messages, not {str(origin.prompt)[:80]!r}; "
                "leave --apply-chat-template off"
            )
        self.args, self.origin, self.sampling_params, self.evaluation = args, origin, sampling_params, evaluation
        given: Mapping[str, str] = (vars(args).get("multi_agent") or {}).get("templates") or {}
        self.template = given.get(self.role, self.template)

    async def run(self, solutions: Sequence[str] = ()) -> Sample:
        """A sample of its own: what the policy writes about the problem, and the solutions so far.

        Raises:
            Aborted: the rollout has ended.
        """
        assert isinstance(self.origin.prompt, list)
        *before, problem = self.origin.prompt
        numbered = "\n\n".join(f"Solution {number}:\n{text}" for number, text in enumerate(solutions, 1))
        shown = self.template.format(problem=problem["content"], solutions=numbered, count=len(solutions))
        part = fresh_copy(self.origin)
        part.rollout_id = self.origin.index if self.origin.rollout_id is None else self.origin.rollout_id
        part.metadata["role"] = self.role
        tokenizer = GenerateState(self.args).tokenizer
        messages = [*before, {"role": "user", "content": shown}]
        part.prompt = render_chat(tokenizer, messages, **part.apply_chat_template_kwargs)
        await generate_once(self.args, part, self.sampling_params, self.evaluation)
        if part.status is Status.ABORTED:
            raise Aborted
        part.note_end()
        return part


class SolverAgent(Agent):
    """Sees the problem."""

    role, template = "solver", prompts.SOLVER


class RewriterAgent(Agent):
    """Sees the problem and all solutions, and writes a new one."""

    role, template = "rewriter", prompts.REWRITER


class SelectorAgent(Agent):
    """Sees the problem and the rewritten solutions, and names one."""

    role, template = "selector", prompts.SELECTOR

    @staticmethod
    def extract_selected_solution_idx(response: str, candidates: Sequence[Any]) -> int | None:
        """Position of the solution that the last `Judgment: IDX` names, from 0; None where there is none."""
        named = _JUDGMENT.findall(response)
        number = int(named[-1][:9]) if named else 0
        return number - 1 if 1 <= number <= len(candidates) else None


def solution_of(sample: Sample, tokenizer: Any) -> str | None:
    """What others see of an answer: the text after its one thought; None where it was cut off or never came to it."""
    if sample.status is not Status.COMPLETED or sample.response.count(END_OF_THOUGHT) > 1:
        return None
    ids = sample.tokens[len(sample.tokens) - sample.response_length :]
    text = str(tokenizer.decode(ids, skip_special_tokens=True))
    return text.rpartition(END_OF_THOUGHT)[2].strip() or None


async def run_agent_system(
    args: Any, sample: Sample, sampling_params: dict[str, Any], *, config: Mapping[str, Any], evaluation: bool = False
) -> list[Sample]:
    """One execution: solvers, rewriters, selector, in this order in the list, with their rewards.

    The selector has the reward of the rewriter that it chose, 0 without a valid choice. In training all rewards are
    weighted by whether that was 1; a stage without a solution ends the execution.

    Raises:
        Aborted: the rollout has ended.
    """
    asked = (args, sample, sampling_params, evaluation)
    tokenizer, count = GenerateState(args).tokenizer, config["num_parallel"]
    solved = await gather_or_cancel(SolverAgent(*asked).run() for _ in range(count))
    made, chosen_reward = list(solved), 0.0
    await _score(args, solved)
    if solutions := _solutions(solved, tokenizer):
        rewritten = await gather_or_cancel(RewriterAgent(*asked).run(solutions) for _ in range(count))
        made += rewritten
        await _score(args, rewritten)
        if candidates := [part for part in rewritten if solution_of(part, tokenizer)]:
            selector = await SelectorAgent(*asked).run(_solutions(candidates, tokenizer))
            index = SelectorAgent.extract_selected_solution_idx(selector.response, candidates)
            selector.reward = Sample.reward_of(args, 0.0)
            if index is not None:
                chosen_reward = float(candidates[index].get_reward_value(args))
                selector.reward = copy.copy(candidates[index].reward)
                selector.reward_is_trusted = candidates[index].reward_is_trusted
            made.append(selector)
    if not evaluation:
        weight = config["correct_reward_weight" if chosen_reward == 1 else "incorrect_reward_weight"]
        for part in made:
            number = float(part.get_reward_value(args)) * weight
            part.reward = part.reward | {args.reward_key: number} if isinstance(part.reward, dict) else number
    return made


def _solutions(parts: Sequence[Sample], tokenizer: Any) -> list[str]:
    return [text for part in parts if (text := solution_of(part, tokenizer))]


async def _score(args: Any, parts: Sequence[Sample]) -> None:
    rewards = await gather_or_cancel(async_rm(args, part) for part in parts)
    for part, reward in zip(parts, rewards, strict=True):
        part.reward = reward
