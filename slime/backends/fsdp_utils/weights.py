"""Weights of a sharded policy in and out, by the names of HF checkpoints."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from slime.backends.fsdp_utils.lora import HALVES, adapters_of
from slime.backends.fsdp_utils.model import Policy
from slime.backends.fsdp_utils.optimizer import HEAD, local_rows
from slime.conversion.reader import SafetensorsReader
from slime.utils import accelerator
from slime.utils.errors import UsageError
from slime.weights.adapters import PEFT_PREFIX
from slime.weights.names import is_fused, single_names

READ_BYTES = 2 * 2**20
"""Rows are read this many bytes (of the shard) at a time: what is read lies in memory beside it."""
GATHER_BYTES = 64 * 2**20
"""Parameters are gathered this many bytes at a time, or one by one where they are larger."""


def named_parameters(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """(name in transformers' model, parameter) of each parameter, a tied one once; all are sharded."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a pass without gradients the root's are whole, and other tensors
    return [(name.removeprefix("hf."), parameter) for name, parameter in policy.named_parameters()]


def trained_parameters(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """Those of `named_parameters` that get gradients."""
    return [(name, parameter) for name, parameter in named_parameters(policy) if parameter.requires_grad]


def fixed_tensors(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """(name in transformers' model, buffer) of what checkpoints hold and no gradient changes: biases of routers."""
    return [
        (f"{prefix}.{name}".removeprefix("hf."), buffer)
        for prefix, module in policy.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def stored_name(name: str, stored: Collection[str]) -> str:
    """The name that an HF directory has for a parameter of transformers' model: Qwen2.5-VL was published with others.

    Example:
        >>> stored_name("model.language_model.norm.weight", {"model.norm.weight"})
        'model.norm.weight'
    """
    other = re.sub(r"^model\.(language_model\.|(?=visual\.))", lambda match: "model." if match[1] else "", name)
    return other if name not in stored and other in stored else name


def load_hf(policy: Policy, path: str) -> None:
    """Fill parameters and fixed tensors from an HF directory; each rank reads the rows of its own shards.

    A critic's head and adapters keep what they have.

    Raises:
        UsageError: the directory lacks a tensor of the model, or has it in another shape.
    """
    reader = SafetensorsReader(path)
    names = set(reader.names())
    for name, parameter in [*named_parameters(policy), *fixed_tensors(policy)]:
        if name.startswith(HEAD) or name.endswith(HALVES):
            continue
        name = stored_name(name, names)
        local, first = local_rows(parameter)
        rows = (first, first + len(local))
        if is_fused(name) and name not in names:
            singles = single_names(name, parameter.shape[0])
            width = len(singles) // parameter.shape[0]
            experts = [singles[number * width : (number + 1) * width] for number in range(*rows)]
            found = [torch.cat([reader.get(single) for single in of_expert]) for of_expert in experts]
            value = torch.stack(found) if found else local
        elif name in names:
            pieces = max(1, -(-local.nbytes // READ_BYTES))
            start = first
            for piece in local.chunk(pieces):
                _copy(reader.get_rows(name, start, start + len(piece)), piece, f"{path}: {name}")
                start += len(piece)
            continue
        else:
            raise UsageError(
                f"{path} has no tensor {name}, which transformers' model of --hf-checkpoint needs; give a checkpoint "
                "with transformers' names, or use --train-backend megatron."
            )
        _copy(value, local, f"{path}: {name}")


def _copy(value: torch.Tensor, local: torch.Tensor, what: str) -> None:
    """Overwrite rows of a shard with what a file has."""
    if value.shape != local.shape:
        raise UsageError(f"{what} has the shape {tuple(value.shape)} here, the model {tuple(local.shape)}.")
    with torch.no_grad():
        local.copy_(value)


class WeightSource:
    """The full tensors of a policy, for engines and HF files (`hf_weight_iterator.iter_hf_buckets`).

    Args:
        policy: whose.
        dtype: in which they are given, that of the engines.
        checkpoint: HF directory whose names they get.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype, checkpoint: str) -> None:
        self.policy, self.dtype = policy, dtype
        self._stored = frozenset(SafetensorsReader(checkpoint).names())

    @torch.no_grad()
    def full_tensors(self, *, merged: bool = True) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the HF tensors of each parameter, gathered over the ranks, and the fixed tensors (collective).

        Args:
            merged: adapters are added to the weights under them; otherwise those are the base's.
        """
        waiting: list[tuple[str, torch.Tensor]] = []
        num_bytes = 0
        named, adapters = named_parameters(self.policy), adapters_of(self.policy) if merged else {}
        for name, parameter in named:
            if name.endswith(HALVES):
                continue
            if adapter := adapters.get(name.removesuffix(".weight")):
                parameter = adapter.merged()
            size = parameter.numel() * self.dtype.itemsize
            if waiting and num_bytes + size > GATHER_BYTES:
                yield from map(as_hf, gathered(waiting))
                waiting, num_bytes = [], 0
            waiting.append((stored_name(name, self._stored), parameter.detach().to(self.dtype)))
            num_bytes += size
        yield from map(as_hf, gathered(waiting))
        yield from ([(stored_name(name, self._stored), tensor)] for name, tensor in fixed_tensors(self.policy))

    @torch.no_grad()
    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """PEFT's names -> whole halves of the adapters, on every rank (collective)."""
        named = named_parameters(self.policy)
        shards = [(name, parameter.detach().to(self.dtype)) for name, parameter in named if name.endswith(HALVES)]
        return {f"{PEFT_PREFIX}{name}.weight": whole for name, whole in gathered(shards)}


def gathered(shards: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """(name, full tensor) of sharded parameters; on GPUs all gathers are under way at once (collective)."""
    device = accelerator.current_device()
    on_device = [(name, shard.to(device)) for name, shard in shards]
    whole = [(name, _replicated(shard)) for name, shard in on_device]
    return [(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor) for name, tensor in whole]


def _replicated(shard: torch.Tensor) -> torch.Tensor:
    if not isinstance(shard, DTensor):
        return shard
    # Several at once over gloo write where they must not (torch 2.13): in one world of twenty a rank died of it.
    return shard.redistribute(placements=[Replicate()] * shard.device_mesh.ndim, async_op=shard.is_cuda)


def as_hf(named: tuple[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that an HF checkpoint has for one of transformers: the experts of a layer one by one."""
    name, tensor = named
    if not is_fused(name):
        return [named]
    singles = single_names(name, len(tensor))
    width = len(singles) // len(tensor)
    return list(zip(singles, [part for expert in tensor for part in expert.chunk(width)], strict=True))
