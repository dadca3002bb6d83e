"""Kernels of SGLang that are compiled side by side while an engine starts: which, and under which names."""

from __future__ import annotations

import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils import early_kernels
from slime.backends.sglang_utils.sglang_engine import last_error

QWEN3 = {
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
ASK = """
import sys, json
from slime.backends.sglang_utils import cpu_standins, early_kernels
cpu_standins.install()
import sglang.kernels.jit.utils as jit
# SGLang makes the name of the folder in this way.
jit.load_jit = lambda *names, **sources: sys.stderr.write("asked " + "_".join(map(str, names)) + "\\n")
early_kernels.compile_all([early_kernels.Kernel(*values) for values in json.loads(sys.argv[1])])
"""


def functions(config: dict[str, Any], **server_args: Any) -> list[str]:
    return [kernel.function for kernel in early_kernels.kernels_of(config, server_args)]


def row_of_cache(config: dict[str, Any], **server_args: Any) -> int:
    kernels = early_kernels.kernels_of(config, server_args)
    return next(kernel.values[0] for kernel in kernels if kernel.module == "sglang.kernels.ops.kvcache.kvcache")


def test_sglang_asks_for_the_kernels_under_the_names_that_are_looked_for():
    kernels = [kernel for kernel in early_kernels.kernels_of(QWEN3, {}) if kernel != early_kernels.NORMS]
    run = subprocess.run([sys.executable, "-c", ASK, json.dumps(kernels)], capture_output=True, text=True, check=True)
    asked = [line.split(" ", 1)[1] + "_hash" for line in run.stderr.splitlines() if line.startswith("asked ")]
    assert len(kernels) == len(asked) == 5, run.stdout + run.stderr
    assert all(
        any(fnmatch(f"sgl_kernel_jit_{name}/module.so", kernel.library) for name in asked) for kernel in kernels
    ), asked
    assert run.stdout.count(" compiled in ") == 5, "each says how long it took"


def test_a_row_of_the_cache_has_the_bytes_of_a_rank():
    assert row_of_cache(QWEN3) == 8 * 128 * 2
    assert row_of_cache(QWEN3, tp_size=4) == 2 * 128 * 2
    assert row_of_cache(QWEN3, tp_size=16) == 128 * 2, "more ranks than heads: each has a copy of one"
    assert row_of_cache(QWEN3, tp_size=4, dp_size=4, enable_dp_attention=True) == 8 * 128 * 2
    assert row_of_cache(QWEN3, kv_cache_dtype="fp8_e4m3") == 8 * 128


@pytest.mark.parametrize(
    "written",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 0.5}},  # as transformers >= 5 writes it
        {"rotary_dim": 64},  # MiniMax
    ],
)
def test_the_rotated_part_of_a_head_is_read_as_the_trainer_reads_it(written: dict[str, Any]) -> None:
    kernels = early_kernels.kernels_of(QWEN3 | written, {})
    (rope,) = [kernel for kernel in kernels if kernel.function == "_jit_fused_rope_module"]
    assert rope.values[1] == QWEN3["head_dim"] // 2


def test_a_model_gets_the_kernels_that_its_layers_have():
    assert "_jit_qknorm_module" in functions(QWEN3)
    assert "_jit_qknorm_module" not in functions(QWEN3 | {"model_type": "qwen2"})
    assert functions(QWEN3 | {"torch_dtype": "float32"}) == []
    assert functions(QWEN3 | {"torch_dtype": "float32"}, dtype="bfloat16") == functions(QWEN3)
    assert functions(QWEN3 | {"kv_lora_rank": 512}) == [] == functions({})


def test_norms_are_compiled_where_flashinfer_brings_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages = {"flashinfer"}
    monkeypatch.setattr(early_kernels, "find_spec", lambda name: name if name in packages else None)
    assert early_kernels.NORMS in early_kernels.kernels_of(QWEN3, {})
    (folder := tmp_path / ".cache" / "flashinfer" / "0.6.15" / "90a" / "cached_ops" / "norm").mkdir(parents=True)
    environment = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    assert early_kernels.missing([early_kernels.NORMS], environment)
    (folder / "norm.so").touch()
    assert early_kernels.missing([early_kernels.NORMS], environment) == []
    packages.add("flashinfer_jit_cache")
    assert early_kernels.NORMS not in early_kernels.kernels_of(QWEN3, {})


def test_only_kernels_that_no_process_has_compiled_are_missing(tmp_path: Path) -> None:
    kernels = early_kernels.kernels_of(QWEN3, {})
    (folder := tmp_path / "sgl_kernel_jit_kvcache_2048_2048_true_0123__arch_9.0a__tvmffi_0.1").mkdir()
    environment = {"TVM_FFI_CACHE_DIR": str(tmp_path)}
    assert early_kernels.missing(kernels, environment) == kernels, "a folder without a library is being compiled"
    (folder / "module.so").touch()
    left = early_kernels.missing(kernels, environment)
    assert [kernel.function for kernel in kernels if kernel not in left] == ["_jit_kvcache_module"]


def test_a_kernel_that_fails_is_said_and_stops_nothing() -> None:
    line = early_kernels.compile_one(early_kernels.Kernel("of_no_version", "compile", (), "", ""))
    assert line.startswith("slime: kernel of_no_version is not compiled ahead: ModuleNotFoundError: No module named")


@pytest.mark.parametrize(
    ("config", "server_args"),
    [
        ({"num_key_value_heads": [8, 4]}, {}),  # of layers that differ
        ({"head_dim": None, "hidden_size": None}, {}),
        ({}, {"tp_size": 2, "dp_size": 4, "enable_dp_attention": True}),  # which SGLang refuses in words
    ],
)
def test_an_engine_starts_without_kernels_that_cannot_be_told(
    config: dict[str, Any],
    server_args: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | config))
    started: list[Any] = []
    monkeypatch.setattr(early_kernels.subprocess, "Popen", started.append)
    early_kernels.start({"model_path": str(tmp_path), **server_args})
    said = capsys.readouterr().out
    assert said.startswith("slime: no kernel is compiled ahead: ") and said.count("\n") == 1 and not started


def test_heads_that_are_not_named_are_those_of_attention() -> None:
    assert row_of_cache(QWEN3 | {"num_key_value_heads": None}) == 16 * 128 * 2


def test_an_error_of_a_compiler_is_not_taken_for_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("ninja exited with status 1\nstderr:\nRuntimeError: no nvcc")

    monkeypatch.setattr(early_kernels.importlib, "import_module", fail)
    line = early_kernels.compile_one(early_kernels.Kernel("activation", "compile", (), "", ""))
    assert "no nvcc" in line and last_error(f"{line}\n") is None
    assert last_error(f"ValueError: no such model\n{line}\n") == "ValueError: no such model"


def test_a_process_that_can_compile_nothing_says_so_on_one_line() -> None:
    """Without SGLang's own CUDA packages its import fails, as where nothing is installed."""
    code = "import sys, runpy; sys.modules['sglang'] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, early_kernels.__name__, json.dumps([("activation", "compile", (), "", "")])]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("slime: no kernel is compiled ahead: ModuleNotFoundError: "), run.stderr
    assert run.stdout.count("\n") == 1 and last_error(run.stdout + run.stderr) is None
