"""--compile-cache-dir: where compiled kernels go, what is said of it, and a run that fills the cache."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.ray.utils import actor_env
from slime.utils.accelerator import compile_cache
from tools import prewarm


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without a compile cache, and leaves none."""
    monkeypatch.setattr(compile_cache, "_in_use", {})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was logged."""
    caplog.set_level("INFO")
    return lambda: [record.getMessage() for record in caplog.records]


def test_every_variable_points_below_the_folder_of_these_versions(tmp_path: Path, said: Callable[[], list[str]]):
    environment: dict[str, str] = {}
    compile_cache.use(tmp_path, environment)
    folder = tmp_path / compile_cache.versions()
    assert said() == [f"compiled kernels are kept in {folder}"]
    assert environment == {name: str(folder / part) for name, part in compile_cache.VARIABLES.items()}


def test_a_cache_that_holds_kernels_is_read(tmp_path: Path, said: Callable[[], list[str]]):
    (tmp_path / compile_cache.versions() / "triton").mkdir(parents=True)
    compile_cache.use(tmp_path, {})
    assert said() == [f"compiled kernels are read from {tmp_path / compile_cache.versions()}"]


def test_kernels_of_other_versions_are_left_alone_with_a_line(
    tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / (old := compile_cache.versions()) / "triton").mkdir(parents=True)
    monkeypatch.setattr(compile_cache.importlib.metadata, "version", lambda package: "99.0")
    environment: dict[str, str] = {}
    compile_cache.use(tmp_path, environment)
    assert said()[1:] == [f"compiled kernels of other versions are not used: {old}"]
    assert "torch99.0" in environment["TRITON_CACHE_DIR"]


def test_a_variable_that_the_user_has_set_stays_and_that_is_said(tmp_path: Path, said: Callable[[], list[str]]):
    environment = {"TRITON_CACHE_DIR": "/somewhere"}
    compile_cache.use(tmp_path, environment)
    assert said()[1:] == ["set in the environment, and left so: TRITON_CACHE_DIR"]
    assert environment["TRITON_CACHE_DIR"] == "/somewhere"


def test_what_inductor_sets_by_itself_is_replaced(tmp_path: Path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_me"}
    compile_cache.use(tmp_path, environment)
    assert environment["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


def test_modules_of_packages_without_bytecode_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import sys\nprint(__spec__.cached, sys.dont_write_bytecode)\n")
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTHONPYCACHEPREFIX", None)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compile_cache.use(tmp_path / "cache", environment)
    line = [sys.executable, "-c", "import sglang"]
    printed = subprocess.run(line, env=environment, check=True, capture_output=True, text=True).stdout.split()
    compiled = Path(printed[0])
    assert compiled.is_relative_to(tmp_path / "cache" / compile_cache.versions())
    assert compiled.is_file()
    assert not (package / "__pycache__").exists()


def test_bytecode_stays_where_packages_have_it(tmp_path: Path):
    environment: dict[str, str] = {}
    compile_cache.use(tmp_path, environment)
    assert "PYTHONPYCACHEPREFIX" not in environment


def test_actors_of_a_ray_that_ran_before_get_what_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    assert not compile_cache.VARIABLES.keys() & actor_env().keys()
    compile_cache.use(tmp_path, {})
    assert compile_cache.VARIABLES.keys() <= actor_env().keys()


def test_a_prewarming_run_saves_nothing_and_begins_anew() -> None:
    flags = ["--save", "/runs/a", "--save-interval=5", "--lr", "1e-6", "--use-wandb", "--num-rollout", "3000"]
    assert prewarm.short_run([*flags, "--load", "/runs/a"], "/scratch") == [
        "--lr",
        "1e-6",
        "--num-rollout",
        "2",
        "--output-dir",
        "/scratch",
    ]
