"""--qwen-gdn-backend: whose kernel computes gated delta nets, what it is given, and where it is refused."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config.megatron.kernel_checks import kernel_problems
from slime.config.parse import CommandLine
from slime.config.problems import Problems
from slime.utils import accelerator
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.megatron_fakes import make_args, make_hf_model, packed, run_world
from tests.unit.script_fakes import hf_config, script_flags

__all__ = ["check", "command_line"]  # fixtures
LENGTHS = [70, 3, 1, 21]
MODEL = "qwen3-next-80B-A3B"


def fake_flash_qla(calls: list[dict[str, Any]]) -> types.ModuleType:
    """The function of flash-qla 0.1.3, with its arguments' names and order, computing with torch.

    It means something because whoever calls it in another way than 0.1.3 can be called fails here, too, and because
    numbers come out of what it is given: they are those of the model without it, or the arguments were others.
    """

    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False,
    ):  # fmt: skip
        from slime_plugins.models.gated_delta_net import torch_delta_rule

        calls.append(locals())
        return torch_delta_rule(*(x.squeeze(0) for x in (q, k, v, g, beta)), cu_seqlens).unsqueeze(0), None

    module = types.ModuleType("flash_qla")
    module.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    return module


def check_that_flashqla_computes(args: argparse.Namespace) -> None:
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    calls: list[dict[str, Any]] = []
    sys.modules["flash_qla"] = fake_flash_qla(calls)
    ids = torch.randint(0, 100, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    found = {}
    for backend in ("fla", "flashqla"):
        args.qwen_gdn_backend = backend
        model = get_model_provider_func(args)()
        load_hf_weights(args, [model], args.hf_checkpoint)
        pack = packed(LENGTHS)
        with torch.no_grad():
            found[backend] = model(ids, None, None, packed_seq_params=pack)
        assert len(calls) == (backend == "flashqla")  # one of the two layers is linear
    assert torch.equal(found["fla"], found["flashqla"])
    call, tokens = calls[0], sum(LENGTHS)
    heads, keys, values = 4, 12, 10
    assert call["q"].shape == call["k"].shape == (1, tokens, heads, keys)
    assert call["v"].shape == (1, tokens, heads, values)
    assert call["g"].shape == call["beta"].shape == (1, tokens, heads)
    assert all(call[name].is_contiguous() for name in ("q", "k", "v", "g", "beta"))
    assert call["g"].dtype == torch.float32  # the kernel's backward pass asserts it
    assert call["cu_seqlens"] is pack.cu_seqlens_q  # the same in every layer: it keeps what it works out from it


@pytest.mark.processes
def test_flashqla_computes_the_layers_that_ask_for_it(tmp_path: Path) -> None:
    make_hf_model(tmp_path / "hf", "qwen3_next")
    run_world(1, check_that_flashqla_computes, make_args(tmp_path / "hf"))


def problems(tmp_path: Path, *flags: str) -> Problems:
    """What is wrong with the public model on 16 GPUs, planned without one."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(MODEL)))
    place = ["--accelerator", "cuda", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--colocate"]
    line = [*script_flags(MODEL), *place, "--hf-checkpoint", str(tmp_path), "--prompt-data", "x", "--dry-run"]
    return CommandLine().check([*line, "--qwen-gdn-backend", "flashqla", *flags]).problems


def test_flashqla_is_taken_for_the_public_model_and_refused_for_heads_it_has_no_kernels_for(tmp_path: Path) -> None:
    def said(*flags: str) -> list[str]:
        found = problems(tmp_path, *flags)
        return [sentence for sentence in [*found.wrong, *found.unsupported] if "--qwen-gdn-backend" in sentence]

    assert said() == []
    (sentence,) = said("--linear-value-head-dim", "64")
    assert "--linear-value-head-dim 64: its kernels are for heads of 128 channels; leave it out" in sentence


def test_flashqla_is_refused_without_cuda_and_without_layers_that_it_computes(check: Check) -> None:
    wrong = check("--qwen-gdn-backend flashqla").problems.wrong
    assert has(wrong, "needs CUDA: its kernels are for GPUs, and --accelerator is cpu; leave it out")
    assert has(wrong, "no effect without --experimental-attention-variant gated_delta_net")
    assert not any("--qwen-gdn-backend" in sentence for sentence in check("--qwen-gdn-backend fla").problems.all())


ASKED: dict[str, Any] = {
    "transformer_impl": "local",
    "attention_backend": "auto",
    "qwen_gdn_backend": "flashqla",
    "megatron_deepgemm_forward_layers": None,
    "megatron_deepgemm_moe_forward_layers": None,
    "fp8": None,
    "accelerator": "cuda",
    "dry_run": False,
    "experimental_attention_variant": "gated_delta_net",
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "bf16": True,
    "fp16": False,
}


def test_flashqla_is_refused_in_fp32_where_it_is_not_installed_and_on_gpus_it_has_no_kernels_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"flash_qla", "tilelang"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    capability: list[tuple[int, int] | None] = [(9, 0)]
    monkeypatch.setattr(accelerator, "compute_capability", lambda: capability[0])

    def said(**changes: Any) -> list[str]:
        return kernel_problems(argparse.Namespace(**ASKED | changes), None).all()

    (sentence,) = said()  # it is not there, whatever find_spec says
    assert "needs the package flash-qla, which does not load: ModuleNotFoundError: No module named 'flash_" in sentence
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    assert said() == said(fp16=True, bf16=False) == []
    assert has(said(bf16=False), "trained in fp32; give --bf16")
    capability[0] = (8, 0)
    assert has(said(), "no kernels for GPUs of compute capability 8.0")
    capability[0] = None  # the driver's node has no GPU
    assert said() == []
    installed.remove("tilelang")
    assert has(said(), "needs the package tilelang, which is not installed; pip install")
    installed.remove("flash_qla")
    assert has(said(), 'needs the package flash-qla, which is not installed; pip install "flash-qla>=0.1.3"')
    assert said(dry_run=True) == []  # a plan for GPUs is made where they are not


def test_flash_linear_attention_is_refused_where_its_backward_pass_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper with some versions of triton, unless tilelang is there."""
    installed, capability, triton = {"fla"}, [(9, 0)], ["3.6.0"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    monkeypatch.setattr(accelerator, "compute_capability", lambda: capability[0])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"triton": triton[0]}[name])
    asked = argparse.Namespace(**ASKED | {"qwen_gdn_backend": "fla"})

    def said(**changes: Any) -> list[str]:
        return kernel_problems(argparse.Namespace(**vars(asked) | changes), None).all()

    assert has(said(), "is wrong with triton 3.6.0 on Hopper GPUs (from 3.4.0 until 3.7.1); pip install tilelang")
    assert said(experimental_attention_variant=None) == said(dry_run=True) == said(accelerator="cpu") == []
    triton[0] = "3.7.1"
    assert said() == []
    triton[0], capability[0] = "3.6.0", (10, 0)
    assert said() == []
    capability[0] = (9, 0)
    installed.add("tilelang")
    assert said() == []
    installed.clear()
    assert said() == []
