"""The environment of geo3k: the model may have its answer scored, and try again."""

from __future__ import annotations

from typing import Any

from base_env import BaseInteractionEnv, Observation

from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.tool_calls import parse_tool_calls
from slime.utils.types import Sample

TOOLS = ("calc_score", "calc_geo3k_reward")


class Geo3kEnv(BaseInteractionEnv):
    """Scores the last call of a turn; a turn without one ends the episode.

    Args:
        ground_truth: the answer of the row.
        max_turns: of the model; before its last one it is told to answer.
    """

    def __init__(self, ground_truth: str, max_turns: int) -> None:
        self.ground_truth, self.max_turns, self.turn = ground_truth, max_turns, 0

    def reset(self, turn: int = 0) -> None:
        """Begin after so many turns of the model."""
        self.turn = turn

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, Any]]:
        """Score the last call of a turn."""
        self.turn += 1
        calls = parse_tool_calls(response_text)
        if not calls:
            return {"obs_str": "", "role": "user"}, True, {}
        call = calls[-1]
        answer = str(call.arguments.get("answer") or "").strip()
        if call.problem or call.name not in TOOLS or not answer:
            wanted = f'call {TOOLS[0]} with {{"answer": "..."}}'
            return self._observation(f"The call cannot be made: {call.problem or wanted}.", 0.0), False, {}
        score = float(grade_answer_verl(f"\\boxed{{{answer}}}", self.ground_truth))
        said = "is right" if score else "is wrong; look at the drawing again"
        return self._observation(f"Your answer {answer} {said}.", score), False, {"tool_score": score}

    def _observation(self, text: str, score: float) -> Observation:
        if self.turn == self.max_turns - 1:
            text += " This is your last turn: give the final answer in \\boxed{}, without a call."
        return {"obs_str": text, "role": "user", "tool_score": score}


def build_env(sample: Sample, args: Any) -> Geo3kEnv:
    """The environment of a sample."""
    if sample.label is None:
        raise ValueError(f"sample {sample.index} has no label (--label-key), which its answers are compared with")
    return Geo3kEnv(str(sample.label), args.max_turns)
