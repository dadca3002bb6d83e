"""OPEN_TRAINING_INT4_FAKE_QAT_FLAG: the trainer computes with an int4 engine's weights, and is trained straight
through."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.megatron.precision.int4_plan import FLAG, GROUP_SIZE, Int4Training, check_int4_training
from slime.config.parse import CommandLine
from slime.weights.formats import EXPERTS_ONLY, Fp8Format, Int4Format
from slime.weights.quantization import dequantize_groups, unpack
from tests.unit.argument_lines import command_line, has
from tests.unit.megatron_fakes import gather_vocab, make_args, make_hf_model, packed, run_world
from tests.unit.script_fakes import hf_config, script_flags
from tests.unit.test_fp8_forward import FC1, FC2, PROJ, QKV, SIZES, results
from tools import convert_hf_to_int4_direct

__all__ = ["command_line"]  # a fixture
ON = {FLAG: "1"}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_hidden_layers": 2}


def checkpoint(tmp_path: Path, group_size: int, family: str = "qwen3", *ignored: str) -> Path:
    """The directory of an int4 checkpoint; beside it lies hf/, the one in fp32 of which it was made."""
    make_hf_model(tmp_path / "hf", family, **SIZES | (EXPERTS if family == "qwen3_moe" else {}))
    line = ["--model-dir", str(tmp_path / "hf"), "--save-dir", str(tmp_path / "int4"), "--group-size", str(group_size)]
    assert convert_hf_to_int4_direct.main([*line, "--ignore-rules", "lm_head", *ignored]) == 0
    return tmp_path / "int4"


def asked(path: Path, flags: str = "", **more: Any) -> argparse.Namespace:
    return make_args(path, flags, train_env_vars=ON, num_rollout=None, num_epoch=None, global_batch_size=8, **more)


def in_int4(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """W rounded by hand: 16 steps of max |w| / 7.5 of a group, from -8 to 7."""
    groups = weight.unflatten(1, (-1, group_size))
    scales = groups.abs().amax(2, keepdim=True) / 7.5
    return ((groups / scales).round().clamp(-8, 7) * scales).flatten(1)


def check_linears(args: argparse.Namespace, group_size: int) -> None:
    """Each linear layer of layer 0, with its own part of what all ranks are given."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.layers.rounded_linear import round_weights_to_int4
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    layer = model.decoder.layers[0]
    plain = {name: vars(layer.get_submodule(name)).copy() for name in (QKV, PROJ, FC1, FC2)}
    assert not any("_forward_impl" in found for found in plain.values())
    round_weights_to_int4([model], Int4Training.of(args))
    generator = torch.Generator().manual_seed(0)
    for name in (QKV, PROJ, FC1, FC2):
        module, is_row = layer.get_submodule(name), name in (PROJ, FC2)
        whole = torch.randn(6, 1, module.weight.shape[1] * (size if is_row else 1), generator=generator)
        mine = whole.chunk(size, -1)[rank] if is_row else whole.chunk(size)[rank]
        rows = 6 // size if is_row else 6
        grad = torch.randn(rows, 1, len(module.weight), generator=generator)
        for fused in (False, True):
            if fused:
                module.weight.main_grad = torch.ones(module.weight.shape)
            module.gradient_accumulation_fusion = fused
            found = results(module, mine, grad)
            impl, kept = vars(module).pop("_forward_impl"), module.weight.data
            module.weight.data = in_int4(kept, group_size)
            expected = results(module, mine, grad)  # of Megatron's own layer, which holds the rounded weight
            module.weight.data = kept
            not_rounded = results(module, mine, grad)
            module._forward_impl = impl
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert (found[0] - not_rounded[0]).abs().max() > 1e-2 and torch.equal(found[2], not_rounded[2])


@pytest.mark.processes
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_a_linear_layer_is_one_with_rounded_weights_trained_straight_through(
    tmp_path: Path, flags: str, group_size: int
) -> None:
    args = asked(checkpoint(tmp_path, group_size), flags)
    run_world(2 if flags else 1, check_linears, args, group_size)


def tensors_of(args: argparse.Namespace, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a sync sends."""
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    return {name: tensor for bucket in iter_hf_buckets(args, [model], buffer_size=2**30) for name, tensor in bucket}


def check_sync(args: argparse.Namespace, fmt: Int4Format) -> None:
    """What a sync sends, read back, is what the trainer computes with, bit for bit."""
    from slime.backends.megatron_utils.layers.rounded_linear import Int4Weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    for dtype in (torch.float32, torch.bfloat16):
        model = get_model_provider_func(args)().to(dtype)
        sent = tensors_of(args, model)
        args.hf_checkpoint = args.hf_checkpoint.replace("int4", "hf")  # which is not rounded
        plain = tensors_of(args, model)
        args.hf_checkpoint = args.hf_checkpoint.replace("hf", "int4")
        names = [name for name in plain if fmt.quantizes(name)]
        assert len(names) > 8
        for name in names:
            module = name.removesuffix(".weight")
            values = unpack(sent[f"{module}.weight_packed"], plain[name].shape[1])
            engine = dequantize_groups(values, sent[f"{module}.weight_scale"], fmt.group_size, dtype=dtype)
            assert torch.equal(Int4Weights(fmt.group_size)._rounded(plain[name]), engine), name


@pytest.mark.processes
@pytest.mark.parametrize("group_size", [32, 128])
def test_the_trainer_computes_with_the_values_that_a_sync_sends(tmp_path: Path, group_size: int) -> None:
    run_world(1, check_sync, asked(checkpoint(tmp_path, group_size)), Int4Format(group_size))


def check_model(args: argparse.Namespace, hf: Path) -> None:
    """A model with rounding has the log-probs of one whose weights were read from the int4 checkpoint; and gradients
    for its own weights, with and without recomputation."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.layers.rounded_linear import round_weights_to_int4
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    ids = torch.randint(0, 100, (1, 14), generator=torch.Generator().manual_seed(3))
    size = args.tensor_model_parallel_size
    log_probs, gradients = [], []
    for source, rounds, recomputes in ((args.hf_checkpoint, 0, 0), (hf, 0, 0), (hf, 1, 0), (hf, 1, 1)):
        args.recompute_granularity = "full" if recomputes else None
        args.recompute_method, args.recompute_num_layers = ("uniform", 1) if recomputes else (None, None)
        model = get_model_provider_func(args)()
        load_hf_weights(args, [model], source)
        round_weights_to_int4([model], Int4Training.of(args) if rounds else None)
        for param in model.parameters():
            param.main_grad = torch.zeros(param.shape)
        logits = model(ids, None, None, packed_seq_params=packed([9, 5]))
        log_probs.append(gather_vocab(logits.detach())[0, :, :100].log_softmax(-1))
        logits[0, :, : 100 // size].square().sum().backward()
        gradients.append([param.main_grad for param in model.decoder.parameters() if param.dim() == 2])
    engine, plain, rounded, again = log_probs
    assert (rounded - engine).abs().max() < 1e-5 and torch.equal(rounded, again)
    assert (plain - engine).abs().max() > 1e-2
    for first, second, of_plain in zip(gradients[2], gradients[3], gradients[1], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
        assert (first.abs().max() > 0) == (of_plain.abs().max() > 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "flags", "ranks"),
    [
        ("qwen3", "", 1),
        ("qwen3", "--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("qwen3_moe", "", 1),
        ("qwen3_moe", "--moe-grouped-gemm", 1),
        ("qwen3_moe", "--expert-model-parallel-size 2 --moe-grouped-gemm", 2),
    ],
)
def test_a_model_with_rounding_has_the_log_probs_of_the_int4_checkpoint(
    tmp_path: Path, family: str, flags: str, ranks: int
) -> None:
    run_world(ranks, check_model, asked(checkpoint(tmp_path, 32, family), flags), tmp_path / "hf")


def test_layers_that_the_checkpoint_ignores_keep_their_weights(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 32, "qwen3_moe", *EXPERTS_ONLY, r"re:.*layers\.1\..*")
    plan = Int4Training.of(asked(path))
    assert plan is not None
    expert = "mlp.experts.local_experts.3.linear_fc1"
    assert [plan.takes(0, name) for name in (QKV, PROJ, "mlp.router", expert)] == [False, False, False, True]
    assert not plan.takes(1, expert)


def test_nothing_is_rounded_without_the_variable(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 32)
    for variables in ({}, {FLAG: "0"}, {FLAG: ""}, {GROUP_SIZE: "32"}):
        args = asked(path)
        args.train_env_vars = variables
        assert Int4Training.of(args) is None


def said(
    tmp_path: Path, command_line: CommandLine, flags: str = "", fmt: Any = None, model: str = "qwen3-4B"
) -> list[str]:
    """What is said of a public model on 8 GPUs, planned without one; the variables come from the environment."""
    quantized = {} if fmt is None else {"quantization_config": fmt.config()}
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model) | quantized))
    place = ["--accelerator", "cuda", "--actor-num-gpus-per-node", "8", "--colocate"]
    line = [*script_flags(model), *place, "--hf-checkpoint", str(tmp_path), "--prompt-data", "x", "--dry-run"]
    problems = command_line.check([*line, *flags.split()]).problems
    return [sentence for sentence in problems.all() if "OPEN_TRAINING" in sentence]


@pytest.mark.parametrize(
    ("variables", "flags", "fmt", "sentence"),
    [
        (ON, "", None, "is in 16 bit; make one with tools/convert_hf_to_int4_direct.py, or unset it."),
        (ON, "", Fp8Format(), "is fp8; make one with"),
        ({FLAG: "true"}, "", Int4Format(32), f"{FLAG}='true' is neither 1 nor 0"),
        (ON | {GROUP_SIZE: "128"}, "", Int4Format(32), f"{GROUP_SIZE}=128: --hf-checkpoint"),
        (ON, "--lora-rank 8", Int4Format(32), "with --lora-rank 8"),
        (ON, "--train-backend fsdp", Int4Format(32), "is not built for --train-backend fsdp"),
        (ON, "--fp8-format e4m3 --fp8-recipe blockwise --bf16", Int4Format(32), "with --fp8-format e4m3: both say"),
        (ON, "--tensor-model-parallel-size 8 --sequence-parallel", Int4Format(128),
         "a rank has 1216 columns of mlp.linear_fc2, which are not whole groups of 128"),
        (ON, "", Int4Format(32, ignored=("re:.*",)), "has no linear layer in int4"),
    ],
)  # fmt: skip
def test_what_cannot_be_rounded_as_the_engine_does_is_refused(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str],
    flags: str, fmt: Any, sentence: str,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert has(said(tmp_path, command_line, flags, fmt), sentence)


def test_what_fits_is_taken_from_the_environment_to_the_trainers(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (ON | {GROUP_SIZE: "32"}).items():
        monkeypatch.setenv(name, value)
    assert said(tmp_path, command_line, fmt=Int4Format(32)) == []
    line = [*script_flags("qwen3-4B"), "--accelerator", "cpu", "--hf-checkpoint", str(tmp_path), "--prompt-data", "x"]
    args = command_line.check(line).args
    assert args.train_env_vars == {FLAG: "1", GROUP_SIZE: "32"}
    assert list(check_int4_training(args, json.loads((tmp_path / "config.json").read_text()))) == []
