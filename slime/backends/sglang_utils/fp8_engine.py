"""What SGLang 0.5.17 lacks for fp8 weights that a trainer replaces; installed in the server process of such a model.

1. One scale a tensor (CUDA): having loaded a checkpoint, SGLang transposes each weight and spreads its scales over
   channels, in new parameters without a loader, so that the first sync fails with an AttributeError (and an expert's
   scale goes nowhere). Here they get loaders that write into the same memory; nothing moves, so CUDA graphs stay
   valid. One scale a block needs none of this: SGLang leaves such weights as they are stored.
2. CPU: SGLang computes with fp8 weights only on CPUs with AMX. Here a layer multiplies its weights by their scales and
   computes in the activations' type: slow, for tests and for trying out a configuration.

It does not quantise, and it does not know who sends the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from slime.weights.fp8 import dequantize


def install(accelerator: str) -> None:
    """Change SGLang's fp8 layers in this process; imports SGLang.

    Args:
        accelerator: "cpu" or "cuda".
    """
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod

    if accelerator == "cpu":
        Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.half])
        for method in (Fp8LinearMethod, Fp8MoEMethod):
            method.process_weights_after_loading = _leave_as_stored
        Fp8LinearMethod.apply, Fp8MoEMethod.apply = _linear, _experts
        return
    Fp8LinearMethod.process_weights_after_loading = _updatable_linear(Fp8LinearMethod.process_weights_after_loading)
    Fp8MoEMethod.process_weights_after_loading = _updatable_experts(Fp8MoEMethod.process_weights_after_loading)


# ---- one scale a tensor, on CUDA


def _updatable_linear(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if self.block_quant or not self.is_checkpoint_fp8_serialized:
            process(self, layer)
            return
        if not self.cutlass_fp8_supported:
            raise RuntimeError(
                "this GPU has no fp8 products, so SGLang re-quantises weights with one scale a tensor and cannot take "
                "new ones; convert the checkpoint with --strategy block (tools/convert_hf_to_fp8.py)"
            )
        from sglang.srt.layers.quantization.utils import convert_to_channelwise

        weight, scale, widths = layer.weight, layer.weight_scale, layer.logical_widths
        process(self, layer)
        if layer.weight.data_ptr() != weight.data_ptr():
            raise RuntimeError("SGLang copied an fp8 weight after loading it, so that no sync could reach it")

        def load_weight(_param: Any, loaded: torch.Tensor, *shard: Any) -> None:
            weight.weight_loader(weight, loaded, *shard)

        def load_scale(param: Any, loaded: torch.Tensor, *shard: Any) -> None:
            scale.weight_loader(scale, loaded, *shard)
            param.data.copy_(convert_to_channelwise(scale.data, widths))

        layer.weight.weight_loader, layer.weight_scale.weight_loader = load_weight, load_scale

    return process_weights_after_loading


def _updatable_experts(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        is_stored_by_tensor = self.quant_config.is_checkpoint_fp8_serialized and not self.block_quant
        scales = layer.w13_weight_scale if is_stored_by_tensor else None
        process(self, layer)
        if scales is None:
            return

        # Of gate and up, which are sent with one scale for both; SGLang keeps their maximum.
        def load_scale(param: Any, loaded: torch.Tensor, *where: Any, **named: Any) -> None:
            scales.weight_loader(scales, loaded, *where, **named)
            param.data.copy_(scales.data.amax(dim=1))

        layer.w13_weight_scale.weight_loader = load_scale

    return process_weights_after_loading


# ---- CPU


def _leave_as_stored(self: Any, layer: Any) -> None:
    """In the place of process_weights_after_loading: what is loaded later lands where the checkpoint's did."""


def _linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, W from its values and scales; a merged layer has a scale for each of its parts."""
    if self.block_quant:
        weight = dequantize(layer.weight, layer.weight_scale_inv, tuple(self.weight_block_size), x.dtype)
    else:
        widths = torch.tensor(layer.logical_widths)
        weight = (layer.weight.float() * layer.weight_scale.repeat_interleave(widths)[:, None]).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    """SGLang's own torch path for experts, over weights made from their values and scales."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x = dispatch_output.hidden_states
    if self.block_quant:
        size = tuple(self.weight_block_size)
        w13 = dequantize(layer.w13_weight, layer.w13_weight_scale_inv, size, x.dtype)
        w2 = dequantize(layer.w2_weight, layer.w2_weight_scale_inv, size, x.dtype)
    else:
        half = layer.w13_weight.shape[1] // 2
        w13 = (layer.w13_weight.float() * layer.w13_weight_scale.repeat_interleave(half, 1)[..., None]).to(x.dtype)
        w2 = (layer.w2_weight.float() * layer.w2_weight_scale[:, None, None]).to(x.dtype)
    weights = SimpleNamespace(num_experts=layer.num_experts, w13_weight=w13, w2_weight=w2)
    return StandardCombineInput(
        hidden_states=moe_forward_native(weights, x, dispatch_output.topk_output, self.moe_runner_config)
    )
