"""--fp8-format e4m3 --fp8-recipe blockwise: which layers, which numbers, and what is refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.megatron.precision import fp8_training_plan
from slime.config.megatron.precision.fp8_training_plan import Fp8Training, fp8_training_problems
from slime.config.parse import CommandLine
from slime.weights.formats import Fp8Format
from slime.weights.quantization import dequantize
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.megatron_fakes import make_args, make_hf_model, packed, run_world
from tests.unit.script_fakes import hf_config, script_flags
from tests.unit.test_fp8_forward import FC1, FC2, PROJ, QKV, SIZES, changed, checkpoints, results, rounded
from tests.unit.test_fp8_forward import rounded_weight as rounded_blocks

__all__ = ["check", "command_line"]  # fixtures
FLAGS = "--fp8-format e4m3 --fp8-recipe blockwise"


def asked(path: Path, flags: str = "", **choice: Any) -> argparse.Namespace:
    return make_args(path, f"{FLAGS} {flags}", num_rollout=None, num_epoch=None, global_batch_size=8, **choice)


def along_tokens(matrix: torch.Tensor) -> torch.Tensor:
    """[T, n], rounded with a scale for 128 tokens of a channel."""
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % 128))
    return rounded(padded.t()).t()[: len(matrix)]


def check_linears(args: argparse.Namespace) -> None:
    """Each linear layer of layer 0, with its own part of what all ranks are given."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.layers.fp8_linears import train_in_fp8
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)().bfloat16()
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    group, layer = parallel_state.get_tensor_model_parallel_group(), model.decoder.layers[0]
    train_in_fp8([model], Fp8Training.of(args))
    assert changed([model]) == {(number, name) for number in range(4) for name in (QKV, PROJ, FC1, FC2)}

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        if size > 1:
            torch.distributed.all_reduce(tensor, group=group)
        return tensor

    generator = torch.Generator().manual_seed(0)
    for name in (QKV, PROJ, FC1, FC2):
        module = layer.get_submodule(name)
        is_row = name in (PROJ, FC2)
        columns = module.weight.shape[1] * (size if is_row else 1)
        whole = torch.randn(140, 1, columns, generator=generator).bfloat16()  # no multiple of 128 tokens
        mine = whole.chunk(size, -1)[rank] if is_row else whole.chunk(size)[rank]
        seen = (mine if is_row else whole).flatten(0, 1)  # column layers gather the sequence first
        weight = rounded_blocks(module.weight.detach()).double()
        product = (rounded(seen).double() @ weight.t()).bfloat16()
        grads = torch.randn(140, 1, len(weight) * (1 if is_row else size), generator=generator).bfloat16()
        grad = grads.chunk(size)[rank] if is_row else grads.chunk(size, -1)[rank]
        of_output = (grads if is_row else grad).flatten(0, 1)
        of_input = (rounded(of_output).double() @ weight).bfloat16()
        if not is_row:
            of_input = summed(of_input).chunk(size)[rank]
        of_weight = along_tokens(of_output).double().t() @ along_tokens(seen).double()
        expected = [summed(product).chunk(size)[rank] if is_row else product, of_input]
        for fused in (False, True):
            if fused:
                module.weight.main_grad = torch.ones(module.weight.shape)
            module.gradient_accumulation_fusion = fused
            output, input_grad, weight_grad = results(module, mine, grad)
            for found, exact in zip((output, input_grad), expected, strict=True):
                # bf16 has 8 bits: a sum in another order may round to the neighbour
                torch.testing.assert_close(found.flatten(0, 1).double(), exact.double(), rtol=2**-7, atol=2e-2)
            limits = {"rtol": 1e-4, "atol": 1e-3} if fused else {"rtol": 2**-7, "atol": 2e-2}
            torch.testing.assert_close(weight_grad.double(), of_weight + fused, **limits)
        module.weight.requires_grad_(False)  # frozen: the input's gradient is the same
        leaf = mine.clone().requires_grad_()
        module(leaf)[0].backward(grad)
        assert torch.equal(leaf.grad, input_grad) and module.weight.grad is None, name


@pytest.mark.processes
@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_output_and_both_gradients_are_products_of_e4m3_values(tmp_path: Path, flags: str) -> None:
    run_world(2 if flags else 1, check_linears, asked(checkpoints(tmp_path), flags))


def check_sync(args: argparse.Namespace) -> None:
    """The bytes that go to the engines are those that the layers multiply with."""
    from slime.backends.megatron_utils.layers.fp8_linears import quantized_weight
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    model = get_model_provider_func(args)().bfloat16()
    sent = {name: tensor for bucket in iter_hf_buckets(args, [model], buffer_size=2**30) for name, tensor in bucket}
    layer, prefix = model.decoder.layers[1], "model.layers.1."

    def found(*names: str) -> list[torch.Tensor]:
        return [torch.cat([sent[f"{prefix}{name}.weight{end}"] for name in names]) for end in ("", "_scale_inv")]

    expected = {
        PROJ: found("self_attn.o_proj"),
        FC1: found("mlp.gate_proj", "mlp.up_proj"),
        FC2: found("mlp.down_proj"),
    }
    # Two groups of one query, one key and one value head: 128 rows, one block each
    q, k, v = (found(f"self_attn.{name}_proj") for name in "qkv")
    rows = [128, 1]
    expected[QKV] = [
        torch.cat([part[i].split(rows[i])[group] for group in (0, 1) for part in (q, k, v)]) for i in (0, 1)
    ]
    for name, (values, scales) in expected.items():
        weight = layer.get_submodule(name).weight
        trained = quantized_weight(weight, is_ue8m0=False)
        assert torch.equal(trained.values.view(torch.uint8), values.view(torch.uint8)), name
        assert torch.equal(trained.scales, scales), name
        turned = quantized_weight(weight, is_ue8m0=False, transposed=True)
        assert torch.equal(dequantize(*turned, (128, 128)), dequantize(values, scales, (128, 128)).t()), name


@pytest.mark.processes
def test_engines_get_the_very_values_that_were_trained_with(tmp_path: Path) -> None:
    run_world(1, check_sync, asked(checkpoints(tmp_path)))


def check_recomputation(args: argparse.Namespace) -> None:
    from slime.backends.megatron_utils.layers.fp8_linears import train_in_fp8
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    ids = torch.randint(0, 100, (1, 14), generator=torch.Generator().manual_seed(3))
    gradients = []
    for granularity in (None, "full"):
        args.recompute_granularity = granularity
        args.recompute_method, args.recompute_num_layers = ("uniform", 1) if granularity else (None, None)
        torch.manual_seed(0)
        model = get_model_provider_func(args)()
        train_in_fp8([model], Fp8Training.of(args))
        for param in model.parameters():
            param.main_grad = torch.zeros(param.shape)
        model(ids, None, None, packed_seq_params=packed([9, 5]))[0, :, :100].square().sum().backward()
        gradients.append([param.main_grad for param in model.decoder.parameters() if param.dim() == 2])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))
    assert all(grad.abs().max() > 0 for grad in gradients[0])


@pytest.mark.processes
def test_recomputed_layers_have_the_same_gradients(tmp_path: Path) -> None:
    run_world(1, check_recomputation, asked(checkpoints(tmp_path)))


def taken(path: Path, flags: str = "") -> set[tuple[int, str]]:
    plan = Fp8Training.of(asked(path, flags))
    assert plan is not None
    return {(layer, name) for layer, sizes in enumerate(plan.sizes) for name in sizes if plan.takes(layer, name)}


def test_layers_that_are_no_whole_blocks_or_16_bit_in_the_checkpoint_stay_in_16_bit(tmp_path: Path) -> None:
    make_hf_model(tmp_path / "hf", "qwen3", **SIZES | {"intermediate_size": 192})
    assert taken(tmp_path / "hf") == {(layer, name) for layer in range(4) for name in (QKV, PROJ)}
    path = checkpoints(tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn.o_proj", "model.layers.1.mlp"]
    (path / "config.json").write_text(json.dumps(config))
    every = {(layer, name) for layer in range(4) for name in (QKV, FC1, FC2)}
    assert taken(path) == every - {(1, FC1), (1, FC2)}


def said(
    tmp_path: Path, command_line: CommandLine, flags: str, model: str = "qwen3-4B", fmt: Fp8Format | None = None
) -> list[str]:
    """What is said of a public model on 8 GPUs, planned without one."""
    quantized = {} if fmt is None else {"quantization_config": fmt.config()}
    plain = {name: value for name, value in hf_config(model).items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(plain | quantized))
    place = ["--accelerator", "cuda", "--actor-num-gpus-per-node", "8", "--colocate"]
    line = [*script_flags(model), *place, "--hf-checkpoint", str(tmp_path), "--prompt-data", "x", "--dry-run"]
    problems = command_line.check([*line, *flags.split()]).problems
    return [s for s in (*problems.all(), *problems.notes, *problems.no_effect) if "--fp8-" in s]


def test_qwen3_4b_is_trained_in_fp8_as_a_whole(tmp_path: Path, command_line: CommandLine) -> None:
    assert said(tmp_path, command_line, f"{FLAGS} --bf16") == []
    assert said(tmp_path, command_line, f"{FLAGS} --bf16", fmt=Fp8Format()) == []


@pytest.mark.parametrize(
    ("flags", "model", "sentence"),
    [
        ("--fp8-format hybrid --fp8-recipe blockwise", "qwen3-4B", "--fp8-format hybrid is not built"),
        ("--fp8-format e4m3", "qwen3-4B", "--fp8-recipe delayed is not built"),
        ("--fp8-recipe blockwise", "qwen3-4B", "--fp8-recipe has no effect without --fp8-format"),
        (f"{FLAGS} --fp16", "qwen3-4B", "needs --bf16"),
        (f"{FLAGS} --lora-rank 8", "qwen3-4B", "with --lora-rank 8: adapters change what is quantised"),
        (f"{FLAGS} --transformer-impl transformer_engine", "qwen3-4B", "give --transformer-impl local"),
        (f"{FLAGS} --megatron-deepgemm-forward-layers 0", "qwen3-4B", "--megatron-deepgemm-forward-layers both say"),
        (f"{FLAGS} --train-backend fsdp", "qwen3-4B", "training in fp8 is not built"),
        (f"{FLAGS} --bf16", "qwen3-30B-A3B", "experts are trained in 16 bit; --megatron-deepgemm-moe-forward-layers"),
        (f"{FLAGS} --bf16 --tensor-model-parallel-size 8 --sequence-parallel", "qwen3-4B",
         "mlp.linear_fc2 (2560 x 1216)"),
    ],
)  # fmt: skip
def test_what_cannot_be_or_stays_in_16_bit_is_said(
    tmp_path: Path, command_line: CommandLine, flags: str, model: str, sentence: str
) -> None:
    assert has(said(tmp_path, command_line, flags, model), sentence)


def test_checkpoints_with_other_blocks_are_refused(tmp_path: Path, command_line: CommandLine) -> None:
    one_scale = said(tmp_path, command_line, f"{FLAGS} --bf16", fmt=Fp8Format(None))
    assert has(one_scale, "have weights in fp8 with other scales than one a block of 128 x 128")


def test_models_without_a_whole_block_are_refused(tmp_path: Path) -> None:
    make_hf_model(tmp_path, "qwen3", hidden_size=576, head_dim=64, intermediate_size=1536)  # as SmolLM2-135M
    args = asked(tmp_path, "--bf16", accelerator="cuda", lora_rank=None, megatron_deepgemm_forward_layers=None)
    config = json.loads((tmp_path / "config.json").read_text())
    (sentence,) = fp8_training_problems(args, config, looks=False).wrong
    assert "no linear layer outside of experts that is whole blocks" in sentence
    assert "mlp.linear_fc1 (1536 x 576)" in sentence and "self_attention.linear_qkv (64 x 576)" in sentence


def test_cpus_and_other_gpus_than_hoppers_are_refused(
    tmp_path: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert has(check(FLAGS).problems.wrong, "--fp8-format e4m3 needs CUDA, not cpu; leave --fp8-format out.")
    make_hf_model(tmp_path, "qwen3", **SIZES)
    args = asked(tmp_path, "--bf16", accelerator="cuda", lora_rank=None, megatron_deepgemm_forward_layers=None)
    card: list[Any] = [(9, 0), "13.0"]
    accelerator = fp8_training_plan.accelerator
    monkeypatch.setattr(accelerator, "compute_capability", lambda: card[0])
    monkeypatch.setattr(accelerator, "gpu_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(accelerator, "cuda_version", lambda: card[1])

    def found(*machine: Any) -> list[str]:
        card[:] = machine
        return fp8_training_problems(args, None, looks=True).environment

    assert found((9, 0), "13.0") == found(None, None) == []
    (sentence,) = found((8, 0), "13.0")
    assert "this machine has NVIDIA A100-SXM4-80GB (compute capability 8.0); leave --fp8-format out." in sentence
    (sentence,) = found((9, 0), "12.8")
    assert "needs CUDA 12.9 or later, and torch is built with 12.8" in sentence
