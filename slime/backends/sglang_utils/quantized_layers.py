"""What SGLang 0.5.17 lacks for fp8 and int4 weights that a trainer replaces; installed in the server of such a model.

fp8:
1. One scale a tensor (CUDA): having loaded a checkpoint, SGLang transposes each weight and spreads its scales over
   channels, in new parameters without a loader, so that the first sync fails with an AttributeError (and an expert's
   scale goes nowhere). Here they get loaders that write into the same memory; nothing moves, so CUDA graphs stay
   valid. One scale a block needs none of this: SGLang leaves such weights as they are stored.
2. CPU: SGLang computes with fp8 weights only on CPUs with AMX.

int4:
1. CUDA: having loaded a checkpoint, SGLang shuffles each layer's weights and scales for its kernels (Marlin; of
   experts also Triton), which no loader can write into. Here a tensor that comes later is loaded into other memory
   by SGLang's loader, which cuts it for this rank; the rows that it wrote are shuffled and copied to their place. That
   works row by row, for kernels shuffle within 64 of them: nothing is kept twice, tensors may come in any order or
   stay away (a delta), nothing moves, and CUDA graphs stay valid.
2. CPU: SGLang has no kernels for int4 there.
3. SGLang's check of weights compares `weight_shape`, too, which no kernel reads: in a layer that several tensors make
   up (queries, keys, values), it is the shape of the one that came last. Here the check passes over it.

On CPU a layer multiplies its weights by their scales and computes in the activations' type: slow, for tests and for
trying out a configuration. Nothing is quantised here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from slime.weights.quantization import dequantize, dequantize_groups, unpack

Place = Callable[[torch.Tensor, int, torch.Tensor], None]
"""Writes rows, [..., rows] as SGLang's loader of experts leaves them, to a parameter: (its data, the first, them)."""

PLACE = "_slime_place"
TILE = 64
"""Rows that Marlin shuffles among each other."""


def install_fp8(accelerator: str) -> None:
    """Change SGLang's fp8 layers in this process; imports SGLang.

    Args:
        accelerator: "cpu" or "cuda".
    """
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8LinearMethod, Fp8MoEMethod

    if accelerator == "cpu":
        Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.half])
        for method in (Fp8LinearMethod, Fp8MoEMethod):
            method.process_weights_after_loading = _leave_fp8_as_stored
        Fp8LinearMethod.apply, Fp8MoEMethod.apply = _fp8_linear, _fp8_experts
        return
    Fp8LinearMethod.process_weights_after_loading = _updatable_fp8_linear(
        Fp8LinearMethod.process_weights_after_loading
    )
    Fp8MoEMethod.process_weights_after_loading = _updatable_fp8_experts(Fp8MoEMethod.process_weights_after_loading)


# ---- fp8 with one scale a tensor, on CUDA


def _updatable_fp8_linear(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
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


def _updatable_fp8_experts(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
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


# ---- fp8 on CPU


def _leave_fp8_as_stored(self: Any, layer: Any) -> None:
    """In the place of process_weights_after_loading: what is loaded later lands where the checkpoint's did."""


def _fp8_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, W from its values and scales; a merged layer has a scale for each of its parts."""
    if self.block_quant:
        weight = dequantize(layer.weight, layer.weight_scale_inv, tuple(self.weight_block_size), x.dtype)
    else:
        widths = torch.tensor(layer.logical_widths)
        weight = (layer.weight.float() * layer.weight_scale.repeat_interleave(widths)[:, None]).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _fp8_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    x = dispatch_output.hidden_states
    if self.block_quant:
        size = tuple(self.weight_block_size)
        w13 = dequantize(layer.w13_weight, layer.w13_weight_scale_inv, size, x.dtype)
        w2 = dequantize(layer.w2_weight, layer.w2_weight_scale_inv, size, x.dtype)
    else:
        half = layer.w13_weight.shape[1] // 2
        w13 = (layer.w13_weight.float() * layer.w13_weight_scale.repeat_interleave(half, 1)[..., None]).to(x.dtype)
        w2 = (layer.w2_weight.float() * layer.w2_weight_scale[:, None, None]).to(x.dtype)
    return _native_experts(self, layer, dispatch_output, w13, w2)


def install_int4(accelerator: str) -> None:
    """Change SGLang's int4 layers in this process; imports SGLang.

    Args:
        accelerator: "cpu" or "cuda".
    """
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsWNA16,
        CompressedTensorsWNA16MoE,
        CompressedTensorsWNA16TritonMoE,
    )

    linear, marlin, triton = CompressedTensorsWNA16, CompressedTensorsWNA16MoE, CompressedTensorsWNA16TritonMoE
    if accelerator == "cpu":
        CompressedTensorsConfig._check_scheme_supported = lambda self, capability, error=True: True
        CompressedTensorsConfig.get_supported_act_dtypes = lambda self: [torch.float32, torch.bfloat16, torch.half]
        for scheme in (linear, marlin, triton):
            scheme.process_weights_after_loading = _leave_int4_as_stored
        linear.apply_weights, marlin.apply_weights, triton.apply_weights = _int4_linear, _int4_experts, _int4_experts
        marlin.create_moe_runner = triton.create_moe_runner = _note_config
        return
    linear.process_weights_after_loading = _updatable_int4_linear(linear.process_weights_after_loading)
    marlin.process_weights_after_loading = _updatable_int4_experts(
        marlin.process_weights_after_loading, _marlin_places
    )
    triton.process_weights_after_loading = _updatable_int4_experts(
        triton.process_weights_after_loading, _triton_places
    )
    _watch_experts()


def _leave_shapes_unchecked(layer: Any) -> None:
    for name, param in layer.named_parameters(recurse=False):
        if name.endswith("weight_shape"):
            param._skip_weight_check = True  # SGLang's own mark


# ---- int4 on CUDA


class _Stored:
    """What a parameter was when SGLang's loader could write into it."""

    def __init__(self, param: torch.nn.Parameter) -> None:
        self.attributes = dict(vars(param))
        self._kind, self._shape, self._dtype, self._device = type(param), param.shape, param.dtype, param.device
        self._rows: dict[Any, tuple[int, int]] = {}

    def empty(self, *, shares_first: bool) -> torch.Tensor:
        """A parameter like it, all zero; with `shares_first`, all entries of dimension 0 (experts) are one memory."""
        size = (1, *self._shape[1:]) if shares_first else self._shape
        data = torch.zeros(size, dtype=self._dtype, device=self._device).expand(self._shape)
        made: torch.Tensor = torch.Tensor._make_subclass(self._kind, data, False)
        made.__dict__.update(self.attributes)
        return made

    def rows(self, key: Any, dim: int, load_ones: Callable[[], torch.Tensor]) -> tuple[int, int]:
        """Which rows (of dimension `dim`) a part of that key goes to: first, behind the last.

        Args:
            key: of the part: gate or up, queries or keys.
            dim: of what `load_ones` returns.
            load_ones: loads ones in the place of the part, and returns what was written into.
        """
        if key not in self._rows:
            written = load_ones().ne(0).any(1 - dim).nonzero()
            self._rows[key] = (int(written[0]), int(written[-1]) + 1)
        return self._rows[key]


def _check_rows(first: int, behind: int) -> None:
    if first % TILE or behind % TILE:
        raise RuntimeError(
            f"rows {first} to {behind} of an int4 layer are no whole multiples of {TILE}, within which SGLang's "
            "kernel shuffles them: use less tensor parallelism, or leave such layers unquantised (--ignore-rules)"
        )


def _updatable_int4_linear(process: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        names = ("weight_packed", "weight_scale")
        stored = {name: (_Stored(getattr(layer, name)), getattr(layer, name).weight_loader) for name in names}
        process(self, layer)
        _leave_shapes_unchecked(layer)
        places = (_place_packed, _scale_place(self.kernel_config.partition_weight_shape[0], self.group_size))
        for name, place in zip(names, places, strict=True):
            getattr(layer, name).weight_loader = _linear_loader(*stored[name], place)

    return process_weights_after_loading


def _linear_loader(stored: _Stored, load: Callable[..., None], place: Place) -> Callable[..., None]:
    def weight_loader(param: Any, loaded: torch.Tensor, *shard: Any) -> None:
        def written(tensor: torch.Tensor) -> torch.Tensor:
            target = stored.empty(shares_first=False)
            load(target, tensor, *shard)
            return target.data

        first, behind = stored.rows(shard, 0, lambda: written(torch.ones_like(loaded)))
        _check_rows(first, behind)
        place(param.data, first, written(loaded)[first:behind].t().contiguous())

    return weight_loader


def _place_packed(data: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """int32 [K / 8, rows] -> Marlin's [K / 16, 2 rows]."""
    from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack

    packed, num_rows = rows.shape
    order = torch.empty(0, dtype=torch.int32, device=rows.device)
    shuffled = gptq_marlin_repack(rows, order, packed * 8, num_rows, 4)
    data[:, 2 * first : 2 * (first + num_rows)].copy_(shuffled)


def _scale_place(size_k: int, group_size: int) -> Place:
    """[groups, rows] -> Marlin's order of these rows."""
    from sglang.srt.layers.quantization.marlin_utils import marlin_permute_scales

    def place(data: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        shuffled = marlin_permute_scales(rows, size_k, rows.shape[1], group_size)
        data[:, first : first + rows.shape[1]].copy_(shuffled)

    return place


def _updatable_int4_experts(
    process: Callable[[Any, Any], None], places_of: Callable[[Any, Any], dict[str, Place]]
) -> Callable[[Any, Any], None]:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if hasattr(layer.w13_weight_packed, PLACE):
            return
        names = [f"{part}_weight_{what}" for part in ("w13", "w2") for what in ("packed", "scale")]
        stored = {name: _Stored(getattr(layer, name)) for name in names}
        process(self, layer)
        _leave_shapes_unchecked(layer)
        for name, place in places_of(self, layer).items():
            vars(getattr(layer, name)).update({**stored[name].attributes, PLACE: (stored[name], place)})

    return process_weights_after_loading


def _marlin_places(scheme: Any, layer: Any) -> dict[str, Place]:
    # The first numbers are those with which SGLang shuffles them: they only say that there is more than one group.
    w13 = _scale_place(layer.w13_weight_packed.shape[2], scheme.group_size)
    w2 = _scale_place(layer.w2_weight_scale.shape[1] * scheme.group_size, scheme.group_size)
    packed = {"w13_weight_packed": _place_packed, "w2_weight_packed": _place_packed}
    return packed | {"w13_weight_scale": w13, "w2_weight_scale": w2}


def _triton_places(_scheme: Any, _layer: Any) -> dict[str, Place]:
    def place(data: torch.Tensor, first: int, rows: torch.Tensor) -> None:
        data[first : first + rows.shape[1]].copy_(rows.t().contiguous().view(data.dtype))

    return dict.fromkeys(("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale"), place)


def _watch_experts() -> None:
    """Have SGLang's loader of experts ask where a parameter's weights go."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    load = FusedMoE._weight_loader_impl

    def load_or_place(
        self: Any,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
    ) -> None:
        if not hasattr(param, PLACE):
            load(self, param, loaded_weight, weight_name, shard_id, expert_id)
            return
        stored, place = getattr(param, PLACE)

        def written(tensor: torch.Tensor) -> torch.Tensor:
            target = stored.empty(shares_first=True)
            load(self, target, tensor, weight_name, shard_id, expert_id)
            return target.data[0]

        first, behind = stored.rows(shard_id, 1, lambda: written(torch.ones_like(loaded_weight)))
        if place is _place_packed:
            _check_rows(first, behind)
        place(param.data[expert_id], first, written(loaded_weight)[:, first:behind].contiguous())

    FusedMoE._weight_loader_impl = load_or_place


# ---- int4 on CPU


def _leave_int4_as_stored(self: Any, layer: Any) -> None:
    """In the place of process_weights_after_loading: what is loaded later lands where the checkpoint's did."""
    _leave_shapes_unchecked(layer)


def _note_config(self: Any, layer: Any, moe_runner_config: Any) -> None:
    self.moe_runner_config = moe_runner_config


def _weight(packed: torch.Tensor, scales: torch.Tensor, group_size: int, dtype: torch.dtype) -> torch.Tensor:
    """int32 [N, K / 8] and [N, K / group] -> [N, K]."""
    values = unpack(packed, scales.shape[1] * group_size)
    return dequantize_groups(values, scales, group_size, dtype=dtype)


def _int4_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b, W from its values and scales."""
    weight = _weight(layer.weight_packed.data, layer.weight_scale.data, self.group_size, x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _int4_experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
    x = dispatch_output.hidden_states

    def weights_of(part: str) -> torch.Tensor:
        packed = getattr(layer, f"{part}_weight_packed").data.transpose(1, 2)  # [E, rows, K / 8]
        scales = getattr(layer, f"{part}_weight_scale").data.transpose(1, 2)
        weight = _weight(packed.flatten(0, 1), scales.flatten(0, 1), self.group_size, x.dtype)
        return weight.unflatten(0, packed.shape[:2])

    return _native_experts(self, layer, dispatch_output, weights_of("w13"), weights_of("w2"))


def _native_experts(self: Any, layer: Any, dispatch_output: Any, w13: torch.Tensor, w2: torch.Tensor) -> Any:
    """SGLang's own torch path for experts, over weights made from their values and scales (CPU)."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    weights = SimpleNamespace(num_experts=layer.num_experts, w13_weight=w13, w2_weight=w2)
    x, routing = dispatch_output.hidden_states, dispatch_output.topk_output
    return StandardCombineInput(hidden_states=moe_forward_native(weights, x, routing, self.moe_runner_config))
