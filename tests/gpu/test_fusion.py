"""What is fused on CUDA equals the same function as it is written, for changing lengths; needs a GPU.

The kernels by hand are also checked without one: TRITON_INTERPRET=1 python -m pytest tests/gpu/test_fusion.py, with
triton installed in the environment.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

import pytest
import torch

from slime.algorithms.log_probs import calculate_log_probs_and_entropy
from slime.utils.accelerator import fusion

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
on_cuda = pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="needs CUDA"),
]
VOCAB, REAL = 4096, 4000
Run = Callable[..., torch.Tensor]


def generator() -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(0)


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


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_log_probs_equal_the_formula_in_float64(dtype: torch.dtype) -> None:
    random = generator()
    for num_rows in (200, 77):
        logits = (3 * torch.randn(num_rows, VOCAB, device="cuda", generator=random)).to(dtype)
        rows = torch.arange(1, num_rows, 2, device="cuda")
        targets = torch.randint(REAL, (len(rows),), device="cuda", generator=random)
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


def close_to_float64(kernel: Run, plain: Run, leaves: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    """Result and gradients of a kernel differ from those of `plain` in float64 by one rounding to `dtype`."""
    found, expected = [], []
    for run, of_type, results in ((kernel, dtype, found), (plain, torch.float64, expected)):
        copies = [leaf.to(of_type).detach().requires_grad_() for leaf in leaves]
        out = run(*copies)
        out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).to(dtype).to(of_type).view(out.shape))
        results += [out.detach(), *(copy.grad for copy in copies)]
    # half of the last digit's value; the interpreter cuts digits off
    relative = 1e-5 if dtype == torch.float32 else 2**-7 if IS_INTERPRETED else 2**-8
    for result, exact in zip(found, expected, strict=True):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, rtol=1.01 * relative, atol=relative * float(exact.std()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_zero_centered", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 2560), (700, 96), (33, 4, 128), (5, 3, 64), (33, 1, 96), (1, 33, 96), (33, 1, 4, 128)],
    ids=["one row", "many rows", "heads", "few heads", "a batch of one", "one first", "heads, a batch of one"],
)
def test_the_norms_kernel_computes_what_the_definition_says(
    shape: tuple[int, ...], is_zero_centered: bool, dtype: torch.dtype
) -> None:
    from slime.backends.megatron_utils.kernels.small import rms_norm

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight + is_zero_centered)

    wide = torch.randn(*shape[:-1], 3 * shape[-1], device=DEVICE, generator=generator(), dtype=torch.float32).to(dtype)
    weight = torch.rand(shape[-1], device=DEVICE, generator=generator()).to(dtype)
    part = slice(shape[-1], 2 * shape[-1])  # as queries lie between keys and values
    close_to_float64(
        lambda x, w: rms_norm(x[..., part], w, 1e-6, is_zero_centered), lambda x, w: norm(x[..., part], w),
        (wide, weight), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("are_read_paired", "are_written_paired"), [(False, False), (True, True), (True, False)],
    ids=["halves", "interleaved", "latent"],
)  # fmt: skip
@pytest.mark.parametrize("heads_dim", [(4, 128), (1, 64), (3, 40)])
def test_the_rotations_kernel_computes_what_the_definition_says(
    heads_dim: tuple[int, int], are_read_paired: bool, are_written_paired: bool, dtype: torch.dtype
) -> None:
    from slime.backends.megatron_utils.kernels.small import rotate
    from slime.backends.megatron_utils.megatron_patch import layers

    heads, dim = heads_dim
    t = torch.randn(77, 2 * heads, dim, device=DEVICE, generator=generator()).to(dtype)
    angles = torch.randn(77, 1, dim, device=DEVICE, generator=generator())
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    plain = inspect.unwrap(layers.rotate)
    close_to_float64(
        lambda x: rotate(x[:, heads:], cos, sin, are_read_paired, are_written_paired),
        lambda x: plain(x[:, heads:], cos.double(), sin.double(), are_read_paired, are_written_paired),
        (t,), dtype,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [3072, 100])
def test_the_activations_kernel_computes_what_the_definition_says(width: int, dtype: torch.dtype) -> None:
    from slime.backends.megatron_utils.kernels.small import SwiGLU, silu_product

    y = torch.randn(19, 2 * width, device=DEVICE, generator=generator()).to(dtype)
    close_to_float64(SwiGLU.apply, lambda y: torch.nn.functional.silu(y[:, :width]) * y[:, width:], (y,), dtype)
    parts = y[None, :, :width].contiguous(), y[None, :, width:].contiguous()
    close_to_float64(silu_product, lambda gate, x: torch.nn.functional.silu(gate) * x, parts, dtype)


def test_a_norm_started_again_has_the_values_of_the_new_pack() -> None:
    from slime.backends.megatron_utils.kernels import small

    weight, buffer = torch.ones(128, device=DEVICE), torch.randn(3000, device=DEVICE, generator=generator())
    for rows, offset in ((3, 0), (20, 0), (7, 128), (7, 1)):  # the last is not aligned
        x = buffer[offset : offset + rows * 128].view(rows, 128)
        expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        torch.testing.assert_close(small.rms_norm(x, weight, 1e-6, False), expected)


def test_a_norm_of_dimensions_that_no_view_joins_is_right_too() -> None:
    from slime.backends.megatron_utils.kernels.small import rms_norm

    wide = torch.randn(3, 2, 4, 8, device=DEVICE, generator=generator())
    close_to_float64(
        lambda x: rms_norm(x.transpose(0, 1), torch.ones(8, device=DEVICE), 1e-6, False),
        lambda x: x.transpose(0, 1) * (x.transpose(0, 1).square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
        (wide,), torch.float32,
    )  # fmt: skip


def test_an_empty_pack_needs_no_kernel() -> None:
    from slime.backends.megatron_utils.kernels.small import rms_norm

    x, weight = (
        torch.empty(0, 64, device=DEVICE, requires_grad=True),
        torch.ones(64, device=DEVICE, requires_grad=True),
    )
    rms_norm(x, weight, 1e-6, False).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@on_cuda
def test_a_model_on_cuda_takes_the_kernels() -> None:
    from slime.backends.megatron_utils import megatron_patch

    megatron_patch.apply("cuda")
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from slime.backends.megatron_utils.megatron_patch import layers
    from slime.backends.megatron_utils.model.spec import rms_norm

    x = torch.randn(8, 2, 64, device="cuda", requires_grad=True)
    weight, angle = torch.ones(64, device="cuda"), torch.randn(8, 1, 64, device="cuda")
    for out, kernel in (
        (rms_norm(x, weight, 1e-6, False), "_RMSNorm"),
        (layers.rotate(x, angle.cos(), angle.sin(), False, False), "_Rotation"),
        (bias_swiglu_impl(x, None), "SwiGLU"),
    ):
        function = out.grad_fn if kernel != "SwiGLU" else out.grad_fn.next_functions[0][0]
        assert type(function).__name__ == kernel + "Backward"


@on_cuda
def test_a_weight_gradient_is_added_in_fp32_to_what_is_there() -> None:
    from slime.backends.megatron_utils.megatron_patch.without_apex import add_weight_gradient

    x, g = (torch.randn(256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    buffer = torch.ones(64, 64, device="cuda")
    add_weight_gradient(x, g, buffer)
    expected = 1 + g.double().t() @ x.double()
    torch.testing.assert_close(buffer.double(), expected, rtol=1e-5, atol=1e-4)
