"""Public path of the grader of multiple choice, which is in slime.rollout.rm_hub."""

from slime.rollout.rm_hub import DEFAULT_VALID_LETTERS, compute_gpqa_reward

__all__ = ["DEFAULT_VALID_LETTERS", "compute_gpqa_reward"]
