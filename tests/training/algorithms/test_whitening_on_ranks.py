"""Whitening over a real group of two processes, one of which may have nothing to whiten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

VALUES = [[1.0, 4.0, 100.0, -2.0], [0.5, 3.0]]
MASKS = [[1, 1, 0, 1], [1, 1]]
SHARES = {
    "both have tokens": [[0], [1]],
    "the second has no sample": [[0, 1], []],
    "the second has only masked tokens": [[0, 1], ["masked"]],
}


def expected() -> list[np.ndarray]:
    trained = np.array([v for vs, ms in zip(VALUES, MASKS, strict=True) for v, m in zip(vs, ms, strict=True) if m])
    scale = np.sqrt(trained.var(ddof=1) + 1e-8)
    return [(np.array(v) - trained.mean()) / scale * np.array(m) for v, m in zip(VALUES, MASKS, strict=True)]


def check_ranks(args: Any) -> None:
    from slime.algorithms.advantages import whiten
    from slime.utils.distributed_utils import distributed_masked_whiten

    group = dist.group.WORLD
    for name, shares in SHARES.items():
        mine = shares[dist.get_rank()]
        is_masked = mine == ["masked"]
        values = [torch.tensor([7.0, 9.0])] if is_masked else [torch.tensor(VALUES[i]) for i in mine]
        masks = [torch.zeros(2)] if is_masked else [torch.tensor(MASKS[i]) for i in mine]
        wanted = [torch.zeros(2)] if is_masked else [torch.tensor(expected()[i]).float() for i in mine]
        found = whiten(values, masks, group)
        assert len(found) == len(wanted), name
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=name)
        flat = torch.cat(values) if values else torch.zeros(0)
        mask = torch.cat(masks) if masks else torch.zeros(0)
        whitened = distributed_masked_whiten(flat, mask, group) * mask
        torch.testing.assert_close(whitened, torch.cat(wanted) if wanted else torch.zeros(0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="every token of every sample is masked out"):
        distributed_masked_whiten(torch.ones(2), torch.zeros(2), group)


def test_values_are_whitened_over_the_trained_tokens_of_both_ranks(tmp_path: Path):
    make_hf_model(tmp_path)
    run_world(2, check_ranks, make_args(tmp_path, actor_num_gpus_per_node=2))
