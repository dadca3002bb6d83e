"""Attention with a learnable sink: a softmax over the scores and one more number of each head, whose share is dropped.

1. A head may attend to nothing: out = sum_j exp(q k_j * scale) v_j / (exp(sink) + sum_j exp(q k_j * scale)).
2. It is computed by the kernels of model.varlen_attention: every sequence gets one more key before its first, which
   all of its queries see. Its value is zero, and its score the head's sink: one more channel holds sink / scale in
   the queries, 1 in that key and 0 in all others. So the sink's gradient is the kernel's own.
3. Megatron's parameter of that kind (`softmax_offset`, --softmax-type) is for attention that takes no packs; the name
   is kept.

A model of one's own has it by --spec slime_plugins.models.learnable_softmax_attention get_learnable_softmax_spec, with
`SINKS` among its weight rules (docs/architectures_beyond_megatron.md). Windows it knows none: attention that has both
can be wrapped (slime_plugins.models.hf_attention).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from slime.backends.megatron_utils.cp_utils import KeyChunks
from slime.backends.megatron_utils.layers.varlen_attention import (
    Spans,
    VarlenAttention,
    attend_spans,
    gather_keys,
    host_ends,
    keep,
    key_chunks_of,
)
from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args
from slime.models.family import Rule
from slime.utils import accelerator
from slime.utils.accelerator import to_device

SINKS = Rule("decoder.layers.{i}.self_attention.core_attention.softmax_offset", ("model.layers.{i}.self_attn.sinks",))
"""The weight rule of sinks that are called as gpt-oss calls them."""
_CHANNELS = 8
"""Kernels want a multiple of it."""


class LearnableSoftmaxAttention(VarlenAttention):
    """Core attention with a sink for each head; shapes as in VarlenAttention.

    Attributes:
        softmax_offset: [heads of this rank], the sinks.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.tp_group = options["pg_collection"].tp
        heads = config.num_attention_heads // self.tp_group.size()
        sinks = torch.zeros(heads, dtype=config.params_dtype, device=accelerator.current_device())
        self.softmax_offset = torch.nn.Parameter(sinks)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend; the mask is causal within each sequence."""
        query, sink_key, sink_value = self._with_sinks(query), _sink_key(key), value.new_zeros(value.shape[-1])
        if packed_seq_params is None:
            firsts = [sink.expand(1, *key.shape[1:3], -1) for sink in (sink_key, sink_value)]
            key, value = (torch.cat(parts) for parts in zip(firsts, (_wider(key), value), strict=True))
            return self._attend_batch(query, key, value)
        chunks = None if self.cp_group is None else key_chunks_of(packed_seq_params, self.cp_group)
        if chunks is not None:
            key, value = gather_keys(key, value, chunks, self.cp_group)
        plan = keep(packed_seq_params, "sinks", lambda: _Plan.of(packed_seq_params, chunks, query.device))
        key, value = plan.with_sinks(_wider(key), sink_key), plan.with_sinks(value, sink_value)
        how: dict[str, Any] = {"scale": self.softmax_scale, "use_kernel": self._use_kernel(query)}
        return attend_spans(query, key, value, plan.spans, **how).reshape(query.shape[0], -1)

    def _with_sinks(self, query: torch.Tensor) -> torch.Tensor:
        """[..., h, d] -> [..., h, d + more], where the first further channel has the head's sink."""
        sinks = (self.softmax_offset.float() / self.softmax_scale).to(query.dtype)
        further = F.pad(sinks[:, None], (0, _further(query) - 1))
        return torch.cat([query, further.expand(*query.shape[:-1], -1)], dim=-1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """What a distributed checkpoint holds: the sinks, cut by heads."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        own = {"softmax_offset": self.softmax_offset}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return found


def _further(x: torch.Tensor) -> int:
    """How many channels are added to [..., d]: at least one."""
    return _CHANNELS - x.shape[-1] % _CHANNELS


def _wider(x: torch.Tensor) -> torch.Tensor:
    """[..., d] -> with zeros in the further channels."""
    return F.pad(x, (0, _further(x)))


def _sink_key(key: torch.Tensor) -> torch.Tensor:
    """[d + more]: zeros, and 1 in the channel in which the queries have their sink."""
    return F.pad(key.new_ones(1), (key.shape[-1], _further(key) - 1))


class _Plan(NamedTuple):
    """What queries see once each run of keys begins with a sink, and the places of the other keys among them."""

    spans: Spans
    places: torch.Tensor

    @classmethod
    def of(cls, packed_seq_params: Any, chunks: KeyChunks | None, device: torch.device) -> _Plan:
        ends = host_ends(packed_seq_params)
        cu_queries, cu_keys = (ends, ends) if chunks is None else (chunks.cu_queries, chunks.cu_keys)
        starts = [start + number for number, start in enumerate(cu_keys)]
        is_given = torch.ones(starts[-1], dtype=torch.bool)
        is_given[starts[:-1]] = False
        return cls(Spans.of(cu_queries, starts, device), to_device(is_given.nonzero().squeeze(1), device))

    def with_sinks(self, x: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        """Keys or values [u, g, d] -> [u + n, g, d], with `sink` [d] before each of the n runs."""
        return sink.expand(self.spans.cu_keys[-1], *x.shape[1:]).index_copy(0, self.places, x)


def get_learnable_softmax_spec(
    args: Args, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this rank's pipeline stage, all with sinks."""

    def adapt(layer: ModuleSpec, _: int) -> None:
        layer.submodules.self_attention.submodules.core_attention = LearnableSoftmaxAttention

    return assemble_block(args, config, vp_stage, adapt)
