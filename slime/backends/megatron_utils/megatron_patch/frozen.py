"""What changes for frozen weights: their layers' backward pass, and recomputed layers behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def use_frozen_weights() -> None:
    """Have layers with a frozen weight train their biases, and multiply all tokens at once going back.

    Upstream (0.16.1): a column-parallel layer with a frozen weight adds its bias inside an autograd function that
    returns no gradient for it, so the bias stays as it is. And the gradient of logits comes as [s, 1, v] with the
    strides of [1, s, v], which torch multiplies token by token: 2.6 s of a step of 3.2 s (Qwen3-4B with adapters,
    16,384 tokens on an H200). It can go when that function returns the one, and multiplies two dimensions.
    """
    from megatron.core.tensor_parallel.layers import LinearWithFrozenWeight

    of_input_alone = LinearWithFrozenWeight.backward

    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        of_rows, of_weight, _, *others = of_input_alone(ctx, rows)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return of_rows.view(*grad_output.shape[:-1], of_rows.shape[-1]), of_weight, of_bias, *others

    LinearWithFrozenWeight.backward = staticmethod(backward)


Function = Callable[..., Any]


def recompute_behind_frozen() -> None:
    """Recompute modules that are trained behind frozen ones.

    Upstream (0.16.1): a recomputed function is one autograd function of its inputs. Where none of them needs a
    gradient, as behind a frozen embedding, autograd never enters it, and the weights inside get no gradient although
    they are trained. Here such a function runs as if it were not recomputed. What it saves stays in memory, but that
    is one group of layers at most, since its output needs a gradient; frozen layers before it save nothing at all. It
    can go when Megatron's checkpoints look at the weights, too.
    """
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_block import TransformerBlock

    random.checkpoint = tensor_parallel.checkpoint = _checkpoint(random.checkpoint)
    discarding = random.CheckpointWithoutOutput
    discarding.checkpoint = _checkpoint_without_output(discarding.checkpoint)
    TransformerBlock._checkpointed_forward = _start_graph(TransformerBlock._checkpointed_forward)


def _checkpoint(recomputed: Function) -> Function:
    def checkpoint(function: Function, distribute_saved_activations: bool, *inputs: Any) -> Any:
        if not _need_gradient(inputs):
            return function(*inputs)
        return recomputed(function, distribute_saved_activations, *inputs)

    return checkpoint


def _checkpoint_without_output(recomputed: Function) -> Function:
    def checkpoint(self: Any, function: Function, *inputs: Any) -> Any:
        if not _need_gradient(inputs):
            self.outputs = ()  # nothing to discard, which its caller asks for next
            return function(*inputs)
        return recomputed(self, function, *inputs)

    return checkpoint


def _need_gradient(inputs: tuple[Any, ...]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def _start_graph(forward: Function) -> Function:
    """Let the first group of layers be recomputed as well, if it is trained: most often it is."""

    def checkpointed_forward(self: Any, hidden_states: torch.Tensor, *inputs: Any, **more: Any) -> Any:
        if not hidden_states.requires_grad:
            first_group = self.layers[: self.config.recompute_num_layers]
            hidden_states.requires_grad_(any(weight.requires_grad for weight in first_group.parameters()))
        return forward(self, hidden_states, *inputs, **more)

    return checkpointed_forward
