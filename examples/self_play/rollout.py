"""Self-play: one policy sets problems and solves them, and a program judges both.

    --custom-generate-function-path examples.self_play.rollout.generate
    --custom-reward-post-process-path examples.self_play.rollout.by_role

`self_play: {...}` in the file of --custom-config-path overrides entries of `SELF_PLAY_CONFIG`. The task is a module
with `problem_of(text)` (the solver's question, None where a proposal is no problem) and `score(question, text)`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import slime
from slime.rollout.sampling.generation import GenerateState, fresh_copy, gather_or_cancel
from slime.rollout.sampling.generation import generate as generate_once
from slime.rollout.train_data import raw_reward
from slime.utils.errors import UsageError
from slime.utils.misc import group_by, load_function, merged_settings, try_to_load
from slime.utils.processing_utils import render_chat
from slime.utils.types import Sample

SELF_PLAY_CONFIG: dict[str, Any] = {
    "task": "examples.self_play.task",  # a module
    "num_solvers": 4,  # answers to each problem
}


def config_of(args: Any) -> dict[str, Any]:
    """`SELF_PLAY_CONFIG` with what the run's `self_play` says.

    Raises:
        UsageError: `self_play` has an entry that there is not, or a wrong value.
    """
    config = merged_settings("self_play", vars(args).get("self_play"), SELF_PLAY_CONFIG)
    if config["num_solvers"] < 2:
        said = f"num_solvers {config['num_solvers']} in self_play of --custom-config-path"
        raise UsageError(f"{said}: give 2 or more; one answer does not tell how hard a problem is")
    return config


def check_args(args: Any) -> Iterator[str]:
    """A sentence for each setting that cannot be; slime asks before a run starts."""
    try:
        config = config_of(args)
    except UsageError as error:
        yield from error.messages
        return
    for name in ("problem_of", "score"):
        if problem := try_to_load(f"{config['task']}.{name}")[1]:
            yield f"self_play in --custom-config-path: {name} of the task {config['task']}{problem}."


def learnability(share: float) -> float:
    """Return what a problem is worth of which this share of answers is right.

    1 - share, but 0 where all are right or none is: it teaches nothing (Absolute Zero, arXiv 2505.03335).

    Example:
        >>> learnability(0.25), learnability(1.0), learnability(0.0)
        (0.75, 0.0, 0.0)
    """
    return 1 - share if 0 < share < 1 else 0.0


class Aborted(Exception):
    """The rollout ended while the policy wrote."""


@dataclass(frozen=True)
class _Game:
    """One execution: who writes what for a row of the data."""

    args: Any
    origin: Sample
    sampling_params: dict[str, Any]
    evaluation: bool
    config: dict[str, Any]

    def of_task(self, name: str) -> Any:
        return load_function(f"{self.config['task']}.{name}")

    async def write(self, role: str, messages: list[dict[str, Any]]) -> tuple[Sample, str]:
        """A sample of its own, and its text without special tokens."""
        tokenizer, part = GenerateState(self.args).tokenizer, fresh_copy(self.origin)
        part.rollout_id = self.origin.index if self.origin.rollout_id is None else self.origin.rollout_id
        part.metadata["role"] = role
        part.prompt = render_chat(tokenizer, messages, **part.apply_chat_template_kwargs)
        await generate_once(self.args, part, self.sampling_params, self.evaluation)
        if part.status is Sample.Status.ABORTED:
            raise Aborted
        part.note_end()
        ids = part.tokens[len(part.tokens) - part.response_length :]
        return part, str(tokenizer.decode(ids, skip_special_tokens=True))

    async def solve(self, messages: list[dict[str, Any]]) -> Sample:
        part, text = await self.write("solver", messages)
        part.reward = float(self.of_task("score")(messages[-1]["content"], text))
        return part

    async def play(self, messages: list[dict[str, Any]]) -> list[Sample]:
        proposal, text = await self.write("proposer", messages)
        is_whole = proposal.status is Sample.Status.COMPLETED
        question = self.of_task("problem_of")(text) if is_whole else None
        slime.log({"self_play/problems": float(question is not None)})
        proposal.reward = 0.0
        if question is None:
            return [proposal]
        asked = [*messages[:-1], {"role": "user", "content": question}]
        answers = await gather_or_cancel(self.solve(asked) for _ in range(self.config["num_solvers"]))
        share = statistics.fmean(raw_reward(self.args, answer) for answer in answers)
        proposal.reward = learnability(share)
        slime.log({"self_play/solved": share})
        return [proposal, *answers]


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample] | Sample:
    """Set a problem and answer it several times, as a fan-out: the proposer's sample, then the solvers'.

    A sample with a label is a problem already: it is answered once (evaluation, or problems of your own). What was
    aborted begins anew.
    """
    game = _Game(args, sample, sampling_params, evaluation, config_of(args))
    messages = sample.prompt if isinstance(sample.prompt, list) else [{"role": "user", "content": sample.prompt}]
    try:
        return await (game.play(messages) if sample.label is None else game.solve(messages))
    except Aborted:
        sample.status = Sample.Status.ABORTED
        return sample


generate.check_args = check_args  # type: ignore[attr-defined]


def by_role(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return the rewards, and the same less the mean of those alike over their deviation.

    Two proposals are alike in the same group, two answers with the same problem. So a hard problem costs its solvers
    nothing.
    """
    raw = [raw_reward(args, sample) for sample in samples]

    def alike(i: int) -> Hashable:
        sample = samples[i]
        role = sample.metadata.get("role")
        return role, sample.rollout_id if role == "solver" else sample.group_index

    normalized = [0.0] * len(raw)
    for members in group_by(range(len(raw)), alike).values():
        values = [raw[i] for i in members]
        mean, scale = math.fsum(values) / len(values), statistics.stdev(values) if len(values) > 1 else 0.0
        for i in members:
            normalized[i] = (raw[i] - mean) / (scale + 1e-6)
    return raw, normalized
