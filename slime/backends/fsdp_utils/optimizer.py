"""AdamW over the shards of a policy as plain tensors: each operation on a DTensor takes the host some time.

And a rank's part of a sharded tensor, and back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from slime.config.args import Args


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


class ShardedAdamW(torch.optim.AdamW):
    """torch's AdamW with Megatron's groups: biases and vectors (norms) do not decay.

    Its parameters are this rank's shards of the given ones, live; `state` has what is kept of them.

    Args:
        args: `lr`, `weight_decay`, `adam_` flags.
        named: (name, sharded parameter) of all that is trained.
    """

    def __init__(self, args: Args, named: Sequence[tuple[str, torch.Tensor]]) -> None:
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
        betas = (args.adam_beta1, args.adam_beta2)
        super().__init__(
            groups, lr=args.lr, betas=betas, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True
        )
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

    def make_moments(self) -> None:
        """Let every parameter have its (zero) moments now, where it has none; it would at the first step."""
        for shard in self._shards.values():
            if not self.state[shard]:
                self.state[shard] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                    **{name: torch.zeros_like(shard.detach()) for name in MOMENTS},
                }

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> live moment of a parameter, sharded as it is."""
        of_one = self.state[self._shards[parameter]]
        return {name: sharded_as(parameter, of_one[name]) for name in MOMENTS}

    @property
    def num_steps(self) -> float:
        """Steps that it has done; every parameter has the same count."""
        return next((float(of_one["step"]) for of_one in self.state.values()), 0.0)

    @num_steps.setter
    def num_steps(self, steps: float) -> None:
        self.make_moments()
        for of_one in self.state.values():
            of_one["step"].fill_(steps)
