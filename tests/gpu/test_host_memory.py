"""Activations and optimizer states that wait in host memory free the GPU's, and change no number; needs a GPU.

python -m pytest -q -s tests/gpu/test_host_memory.py
"""

from __future__ import annotations

import time

import pytest
import torch

from slime.utils import accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
NUM_LAYERS, ROWS, WIDTH = 8, 8192, 1024
MB = 1 << 20


class Layer(torch.nn.Module):
    """A gated MLP with a residual: keeps some 100 MB of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(WIDTH)
        self.up, self.down = (
            torch.nn.Linear(WIDTH, 6 * WIDTH, bias=False),
            torch.nn.Linear(3 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(self.norm(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.down(torch.nn.functional.silu(gate) * value)


def pass_over(layers: list[Layer], x: torch.Tensor) -> tuple[int, list[torch.Tensor]]:
    """(bytes that a forward pass leaves on the GPU, gradients)."""
    before = torch.cuda.memory_allocated()
    y = x
    for layer in layers:
        y = layer(y)
    kept = torch.cuda.memory_allocated() - before
    params = [param for layer in layers for param in layer.parameters()]
    return kept, list(torch.autograd.grad(y.float().square().mean(), params))


def test_activations_of_offloaded_layers_are_not_on_the_gpu_and_gradients_keep_their_bits() -> None:
    from slime.backends.megatron_utils.layers.activation_offload import ActivationOffload

    accelerator.activate("cuda")
    torch.manual_seed(0)
    layers = [Layer().cuda().bfloat16() for _ in range(NUM_LAYERS)]
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    usual, gradients = pass_over(layers, x)
    ActivationOffload(layers, 6, min_size=1 << 16)
    for _ in range(3):  # the second and third pass take the pinned memory of the first
        torch.cuda.synchronize()
        started = time.perf_counter()
        kept, found = pass_over(layers, x)
        torch.cuda.synchronize()
        print(f"kept {kept / MB:.0f} of {usual / MB:.0f} MB, {1e3 * (time.perf_counter() - started):.1f} ms")
        assert kept <= usual * 2 / NUM_LAYERS * 1.1 + MB  # two of eight layers stay
        assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_optimizer_in_host_memory_makes_the_same_update_without_state_on_the_gpu(overlaps: bool) -> None:
    from slime.backends.megatron_utils.megatron_patch.without_apex import Adam
    from slime.backends.megatron_utils.optimizer import Held, MasterAdam

    torch.manual_seed(0)
    masters = [torch.randn(4096, 1024, device="cuda") for _ in range(8)]
    params = [master.bfloat16() for master in masters]
    masters = [param.float() for param in params]
    usual = Adam(masters, lr=1e-2, weight_decay=0.1)
    ours = MasterAdam(
        params, held=Held(host_fraction=1.0, overlaps=overlaps, num_threads=8), lr=1e-2, weight_decay=0.1
    )
    for _ in range(3):
        grads = [torch.randn_like(master) for master in masters]
        for param, master, grad in zip(params, masters, grads, strict=True):
            param.decoupled_grad, master.grad = grad, grad
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        started = time.perf_counter()
        ours.step()
        torch.cuda.synchronize()
        print(f"step of 34M weights {1e3 * (time.perf_counter() - started):.1f} ms, overlaps={overlaps}")
        assert torch.cuda.memory_allocated() - before <= MB
        usual.step()
    for param, master in zip(params, masters, strict=True):
        # one rounding to bf16, and fused kernels of two devices that round differently
        torch.testing.assert_close(ours.state[param]["master_param"].cuda(), master, rtol=1e-5, atol=1e-6)
        assert torch.equal(param.cpu(), ours.state[param]["master_param"].bfloat16())
