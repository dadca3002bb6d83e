"""Rewards from a judge, a language model next to the policy or anywhere else.

`rubric` (--custom-rm-path) asks for points from 0 to 10. `pairwise` (--custom-rm-path with --group-rm) compares each
answer with the next ones of its group, in both orders: a judge that prefers a place, not an answer, gives half a win
to each. Equal questions are asked once. A judge that gives no answer in time, or none that can be read, fails the
reward, and --on-untrusted-reward decides what becomes of the sample.

Keys of --custom-config-path: `judge_url` (an OpenAI-compatible server; without it the model "judge" of
--sglang-config), `judge_model`, `judge_deadline_s`, `judge_in_flight`, `judge_opponents`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import slime
from slime.rollout.sampling.engine_request import required_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

RUBRIC = """Grade the answer to the task. 10: correct, complete, clear. 5: partly correct. 0: wrong or off the topic.

Task: {task}

Answer: {answer}

Write nothing but "Points: N", where N is a whole number from 0 to 10."""
PAIR = """Which answer to the task is better?

Task: {task}

Answer A: {first}

Answer B: {second}

Write nothing but "Better: A", "Better: B" or "Better: tie"."""
POINTS, BETTER = re.compile(r"Points:\s*(10|\d)\b"), re.compile(r"Better:\s*(A|B|tie)\b")
MOST_CACHED = 100_000


class Judge:
    """A judge of one process.

    Args:
        args: of the run, with the keys of the module's docstring.
    """

    def __init__(self, args: Any) -> None:
        keys, path = vars(args), "/v1/chat/completions"
        if url := keys.get("judge_url"):
            self._url = f"{str(url).rstrip('/')}{path}"
        else:
            remedy = "give judge_url in --custom-config-path, or a model with the name judge in --sglang-config"
            self._url = required_model_url(args, "judge", path, remedy=remedy)
        self._model = keys.get("judge_model", "judge")
        self._deadline_s = float(keys.get("judge_deadline_s", 60))
        self._places = asyncio.Semaphore(int(keys.get("judge_in_flight", 64)))
        self._answers: dict[str, asyncio.Task[str]] = {}

    async def ask(self, question: str, form: re.Pattern[str]) -> str:
        """Return what the judge's answer says in this form; equal questions are asked once.

        Raises:
            ValueError: it says nothing of the kind.
            TimeoutError: it gives no answer by the deadline, the wait for its turn included.
        """
        if (answer := self._answers.get(question)) is None:
            while len(self._answers) >= MOST_CACHED:
                self._answers.pop(next(iter(self._answers)))
            answer = self._answers[question] = asyncio.create_task(self._ask(question))
        try:
            text = await asyncio.shield(answer)
            if (found := form.search(text)) is None:
                raise ValueError(f"the judge at {self._url} answers {text[:200]!r}, not in the form {form.pattern!r}")
        except (TimeoutError, ValueError, RuntimeError):
            self._answers.pop(question, None)  # another try asks anew
            raise
        return found[1]

    async def _ask(self, question: str) -> str:
        body = {"model": self._model, "temperature": 0, "max_tokens": 32}
        body |= {"messages": [{"role": "user", "content": question}]}
        async with asyncio.timeout(self._deadline_s), self._places:
            answer = await post(self._url, body, max_retries=2, timeout_s=self._deadline_s)
        return str(answer["choices"][0]["message"]["content"])


_judges: dict[int, Judge] = {}


def judge_of(args: Any) -> Judge:
    """The judge of this process and event loop."""
    loop = id(asyncio.get_running_loop())
    if loop not in _judges:
        _judges[loop] = Judge(args)
    return _judges[loop]


async def rubric(args: Any, sample: Sample, **_: Any) -> float:
    """A reward from 0 to 1."""
    question = RUBRIC.format(task=sample.prompt, answer=sample.response)
    return int(await judge_of(args).ask(question, POINTS)) / 10


async def pairwise(args: Any, samples: Sequence[Sample], **_: Any) -> list[float]:
    """Return the share of its comparisons that each sample of a group wins; a tie is half a win."""
    judge, count = judge_of(args), len(samples)
    reach = min(int(vars(args).get("judge_opponents", 2)), count // 2)
    ring = [(i, (i + step) % count) for step in range(1, reach + 1) for i in range(count)]
    pairs = sorted({(min(pair), max(pair)) for pair in ring})
    outcomes = await asyncio.gather(*(_compare(judge, samples[i], samples[j]) for i, j in pairs))
    wins, games = [0.0] * count, [0] * count
    for (i, j), outcome in zip(pairs, outcomes, strict=True):
        wins[i], wins[j] = wins[i] + outcome, wins[j] + 1 - outcome
        games[i], games[j] = games[i] + 1, games[j] + 1
    return [won / played if played else 0.5 for won, played in zip(wins, games, strict=True)]


async def _compare(judge: Judge, one: Sample, other: Sample) -> float:
    """1 if `one` is better, 0 if `other` is, one half for a tie or where the order decides."""
    texts = one.response, other.response
    if texts[0] == texts[1]:
        return 0.5
    orders = [PAIR.format(task=one.prompt, first=a, second=b) for a, b in (texts, texts[::-1])]
    there, back = await asyncio.gather(*(judge.ask(question, BETTER) for question in orders))
    slime.log({"judge/order_decides": float(there == back != "tie")})
    value = {"A": 1.0, "tie": 0.5, "B": 0.0}
    return (value[there] + 1 - value[back]) / 2
