"""Weights outside a model: formats of checkpoints, their arithmetic, files, names and deltas."""
