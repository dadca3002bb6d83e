"""Upstream's path of what writes and reads rollouts, which is in slime.checkpoints.dumps."""

from slime.checkpoints.dumps import load_dump, load_samples, save_dump, subsample

__all__ = ["load_dump", "load_samples", "save_dump", "subsample"]
