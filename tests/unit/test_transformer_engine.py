"""--transformer-impl transformer_engine: which modules of a layer are replaced, and what is refused before a start.

That the replaced layers have the same numbers is tests/gpu/test_transformer_engine.py's.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from slime.config.args import Args
from slime.config.megatron import kernel_checks
from tests.unit.argument_lines import Check, check, command_line
from tests.unit.megatron_fakes import make_args, make_hf_model, packed

__all__ = ["check", "command_line"]  # fixtures
ENGINE = "--transformer-impl transformer_engine"


def layer_of(tmp_path: Path, family: str, *, kind: str) -> Any:
    """The specification of the last layer of a tiny model."""
    from slime.backends.megatron_utils import megatron_patch
    from slime.backends.megatron_utils.model.spec import last_layer_spec
    from slime.backends.megatron_utils.model_provider import transformer_config

    megatron_patch.apply("cpu")
    if not tmp_path.exists():
        make_hf_model(tmp_path, family)
    args = make_args(tmp_path, f"--transformer-impl {kind}")
    return last_layer_spec(transformer_config(args), args).submodules


@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_moe", "deepseek_v3"])
def test_linear_layers_and_attention_are_replaced_and_nothing_else(tmp_path: Path, family: str) -> None:
    from megatron.core.extensions import transformer_engine as te

    ours = leaves(layer_of(tmp_path / family, family, kind="local"))
    theirs = leaves(layer_of(tmp_path / family, family, kind="transformer_engine"))
    assert ours.keys() == theirs.keys()  # so weights have the same names
    changed = {name.rpartition(".")[2]: part for name, part in theirs.items() if part != ours[name]}
    column, row = te.TEColumnParallelLinear, te.TERowParallelLinear
    expected = {"linear_proj": row, "core_attention": te.TEDotProductAttention}
    expected |= {"linear_fc1": column, "linear_fc2": row}  # of an MLP, or of experts which all tokens go to
    if family == "deepseek_v3":
        expected |= dict.fromkeys(("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"), column)
    else:
        expected["linear_qkv"] = column
    assert changed == expected
    if "moe" in family or family == "deepseek_v3":
        assert all(theirs[name] is ours[name] for name in ours if ".experts" in name or ".router" in name)


def leaves(submodules: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted name of each module of a layer -> its class."""
    found: dict[str, Any] = {}
    for name, part in vars(submodules).items():
        found[prefix + name] = getattr(part, "module", part)
        if dataclasses.is_dataclass(inner := getattr(part, "submodules", None)):
            found |= leaves(inner, f"{prefix}{name}.")
    return found


def test_it_needs_cuda_and_layers_that_megatron_has(check: Check) -> None:
    def said(*flags: str) -> str:
        return " ".join(
            sentence for sentence in check(f"{ENGINE} {' '.join(flags)}").problems.all() if ENGINE in sentence
        )

    assert "needs CUDA, and --accelerator is cpu; give --transformer-impl local or leave it out." in said()
    assert check("--transformer-impl local").problems.all() == []
    planned = "--accelerator cuda --dry-run"
    assert said(planned) == ""  # whether it is installed is asked where the run is to be
    assert "with --spec a.module spec: those layers have kernels of their own" in said(planned, "--spec a.module spec")
    (fused,) = check(f"--attention-backend fused {planned}").problems.wrong
    assert fused == f"--attention-backend fused is TransformerEngine's; add {ENGINE}, or use auto."
    assert check(f"--attention-backend fused {ENGINE} {planned}").problems.wrong == []


def test_what_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    problems: list[str] = []
    monkeypatch.setattr(kernel_checks, "_load_problems", lambda _: problems)

    def said(attention: str = "auto") -> list[str]:
        return list(kernel_checks.MISSING_TRANSFORMER_ENGINE(Args.of({"attention_backend": attention})))

    (absent,) = said()
    assert "needs TransformerEngine, which is not installed; pip install --no-build-isolation" in absent
    installed.add("transformer_engine")
    version = ["2.11.0"]
    monkeypatch.setattr(kernel_checks, "_version_of", lambda _: Version(version[0]))
    assert said() == []
    version[0] = "1.13.0"
    (old,) = said()
    assert "TransformerEngine 1.13.0 is installed, and Megatron 0.16.1 goes with those from 2.9.0 until 2.12.0" in old
    version[0] = "2.9.0"
    (flash,) = said("flash")
    assert flash.endswith("needs the package flash-attn, which is not installed; use auto or fused.")
    installed.add("flash_attn")
    assert said("flash") == []
    problems.append("OSError: libcudnn.so.9: cannot open shared object file")
    (broken,) = said()
    assert "does not load: OSError: libcudnn.so.9" in broken


class Keeper(torch.nn.Linear):
    """Keeps a state beside its weights, as TransformerEngine's modules do; torch misses it where it is not given."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None

    def sharded_state_dict(self) -> dict[str, Any]:
        return dict(self.state_dict())


def test_what_is_kept_for_8_bit_is_neither_saved_nor_missed() -> None:
    from slime.backends.megatron_utils.checkpoint import iterations

    keeper, other = Keeper(2, 2), Keeper(2, 2)
    saved = iterations._weights_of(keeper)
    assert saved.keys() == {"weight", "bias"}
    iterations.set_weights(other, saved)
    assert torch.equal(other.weight, keeper.weight)
    with pytest.raises(RuntimeError, match="bias"):
        iterations.set_weights(other, {"weight": saved["weight"]})


def test_what_layers_keep_with_a_pack_ends_with_the_pass() -> None:
    from slime.backends.megatron_utils.passes.forward import run_model

    class Layer(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, *_: Any, packed_seq_params: Any) -> torch.Tensor:
            packed_seq_params.kept = tokens
            return tokens

    pack = packed([3])
    batch = {"tokens": torch.zeros(1, 3), "position_ids": None, "packed_seq_params": pack}
    run_model(Layer(), batch)
    assert not hasattr(pack, "kept")
