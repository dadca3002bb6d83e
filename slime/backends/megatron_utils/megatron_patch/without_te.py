"""Experts and latent attention without TransformerEngine, and the exchange of tokens between experts on the CPU.

Upstream (0.16.1): `moe_utils` names `te_general_gemm` also where its import failed, so that every router raises a
NameError without TransformerEngine; None makes it take torch's matmul. Latent attention believes in TransformerEngine
because names of it can be imported, which are no classes. And the dispatcher hands its split sizes to all-to-all as
numpy arrays, but only if they were on a GPU: on the CPU they stay tensors, which torch refuses. All of this can go
when upstream does it. Nothing here changes a number.
"""

from __future__ import annotations

from typing import Any

import torch


def apply() -> None:
    """Define the name, tell latent attention, and let split sizes leave the CPU as they leave a GPU."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.multi_latent_attention as latent

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(latent.TELinear, type):
        latent.HAVE_TE = False
    upstream = token_dispatcher.maybe_move_tensor_to_cpu
    if upstream.__module__ == __name__:
        return

    def move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        """As upstream's, also for a tensor that is on the CPU already."""
        if as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda:
            return tensor.numpy()
        return upstream(tensor, as_numpy=as_numpy, record_stream=record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_to_cpu
