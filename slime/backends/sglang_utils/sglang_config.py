"""The public path of the classes of --sglang-config; what reads the file is in `slime.config.sglang`."""

from slime.config.sglang.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig

__all__ = ["ModelConfig", "ServerGroupConfig", "SglangConfig"]
