"""Adam in the layout that megatron-core's DistributedOptimizer can checkpoint without TransformerEngine and Apex.

Upstream (0.16.1): without those packages it falls back to torch's AdamW, whose state (a step tensor per parameter,
shared after loading) its checkpoint code reads back wrongly, so that a resumed run differs. This class keeps the step
in the parameter group, as Apex's FusedAdam does, and updates all parameters in torch's fused kernel. It can go when
Megatron checkpoints torch's AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from slime.utils.accelerator import reserve_segment


class Adam(torch.optim.Optimizer):
    """Adam with decoupled weight decay (`adam_w_mode`) or L2 regularisation; same maths as torch.optim.AdamW / Adam.

    Args:
        params: parameters, or groups with their own "lr" and "weight_decay".
        adam_w_mode: decay the weights themselves (AdamW) instead of adding the decay to the gradient.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode
        self.is_stateless = False
        """Keep no moments: every update is Adam's first one, lr * g / (|g| + eps)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; `closure` is not supported."""
        if closure is not None:
            raise ValueError("this Adam takes no closure: Megatron computes gradients before the step.")
        for group in self.param_groups:
            # A group without parameters on this rank counts too: the step is one number for the whole run.
            group["step"] = int(group.get("step") or 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            if params:
                self._step_group(group, params)

    def fill_state(self) -> None:
        """Make the (zero) moments of parameters that were never updated, as if before their first step."""
        for group in self.param_groups:
            group.setdefault("step", 0)
            self._fill(group["params"])

    def _fill(self, params: list[torch.Tensor]) -> None:
        new = [param for param in params if not self.state[param]]
        if new and new[0].is_cuda:
            reserve_segment(param.nbytes for param in new for _ in range(2))
        for param in new:
            self.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))

    def _step_without_moments(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        grads: Any = [p.grad for p in params]
        lr, decay = group["lr"], group["weight_decay"]
        if decay and self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        # after one step the bias-corrected moments are g and g^2, whatever the betas
        denominators = torch._foreach_abs(grads)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_addcdiv_(params, grads, denominators, -lr)

    def _step_group(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        if self.is_stateless:
            return self._step_without_moments(group, params)
        self._fill(params)
        grads: Any = [p.grad for p in params]
        exp_avgs = [self.state[p]["exp_avg"] for p in params]
        exp_avg_sqs = [self.state[p]["exp_avg_sq"] for p in params]
        beta1, beta2 = group["betas"]
        step = torch.full((), float(group["step"]), device=params[0].device)
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        update(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def apply() -> None:
    """Make Megatron's optimizers use `Adam` where it would fall back to torch's."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
