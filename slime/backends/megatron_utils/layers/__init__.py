"""Layers that Megatron lacks or does otherwise, and what they ask of a pack of sequences."""
