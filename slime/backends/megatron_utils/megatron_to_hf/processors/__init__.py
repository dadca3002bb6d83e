"""Public path of what is done to HF tensors before they leave the trainer, which is in quantizer.py."""

from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_params

__all__ = ["quantize_params"]
