"""The device a process computes on, chosen once: real GPUs ("cuda") or the CPU ("cpu").

`resolve` turns the flag `--accelerator` into a kind at parse time; `activate` makes it this process's device.
Everything else asks here instead of testing for CUDA, so that code has no branches per device. torch is imported only
where it is used: a command line is checked without it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from slime.utils.errors import UsageError

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]

# Names of this module that are torch's own: of `torch.cuda`; on the CPU first of `torch.cpu` and `torch`
_FROM_TORCH = {
    "current_stream",
    "default_stream",
    "device_count",
    "get_device_properties",
    "get_rng_state",
    "initial_seed",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "set_rng_state",
    "stream",
}


def _from_torch(name: str) -> Any:
    if name not in _FROM_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    places = (torch.cuda,) if kind() == "cuda" else (torch.cpu, torch, torch.cuda)
    return next(getattr(place, name) for place in places if hasattr(place, name))


if not TYPE_CHECKING:  # so that a wrong name in our own code is still an error of types
    __getattr__ = _from_torch


class _Active:
    """The one owner of this process's device; None until `activate` was called."""

    def __init__(self) -> None:
        self.kind: Kind | None = None


_ACTIVE = _Active()


def cuda_is_available() -> bool:
    """Whether torch sees a CUDA device (a name of its own so that tests can replace it)."""
    if "torch" not in sys.modules and is_built_without_cuda():
        return False
    import torch

    return torch.cuda.is_available()


def is_built_without_cuda() -> bool:
    """Whether the installed torch is a build for CPUs."""
    says = _torch_build()
    return bool(says) and says.get("cuda") is None and says.get("hip") is None


def is_built_for_amd() -> bool:
    """Whether the installed torch is a build for AMD's GPUs."""
    return bool(_torch_build().get("hip"))


def cuda_version() -> str | None:
    """The CUDA that the installed torch was built with ("13.0"); None for a build for CPUs."""
    return cast("str | None", _torch_build().get("cuda"))


def _torch_build() -> dict[str, Any]:
    """What the installed torch says of its build, in a file that is read much faster than torch; empty without it."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, "version.py")
        if file.is_file():
            return runpy.run_path(str(file))
    return {}


def resolve(name: str) -> Kind:
    """Return the kind that `--accelerator name` means on this machine.

    Args:
        name: "auto" (CUDA if there is any), "cuda" or "cpu".

    Raises:
        UsageError: for an unknown name, or "cuda" where torch sees no CUDA device.
    """
    if name == "auto":
        return "cuda" if cuda_is_available() else "cpu"
    if name not in get_args(Kind):
        raise UsageError(f"--accelerator {name} is not known; use auto, cuda or cpu.")
    if name == "cuda" and not cuda_is_available():
        raise UsageError("--accelerator cuda: torch sees no CUDA device here; use --accelerator cpu (or auto).")
    return cast(Kind, name)


def activate(kind: str) -> None:
    """Make `kind` ("cpu" or "cuda") this process's device; calling it again with another kind is an error."""
    if kind not in get_args(Kind):
        raise ValueError(f"activate takes 'cpu' or 'cuda', got {kind!r}; call resolve() first.")
    if _ACTIVE.kind not in (None, kind):
        raise RuntimeError(f"this process already computes on {_ACTIVE.kind}; it cannot change to {kind}.")
    _ACTIVE.kind = cast(Kind, kind)


def kind() -> Kind:
    """The active kind; without `activate` it is what `auto` means here."""
    return _ACTIVE.kind or resolve("auto")


device_type = kind


def current_device() -> torch.device:
    """The device on which this process puts its tensors."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if kind() == "cuda" else torch.device("cpu")


def compute_capability() -> tuple[int, int] | None:
    """What this process's first GPU can do, as CUDA numbers it: (9, 0) is Hopper; None where it sees none, as a driver
    on a node without GPUs."""
    import torch

    return torch.cuda.get_device_capability(0) if cuda_is_available() else None


def gpu_name() -> str:
    """The name of this process's device, as its driver gives it; empty without a GPU."""
    import torch

    return str(torch.cuda.get_device_name()) if kind() == "cuda" else ""


def supports(cap: str) -> bool:
    """Whether torch's module of this process's device has what is named so ("ipc_collect", "mem_get_info", ...)."""
    import torch

    return hasattr(torch.cuda if kind() == "cuda" else torch.cpu, cap)


def register_accelerator(*_: object, **__: object) -> None:
    """Refuse another kind of device, as upstream lets one be registered.

    Raises:
        UsageError: always.
    """
    raise UsageError("register_accelerator: slime computes on cuda (CUDA and ROCm) and on cpu, see --accelerator.")


def set_device(index: int) -> None:
    """Choose the GPU `index` of this host; the CPU has no index and ignores it."""
    if kind() == "cuda":
        import torch

        torch.cuda.set_device(index)


def synchronize(device_arg: int | str | torch.device | None = None) -> None:
    """Wait until the device (None: the current one) has done what was queued; at once on the CPU."""
    if kind() == "cuda":
        import torch

        torch.cuda.synchronize(device_arg)


def empty_cache() -> None:
    """Give cached device memory back, cuBLAS's workspaces too (nothing is cached on the CPU).

    There is a workspace of 32 MiB for each thread that multiplies. That of the backward pass lies where an activation
    was, and would keep all of its piece of memory.
    """
    if kind() == "cuda":
        import torch

        torch.cuda.synchronize()  # a product that runs still uses its workspace
        torch._C._cuda_clearCublasWorkspaces()  # named in torch's notes on CUDA
        torch.cuda.empty_cache()


def free_share() -> float:
    """The part of the device's memory that no process has; 1.0 on the CPU."""
    if kind() != "cuda":
        return 1.0
    import torch

    free, total = torch.cuda.mem_get_info()
    return float(free / total)


def reserve_segment(sizes: Iterable[int]) -> None:
    """Have torch put tensors of these sizes, in bytes, which are made next, into one piece of device memory.

    By itself it takes a piece from the driver for every tensor above 10 MB, and for every 20 MB of smaller ones, into
    whatever an earlier computation has left. A trainer that sleeps gives up and takes back piece by piece, holes
    included. Nothing happens on the CPU. What torch has cached is given back first.
    """
    if kind() != "cuda":
        return
    import torch

    empty_cache()
    # Tensors of at most 1 MiB come out of a pool of their own; the others are aligned to 512 bytes.
    if num_bytes := sum(-(-size // 512) * 512 for size in sizes if size > 2**20):
        torch.empty(num_bytes, dtype=torch.uint8, device=current_device())  # freed at once: torch cuts it up


def process_bytes() -> int | None:
    """Device memory that this process alone holds, its context included; None where the driver does not say (CPU)."""
    if kind() != "cuda" or importlib.util.find_spec("pynvml") is None:
        return None
    import pynvml
    import torch

    try:
        device = _nvml_device(torch.cuda.current_device())
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
    except pynvml.NVMLError:
        return None
    # In a container the driver may know processes by other numbers.
    return next((found.usedGpuMemory for found in processes if found.pid == os.getpid()), None)


@functools.cache
def _nvml_device(index: int) -> Any:
    """NVML's handle of a device of this process. NVML stays open: opening it looks for every GPU of the host."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def process_group_backend(default: str = "nccl") -> str:
    """The torch.distributed backend of the device: gloo on the CPU, otherwise `default`."""
    return "gloo" if kind() == "cpu" else default


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host without waiting for the device's other work."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # or a copy of more than some 64 KB waits all the same
    return tensor.to(device, non_blocking=True)
