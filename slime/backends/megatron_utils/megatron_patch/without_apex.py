"""What Megatron takes from TransformerEngine and Apex, without them: Adam that can be checkpointed, and few
kernels."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from slime.utils.accelerator import reserve_segment
from slime.utils.accelerator.fusion import triton_works


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
        moments = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        self._fused_update(group, params, [p.grad for p in params], *moments)

    def _fused_update(self, group: dict[str, Any], params: list[torch.Tensor], *of_params: list[Any]) -> None:
        """One kernel for all of them; `of_params`: their gradients, first and second moments."""
        step = torch.full((), float(group["step"]), device=params[0].device)
        beta1, beta2 = group["betas"]
        (torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_)(
            params,
            *of_params,
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


def use_fused_adam() -> None:
    """Take `Adam`, in the layout that megatron-core's DistributedOptimizer can checkpoint without Apex.

    Upstream (0.16.1): without those packages it falls back to torch's AdamW, whose state (a step tensor per parameter,
    shared after loading) its checkpoint code reads back wrongly, so that a resumed run differs. This class keeps the
    step in the parameter group, as Apex's FusedAdam does, and updates all parameters in torch's fused kernel. It can
    go when Megatron checkpoints torch's AdamW.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distrib_optimizer.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


Lists = Sequence[Sequence[torch.Tensor]]


def norm_of(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """Euclidean norm of the tensors of all lists, taken together, with the arguments of Apex's `multi_tensor_l2norm`.

    Returns:
        [1], float32, on the tensors' device; and None for the norms of single tensors, which nobody asks for.
    """
    tensors = [tensor for tensors in lists for tensor in tensors]
    norms = torch._foreach_norm(tensors, 2.0, torch.float32)
    return torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in norms])).view(1), None


def scale(chunk_size: int, overflow: torch.Tensor, lists: Lists, factor: float) -> None:
    """Multiply tensors by `factor` in place, with the arguments of Apex's `multi_tensor_scale`.

    Args:
        lists: what to read and where to write, the same tensors here.

    Raises:
        ValueError: the two lists are not of the same tensors.
    """
    sources, targets = lists
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        raise ValueError("gradients are scaled in place; sources and targets have to be the same tensors")
    if targets:
        torch._foreach_mul_(targets, factor)


def use_fused_clipping() -> None:
    """Take the norm of all gradients, and scale them, by a few kernels for all of them.

    Upstream (0.16.1): without TransformerEngine and Apex it takes the norm of each weight's gradient to the host by
    itself, which waits for the GPU as often as a rank has weights (226 times at Qwen3-0.6B), and clips by a scaled
    copy of each gradient. It can go when Megatron's own fallback is made of torch's functions for lists of tensors.
    """
    import megatron.core.optimizer.clip_grads as clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of
        clip_grads.multi_tensor_scale_impl = scale


def use_fused_swiglu() -> None:
    """Compute SwiGLU without a bias by one kernel each way, started without torch.compile.

    Upstream (0.16.1): its autograd function calls two functions of torch.compile, whose guards and wrappers take the
    host longer than the operations one by one. Functions that add a bias or weigh experts are left as they are. It can
    go when a compiled function costs the host no more than a kernel.
    """
    import megatron.core.fusions.fused_bias_swiglu as fused_bias_swiglu

    upstream = fused_bias_swiglu.SwiGLUFunction

    class SwiGLUFunction:
        """What Megatron calls: our kernel where it keeps its input as it is."""

        @staticmethod
        def apply(y: torch.Tensor, is_kept_in_fp8: bool, is_offloaded: bool) -> Any:
            """y [n, 2 F] -> [n, F]."""
            if is_kept_in_fp8 or is_offloaded or y.device.type != "cuda" or not triton_works():
                return upstream.apply(y, is_kept_in_fp8, is_offloaded)
            from slime.backends.megatron_utils.kernels.small import SwiGLU

            return SwiGLU.apply(y)

    fused_bias_swiglu.SwiGLUFunction = SwiGLUFunction


def add_weight_gradient(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += grad_output [T, out]^T @ total_input [T, in], in the precision of main_grad."""
    left = grad_output.t()
    if main_grad.dtype == total_input.dtype:
        main_grad.addmm_(left, total_input)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, left, total_input, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(left @ total_input)


def accumulate_in_product() -> None:
    """Add a weight's gradient to the fp32 buffer inside the matrix product, without Apex.

    Upstream (0.16.1): --gradient-accumulation-fusion (its default) needs Apex's fused_weight_gradient_mlp_cuda;
    without it the product is written in 16 bit and then added to the buffer, which rounds it and moves twice the
    memory. cuBLAS accumulates into an fp32 output by itself; torch offers that as addmm with out_dtype. It can go when
    Megatron calls torch's.
    """
    import megatron.core.tensor_parallel.layers as layers

    if layers._grad_accum_fusion_available:
        return
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
    )
    layers._grad_accum_fusion_available = True


def do_without_te() -> None:
    """Let experts and latent attention do without TransformerEngine, and experts exchange tokens on the CPU.

    Upstream (0.16.1): `moe_utils` names `te_general_gemm` also where its import failed, so that every router raises a
    NameError without TransformerEngine; None makes it take torch's matmul. Latent attention believes in
    TransformerEngine because names of it can be imported, which are no classes. And the dispatcher hands its split
    sizes to all-to-all as numpy arrays, but only if they were on a GPU: on the CPU they stay tensors, which torch
    refuses. All of this can go when upstream does it. Nothing here changes a number.
    """
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as latent

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False
    upstream = token_dispatcher.maybe_move_tensor_to_cpu

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """As upstream's, also for a tensor that is on the CPU already."""
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return upstream(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu
