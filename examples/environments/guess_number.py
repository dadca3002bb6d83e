"""An OpenEnv environment: find a number by guessing. Written with OpenEnv only; slime is not needed.

environment: {framework: openenv, name: "guess_number:GuessNumber", arguments: {highest: 20}}
"""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

MAX_GUESSES = 6


class Guess(Action):
    """Guess the number."""

    number: int


class Hint(Observation):
    """The observation after a guess."""

    text: str


class GuessNumber(Environment[Guess, Hint, State]):
    """The player guesses until the number is found; each wrong guess costs a tenth of the reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, highest: int = 20) -> None:
        super().__init__()
        self.highest, self.number, self._state = highest, 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        """Think of a number, the same for the same seed."""
        self.number = random.Random(seed).randint(1, self.highest)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text=f"Find my number between 1 and {self.highest}. You have {MAX_GUESSES} guesses.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        """Say whether the number is higher or lower."""
        self._state.step_count += 1
        if action.number == self.number:
            return Hint(text="Found.", done=True, reward=1.1 - 0.1 * self._state.step_count)
        word = "higher" if action.number < self.number else "lower"
        return Hint(text=f"It is {word}.", done=self._state.step_count >= MAX_GUESSES, reward=0.0)

    @property
    def state(self) -> State:
        """The episode's id and how many guesses were made."""
        return self._state
