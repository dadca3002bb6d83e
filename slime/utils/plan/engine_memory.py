"""Bytes per GPU of an SGLang engine: weights, KV cache, and how many tokens and requests fit into it.

SGLang takes `mem_fraction_static` of the device for weights and cache together; the rest is for activations, CUDA
graphs and the process itself. One token's cache is, on each tensor-parallel rank, keys and values of its share of the
heads (at least one head: more ranks than heads keep copies) in every layer; latent attention caches the latent and the
rotary key once on every rank. It starts no engine and reads no ServerArgs: settings come in as a mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.utils.plan.devices import Device
from slime.utils.plan.shape import ModelShape
from slime.utils.weight_format import PROBES, WeightFormat, quantized_parts

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "half": 2, "float16": 2, "float32": 4, "float": 4}
KV_DTYPE_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1, "bf16": 2, "bfloat16": 2, "float16": 2, "float32": 4}
MEM_FRACTION = 0.88
"""What SGLang chooses for a device of 80 GB and more, give or take a few points, where no flag says."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each GPU of one kind of engine."""

    name: str
    tp: int
    pp: int
    ep: int
    dtype_bytes: int
    weights: int
    kv_bytes_per_token: int
    mem_fraction: float
    is_fraction_assumed: bool
    kv_cache: int
    """Bytes left for the cache; negative where not even the weights fit into the fraction."""
    kv_tokens: int
    """Tokens that fit, over the whole engine."""
    full_length_requests: int
    """Requests of the longest prompt and response that fit at once."""
    max_running_requests: int | None
    """As a flag says; None: SGLang decides."""
    static: int
    """Weights and cache: what the process holds while it serves."""


def engine_memory(
    shape: ModelShape,
    device: Device,
    settings: Mapping[str, Any],
    *,
    num_gpus: int,
    longest: int,
    name: str = "",
    fmt: WeightFormat | None = None,
) -> EngineMemory:
    """Memory of an engine.

    Args:
        shape: the model that it serves (padding of the vocabulary is counted, the engine has none).
        device: of each rank.
        settings: ServerArgs values that were chosen: dtype, quantization, kv_cache_dtype, mem_fraction_static,
            max_total_tokens, max_running_requests, pp_size, ep_size, enable_dp_attention, dp_size.
        num_gpus: of the engine.
        longest: tokens of a full request.
        name: shown.
        fmt: how the checkpoint that it serves is quantised; SGLang finds it in config.json.
    """
    pp = settings.get("pp_size") or 1
    tp = max(1, num_gpus // pp)
    ep = settings.get("ep_size") or 1
    dtype = DTYPE_BYTES.get(settings.get("dtype") or "auto", 2)
    parts = weight_params(shape, tp, pp, ep)
    if fmt is not None:
        quantized = sum(parts[part] for part in quantized_parts(fmt))
        small = fmt.bytes_of_params(quantized, itemsize=dtype)
    else:
        # What SGLang quantises itself: about one byte, for scales are small.
        quantized = sum(parts[part] for part in PROBES) if settings.get("quantization") else 0
        small = quantized
    weights = small + (sum(parts.values()) - quantized) * dtype
    attention_tp = tp // (settings.get("dp_size") or 1) if settings.get("enable_dp_attention") else tp
    cache_dtype = KV_DTYPE_BYTES.get(settings.get("kv_cache_dtype") or "auto", dtype)
    per_token = kv_elements(shape, max(1, attention_tp), pp) * cache_dtype
    given = settings.get("mem_fraction_static")
    fraction = given or MEM_FRACTION
    limit = settings.get("max_total_tokens")
    room = int(device.memory_bytes * fraction) - weights
    if device.is_shared and limit:
        room = limit * per_token  # the CPU engine allocates this many tokens and knows no fraction
    tokens = max(0, room // per_token)
    if limit:
        tokens = min(tokens, limit)
    cache = tokens * per_token if room > 0 else room
    replicas = (settings.get("dp_size") or 1) if settings.get("enable_dp_attention") else 1
    return EngineMemory(
        name=name,
        tp=tp,
        pp=pp,
        ep=ep,
        dtype_bytes=dtype,
        weights=weights,
        kv_bytes_per_token=per_token,
        mem_fraction=fraction,
        is_fraction_assumed=not given,
        kv_cache=cache,
        kv_tokens=tokens * replicas,
        full_length_requests=tokens * replicas // max(1, longest),
        max_running_requests=settings.get("max_running_requests"),
        static=weights + max(cache, 0),
    )


def weight_params(shape: ModelShape, tp: int, pp: int, ep: int) -> dict[str, int]:
    """Parameters by part of the model on the rank that has most: of the first or of the last pipeline stage.

    Experts are divided by TP whatever the expert parallelism is: that is a part of TP in SGLang (ep <= tp).
    """
    layers = [shape.layer_params(layer) for layer in range(shape.num_layers)]
    per_stage = -(-shape.num_layers // pp)
    stage = sorted(layers, key=lambda layer: -layer.total)[:per_stage]
    linear = {part: sum(vars(layer)[part] // max(tp, ep) for layer in stage) for part in PROBES}
    embeddings = 1 if shape.is_tied or pp > 1 else 2
    others = sum(layer.replicated for layer in stage) + embeddings * shape.embedding_params // tp + shape.norm_params
    return linear | {"others": others}


def kv_elements(shape: ModelShape, tp: int, pp: int) -> int:
    """Elements of one token's cache on one rank; with sparse attention the indexer's keys, too.

    A gated delta net has none, but a state for each request, which SGLang takes from the same memory
    (--mamba-full-memory-ratio): it is not counted.
    """
    layers = -(-shape.num_attention_layers // pp)
    if shape.latent is not None:
        keys = shape.indexer.head_dim if shape.indexer else 0
        return layers * (shape.latent.kv_lora_rank + shape.latent.qk_pos_emb_head_dim + keys)
    return layers * 2 * max(1, shape.num_query_groups // tp) * shape.kv_channels
