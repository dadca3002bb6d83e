"""What layers ask of a pack is found once: where each copies it to the GPU anew, the host waits for the GPU."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from megatron.core.transformer.enums import AttnBackend

from slime.backends.megatron_utils.data import Packing, pack
from slime.backends.megatron_utils.layers import varlen_attention
from slime.utils import accelerator
from slime_plugins.models import learnable_softmax_attention
from tests.unit.megatron_fakes import packed

HEADS, DIM = 2, 8


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is copied to the device while a test runs."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        found.append(tensor)
        return accelerator.to_device(tensor, device)

    monkeypatch.setattr(varlen_attention, "to_device", note)
    monkeypatch.setattr(learnable_softmax_attention, "to_device", note)
    return found


def layer(kind: type[varlen_attention.VarlenAttention], cp_size: int) -> varlen_attention.VarlenAttention:
    """A core attention; its context-parallel group has no processes."""
    config = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=DIM,
        attention_backend=AttnBackend.auto,
        context_parallel_size=cp_size,
        num_attention_heads=HEADS,
        params_dtype=torch.float32,
    )
    group = SimpleNamespace(size=lambda: cp_size, rank=lambda: 0)
    one = SimpleNamespace(size=lambda: 1)
    return kind(config, 1, None, "self", pg_collection=SimpleNamespace(cp=group, tp=one))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "cp_size", "number"),
    [
        (varlen_attention.VarlenAttention, 2, 3),  # rows of keys, and where queries and keys start
        (learnable_softmax_attention.LearnableSoftmaxAttention, 1, 3),  # starts, and places of what is no sink
        (learnable_softmax_attention.LearnableSoftmaxAttention, 2, 4),
    ],
    ids=["CP 2", "sinks", "sinks, CP 2"],
)
def test_all_layers_of_a_pass_share_what_is_copied_to_the_device(
    kind: Any, cp_size: int, number: int, copies: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        varlen_attention, "gather_from_sequence_parallel_region", lambda x, **_: torch.cat([x] * cp_size)
    )
    of_micro_batch = packed([8, 4, 12])
    for passes in (1, 2):
        of_pass = copy.copy(of_micro_batch)  # as run_model does
        for _ in range(3):
            qkv = torch.randn(3, 24 // cp_size, HEADS, DIM)
            assert layer(kind, cp_size)(*qkv, packed_seq_params=of_pass).shape == (24 // cp_size, HEADS * DIM)
        assert len(copies) == passes * number


def test_where_sequences_end_is_known_without_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [torch.arange(5), torch.arange(3)]
    for packing, ends in (
        (Packing(multiple=4), [0, 5, 8]),
        (Packing(multiple=4, cp_rank=1, cp_size=2), [0, 8, 12, 16]),
    ):
        packed_seq_params = pack(samples, packing)["packed_seq_params"]
        assert varlen_attention.cu_seqlens_of(packed_seq_params).tolist() == ends
        monkeypatch.setattr(packed_seq_params, "cu_seqlens_q_padded", torch.empty(4, device="meta"))  # has no values
        assert varlen_attention.host_ends(copy.copy(packed_seq_params)) == ends


@pytest.mark.parametrize("width", [8, 6])
def test_the_kernel_gets_the_values_themselves_and_wider_ones_where_it_has_one_width_alone(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, width)
    given: list[torch.Tensor] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        given.append(v)
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel)
    ends = torch.tensor([0, 5], dtype=torch.int32)
    out = varlen_attention.varlen_kernel(query, key, value, (ends, ends), (5, 5), scale=0.3)
    assert (given[0] is value) == (width == 8), "a copy costs reading and writing them"
    assert given[0].shape == (5, 2, 8) and out.shape == (5, 4, width)
