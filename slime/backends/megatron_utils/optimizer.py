"""Adam that holds the fp32 weights itself: in host memory (--optimizer-cpu-offload) or with a smaller first moment
(--use-precision-aware-optimizer).

Megatron's optimizer then keeps no copies of weights and gradients: `param` is its share of the model's weights and
`param.decoupled_grad` a view of the gradient buffer. The state of a weight is "master_param", "exp_avg" and
"exp_avg_sq", which its checkpoints read and write under the names that every run has, so that a run may be resumed
with or without. Upstream (0.16.1) has this in TransformerEngine's FusedAdam, and a HybridDeviceOptimizer that cannot
resume a model with fp32 weights. The update is `Adam`'s, number by number.

At the end, what any optimizer remembers between steps: made before the first, forgotten (--reset-optimizer-states), or
never kept (--use-stateless-adam). That changes no weight, nor its fp32 copy, no learning rate and no schedule.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slime.backends.megatron_utils.megatron_patch.without_apex import Adam
from slime.config.args import Args
from slime.utils.accelerator import reserve_segment
from slime.utils.misc import needed

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """How the state is held."""

    host_fraction: float = 0.0
    """Share of the weights, in order, whose state is in host memory and which are updated there."""
    overlaps: bool = False
    """Gradients of all weights are on their way while the first is updated, and weights return behind that."""
    pins_grads: bool = True
    pins_params: bool = True
    exp_avg_dtype: torch.dtype = torch.float32
    num_threads: int = 1
    """CPU threads of an update in host memory."""


@dataclass
class _HostCopies:
    """Of one weight that is updated in host memory: where its gradient arrives and its new value leaves."""

    grad: torch.Tensor
    param: torch.Tensor
    has_arrived: Any


class MasterAdam(Adam):
    """`Adam` over shares of a model's weights in any precision; see the module's docstring.

    Args:
        params: parameters, or groups of them; each needs a `decoupled_grad` at every step that shall update it.
        held: how the state is held.
        settings: of `Adam`.
    """

    state: Any

    def __init__(self, params: Any, *, held: Held, **settings: Any) -> None:
        self._held = held
        self._host: dict[torch.Tensor, _HostCopies | None] = {}
        """Weight -> its copies in host memory, None for one that is updated where it is; made with the state."""
        self._stream = torch.cuda.Stream()
        super().__init__(params, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient, in its place too; `closure` is not supported."""
        if closure is not None:
            raise ValueError("this Adam takes no closure: Megatron computes gradients before the step.")
        work = []
        for group in self.param_groups:
            group["step"] = int(group.get("step") or 0) + 1
            params = [p for p in group["params"] if _grad(p) is not None and p.numel()]
            self._fill(params)
            work += [(group, param) for param in params]
        on_host = [(group, param) for group, param in work if self._host[param] is not None]
        if self._held.overlaps:
            self._send_grads([param for _, param in on_host])
        for group, param in work:
            if self._host[param] is None:
                self._update(group, param, _grad(param))
                param.copy_(self.state[param]["master_param"])
        with _threads(self._held.num_threads):
            for group, param in on_host:
                self._update_on_host(group, param)
        torch.cuda.current_stream().wait_stream(self._stream)

    def take_weights(self, state_dict: Any = None) -> None:
        """Set the fp32 weights from the model's, which something else has changed; called as Megatron's."""
        for param, state in self.state.items():
            state["master_param"].copy_(param.detach())

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A part of a weight's state in fp32, for a checkpoint."""
        return self.state[param][name].float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """Set a part of a weight's state from a checkpoint's."""
        self._fill([param])
        self.state[param][name].copy_(value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the groups' settings; tensors come through `set_scaled_state`.

        torch would bring them into the weights' precision and onto their device.
        """
        state = self.state
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state = state

    def _fill(self, params: list[torch.Tensor]) -> None:
        if not self._host:
            self._host = dict(self._places())
        new = [param for param in params if not self.state[param]]
        dtypes = (self._held.exp_avg_dtype, torch.float32)
        if new and new[0].is_cuda:
            on_device = [param.numel() for param in new if self._host[param] is None]
            reserve_segment(numel * dtype.itemsize for numel in on_device for dtype in (torch.float32, *dtypes))
        for param in new:
            device = param.device if self._host[param] is None else torch.device("cpu")
            master = param.detach().to(device, torch.float32, copy=True)
            moments = [torch.zeros_like(master, dtype=dtype) for dtype in dtypes]
            self.state[param].update(zip(("master_param", *MOMENTS), (master, *moments), strict=True))

    def _places(self) -> Iterator[tuple[torch.Tensor, _HostCopies | None]]:
        """Each weight with its copies in host memory, if it is one of those that are updated there."""
        params = [param for group in self.param_groups for param in group["params"]]
        wanted, taken = self._held.host_fraction * sum(param.numel() for param in params), 0
        for param in params:
            is_on_host = taken < wanted
            taken += is_on_host * param.numel()
            yield param, self._host_copies(param) if is_on_host else None

    def _host_copies(self, param: torch.Tensor) -> _HostCopies:
        has_gpu = param.device.type == "cuda"
        grad = torch.empty(param.shape, dtype=torch.float32, pin_memory=has_gpu and self._held.pins_grads)
        copy = torch.empty(param.shape, dtype=param.dtype, pin_memory=has_gpu and self._held.pins_params)
        return _HostCopies(grad, copy, torch.cuda.Event())

    def _send_grads(self, params: list[torch.Tensor]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for param in params:
                host = needed(self._host[param])
                host.grad.copy_(_grad(param).float(), non_blocking=True)
                host.has_arrived.record(self._stream)

    def _update_on_host(self, group: dict[str, Any], param: torch.Tensor) -> None:
        host = needed(self._host[param])
        if not self._held.overlaps:
            self._send_grads([param])
        host.has_arrived.synchronize()
        self._update(group, param, host.grad)
        host.param.copy_(self.state[param]["master_param"])
        with torch.cuda.stream(self._stream):
            param.copy_(host.param, non_blocking=True)
        if not self._held.overlaps:
            self._stream.synchronize()

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        """Adam's step on a weight's state, where that is; the moments are in fp32 meanwhile."""
        state = self.state[param]
        first, second = (state[name].float() for name in MOMENTS)
        self._fused_update(group, [state["master_param"]], [grad.float()], [first], [second])
        if first is not state["exp_avg"]:
            state["exp_avg"].copy_(first)


def _grad(param: Any) -> Any:
    return vars(param).get("decoupled_grad")


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Let torch use so many threads of the CPU inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def held_by(args: Args) -> Held | None:
    """What the flags say about state that Adam holds itself; None where Megatron holds the fp32 weights."""
    from slime.backends.megatron_utils.model_provider import torch_type

    if not (args.optimizer_cpu_offload or args.use_precision_aware_optimizer):
        return None
    cores = len(os.sched_getaffinity(0))
    return Held(
        host_fraction=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
        overlaps=args.overlap_cpu_optimizer_d2h_h2d,
        pins_grads=args.pin_cpu_grads,
        pins_params=args.pin_cpu_params,
        exp_avg_dtype=torch_type(args.exp_avg_dtype),
        num_threads=max(1, cores // args.actor_num_gpus_per_node) if args.accelerator == "cuda" else 1,
    )


def make_optimizer(config: Any, model: list[torch.nn.Module], held: Held) -> Any:
    """Megatron's optimizer of `model`, in which `MasterAdam` holds weights and moments.

    Args:
        config: an OptimizerConfig that asks for none of this: its own ways need TransformerEngine.
        model: chunks of a data-parallel model.
        held: how the state is held.
    """
    import megatron.core.optimizer as upstream

    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True  # what its DistributedOptimizer asks
    usual = upstream.Adam
    upstream.Adam = functools.partial(MasterAdam, held=held)
    try:
        optimizer = upstream.get_megatron_optimizer(config, model)
    finally:
        upstream.Adam = usual
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, MasterAdam):
            # Upstream's does nothing here, for its FusedAdam makes the weights at the first step.
            part._copy_model_params_to_main_params = part.optimizer.take_weights
    return optimizer


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron's chains, or itself."""
    return list(vars(optimizer).get("chained_optimizers", [optimizer]))


def torch_optimizers(optimizer: Any) -> list[Any]:
    """torch's optimizers below Megatron's; there is none where this rank has no share of some parameters."""
    return [part.optimizer for part in parts_of(optimizer) if part.optimizer is not None]


MASTER_WEIGHTS = ("param", "master_param")
"""Keys of a parameter's state that hold weights, not moments (Megatron's precision-aware and CPU optimizers)."""


def make_moments(optimizer: Any) -> None:
    """Let every Adam of Megatron's optimizer have its (zero) moments now, where it has none; it would at its first
    step."""
    for adam in torch_optimizers(optimizer):
        if isinstance(adam, Adam):
            adam.fill_state()


def keep_no_moments(optimizer: Any) -> None:
    """Let every Adam of Megatron's optimizer work without moments; the fp32 weights of a 16-bit model stay."""
    for adam in torch_optimizers(optimizer):
        if isinstance(adam, Adam):
            adam.is_stateless = True


def reset_optimizer_states(optimizer: Any) -> None:
    """Set the moments and the step count of every parameter to 0.

    Args:
        optimizer: Megatron's, of any kind; it may chain several.
    """
    for one in torch_optimizers(optimizer):
        for group in one.param_groups:
            if "step" in group:
                group["step"] = torch.zeros_like(group["step"]) if torch.is_tensor(group["step"]) else 0
        for state in one.state.values():
            for name, value in state.items():
                if name in MASTER_WEIGHTS:
                    continue
                if torch.is_tensor(value):
                    value.zero_()
                elif name == "step":
                    state[name] = 0
