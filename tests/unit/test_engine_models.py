"""An engine imports the module of its own model, and all of SGLang's where it may need a second one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slime.backends.sglang_utils.engine_patches import OTHER_MODELS, import_one_model


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that the test sets is taken back."""
    monkeypatch.setenv(OTHER_MODELS, "")
    monkeypatch.delenv(OTHER_MODELS)


def left_out(*architectures: str, **server_args: object) -> set[str]:
    """The modules that SGLang is told to leave out."""
    import_one_model({"architectures": list(architectures)}, server_args)
    return set(filter(None, os.environ.pop(OTHER_MODELS, "").split(",")))


@pytest.mark.parametrize(
    ("architecture", "module"),
    [("Qwen3ForCausalLM", "qwen3"), ("Qwen3MoeForCausalLM", "qwen3_moe"), ("DeepseekV3ForCausalLM", "deepseek_v2")],
)
def test_all_modules_but_that_of_the_model_are_left_out(architecture: str, module: str) -> None:
    found = left_out(architecture)
    assert module not in found and {"llama", "gemma3_mm"} <= found


@pytest.mark.parametrize(
    ("architectures", "server_args"),
    [
        (["NoSuchForCausalLM"], {}),
        ([], {}),
        (["Qwen3VLForConditionalGeneration"], {}),
        (["MixtralForCausalLM"], {}),
        (["Qwen3ForCausalLM"], {"speculative_algorithm": "EAGLE"}),
        (["Qwen3ForCausalLM"], {"model_impl": "transformers"}),
    ],
)
def test_nothing_is_left_out_where_a_second_model_may_be_needed(
    architectures: list[str], server_args: dict[str, str]
) -> None:
    assert left_out(*architectures, **server_args) == set()


def test_a_class_that_is_no_entry_of_its_module_leaves_nothing_out() -> None:
    """SGLang's baichuan.py has the base class, and serves another one by it."""
    assert left_out("BaiChuanBaseForCausalLM") == set()


def test_modules_of_a_package_of_the_user_are_all_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "own.models")
    assert left_out("Qwen3ForCausalLM") == set()


def test_a_users_choice_of_modules_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OTHER_MODELS, "llama")
    import_one_model({"architectures": ["Qwen3ForCausalLM"]}, {})
    assert os.environ[OTHER_MODELS] == "llama"


@pytest.mark.processes
def test_sglangs_registry_then_has_that_model_alone() -> None:
    code = (
        "from slime.backends.sglang_utils import cpu_standins, engine_patches\n"
        "engine_patches.import_one_model({'architectures': ['Qwen3ForCausalLM']}, {})\n"
        "cpu_standins.install(); cpu_standins.install_kernels()\n"
        "from sglang.srt.models.registry import ModelRegistry\n"
        "print(sorted(ModelRegistry.models))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['Qwen3ForCausalLM']"
