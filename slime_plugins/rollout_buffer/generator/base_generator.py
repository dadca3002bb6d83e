"""The public path of `BaseGenerator`; what it does is in `slime_plugins.rollout_buffer.generators.base_generator`."""

from slime_plugins.rollout_buffer.generators.base_generator import BaseGenerator

__all__ = ["BaseGenerator"]
