"""A taskset of verifiers: how often is a letter in a word; with a tool that counts. slime is not needed.

environment: {framework: verifiers, name: letter_counts}
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

WORDS = ("strawberry", "banana", "mississippi", "letter", "parallel", "engine", "tokenizer", "assess")


class Letters(vf.Toolset[vf.SharedToolsetConfig]):
    """One server for all episodes."""

    TOOL_PREFIX = None

    @vf.tool
    def count_letter(self, word: str, letter: str) -> str:
        """Return how often a letter occurs in a word."""
        return str(word.count(letter))


class LetterData(vf.TaskData):
    """A question and its answer."""

    answer: str


class LetterTask(vf.Task[LetterData]):
    """The rubric: the right number (weight 1), and a short answer (weight 0.1)."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        """1 when the model's last message has the number."""
        return float(self.data.answer in (trace.last_reply or "").split())

    @vf.reward(weight=0.1)
    async def is_short(self, trace: vf.Trace) -> float:
        """1 when the last message has at most five words."""
        return float(0 < len((trace.last_reply or "").split()) <= 5)


class LetterConfig(vf.TasksetConfig):
    """The settings that `arguments: {taskset: ...}` may have."""

    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class LetterCounts(vf.Taskset[LetterTask, LetterConfig]):
    """Every letter of every word."""

    @classmethod
    def toolsets(cls, config: LetterConfig) -> list[vf.Toolset]:
        """The tools that the tasks share."""
        return [Letters(config.tools)]

    def load(self) -> Iterator[LetterTask]:
        """Make the tasks."""
        for word in WORDS:
            for letter in sorted(set(word)):
                question = f"How many times is the letter {letter} in {word}? Answer with the number."
                yield LetterTask(LetterData(prompt=question, answer=str(word.count(letter))), self.config.task)


__all__ = ["LetterCounts"]

if __name__ == "__main__":
    Letters.run()
