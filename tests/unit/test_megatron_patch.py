"""The run-time patches: Adam's maths, clipping, attention by equal lengths, and life beside the engine's stand-ins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.megatron_patch import without_apex
from slime.backends.megatron_utils.megatron_patch.without_apex import Adam

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("decoupled", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_adam_equals_torchs_and_counts_steps_in_the_group(decoupled, reference):
    start = [torch.randn(7, 3), torch.randn(5)]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    a, b = Adam(ours, **options, adam_w_mode=decoupled), reference(theirs, **options)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-7, rtol=1e-6)
    assert a.param_groups[0]["step"] == 5
    assert set(a.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}


def test_adam_counts_a_step_on_a_rank_whose_share_of_a_group_is_empty():
    adam = Adam([torch.nn.Parameter(torch.empty(0))], lr=1.0)
    adam.step()
    assert adam.param_groups[0]["step"] == 1


def test_gradients_have_the_norm_of_their_concatenation_and_are_clipped_in_place():
    grads = [torch.tensor([3.0, 0.0]), torch.empty(0), torch.tensor([[4.0], [12.0]])]
    norm, _ = without_apex.norm_of(1, torch.zeros(1), [grads], False)
    assert norm.tolist() == [13.0], "sqrt(9 + 16 + 144)"
    rough = [torch.tensor([1.0], dtype=torch.bfloat16) for _ in range(257)]
    assert without_apex.norm_of(1, torch.zeros(1), [rough], False)[0].item() == pytest.approx(257**0.5, rel=1e-6)
    without_apex.scale(1, torch.zeros(1), (grads, grads), 0.5)
    assert [grad.flatten().tolist() for grad in grads] == [[1.5, 0.0], [], [2.0, 6.0]]
    with pytest.raises(ValueError, match="in place"):
        without_apex.scale(1, torch.zeros(1), (grads, [grad.clone() for grad in grads]), 0.5)
    without_apex.scale(1, torch.zeros(1), ([], []), 0.5)  # a rank without a share


@pytest.mark.parametrize("lengths", [[5, 5, 5], [4, 1, 7, 4, 0, 1, 4], [12]])
def test_attention_by_equal_lengths_is_attention_sequence_by_sequence(lengths):
    from slime.backends.megatron_utils.layers.varlen_attention import attend_packed

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lengths), 4, 8, generator=generator, requires_grad=True)
    k, v = (torch.randn(sum(lengths), 2, 8, generator=generator) for _ in range(2))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).tolist()
    got = attend_packed(q, k, v, cu_seqlens, scale=0.3)
    expected = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        q1, k1, v1 = (x.transpose(0, 1) for x in parts)
        scores = q1 @ k1.repeat_interleave(2, 0).transpose(1, 2) * 0.3
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(future, -torch.inf), -1)
        expected.append((weights @ v1.repeat_interleave(2, 0)).transpose(0, 1))
    expected = torch.cat(expected)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    grads = [torch.autograd.grad(out.square().sum(), q)[0] for out in (got, expected)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)


BESIDE_THE_ENGINE = """
import sys, torch
def trainer():
    from slime.utils import accelerator
    from slime.backends.megatron_utils import megatron_patch
    accelerator.activate("cpu")
    megatron_patch.apply("cpu")
    megatron_patch.apply("cpu")
    from slime.backends.megatron_utils.model import spec
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).cuda().sum() == 0
def engine():
    from slime.backends.sglang_utils import cpu_standins
    cpu_standins.install()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    bucket = FlattenedTensorBucket(named_tensors=[("a", torch.ones(3))])
    assert bucket.get_flattened_tensor().numel()
for step in sys.argv[1:]:
    globals()[step]()
"""


@pytest.mark.processes
@pytest.mark.parametrize("order", [("trainer", "engine"), ("engine", "trainer")])
def test_the_stand_ins_of_trainer_and_engine_live_in_one_process(order):
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_THE_ENGINE, *order], cwd=ROOT, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr[-3000:]
