"""Upstream's path of what writes and reads rollouts, which is in slime.checkpoints.rollout_files."""

from slime.checkpoints.rollout_files import load_dump, load_samples, save_dump, subsample

__all__ = ["load_dump", "load_samples", "save_dump", "subsample"]
