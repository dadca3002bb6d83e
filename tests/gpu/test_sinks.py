"""Attention with a sink in each head, by the kernel on CUDA, is its definition, gradients included; needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
HEADS, GROUPS = 4, 2
LENGTHS = [70, 3, 1, 190, 3]


def defined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """[t, h, d] of one sequence after the other, written out."""
    outs = []
    k, v = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (k, v))
    for queries, keys, values in zip(*(part.split(LENGTHS) for part in (q, k, v)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(queries), 1)], -1).softmax(-1)[..., :-1]
        outs.append(torch.einsum("hqk,khd->qhd", scores, values))
    return torch.cat(outs).flatten(1)


def check(device: str, dtype: torch.dtype, dim: int, tolerance: float) -> None:
    """The layer's values and gradients, relative to those of the definition."""
    from megatron.core.transformer.enums import AttnBackend

    from slime_plugins.models.learnable_softmax_attention import LearnableSoftmaxAttention
    from tests.unit.megatron_fakes import packed

    config = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=dim,
        attention_backend=AttnBackend.flash if device == "cuda" else AttnBackend.auto,
        context_parallel_size=1,
        num_attention_heads=HEADS,
        params_dtype=dtype,
    )
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    layer = LearnableSoftmaxAttention(config, 1, None, "self", pg_collection=groups).to(device)
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS, dim), (GROUPS, dim), (GROUPS, dim))
    given = [torch.randn(sum(LENGTHS), *shape, generator=generator).to(device, dtype) for shape in shapes]
    layer.softmax_offset.data.copy_(torch.randn(HEADS, generator=generator))
    weight = torch.randn(sum(LENGTHS), HEADS * dim, generator=generator).to(device)
    pack = packed(LENGTHS)
    pack.cu_seqlens_q = pack.cu_seqlens_q.to(device)

    leaves = [x.clone().requires_grad_() for x in given]
    out = layer(*leaves, packed_seq_params=pack)
    (out.float() * weight).sum().backward()
    found = [out.detach(), *(leaf.grad for leaf in leaves), layer.softmax_offset.grad]

    leaves = [x.detach().double().requires_grad_() for x in (*given, layer.softmax_offset)]
    out = defined(*leaves, dim**-0.5)
    (out * weight).sum().backward()
    for ours, theirs in zip(found, [out.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("dim", [64, 128])
def test_the_kernel_computes_what_the_definition_says(dim: int) -> None:
    check("cuda", torch.bfloat16, dim, 1e-2)
