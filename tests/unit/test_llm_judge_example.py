"""The judge of examples/llm_judge against a fake one: what it makes of answers, order, repeats and silence."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

import pytest

from examples.llm_judge import judge as module
from examples.llm_judge.judge import pairwise, rubric
from slime.utils.types import Sample


class FakeJudge:
    """Answers a question by a rule, and notes what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
        self.asked: list[str] = []
        self.logged: list[float] = []
        self._rule = rule
        monkeypatch.setattr(module, "post", self._post)
        monkeypatch.setattr(module, "_judges", {})
        monkeypatch.setattr(module.slime, "log", lambda values: self.logged.extend(values.values()))

    async def _post(self, url: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        assert url == "http://judge:1/v1/chat/completions" and body["temperature"] == 0
        question = body["messages"][0]["content"]
        self.asked.append(question)
        text = self._rule(question)
        await asyncio.sleep(1.0 if text is None else 0.0)
        return {"choices": [{"message": {"content": text}}]}


ARGS = Namespace(judge_url="http://judge:1/", judge_deadline_s=0.05)


def group(*responses: str) -> list[Sample]:
    return [Sample(prompt="Say a long word.", response=response) for response in responses]


def longer(question: str) -> str:
    first, second = question.partition("Answer A: ")[2].partition("\n\nWrite")[0].split("\n\nAnswer B: ")
    return f"Better: {'A' if len(first) > len(second) else 'B' if len(second) > len(first) else 'tie'}"


def test_points_become_a_reward_and_an_equal_question_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeJudge(monkeypatch, lambda question: "Points: 10" if "good" in question else "Points: 3")

    async def work() -> list[float]:
        return list(await asyncio.gather(*(rubric(ARGS, sample) for sample in group("good", "bad", "good"))))

    assert asyncio.run(work()) == [1.0, 0.3, 1.0]
    assert len(fake.asked) == 2 and "Say a long word." in fake.asked[0]


def test_a_group_is_ranked_by_the_share_of_its_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeJudge(monkeypatch, longer)
    # each meets its two neighbours on either side: in a group of four all others; "aa" ties with "bb"
    assert asyncio.run(pairwise(ARGS, group("aaaa", "aa", "bb", "a"))) == [1.0, 0.5, 0.5, 0.0]
    assert len(fake.asked) == 2 * 6 and set(fake.logged) == {0.0}


def test_a_judge_that_prefers_a_place_gives_half_a_win_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeJudge(monkeypatch, lambda question: "Better: A")
    assert asyncio.run(pairwise(ARGS, group("x", "y"))) == [0.5, 0.5] and fake.logged == [1.0]
    assert asyncio.run(pairwise(ARGS, group("same", "same"))) == [0.5, 0.5] and len(fake.asked) == 2, "nothing to ask"


@pytest.mark.parametrize(("answer", "error"), [("I like it", ValueError), (None, TimeoutError)])
def test_silence_and_nonsense_fail_the_reward_and_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, error: type[Exception]
) -> None:
    fake = FakeJudge(monkeypatch, lambda question: answer)

    async def work() -> None:
        for _ in range(2):
            with pytest.raises(error):
                await rubric(ARGS, group("x")[0])

    asyncio.run(work())
    assert len(fake.asked) == 2


def test_a_run_without_a_judge_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeJudge(monkeypatch, longer)
    args = Namespace(sglang_model_routers={"default": ("h", 1)})
    with pytest.raises(ValueError, match="judge_url in --custom-config-path"):
        asyncio.run(rubric(args, group("x")[0]))
