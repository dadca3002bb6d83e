"""The base class of this rollout's environments: they answer a turn of the model with an observation."""

from __future__ import annotations

from typing import Any

Observation = dict[str, Any]


class BaseInteractionEnv:
    """An environment for one sample. Its methods run in a thread, so that they may block.

    An observation is a dict: `obs_str` is its text, `role` who says it ("user"), and `multi_modal_data` may hold
    images, `{"image": [...]}`, as a tool of slime.rollout.multi_turn gives them.

    A sample that was aborted goes on with a new environment: what one needs to know of earlier turns, it is told by
    `reset` and finds in the sample's metadata.
    """

    def reset(self, turn: int = 0) -> None:
        """Begin after so many turns of the model."""

    def step(self, response_text: str) -> tuple[Observation, bool, dict[str, Any]]:
        """Answer a turn: (observation, whether the episode ends here, what is put into the sample's metadata)."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what the environment holds."""

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        """The message of an observation."""
        images = (observation.get("multi_modal_data") or {}).get("image") or []
        text = str(observation.get("obs_str") or "")
        parts = [{"type": "text", "text": text}, *({"type": "image", "image": image} for image in images)]
        return {"role": observation.get("role") or "user", "content": parts if images else text}
