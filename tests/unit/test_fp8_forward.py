"""Linear layers whose forward pass is an fp8 engine's: which ones, which numbers, which gradients."""

from __future__ import annotations

import argparse
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.weights.quantization import dequantize, quantize_blocks, quantize_rows
from tests.unit.megatron_fakes import make_args, make_hf_model, packed, run_world
from tools import convert_hf_to_fp8

pytestmark = pytest.mark.processes

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
}
FC1, FC2, QKV, PROJ = "mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv", "self_attention.linear_proj"


def checkpoints(tmp_path: Path, family: str = "qwen3", **config: Any) -> Path:
    """The directory of an fp8 checkpoint; beside it lies hf/, the one in fp32 of which it was made."""
    make_hf_model(tmp_path / "hf", family, **SIZES | config)
    convert = ["--model-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "fp8"), "--block-size", "128", "128"]
    assert convert_hf_to_fp8.main(convert) == 0
    return tmp_path / "fp8"


def asked(path: Path, flags: str = "", **choice: Any) -> argparse.Namespace:
    others = {
        "megatron_deepgemm_forward_modules": None,
        "num_rollout": None,
        "num_epoch": None,
        "global_batch_size": 8,
    }
    return make_args(path, flags, **others | choice)


def changed(chunks: list[Any]) -> set[tuple[int, str]]:
    """(layer in the whole model from 0, linear layer) of everything that computes in fp8 on this rank."""
    from slime.backends.megatron_utils.model_provider import unwrap

    return {
        (layer.layer_number - 1, name)
        for chunk in chunks
        for layer in unwrap(chunk).decoder.layers
        for name, module in layer.named_modules()
        if "_forward_impl" in vars(module)
    }


def check_choice(args: argparse.Namespace, expected: set[tuple[int, str]]) -> None:
    from slime.backends.megatron_utils.model.setup import setup_model_and_optimizer

    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, changed(setup_model_and_optimizer(args).model))
    assert set.union(*found) == expected, found
    assert sum(map(len, found)) == len(expected), "no layer is on two stages"


def test_only_the_named_layers_and_modules_are_changed(tmp_path: Path) -> None:
    path = checkpoints(tmp_path)
    run_world(1, check_choice, asked(path), set())
    every = {(layer, name) for layer in (0, 3) for name in (QKV, PROJ, FC1, FC2)}
    run_world(1, check_choice, asked(path, megatron_deepgemm_forward_layers=[0, 3]), every)
    some = asked(
        path,
        megatron_deepgemm_forward_layers=[2],
        megatron_deepgemm_forward_modules=["linear_fc2", "self_attention.linear_proj"],
    )
    run_world(1, check_choice, some, {(2, PROJ), (2, FC2)})


def test_layers_are_numbered_over_all_pipeline_stages(tmp_path: Path) -> None:
    path, stages = checkpoints(tmp_path), "--pipeline-model-parallel-size 2"
    some: dict[str, Any] = {"megatron_deepgemm_forward_layers": [1, 2, 3], "megatron_deepgemm_forward_modules": [FC2]}
    expected = {(1, FC2), (2, FC2), (3, FC2)}
    run_world(2, check_choice, asked(path, stages, **some), expected)
    virtual = f"{stages} --num-virtual-stages-per-pipeline-rank 2"
    run_world(2, check_choice, asked(path, virtual, **some), expected)


def test_what_the_checkpoint_keeps_in_16_bit_stays_so(tmp_path: Path) -> None:
    path = checkpoints(tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn.o_proj", "model.layers.1.mlp"]
    (path / "config.json").write_text(json.dumps(config))
    args = asked(path, megatron_deepgemm_forward_layers=[0, 1])
    run_world(1, check_choice, args, {(0, QKV), (0, FC1), (0, FC2), (1, QKV)})


def rounded(rows: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize_rows(rows, 128), (1, 128))


def rounded_weight(weight: torch.Tensor, *, ue8m0: bool = False) -> torch.Tensor:
    return dequantize(*quantize_blocks(weight, (128, 128), ue8m0=ue8m0), (128, 128))


def results(module: Any, given: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradient of the input and of the weight (added to ones, where there is a main_grad)."""
    leaf = given.clone().requires_grad_()
    module.weight.grad = None
    if hasattr(module.weight, "main_grad"):
        module.weight.main_grad = torch.ones(module.weight.shape)
    output = module(leaf)[0]
    output.backward(grad)
    of_weight = module.weight.main_grad if hasattr(module.weight, "main_grad") else module.weight.grad
    return [output.detach(), leaf.grad, of_weight]


def check_linears(args: argparse.Namespace) -> None:
    """Each linear layer of layer 0, with its own part of what all ranks are given."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.layers.fp8_linears import compute_in_fp8
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.config.megatron.precision.fp8_forward_plan import Fp8Choice

    model = get_model_provider_func(args)().bfloat16()
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    group, layer = parallel_state.get_tensor_model_parallel_group(), model.decoder.layers[0]
    compute_in_fp8([model], Fp8Choice.of(args))
    generator = torch.Generator().manual_seed(0)
    for name in (QKV, PROJ, FC1, FC2):
        module = layer.get_submodule(name)
        is_row = name in (PROJ, FC2)
        columns = module.weight.shape[1] * (size if is_row else 1)
        whole = torch.randn(6, 1, columns, generator=generator).bfloat16()
        mine = whole.chunk(size, -1)[rank] if is_row else whole.chunk(size)[rank]
        seen = (mine if is_row else whole).flatten(0, 1)  # column layers gather the sequence first
        product = (rounded(seen) @ rounded_weight(module.weight.detach()).t()).bfloat16()
        if is_row and size > 1:  # what all ranks have, added up; this rank keeps its part of the sequence
            torch.distributed.all_reduce(product, group=group)
            product = product.chunk(size)[rank]
        grad = torch.randn(product.shape, generator=generator).bfloat16().unsqueeze(1)
        for fused in (False, True):
            if fused:
                module.weight.main_grad = torch.ones(module.weight.shape)
            module.gradient_accumulation_fusion = fused
            in_fp8 = results(module, mine, grad)
            changed_product = vars(module).pop("_forward_impl")
            plain = results(module, mine, grad)
            module._forward_impl = changed_product
            assert torch.equal(in_fp8[0].flatten(0, 1), product), name
            assert not torch.equal(in_fp8[0], plain[0]), name
            assert torch.equal(in_fp8[1], plain[1]) and torch.equal(in_fp8[2], plain[2]), name
        module.weight.requires_grad_(False)
        leaf = mine.clone().requires_grad_()
        module(leaf)[0].backward(grad)
        assert torch.equal(module(leaf)[0].flatten(0, 1), product) and torch.equal(leaf.grad, plain[1]), name


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_a_linear_layer_rounds_what_it_multiplies_and_has_the_gradients_of_bf16(tmp_path: Path, flags: str) -> None:
    run_world(
        2 if flags else 1, check_linears, asked(checkpoints(tmp_path), flags, megatron_deepgemm_forward_layers=[0])
    )


def check_that_models_agree(args: argparse.Namespace, hf: Path) -> None:
    """The model in fp8 is near the one that does not round, and not the same; its gradients are finite."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.layers.fp8_linears import compute_in_fp8
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.config.megatron.precision.fp8_forward_plan import Fp8Choice

    lengths = [9, 5]
    ids = torch.randint(0, 100, (1, sum(lengths)), generator=torch.Generator().manual_seed(3))
    logits = []
    for choice in (None, Fp8Choice.of(args)):
        model = get_model_provider_func(args)()
        load_hf_weights(args, [model], hf)
        compute_in_fp8([model], choice)
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
        logits.append(model(ids, None, None, packed_seq_params=packed(lengths))[0, :, :100])
        logits[-1].square().sum().backward()
        assert all(param.main_grad.isfinite().all() for param in model.parameters())
    plain, in_fp8 = (one.detach() for one in logits)
    # e4m3 has 3 bits: up to 6% a value. Some tokens have other experts then.
    assert 1e-3 < (in_fp8 - plain).norm() / plain.norm() < (0.3 if args.num_moe_experts else 0.15)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_model_in_fp8_is_near_the_one_in_full_precision(tmp_path: Path, family: str) -> None:
    path = checkpoints(tmp_path, family, **({"moe_intermediate_size": 128} if family == "qwen3_moe" else {}))
    flags, layers = ("--moe-grouped-gemm", [0, 1, 2, 3]) if family == "qwen3_moe" else ("", None)
    args = asked(
        path, flags, megatron_deepgemm_forward_layers=[0, 1, 2, 3], megatron_deepgemm_moe_forward_layers=layers
    )
    run_world(1, check_that_models_agree, args, tmp_path / "hf")


def check_experts(args: argparse.Namespace) -> None:
    from slime.backends.megatron_utils.layers import grouped_experts
    from slime.backends.megatron_utils.layers.fp8_linears import compute_in_fp8, fp8_grouped_product
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.config.megatron.precision.fp8_forward_plan import Fp8Choice

    model = get_model_provider_func(args)().bfloat16()
    compute_in_fp8([model], Fp8Choice.of(args))
    assert changed([model]) == set()  # neither routers nor attention
    with_experts = [layer.mlp.experts._weighs_last for layer in model.decoder.layers]
    assert with_experts == [False, True, False, False]
    experts, counts = model.decoder.layers[1].mlp.experts, [3, 0, 4, 1, 0, 0, 2, 0]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 128, generator=generator).bfloat16()
    probs = torch.rand(10, generator=generator)
    with torch.no_grad():
        found, _ = experts(rows, torch.tensor(counts), probs)
    start = 0
    for expert, count in zip(experts.local_experts, counts, strict=True):
        part = slice(start, start + count)
        first, second = (rounded_weight(expert.get_submodule(n).weight.detach()) for n in ("linear_fc1", "linear_fc2"))
        gate, up = (rounded(rows[part]) @ first.t()).bfloat16().chunk(2, -1)
        out = (rounded(torch.nn.functional.silu(gate) * up) @ second.t()).bfloat16()
        assert torch.equal(found[part], (out * probs[part, None]).bfloat16())  # weighed behind, as SGLang does
        start += count

    grad, recomputed = torch.randn(10, 128, generator=generator).bfloat16(), []
    for param in experts.parameters():
        param.main_grad = torch.zeros(param.shape)
    for experts._recomputes_activation in (False, True):
        leaves = [rows.clone().requires_grad_(), probs.clone().requires_grad_()]
        experts(leaves[0], torch.tensor(counts), leaves[1])[0].backward(grad)
        recomputed.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*recomputed, strict=True)) and recomputed[0][1].abs().min() > 0

    weights = [torch.nn.Parameter(expert.linear_fc1.weight.detach().clone()) for expert in experts.local_experts]
    grad, offsets, gradients = torch.randn(10, 256, generator=generator).bfloat16(), torch.tensor(counts).cumsum(0), []

    def in_fp8(*given: Any) -> torch.Tensor:
        return fp8_grouped_product(*given, is_ue8m0=True)

    for product in (in_fp8, grouped_experts._product):
        products = product, grouped_experts.grouped_product
        leaves = [rows.clone().requires_grad_(), *(torch.nn.Parameter(w.detach().clone()) for w in weights)]
        grouped_experts.GroupedLinear.apply(products, counts, offsets, False, *leaves).backward(grad)
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_experts_are_multiplied_in_fp8_and_have_the_gradients_of_bf16(tmp_path: Path) -> None:
    path = checkpoints(tmp_path, "qwen3_moe", moe_intermediate_size=128)
    run_world(1, check_experts, asked(path, "--moe-grouped-gemm", megatron_deepgemm_moe_forward_layers=[1]))


def fake_deep_gemm(alignment: int) -> types.ModuleType:
    """DeepGEMM's two functions (the same names in 0.1.5 and 0.2.5), in torch, with what their kernels assume asserted.

    It means something because its outputs come from the values and scales that it is handed, in the layout that
    SGLang hands them in: scales that were swapped, not aligned, or of other groups would fail or give other numbers.
    """

    def matrix(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, scales = pair
        rows, groups = scales.shape
        assert values.dtype == torch.float8_e4m3fn and values.is_contiguous() and values.shape == (rows, groups * 128)
        assert scales.stride() == (1, -(-rows // 4) * 4) and scales.dtype == torch.float32
        return dequantize(values, scales, (1, 128))

    def fp8_gemm_nt(a, b, d, c=None, recipe=None) -> None:
        assert b[1].is_contiguous() and d.dtype == torch.bfloat16
        d.copy_(matrix(a) @ dequantize(*b, (128, 128)).t())

    def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None) -> None:
        assert grouped_layout.dtype == torch.int32 and len(grouped_layout) % alignment == 0
        assert (grouped_layout.view(-1, alignment) == grouped_layout[::alignment, None]).all()
        weights = dequantize(*b, (128, 128))
        d.copy_(torch.einsum("mk,mnk->mn", matrix(a), weights[grouped_layout.long()]))

    module = types.ModuleType("deep_gemm")
    module.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    module.m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous  # type: ignore[attr-defined]
    module.get_mk_alignment_for_contiguous_layout = lambda: alignment  # type: ignore[attr-defined]
    return module


def check_deep_gemm(_: argparse.Namespace) -> None:
    from slime.backends.megatron_utils.layers import fp8_linears
    from slime.backends.megatron_utils.layers.fp8_linears import aligned_places, fp8_grouped_product, fp8_product

    assert [part.tolist() for part in aligned_places([3, 0, 1], 2)] == [[0, 1, 2, 4], [0, 0, 0, 0, 2, 2]]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(14, 256, generator=generator).bfloat16()
    weights = [torch.randn(192, 256, generator=generator).bfloat16() for _ in range(3)]
    counts = [9, 0, 5]
    sys.modules["deep_gemm"] = fake_deep_gemm(alignment=8)
    found = []
    for is_on_gpu in (False, True):
        fp8_linears.is_on_gpu = lambda _, answer=is_on_gpu: answer
        grouped = fp8_grouped_product(rows, weights, counts, torch.empty(0), is_ue8m0=False)
        empty = fp8_product(rows[:0], weights[0], False)
        found.append([fp8_product(rows, weights[0], True), grouped, empty])
    assert [tuple(one.shape) for one in found[0]] == [(14, 192), (14, 192), (0, 192)]
    for emulated, of_kernel in zip(*found, strict=True):
        torch.testing.assert_close(of_kernel, emulated, rtol=2**-7, atol=1e-3)  # sums in another order: a last bit
    exact = rounded(rows) @ rounded_weight(weights[0], ue8m0=True).t()
    assert torch.equal(found[0][0], exact.bfloat16())


def test_deep_gemm_is_given_what_its_kernels_take() -> None:
    run_world(1, check_deep_gemm, make_args())
