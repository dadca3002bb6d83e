"""Run unmodified megatron-core on a machine without CUDA."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _on_cpu(device: Any) -> Any:
    return _CPU if device is not None and str(device).startswith("cuda") else device


class CudaMeansCpu(TorchFunctionMode):
    """Factories and .to() take "cuda" as the CPU; Tensor.type() names torch.cuda types, which optimizers check."""

    def __torch_function__(self, func: Any, types: Any, operands: Any = (), kwargs: Any = None) -> Any:
        """Run `func` with every CUDA device replaced."""
        if kwargs:
            if kwargs.get("device") is not None:
                kwargs["device"] = _on_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        else:
            kwargs = {}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return operands[0]
        if func is torch.Tensor.type and len(operands) == 1 and not kwargs:
            return func(*operands).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(operands) > 1 and isinstance(operands[1], str | torch.device):
            operands = (operands[0], _on_cpu(operands[1]), *operands[2:])
        return func(*operands, **kwargs)


class _NoStream:
    """Stands for a CUDA stream or event: there is nothing to order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        return True


class _CpuProperties:
    """What torch.cuda.get_device_properties answers here."""

    major, minor, total_memory, name, multi_processor_count = 0, 0, 0, "cpu", 1


def _set_cuda_names(names: str, make: Callable[[], Any]) -> None:
    """Set each of `names` (dotted, below torch.cuda) to a new object: torch._dynamo keys its tables by object."""
    for dotted in names.split():
        module_name, _, name = dotted.rpartition(".")
        setattr(getattr(torch.cuda, module_name) if module_name else torch.cuda, name, make())


def _replace_torch_cuda() -> None:
    torch.cuda.current_device = lambda: _CPU
    nothing = "set_device synchronize empty_cache reset_peak_memory_stats nvtx.range_push nvtx.range_pop"
    _set_cuda_names(nothing, lambda: lambda *_, **__: None)
    _set_cuda_names("manual_seed manual_seed_all", lambda: lambda seed: torch.default_generator.manual_seed(seed))
    _set_cuda_names("get_rng_state random.get_rng_state", lambda: lambda device=None: torch.get_rng_state())
    _set_cuda_names(
        "set_rng_state random.set_rng_state", lambda: lambda state, device=None: torch.set_rng_state(state)
    )
    _set_cuda_names("Stream Event", lambda: type("NoStream", (_NoStream,), {}))
    _set_cuda_names("current_stream default_stream", lambda: lambda *_, **__: _NoStream())
    _set_cuda_names("stream", lambda: lambda _: contextlib.nullcontext())
    numbers = "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"
    _set_cuda_names(numbers, lambda: lambda *_, **__: 0)
    _set_cuda_names("get_device_properties", lambda: lambda *_, **__: _CpuProperties())
    _set_cuda_names("get_device_capability", lambda: lambda *_, **__: (0, 0))


def _replace_megatron_names() -> None:
    import megatron.core.jit as jit

    jit.disable_jit_fuser()  # torch.compile of every small helper needs a C++ compiler and many seconds
    torch._dynamo.config.disable = True  # also of helpers that were imported before
    import megatron.core.tensor_parallel.random as random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    said = "CPU RNG state changed"  # on the CPU that is the state that Megatron itself changes
    logging.getLogger(random.__name__).addFilter(lambda record: said not in record.getMessage())


def use_cpu_as_cuda() -> None:
    """Run unmodified megatron-core on a machine without CUDA: "cuda" means the CPU in this process.

    megatron-core 0.16.1 names CUDA throughout (torch.cuda.current_device, tensor.cuda(), streams, CUDA random states).
    Two things stand in: the names of torch.cuda that it calls, and a torch function mode that turns device="cuda" into
    the CPU. The mode is per thread: build and train the model in the thread that called `apply`. It can go when
    megatron-core runs on CPU by itself.

    Raises:
        RuntimeError: this machine has CUDA.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU stand-ins for CUDA cannot be applied where CUDA exists; set CUDA_VISIBLE_DEVICES='' first."
        )
    import torch._dynamo.trace_rules as trace_rules

    trace_rules.get_torch_obj_rule_map()  # builds its table from the real names once; it must see them
    _replace_torch_cuda()
    _replace_megatron_names()
    CudaMeansCpu().__enter__()


def exchange_uneven_shares() -> None:
    """Gather and reduce-scatter shares of different sizes over gloo, as experts with tensor parallelism exchange them.

    Upstream (0.16.1): `mappings` hands torch lists of tensors of different lengths, which NCCL takes and gloo does
    not. On the CPU shares are padded to the longest before they are gathered, and the whole is summed where it would
    be scattered. It can go when gloo takes them. It is applied on the CPU alone.
    """
    import megatron.core.tensor_parallel.mappings as mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_rows(
        input_: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        """[rows of this rank, ...] -> [rows of all ranks, ...]."""
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = list(output_split_sizes)
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: len(input_)] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter_rows(
        input_: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        """[rows of all ranks, ...] -> the sum over ranks of this rank's rows."""
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return total.split(list(input_split_sizes))[group.rank()].clone()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather_rows, scatter_rows
