"""The public path of `parse_args`; what it does is in `slime.config`."""

from slime.config.parse import parse_args

__all__ = ["parse_args"]
