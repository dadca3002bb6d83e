"""Checkpoints: iterations, states beside the weights, HF exports, and readers and writers of torch_dist."""
