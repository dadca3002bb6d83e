"""Activations that wait in host memory for their backward pass: --cpu-offloading and
--fine-grained-activation-offloading.

Megatron (0.16.1) offloads whole layers with TransformerEngine alone, and its offloading of single modules keeps host
buffers of every shape that it ever met, which packed micro-batches of changing lengths make endless. Here autograd's
own hooks hand out what a layer saves: it is copied to pinned memory on a stream of its own while the next layer
computes, and comes back while the layer behind it goes backward. Weights stay, and so does what all layers share
(rotary angles). No number changes. Without a GPU the copies are made all the same, which is how this is tested.

It knows layers and their modules by Megatron's names, and nothing about losses, pipelines or flags.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from slime.utils import accelerator

MODULES: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm",),
    "qkv_linear": (
        "self_attention.linear_qkv",
        "self_attention.linear_q_proj",
        "self_attention.linear_q_down_proj",
        "self_attention.linear_kv_down_proj",
    ),
    "core_attn": ("self_attention.core_attention",),
    "attn_proj": ("self_attention.linear_proj",),
    "mlp_norm": ("pre_mlp_layernorm",),
}
"""Value of --offload-modules -> modules of a layer; latent attention has several for one."""


class _Memory:
    """The storage of tensors that autograd saved: where its bytes are now."""

    def __init__(self, group: _Group, original: torch.Tensor) -> None:
        self.group = group
        self.original: torch.Tensor | None = original
        has_gpu = original.device.type == "cuda"
        self.host = torch.empty(original.shape, dtype=torch.uint8, device="cpu", pin_memory=has_gpu)
        self.back: torch.Tensor | None = None


class _Saved(NamedTuple):
    """One tensor that autograd saved, as a view of its storage: a copy with other strides could round otherwise."""

    memory: _Memory
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def view_of(self, bytes_: torch.Tensor) -> torch.Tensor:
        """The tensor in a copy of its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=bytes_.device)
        return empty.set_(bytes_.untyped_storage(), self.offset, self.size, self.stride)


class _Group:
    """What one layer saved in one forward pass."""

    def __init__(self, previous: _Group | None, stream: Any) -> None:
        self.previous = previous
        """The layer before, in the same pass: the next one to go backward."""
        self._stream = stream
        self._memories: list[_Memory] = []
        self._by_storage: dict[tuple[int, int], _Memory] = {}
        self._is_copied, self._is_back = torch.cuda.Event(), torch.cuda.Event()
        self._is_fetched = self._is_waited_for = False

    def save(self, tensor: torch.Tensor) -> _Saved:
        """Start the copy to host memory; a storage that is saved twice is copied once."""
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor._version)
        if key not in self._by_storage:
            bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memory = self._by_storage[key] = _Memory(self, bytes_)
            self._memories.append(memory)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                memory.host.copy_(bytes_, non_blocking=True)
        return _Saved(self._by_storage[key], tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def close(self) -> None:
        """The layer is done: nothing more is saved."""
        self._by_storage.clear()
        self._is_copied.record(self._stream)

    def release(self) -> None:
        """Give back the device's memory; what is computed from now on waits for the copies first."""
        torch.cuda.current_stream().wait_event(self._is_copied)
        for memory in self._memories:
            memory.original = None

    def fetch(self) -> None:
        """Start the copies back; calling it again does nothing. Afterwards only autograd holds the tensors."""
        if self._is_fetched:
            return
        self._is_fetched = True
        for memory in self._memories:  # allocated for the stream that computes, which frees it
            memory.back = memory.original
            if memory.back is None:
                memory.back = torch.empty_like(memory.host, device=accelerator.current_device())
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for memory in self._memories:
                if memory.original is None and memory.back is not None:
                    memory.back.copy_(memory.host, non_blocking=True)
        self._is_back.record(self._stream)
        self._memories.clear()

    def restore(self, saved: _Saved) -> torch.Tensor:
        """The tensor on the device again; the layer before starts to come back as well."""
        self.fetch()
        if not self._is_waited_for:
            self._is_waited_for = True
            torch.cuda.current_stream().wait_event(self._is_back)
            if self.previous is not None:
                self.previous.fetch()
                self.previous = None  # a chain would keep every layer until the first is done
        assert saved.memory.back is not None
        return saved.view_of(saved.memory.back)


class ActivationOffload:
    """Offloads what the first `num_layers` of `layers` save; wraps their `forward`.

    Args:
        layers: of one model chunk, in order.
        num_layers: how many; the last layer, which goes backward at once, always stays.
        min_size: tensors with fewer elements stay.
        modules: names of `MODULES` whose saved tensors alone are offloaded; None means all of a layer.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        num_layers: int,
        *,
        min_size: int,
        modules: Sequence[str] | None = None,
    ) -> None:
        self._min_size = min_size
        self._stream = torch.cuda.Stream()
        self._group: _Group | None = None
        """Of the layer that runs now, or ran last."""
        self._staying: set[int] = set()
        """Storages that the running layer does not own."""
        count = min(num_layers, len(layers) - 1)
        for index, layer in enumerate(layers[:count]):
            parts = None if modules is None else list(_parts(layer, modules))
            for part in parts or []:
                part.forward = self._in_part(functools.partial(_forward, part))
            forward = layer.forward if parts is not None else self._in_part(layer.forward)
            layer.forward = self._in_layer(layer, forward, is_first=index == 0)
        if count > 0:
            layers[count].forward = self._behind(layers[count].forward)

    def _in_layer(self, layer: torch.nn.Module, forward: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(hidden_states, *args, **kwargs)
            before = None if is_first else self._group
            group = self._group = _Group(before, self._stream)
            shared = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self._staying = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *shared)}
            output = forward(hidden_states, *args, **kwargs)
            group.close()
            if before is not None:
                before.release()
            return output

        return run

    def _in_part(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return forward(*args, **kwargs)

        return run

    def _behind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if torch.is_grad_enabled() and self._group is not None:
                self._group.release()
                self._group = None
            return output

        return run

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        stays = tensor.numel() < self._min_size or tensor.device.type != accelerator.current_device().type
        if stays or self._group is None or tensor.untyped_storage().data_ptr() in self._staying:
            return tensor
        return self._group.save(tensor.detach())


def _forward(part: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward pass of the module's class, looked up now: layers.lora changes that class after wrapping."""
    return type(part).forward(part, *args, **kwargs)


def _unpack(saved: torch.Tensor | _Saved) -> torch.Tensor:
    return saved.memory.group.restore(saved) if isinstance(saved, _Saved) else saved


def _parts(layer: torch.nn.Module, modules: Sequence[str]) -> Iterator[torch.nn.Module]:
    """The modules of a layer with these names of `MODULES`."""
    by_name = dict(layer.named_modules())
    for name in modules:
        yield from (by_name[path] for path in MODULES[name] if path in by_name)
