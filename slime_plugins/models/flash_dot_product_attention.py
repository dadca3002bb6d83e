"""Upstream's path of attention over packed sequences, which is in slime.backends.megatron_utils.layers."""

from slime.backends.megatron_utils.layers.varlen_attention import VarlenAttention

__all__ = ["VarlenAttention"]
