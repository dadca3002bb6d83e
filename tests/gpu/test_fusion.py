"""What is fused on CUDA equals the same function as it is written, for changing lengths; needs a GPU."""

from __future__ import annotations

import inspect

import pytest
import torch

from slime.utils import fusion
from slime.utils.ppo_utils import calculate_log_probs_and_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
VOCAB, REAL = 4096, 4000


def log_probs_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = calculate_log_probs_and_entropy(
        leaf, targets, None, True, 64, temperature=0.7, vocab_size=REAL, rows=rows
    )
    assert entropy is not None
    (log_probs.sum() + 0.1 * (entropy * entropy).sum()).backward()
    assert leaf.grad is not None
    return log_probs.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_log_probs_equal_the_formula_in_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for num_rows in (200, 77):
        logits = (3 * torch.randn(num_rows, VOCAB, device="cuda", generator=generator)).to(dtype)
        rows = torch.arange(1, num_rows, 2, device="cuda")
        targets = torch.randint(REAL, (len(rows),), device="cuda", generator=generator)
        found = log_probs_and_gradient(logits, targets, rows)

        leaf = logits.double().requires_grad_()
        log_p = torch.log_softmax(leaf[rows, :REAL] / 0.7, dim=-1)
        expected = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        (expected.sum() + 0.1 * (entropy * entropy).sum()).backward()
        torch.testing.assert_close(found[0].double(), expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1].double(), entropy.detach(), rtol=1e-4, atol=1e-5)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found[2].double(), leaf.grad, rtol=tolerance, atol=1e-6)
    assert not fusion._unavailable, fusion._unavailable


def test_fused_norm_and_rotation_equal_their_unfused_selves() -> None:
    from slime.backends.megatron_utils.megatron_patch.packed_rope import _rotate
    from slime.backends.megatron_utils.model.spec import _rms_norm

    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.rand(128, device="cuda", generator=generator, requires_grad=True)
    for num_tokens in (64, 33):
        x = torch.randn(num_tokens, 4, 128, device="cuda", generator=generator)
        angle = torch.randn(num_tokens, 1, 128, device="cuda", generator=generator)
        for function, more in ((_rms_norm, (weight, 1e-6)), (_rotate, (angle.cos(), angle.sin()))):
            results = []
            for call in (function, inspect.unwrap(function)):
                leaf = x.clone().requires_grad_()
                out = call(leaf, *more)
                (out * out).sum().backward()
                results.append((out.detach(), leaf.grad))
            torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    assert not fusion._unavailable, fusion._unavailable


def test_a_weight_gradient_is_added_in_fp32_to_what_is_there() -> None:
    from slime.backends.megatron_utils.megatron_patch.gradient_accumulation import add_weight_gradient

    x, g = (torch.randn(256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    buffer = torch.ones(64, 64, device="cuda")
    add_weight_gradient(x, g, buffer)
    expected = 1 + g.double().t() @ x.double()
    torch.testing.assert_close(buffer.double(), expected, rtol=1e-5, atol=1e-4)
