"""The gated delta rule of flash-linear-attention and of FlashQLA is torch's, gradients included; needs a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from slime.utils import accelerator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
HEADS, DIM = 4, 128
PACKS = {"short": [70, 3, 1, 190, 56], "long": [5000, 64, 700]}
NAMES = ("q", "k", "v", "g", "beta")


def inputs(total: int) -> dict[str, torch.Tensor]:
    """As a layer makes them: queries and keys of length 1 and strengths in bf16, logarithms of decays in fp32."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(total, *shape, device="cuda", generator=generator)

    q, k = (torch.nn.functional.normalize(normal(HEADS, DIM), dim=-1).bfloat16() for _ in range(2))
    v, beta = normal(HEADS, DIM).bfloat16(), normal(HEADS).sigmoid().bfloat16()
    return dict(zip(NAMES, (q, k, v, torch.nn.functional.logsigmoid(normal(HEADS)), beta), strict=True))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("package", ["fla", "flash_qla"])
@pytest.mark.parametrize("pack", list(PACKS))
def test_kernels_give_the_values_and_gradients_of_the_rule_in_fp32(
    package: str, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.config.megatron.kernel_checks import FLASHQLA_CAPABILITIES, _broken_fla
    from slime_plugins.models.gated_delta_net import delta_rule_for, torch_delta_rule

    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if package == "flash_qla" and accelerator.compute_capability() not in FLASHQLA_CAPABILITIES:
        pytest.skip(f"flash_qla has no kernels for compute capability {accelerator.compute_capability()}")
    if package == "fla" and (problem := next(_broken_fla(), None)):
        pytest.skip(problem)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")  # fla's own kernel, where both are installed
    kernel = delta_rule_for(torch.device("cuda"), {"fla": "fla", "flash_qla": "flashqla"}[package])
    assert kernel is not torch_delta_rule
    lengths = PACKS[pack]
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    given = inputs(sum(lengths))
    weight = torch.randn(given["v"].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = {}
    for rule, dtype in ((kernel, None), (torch_delta_rule, torch.float32)):
        leaves = [given[name].detach().to(dtype or given[name].dtype, copy=True).requires_grad_() for name in NAMES]
        out = rule(*leaves, cu_seqlens)
        (out.float() * weight).sum().backward()
        found[rule] = [out.detach(), *(leaf.grad for leaf in leaves)]
    for name, of_kernel, expected in zip(("out", *NAMES), found[kernel], found[torch_delta_rule], strict=True):
        # bf16 has 8 bits of mantissa, and a chunk's products pass through it a few times.
        assert relative(of_kernel, expected) < (0.01 if name == "out" else 0.03), name
