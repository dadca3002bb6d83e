"""How often a function that is fused on CUDA is compiled, seen with a compiler on CPU that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from slime.backends.megatron_utils.model import spec
from slime.utils import fusion

HIDDEN, HEADS, GROUPS, DIM = 32, 4, 2, 8


@pytest.fixture(autouse=True)
def compiling() -> Iterator[None]:
    """The CPU stand-ins for CUDA turn the compiler off; no size may change but what is marked."""
    limit = torch._dynamo.config.recompile_limit
    with torch._dynamo.config.patch(disable=False, recompile_limit=limit, automatic_dynamic_shapes=False):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def test_a_function_stays_compiled_beyond_torchs_own_limit_of_kinds() -> None:
    counter = CompileCounter()

    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    call = fusion.compiled(double, backend=counter, dynamic=False)
    for size in range(2, 14):
        assert call(torch.ones(size)).sum() == 2 * size
    assert counter.frame_count == 12  # torch's limit is 8


def test_the_norms_of_a_layer_are_compiled_once_for_each_shape_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounter()
    plain = spec._rms_norm.__wrapped__  # type: ignore[attr-defined]
    call = fusion.compiled(plain, backend=counter)

    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        torch._dynamo.maybe_mark_dynamic(x, 0)  # as fused_on_cuda does
        return call(x, weight, eps)

    monkeypatch.setattr(spec, "_rms_norm", norm)
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=False)
    of_hidden, of_heads = spec.RMSNorm(config, HIDDEN), spec.RMSNorm(config, DIM)
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training):
            for tokens in (5, 9):
                embedded = torch.randn(1, tokens, HIDDEN, requires_grad=is_training).transpose(0, 1)
                hidden = torch.randn(tokens, 1, HIDDEN, requires_grad=is_training)
                both = torch.randn(tokens, 1, (HEADS + GROUPS) * DIM, requires_grad=is_training)
                q, k = both.split([HEADS * DIM, GROUPS * DIM], dim=-1)
                for x in (embedded, hidden):
                    assert of_hidden(x).shape == x.shape
                for x in (q.reshape(tokens, 1, HEADS, DIM), k.view(tokens, 1, GROUPS, DIM)):
                    torch.testing.assert_close(of_heads(x), plain(x, of_heads.weight, 1e-6))
    assert counter.frame_count == 6  # hidden states, queries and keys, with gradients and without
