"""The trainer's nucleus against that of the engine: what SGLang's PyTorch sampler makes of the same logits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from slime.algorithms.log_probs import calculate_log_probs_and_entropy

ENGINE = """
import sys
from slime.backends.sglang_utils import cpu_standins
cpu_standins.install()
import torch
from sglang.srt.layers.sampler import top_p_normalize_probs_torch
probs, top_ps = torch.load(sys.argv[1])
torch.save(top_p_normalize_probs_torch(probs, top_ps), sys.argv[1])
"""
"""In a process of its own: the stand-ins would stay in this one."""


def test_every_token_has_the_probability_that_sglang_samples_it_with(tmp_path: Path) -> None:
    logits = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    top_p, temperature, exchanged = 0.8, 0.7, tmp_path / "probs.pt"
    torch.save(((logits / temperature).softmax(-1), torch.full((4,), top_p)), exchanged)
    subprocess.run([sys.executable, "-c", ENGINE, str(exchanged)], check=True, timeout=120)
    engine = torch.load(exchanged)
    sampled = [row.nonzero()[:, 0] for row in engine]
    assert len({len(ids) for ids in sampled}) > 1 and all(len(ids) < 50 for ids in sampled)
    for row, ids in enumerate(sampled):
        num_kept = torch.zeros(len(ids))
        log_probs, _ = calculate_log_probs_and_entropy(
            logits[row].expand(len(ids), -1), ids, None, temperature=temperature, top_p=top_p, num_kept=num_kept
        )
        assert num_kept.tolist() == [len(ids)] * len(ids)
        torch.testing.assert_close(log_probs.exp(), engine[row, ids])
