"""AdamW, SGD and Muon over the shards of a policy as plain tensors: each operation on a DTensor takes the host time.

And a rank's part of a sharded tensor, and back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.config.args import Args

HEAD = "value_head."


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, live."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter (a live view), and the number of the first."""
    if not isinstance(parameter, DTensor):
        return parameter.data, 0
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    first = min(rows * mesh.get_local_rank(mesh.ndim - 1), parameter.shape[0])
    return parameter.to_local().data, first


def sharded_as(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A shard (live) as part of a tensor that is sharded as a parameter is."""
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


MOMENTS = ("exp_avg", "exp_avg_sq")
BUFFER = ("momentum_buffer",)
NOT_A_MAP = re.compile(r"embed|lm_head|\bwte\b|\bwpe\b|" + re.escape(HEAD))
"""Matrices whose rows are a table: Muon leaves them to AdamW, as its authors do."""


class _Sharded(torch.optim.Optimizer):
    """What the optimizers of this module share; each comes before one of torch's.

    Its parameters are this rank's shards of the given ones, live; `state` has what is kept of them. Groups are
    Megatron's: biases and vectors (norms) do not decay.

    Args:
        named: (name, sharded parameter) of all that is trained.
        settings: of torch's optimizer.
    """

    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], **settings: Any) -> None:
        self._shards = {parameter: torch.nn.Parameter(local(parameter).detach()) for _, parameter in named}
        decays = [p.ndim > 1 and not name.endswith(".bias") for name, p in named]
        groups = [
            {
                "params": [self._shards[p] for (_, p), its in zip(named, decays, strict=True) if its == decay],
                "wd_mult": float(decay),
                "lr_mult": 1.0,
            }
            for decay in (True, False)
            if decay in decays
        ]
        super().__init__(groups, **settings)
        self.make_moments()

    @torch.no_grad()
    def update(self, *, clip_grad: float, skip_nan: bool) -> float:
        """Do a step with the parameters' gradients, and drop them; returns their norm before clipping (collective).

        The norm stays on the device until the step is queued: clipping, and a step that is to be left out, are the
        kernel's.

        Args:
            clip_grad: the norm to which a longer gradient is scaled; 0 scales none.
            skip_nan: change nothing where the norm is not finite.
        """
        for parameter, shard in self._shards.items():
            shard.data = local(parameter)  # FSDP2 puts shards of unequal sizes elsewhere in the first pass
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        norm = self._norm()
        # what torch's GradScaler sets, too
        self.grad_scale = ((norm + 1e-6) / clip_grad).clamp(min=1.0) if clip_grad > 0 else None
        self.found_inf = (~norm.isfinite()).float() if skip_nan else None
        self.step()
        self.zero_grad()
        return float(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and shards."""
        for parameter, shard in self._shards.items():
            parameter.grad = shard.grad = None

    def _norm(self) -> torch.Tensor:
        """Norm of the whole gradient."""
        grads = [shard.grad for shard in self._shards.values() if shard.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        mesh = next(iter(self._shards)).device_mesh
        if mesh.size(mesh.ndim - 1) > 1:
            squares = norm.square()
            dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))  # copies (HSDP) have the same gradients
            norm = squares.sqrt()
        return norm

    # ---- its state

    def moment_names(self, shard: torch.Tensor) -> tuple[str, ...]:
        """What is kept of a parameter."""
        return MOMENTS

    def make_moments(self) -> None:
        """Let every parameter have its (zero) moments now, where it has none; it would at the first step."""
        for shard in self._shards.values():
            if not self.state[shard]:
                self.state[shard] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                    **{name: torch.zeros_like(shard.detach()) for name in self.moment_names(shard)},
                }

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> live moment of a parameter, sharded as it is."""
        shard = self._shards[parameter]
        return {name: sharded_as(parameter, self.state[shard][name]) for name in self.moment_names(shard)}

    @property
    def num_steps(self) -> float:
        """Steps that it has done; every parameter has the same count."""
        return next((float(of_one["step"]) for of_one in self.state.values()), 0.0)

    @num_steps.setter
    def num_steps(self, steps: float) -> None:
        self.make_moments()
        for of_one in self.state.values():
            of_one["step"].fill_(steps)


class ShardedAdamW(_Sharded, torch.optim.AdamW):
    """torch's AdamW.

    Args:
        args: `lr`, `weight_decay`, `adam_` flags.
        named: see `_Sharded`.
    """

    def __init__(self, args: Args, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        betas = (args.adam_beta1, args.adam_beta2)
        super().__init__(named, lr=args.lr, betas=betas, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True)


class ShardedSgd(_Sharded, torch.optim.SGD):
    """torch's SGD with momentum; weight decay is a part of the gradient.

    Args:
        args: `lr`, `weight_decay`, `sgd_momentum`.
        named: see `_Sharded`.
    """

    def __init__(self, args: Args, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__(named, lr=args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay, fused=True)

    def moment_names(self, shard: torch.Tensor) -> tuple[str, ...]:
        """See `_Sharded`."""
        return BUFFER

    def step(self, closure: Any = None) -> None:
        """Do torch's step; it keeps no count."""
        super().step(closure)
        done = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for of_one in self.state.values():
            of_one["step"] += done


class ShardedMuon(ShardedAdamW):
    """Muon for matrices that map vectors to vectors, AdamW for all else.

    A matrix moves by the orthogonalised momentum of its whole gradient, so its update is gathered first; each rank
    computes it, and takes its own rows. The orthogonalisation is that of `torch.optim.Muon`. Names and defaults of
    the flags are Megatron's.

    Args:
        args: of `ShardedAdamW`, and `muon_momentum`, `muon_use_nesterov`, `muon_num_ns_steps`, `muon_scale_mode`,
            `muon_extra_scale_factor`.
        named: see `_Sharded`.
    """

    def __init__(self, args: Args, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._args = args
        self._maps = {parameter for name, parameter in named if parameter.ndim == 2 and not NOT_A_MAP.search(name)}
        self._map_shards: set[torch.Tensor] = set()
        super().__init__(args, named)

    def make_moments(self) -> None:
        """See `_Sharded`."""
        self._map_shards = {self._shards[parameter] for parameter in self._maps}
        super().make_moments()

    def moment_names(self, shard: torch.Tensor) -> tuple[str, ...]:
        """See `_Sharded`."""
        return BUFFER if shard in self._map_shards else MOMENTS

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Do AdamW's step with all that is no map, and Muon's with the maps (collective)."""
        grads = {shard: shard.grad for shard in self._map_shards}
        for shard in grads:
            shard.grad = None
        super().step(closure)
        if self.found_inf is not None and self.found_inf:
            return
        settings = {shard: group for group in self.param_groups for shard in group["params"]}
        for parameter, shard in self._shards.items():
            grad = grads.get(shard)
            if grad is not None:
                self._move(parameter, shard, grad, settings[shard])

    def _move(
        self, parameter: torch.Tensor, shard: torch.Tensor, grad: torch.Tensor, settings: Mapping[str, Any]
    ) -> None:
        momentum, kept = self._args.muon_momentum, self.state[shard]
        grad = grad if self.grad_scale is None else grad / self.grad_scale
        kept["momentum_buffer"].lerp_(grad, 1 - momentum)
        kept["step"] += 1.0
        update = kept["momentum_buffer"]
        if self._args.muon_use_nesterov:
            update = grad.lerp(update, momentum)
        whole = sharded_as(parameter, update)
        direction = orthogonal(self._args, whole.full_tensor() if isinstance(whole, DTensor) else whole)
        rows, first = local_rows(parameter)
        shard.mul_(1 - settings["lr"] * settings["weight_decay"])
        shard.add_(direction[first : first + rows.shape[0]], alpha=settings["lr"])


def orthogonal(args: Args, update: torch.Tensor) -> torch.Tensor:
    """What Muon adds to a matrix for a momentum, at a learning rate of 1.

    Args:
        args: `muon_num_ns_steps`, `muon_scale_mode`, `muon_extra_scale_factor`.
        update: [rows, columns], whole.
    """
    matrix = torch.nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    # of torch's two scales one is Megatron's, and the other is a fifth of its "spectral"
    spectral = args.muon_scale_mode == "spectral"
    torch.optim.Muon(
        [matrix],
        lr=args.muon_extra_scale_factor * (5.0 if spectral else 1.0),
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        ns_steps=args.muon_num_ns_steps,
        adjust_lr_fn="match_rms_adamw" if spectral else "original",
    ).step()
    return matrix.data


OPTIMIZERS: dict[str, type[ShardedAdamW] | type[ShardedSgd]] = {
    "adam": ShardedAdamW,
    "sgd": ShardedSgd,
    "muon": ShardedMuon,
}
"""--optimizer -> its class."""
