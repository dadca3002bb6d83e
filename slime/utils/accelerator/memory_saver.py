"""GPU memory that is given up for a while and comes back at the same addresses (torch_memory_saver).

The saver is a library in LD_PRELOAD (`environment`) that stands between torch and cudaMalloc. What is allocated while
it is in force is *managed*: `pause` copies it to pinned host memory and frees the pages, `resume` brings them back;
between the two, whoever touches managed memory crashes the process. Everything is managed, except inside
`outside_saver`: memory that another process maps (CUDA IPC) or that NCCL registers must not be managed.

It is the one module that touches the package. Whoever pauses has waited for the device's work and has emptied torch's
cache, which would be copied too.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.utils.accelerator import cuda_version
from slime.utils.errors import UsageError

PACKAGE = "torch_memory_saver"
EXPANDABLE = "expandable_segments:true"


class _PerThread(threading.local):
    """The saver's own switch is per thread, and so is this count of the blocks that turned it off."""

    blocks_outside = 0


_THREAD = _PerThread()


def is_installed() -> bool:
    """Whether the package can be imported here."""
    return importlib.util.find_spec(PACKAGE) is not None


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """What makes a process start under the saver, with copies in host memory of all that is managed.

    Args:
        inherited: the environment that the process gets otherwise; what it preloads already stays.

    Raises:
        UsageError: the package is missing, has no library for torch's CUDA, or torch's allocator is set up in a way
            that it cannot work with.
    """
    settings = f"{inherited.get('PYTORCH_CUDA_ALLOC_CONF')},{inherited.get('PYTORCH_ALLOC_CONF')}"
    if EXPANDABLE in settings.lower():
        raise UsageError(
            "--offload-train does not go with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF: the saver would "
            "not see torch's memory; take it out, or give --no-offload-train."
        )
    preload = [*_preloaded(), inherited.get("LD_PRELOAD", "")]
    return {
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "TMS_INIT_ENABLE": "1",
        "TMS_INIT_ENABLE_CPU_BACKUP": "1",
    }


def _preloaded() -> list[str]:
    """The hook's library for the CUDA that torch was built with, behind the runtime that it needs.

    A runtime that came as a Python package is on no path that the dynamic linker knows before torch is imported;
    without it a process with the hook would not start at all.
    """
    spec, version = importlib.util.find_spec(PACKAGE), cuda_version()
    remedy = f"install {PACKAGE}, or give --no-offload-train"
    if spec is None or spec.origin is None:
        raise UsageError(f"--offload-train needs the package {PACKAGE}, which is not installed; {remedy}.")
    if version is None:
        raise UsageError("--offload-train needs a torch that is built with CUDA; give --no-offload-train.")
    major = version.split(".")[0]
    package = Path(spec.origin).parent
    pattern = f"{PACKAGE}_hook_mode_preload_cu{major}.*so"
    hooks = sorted(package.glob(pattern)) or sorted(package.parent.glob(pattern))
    if len(hooks) != 1:
        raise UsageError(f"--offload-train: {PACKAGE} in {package.parent} has no library for CUDA {major}; {remedy}.")
    runtimes = sorted(package.parent.glob(f"nvidia/*/lib/libcudart.so.{major}"))
    return [*map(str, runtimes[:1]), str(hooks[0])]


def is_loaded() -> bool:
    """Whether this process was started under the saver."""
    return PACKAGE in os.environ.get("LD_PRELOAD", "") and os.environ.get("TMS_INIT_ENABLE") == "1"


@contextmanager
def outside_saver() -> Iterator[None]:
    """What this thread allocates inside the block is not managed; it does nothing where the saver is not loaded.

    Blocks may be nested. Other threads (autograd's too) go on allocating managed memory.
    """
    if not is_loaded() or _THREAD.blocks_outside:
        yield
        return
    _THREAD.blocks_outside += 1
    try:
        with _saver().disable():
            yield
    finally:
        _THREAD.blocks_outside -= 1


def pause() -> None:
    """Copy all managed memory to the host and free it on the device.

    The copies stay allocated for the next time: pinning memory anew takes ten times as long as copying into it.

    Raises:
        RuntimeError: this process was not started under the saver.
    """
    _saver().pause()


def resume() -> None:
    """Bring all managed memory back, at the addresses and with the values it had.

    Raises:
        RuntimeError: this process was not started under the saver.
    """
    _saver().resume()


def _saver() -> Any:
    """The package's one object, set up for LD_PRELOAD; to be asked for only after megatron was imported."""
    if not is_loaded():
        raise RuntimeError(f"this process does not run under {PACKAGE}: it was started without its environment")
    from torch_memory_saver import torch_memory_saver as saver  # not on every host

    if saver._impl is None:
        saver.hook_mode = "preload"  # importing megatron-core 0.16.1 sets another one
        saver.retain_cpu_backup = True
        # Kept so that a later import which sets the mode, without effect by now, does not fail.
        saver._impl_ctor_kwargs = {}
    return saver
