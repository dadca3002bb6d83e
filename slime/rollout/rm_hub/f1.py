"""Public path of token F1, which is in slime.rollout.rm_hub."""

from slime.rollout.rm_hub import f1_score, normalize_answer

__all__ = ["f1_score", "normalize_answer"]
