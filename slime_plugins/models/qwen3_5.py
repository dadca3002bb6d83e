"""Qwen3.5: --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec. Its layers are those of Qwen3-Next."""

from __future__ import annotations

from slime_plugins.models.qwen3_next import get_qwen3_next_spec as get_qwen3_5_spec

__all__ = ["get_qwen3_5_spec"]
