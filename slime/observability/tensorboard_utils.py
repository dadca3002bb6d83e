"""Upstream's path of TensorBoard as a tracker, which is in slime.observability.trackers.services."""

from slime.observability.trackers.services import _TensorboardAdapter, tensorboard_dir

__all__ = ["_TensorboardAdapter", "tensorboard_dir"]
