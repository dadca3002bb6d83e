"""Changes to Megatron's layers: for frozen weights, for a single rank, and for rotary positions of packed samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.cp_utils import zigzag_positions
from slime.utils.accelerator.fusion import kernel_on_cuda

Function = Callable[..., Any]


# ---- frozen weights


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


# ---- one rank


def smallest() -> Any:
    """The options of an NCCL group with one channel."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = 1
    return options


def use_small_groups() -> None:
    """Give process groups of one rank the smallest NCCL communicator.

    Upstream (0.16.1): every group gets NCCL's default options, with which a communicator is made ready for 32
    channels, whether there is another rank to talk to or not. A trainer on one GPU has about ten such groups, and each
    that was used holds 0.54 GB (NCCL 2.28 on an H200; with one channel 9 MB). It can go when NCCL takes no buffers for
    a lone rank.
    """
    import megatron.core.parallel_state as parallel_state

    create = parallel_state.create_group

    def create_group(
        ranks: list[int], timeout: Any = None, backend: str | None = None, pg_options: Any = None, **more: Any
    ) -> Any:
        if len(ranks) == 1 and pg_options is None and backend in (None, "nccl"):
            pg_options = smallest()
        return create(ranks, timeout, backend, pg_options, **more)

    parallel_state.create_group = create_group


def skip_regions() -> None:
    """Leave out the autograd functions of a tensor-parallel region of one rank, which do nothing.

    Upstream (0.16.1): every linear layer copies into, or reduces from, the region of its tensor-parallel group. With
    one rank both give back what they got, at the host's price of an autograd function forward and back: four in each
    layer. It can go when Megatron leaves them out itself.
    """
    import megatron.core.tensor_parallel.layers as layers

    layers.copy_to_tensor_model_parallel_region = _unless_single_rank(layers.copy_to_tensor_model_parallel_region)
    layers.reduce_from_tensor_model_parallel_region = _unless_single_rank(
        layers.reduce_from_tensor_model_parallel_region
    )


def _unless_single_rank(change: Function) -> Function:
    def changed(input_: torch.Tensor, group: Any = None) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else change(input_, group=group)

    return changed


# ---- packs


_last: tuple[Any, ...] = ()
"""What cosines and sines were last asked for, and they. In most models every layer asks for the same; with latent
attention the two of a layer do, and to keep them for each layer would take memory."""


def rotate_packs_at_once() -> None:
    """Turn packed (THD) sequences in one indexing step.

    Upstream (0.16.1): the unfused path reads the sequences' lengths from the GPU, walks over them in Python, for
    queries and keys of every layer, and takes cos and sin of every token again; a pack of 128 short sequences spends
    more time there than in its matmuls. It also decides by `max_seqlen == total tokens` whether the table holds
    positions of the whole pack, which is wrong for several sequences with a generous max_seqlen. Off CUDA values are
    bitwise the same as its own. It can go when TransformerEngine's fused kernel is used.
    """
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    def rotate_packed(
        t: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: Any = None,
    ) -> torch.Tensor:
        """t [T, heads, dim], freqs [max_seqlen, 1, 1, rotary dim] or each token's [T, 1, rotary dim] -> as t."""
        if cp_group is None:
            raise ValueError("the rotation of a pack needs the context-parallel group.")
        cos, sin = _cos_sin(freqs, cu_seqlens, t, mscale=mscale, cp_group=cp_group)
        dim = freqs.shape[-1]
        rotated = t if dim == t.shape[-1] else t[..., :dim]
        if multi_latent_attention and rotary_interleaved:
            rotated = _halves(rotated)
        # the weights of latent attention have the two parts of a channel side by side
        are_paired = rotary_interleaved or multi_latent_attention
        rotated = rotate(rotated, cos, sin, are_paired, rotary_interleaved)
        return rotated if dim == t.shape[-1] else torch.cat((rotated, t[..., dim:]), dim=-1)

    rope_utils._apply_rotary_pos_emb_thd = rotate_packed


def _cos_sin(
    freqs: torch.Tensor, cu_seqlens: torch.Tensor, t: torch.Tensor, *, mscale: float, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every token [T, 1, rotary dim]."""
    global _last
    key = (t.size(0), mscale, t.dtype)
    last = _last  # of one moment: checkpoints compute again in another thread
    if not (last and last[0] is freqs and last[1] is cu_seqlens and last[2] == key):
        cos, sin = ((f(freqs) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
        if freqs.dim() == 4:
            positions = zigzag_positions(cu_seqlens, t.size(0), cp_rank=cp_group.rank(), cp_size=cp_group.size())
            cos, sin = (x[positions].squeeze(1) for x in (cos, sin))
        last = _last = (freqs, cu_seqlens, key, cos, sin)
    return last[3], last[4]


@kernel_on_cuda("slime.backends.megatron_utils.kernels.small.rotate")
def rotate(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, are_read_paired: bool, are_written_paired: bool
) -> torch.Tensor:
    if are_read_paired and not are_written_paired:
        t = _halves(t)
    if are_written_paired:
        even, odd = t[..., ::2], t[..., 1::2]
        turned = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = t.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    return (t * cos) + (turned * sin)


def _halves(t: torch.Tensor) -> torch.Tensor:
    """[..., dim]: the even channels, then the odd ones."""
    return torch.cat((t[..., ::2], t[..., 1::2]), dim=-1)
