"""Upstream's path of what writes the data of a train step, which is in slime.training.reports."""

from slime.training.reports import merge_shares, save_train_data

__all__ = ["merge_shares", "save_train_data"]
