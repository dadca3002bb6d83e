"""Experts in one grouped product on CUDA equal one product for each expert, gradients included; needs a GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
EXPERTS, HIDDEN, WIDTH = 4, 256, 192


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within bfloat16's rounding of the inputs' products, which fp32 sums."""
    return bool((found.double() - expected).norm() <= 4e-3 * expected.norm() + 1e-6)


@pytest.mark.parametrize("counts", [[300, 0, 17, 195], [0, 512, 0, 0], [1, 2, 3, 506]])
@pytest.mark.parametrize("in_one_storage", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_values_and_gradients_are_those_of_a_product_for_each_expert(
    counts: list[int], in_one_storage: bool, fused: bool
) -> None:
    from slime.backends.megatron_utils.layers import grouped_experts

    generator = torch.Generator("cuda").manual_seed(0)
    # as in a data-parallel buffer: another parameter lies between two of these
    whole = torch.randn(EXPERTS, 2 * WIDTH * HIDDEN, device="cuda", generator=generator).bfloat16() * 0.1
    views = [whole[i, : WIDTH * HIDDEN].view(WIDTH, HIDDEN) for i in range(EXPERTS)]
    weights = [torch.nn.Parameter(view if in_one_storage else view.clone()) for view in views]
    for weight in weights:
        weight.main_grad = torch.ones(WIDTH, HIDDEN, device="cuda")
    rows = torch.randn(512, HIDDEN, device="cuda", generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(512, WIDTH, device="cuda", generator=generator).bfloat16()
    offsets = torch.tensor(counts, device="cuda").cumsum(0).int()

    assert grouped_experts.can_group(rows, weights[0])
    stacked = grouped_experts.stacked([weight.t() for weight in weights])
    assert (stacked.data_ptr() == whole.data_ptr()) == in_one_storage
    found = grouped_experts.GroupedLinear.apply(grouped_experts._product, counts, offsets, fused, rows, *weights)
    found.backward(grad)

    parts = zip(rows.detach().double().split(counts), grad.double().split(counts), weights, strict=True)
    parts = [(row, of_row, weight.detach().double()) for row, of_row, weight in parts]
    assert close(found, torch.cat([row @ weight.t() for row, _, weight in parts]))
    assert rows.grad is not None
    assert close(rows.grad, torch.cat([of_row @ weight for _, of_row, weight in parts]))
    for weight, (row, of_row, _) in zip(weights, parts, strict=True):
        of_weight = weight.main_grad - 1 if fused else weight.grad
        assert close(of_weight, of_row.t() @ row)
