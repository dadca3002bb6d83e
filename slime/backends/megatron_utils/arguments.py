"""The public path of `set_default_megatron_args`; Megatron's flags are in `slime.config.megatron`."""

from slime.config.megatron.arguments import set_default_megatron_args

__all__ = ["set_default_megatron_args"]
