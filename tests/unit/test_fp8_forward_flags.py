"""--megatron-deepgemm-*: what is chosen of public models, and what is refused before anything starts."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from slime.config.megatron.kernel_checks import kernel_problems
from slime.config.parse import CommandLine
from slime.utils import accelerator
from slime.weights.formats import Fp8Format
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.script_fakes import hf_config, script_flags

__all__ = ["check", "command_line"]  # fixtures
LAYERS, MODULES = "--megatron-deepgemm-forward-layers", "--megatron-deepgemm-forward-modules"
MOE_LAYERS, MOE_MODULES = "--megatron-deepgemm-moe-forward-layers", "--megatron-deepgemm-moe-forward-modules"
BLOCKS = Fp8Format()
DENSE, MOE, LATENT = "qwen3-4B", "qwen3-30B-A3B", "deepseek-v3"


def said(
    tmp_path: Path, command_line: CommandLine, flags: str, model: str = DENSE, fmt: Fp8Format | None = BLOCKS
) -> list[str]:
    """What is wrong, as far as it speaks of our flags, with a public model on 16 GPUs, planned without one."""
    quantized = {} if fmt is None else {"quantization_config": fmt.config()}
    plain = {name: value for name, value in hf_config(model).items() if name != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(plain | quantized))
    place = ["--accelerator", "cuda", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--colocate"]
    line = [*script_flags(model), *place, "--hf-checkpoint", str(tmp_path), "--prompt-data", "x", "--dry-run"]
    problems = command_line.check([*line, *flags.split()]).problems
    return [s for s in (*problems.all(), *problems.no_effect) if "--megatron-deepgemm" in s]


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (DENSE, f"{LAYERS} 0 35"),
        (DENSE, f"{LAYERS} 7 {MODULES} linear_fc1 self_attention.linear_proj --tensor-model-parallel-size 4"),
        (MOE, f"{LAYERS} 3 {MOE_LAYERS} 3 47 {MOE_MODULES} mlp.experts --moe-grouped-gemm"),
        # 576 rows of kv_a_proj_with_mqa end in half a block, which is the tensor's end as long as it is not cut.
        (LATENT, f"{LAYERS} 0 60 {MOE_LAYERS} 3 60 --moe-grouped-gemm"),
    ],
)
def test_layers_of_public_models_can_be_chosen(
    tmp_path: Path, command_line: CommandLine, model: str, flags: str
) -> None:
    assert said(tmp_path, command_line, flags, model) == []


WITHOUT_QKV = Fp8Format(unquantized=tuple(f"self_attn.{name}_proj" for name in "qkv"))


@pytest.mark.parametrize(
    ("model", "flags", "fmt", "sentence"),
    [
        (DENSE, f"{LAYERS} 36", BLOCKS, "36: the model has 36 decoder layers, 0 to 35; choose among them"),
        (DENSE, f"{LAYERS} -1", BLOCKS, "-1: the model has 36 decoder layers"),
        (DENSE, f"{LAYERS} 0", None, "compute in 16 bit, and the forward pass is meant to be theirs; convert it with"),
        (DENSE, f"{LAYERS} 0", Fp8Format(block_size=None), "with other scales than one a block of 128"),
        (DENSE, f"{LAYERS} 0", Fp8Format(block_size=(64, 64)), "with other scales than one a block of 128"),
        (
            DENSE,
            f"{LAYERS} 0 {MODULES} mlp.fc1",
            BLOCKS,
            "mlp.fc1 matches no linear layer of layers 0; there are",
        ),
        (MOE, f"{LAYERS} 0 {MODULES} linear_fc1", BLOCKS, "linear_fc1 matches no linear layer"),
        (DENSE, f"{LAYERS} 0 {MODULES} linear_qkv", WITHOUT_QKV, "the checkpoint keeps it in 16 bit"),
        (DENSE, f"{LAYERS} 0", Fp8Format(unquantized=("layers",)), "has none of their linear layers in fp8"),
        (DENSE, f"{LAYERS} 0 --kv-channels 64", BLOCKS, "self_attention.linear_qkv with --tensor-model-par"),
        (
            DENSE,  # 9728 / 8 = 1216 = 9.5 blocks of a gate, behind which its up projection would begin
            f"{LAYERS} 0 --tensor-model-parallel-size 8",
            BLOCKS,
            "mlp.linear_fc1 with --tensor-model-parallel-size 8: a rank has 1216 rows",
        ),
        (
            LATENT,
            f"{LAYERS} 0 --tensor-model-parallel-size 2 --sequence-parallel",
            BLOCKS,
            "linear_kv_down_proj with --tensor-model-parallel-size 2: a rank has 288 rows",
        ),
        (DENSE, f"{MOE_LAYERS} 0 --moe-grouped-gemm", BLOCKS, "is for layers with experts, and the model has no"),
        (LATENT, f"{MOE_LAYERS} 2 3 --moe-grouped-gemm", BLOCKS, f"{MOE_LAYERS} 2: these layers have no experts"),
        (MOE, f"{MOE_LAYERS} 0", BLOCKS, "give --moe-grouped-gemm, too"),
        (MOE, f"{MOE_LAYERS} 0 {MOE_MODULES} mlp.router", BLOCKS, "mlp.router names no experts"),
        (
            MOE,
            f"{MOE_LAYERS} 0",
            Fp8Format(unquantized=("layers.0.mlp",)),
            "0: the checkpoint keeps its experts in 16",
        ),
        (
            MOE,  # 768 / 4 = 192 rows of a gate
            f"{MOE_LAYERS} 0 --moe-grouped-gemm --expert-tensor-parallel-size 4",
            BLOCKS,
            "linear_fc1 with --expert-tensor-parallel-size 4: a rank has 192 rows",
        ),
        (DENSE, f"{LAYERS} 0 --fp16", BLOCKS, "needs --bf16"),
        (DENSE, f"{MODULES} linear_fc1", BLOCKS, f"{MODULES}"),
    ],
)
def test_what_cannot_be_computed_as_the_engine_does_is_refused(
    tmp_path: Path, command_line: CommandLine, model: str, flags: str, fmt: Fp8Format | None, sentence: str
) -> None:
    assert has(said(tmp_path, command_line, flags, model, fmt), sentence)


def test_it_is_refused_without_cuda(check: Check) -> None:
    found = check(f"{LAYERS} 0").problems
    assert has(found.wrong, f"{LAYERS} needs CUDA: DeepGEMM has no kernels for --accelerator cpu; leave it out")
    assert not any("not installed" in sentence for sentence in found.all() if LAYERS in sentence)


def test_it_is_refused_where_deep_gemm_is_not_installed_and_on_other_gpus_than_hoppers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed, capability, broken = {"deep_gemm"}, [(9, 0)], []

    def load(name: str) -> None:
        if name in broken:
            raise OSError("_C.so: undefined symbol: c10") from None

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(accelerator, "compute_capability", lambda: capability[0])
    asked: dict[str, Any] = {
        "qwen_gdn_backend": "fla",
        "transformer_impl": "local",
        "attention_backend": "auto",
        "experimental_attention_variant": None,
        "accelerator": "cuda",
        "dry_run": False,
        "bf16": True,
        "num_layers": 4,
        "spec": None,
        "custom_model_provider_path": "a.model",
        "megatron_deepgemm_forward_layers": [0],
        "megatron_deepgemm_moe_forward_layers": None,
        "fp8": None,
    }

    def found(**changes: Any) -> list[str]:
        return kernel_problems(argparse.Namespace(**asked | changes), None).all()

    assert found() == found(megatron_deepgemm_forward_layers=None, bf16=False) == []
    broken.append("deep_gemm")
    (sentence,) = found()
    assert "which does not load: OSError: _C.so: undefined symbol: c10 (it is built for one version" in sentence
    capability[0] = (10, 0)
    assert has(found(), f"{LAYERS} is for Hopper (compute capability 9.0), and this machine's GPU has 10.0")
    installed.clear()
    (sentence,) = found()
    assert "needs the package sgl-deep-gemm (module deep_gemm), which is not installed" in sentence
    assert found(dry_run=True) == []  # a plan for GPUs is made where they are not
