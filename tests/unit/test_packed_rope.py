"""The rotation of a pack is bitwise Megatron's own, sequence by sequence, and reads nothing from the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import pytest
import torch

from slime.backends.megatron_utils.megatron_patch import layers

LENGTHS, HEADS, ROTATED, REST = [8, 4, 12], 3, 8, 4
# Latent attention's, and GLM-4's, which interleaves.
KINDS = {"plain": {}, "interleaved": {"rotary_interleaved": True}, "latent": {"multi_latent_attention": True}}
KINDS["latent, interleaved"] = KINDS["latent"] | KINDS["interleaved"]


@pytest.fixture
def rotate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our function in the place of Megatron's."""
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_thd", rope_utils._apply_rotary_pos_emb_thd)
    layers.rotate_packs_at_once()
    return rope_utils._apply_rotary_pos_emb_thd


def group(rank: int, size: int) -> Any:
    """As much of a context-parallel group as a rotation asks for."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_pack_is_rotated_as_megatron_rotates_each_sequence(rotate: Any, kind: str, rank: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(max(LENGTHS), 1, 1, ROTATED, generator=generator)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    t = torch.randn(sum(LENGTHS) // size, HEADS, ROTATED + REST, generator=generator)
    expected = []
    for x in t.split([length // size for length in LENGTHS]):
        freqs = rope_utils._get_thd_freqs_on_this_cp_rank(rank, size, x, table)
        expected.append(rope_utils._apply_rotary_pos_emb_bshd(x.unsqueeze(1), freqs, mscale=0.7, **KINDS[kind]))
    for _ in range(2):  # the second time with what is kept
        found = rotate(t, cu_seqlens, table, mscale=0.7, cp_group=group(rank, size), **KINDS[kind])
        assert torch.equal(found, torch.cat(expected).squeeze(1))


def test_another_table_pack_or_scale_is_not_taken_for_the_last_one(rotate: Any) -> None:
    def of(base: float, lengths: list[int], mscale: float) -> torch.Tensor:
        table = (torch.arange(6.0)[:, None] * base ** -torch.arange(4.0))[:, None, None].repeat(1, 1, 1, 2)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        found: torch.Tensor = rotate(torch.ones(6, 1, 8), cu_seqlens, table, mscale=mscale, cp_group=group(0, 1))
        return found

    # 6 tokens each: only what the rotation is told differs.
    assert (
        len(
            {
                tuple(of(*case).flatten().tolist())
                for case in ((2, [6], 1.0), (3, [6], 1.0), (2, [3, 3], 1.0), (2, [6], 0.5))
            }
        )
        == 4
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_is_read_from_the_device(rotate: Any, kind: str) -> None:
    """A tensor on the meta device has no values: whoever asks for one fails."""
    with torch.device("meta"):
        found = rotate(
            torch.empty(24, HEADS, ROTATED + REST),
            torch.empty(4, dtype=torch.int32),
            torch.empty(12, 1, 1, ROTATED),
            cp_group=group(0, 1),
            **KINDS[kind],
        )
    assert found.shape == (24, HEADS, ROTATED + REST)
