"""The environment of a process under torch_memory_saver, and what the module does in one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.utils.accelerator import memory_saver
from slime.utils.errors import UsageError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site directory as the wheel of torch_memory_saver makes it: libraries for two CUDAs beside the package."""
    (tmp_path / "torch_memory_saver").mkdir()
    (tmp_path / "torch_memory_saver" / "__init__.py").touch()
    for variant in ("_cu12", "_cu13", ""):
        for mode in ("preload", "torch"):
            (tmp_path / f"torch_memory_saver_hook_mode_{mode}{variant}.abi3.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("cuda", "major"), [("12.8", "12"), ("13.0", "13")])
def test_the_library_is_the_one_for_torchs_cuda_and_stands_before_what_is_preloaded_anyway(
    installed, monkeypatch, cuda, major
):
    monkeypatch.setattr(memory_saver, "cuda_version", lambda: cuda)
    env = memory_saver.environment({"LD_PRELOAD": "/usr/lib/libjemalloc.so"})
    hook = installed / f"torch_memory_saver_hook_mode_preload_cu{major}.abi3.so"
    assert env == {
        "LD_PRELOAD": f"{hook}:/usr/lib/libjemalloc.so",
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }


def test_a_cuda_runtime_that_is_a_python_package_is_preloaded_before_the_library_that_needs_it(installed, monkeypatch):
    monkeypatch.setattr(memory_saver, "cuda_version", lambda: "13.0")
    runtime = installed / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    hook = installed / "torch_memory_saver_hook_mode_preload_cu13.abi3.so"
    assert memory_saver.environment({})["LD_PRELOAD"] == f"{runtime}:{hook}"


def test_what_is_missing_is_named_with_the_way_out(installed, monkeypatch):
    monkeypatch.setattr(memory_saver, "cuda_version", lambda: "11.8")
    with pytest.raises(UsageError, match="no library for CUDA 11.*--no-offload-train"):
        memory_saver.environment({})
    monkeypatch.setattr(memory_saver, "cuda_version", lambda: None)
    with pytest.raises(UsageError, match="built with CUDA.*--no-offload-train"):
        memory_saver.environment({})
    monkeypatch.setattr(memory_saver, "PACKAGE", "torch_memory_saver_that_is_not_there")
    with pytest.raises(UsageError, match="not installed.*--no-offload-train"):
        memory_saver.environment({})


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_that_the_saver_cannot_see_is_refused(installed, monkeypatch, name):
    monkeypatch.setattr(memory_saver, "cuda_version", lambda: "13.0")
    with pytest.raises(UsageError, match="expandable_segments"):
        memory_saver.environment({name: "max_split_size_mb:64,expandable_segments:True"})


def test_where_the_saver_is_not_loaded_blocks_do_nothing_and_pausing_is_an_error(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert not memory_saver.is_loaded()
    with memory_saver.outside_saver(), memory_saver.outside_saver():
        pass
    for verb in (memory_saver.pause, memory_saver.resume):
        with pytest.raises(RuntimeError, match="does not run under torch_memory_saver"):
            verb()


def test_nested_blocks_turn_the_saver_off_once_and_on_again_at_the_end(monkeypatch):
    class Saver:  # the package loads its library, which needs CUDA; this is the part of its interface that counts
        managing = True

        @staticmethod
        def disable():
            from contextlib import contextmanager

            @contextmanager
            def block():
                assert Saver.managing, "the package asserts this"
                Saver.managing = False
                yield
                Saver.managing = True

            return block()

    monkeypatch.setattr(memory_saver, "is_loaded", lambda: True)
    monkeypatch.setattr(memory_saver, "_saver", Saver)
    with memory_saver.outside_saver():
        with memory_saver.outside_saver():
            assert not Saver.managing
        assert not Saver.managing
    assert Saver.managing
