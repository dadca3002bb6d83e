"""A critic is a GPT whose output layer gives one value per token: the layer, and how a model gets it.

The value of row p is what the critic expects of the response from the token behind p on, as the logits of row p are
those of that token. The head counts in fp32, also where the model is in 16 bit: returns are not probabilities, and a
bfloat16 value would be a multiple of its 256th part. It starts at 0, so that a fresh critic changes no advantage and
needs no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from slime.backends.megatron_utils.model_provider import unwrap
from slime.config.args import Args

if TYPE_CHECKING:
    from slime.conversion.reader import SafetensorsReader

HEAD = "output_layer"
"""Where it is in the model, in place of the layer of that name."""
CHECKPOINT_PREFIX = "value_head."
"""Its name in a checkpoint, so that the output layer of a policy is not taken for it."""


def is_value_model(args: Args) -> bool:
    """Whether these args are a critic's (slime.config.roles)."""
    return args.loss_type == "value_loss"


class ValueHead(nn.Module):
    """Hidden states [T, 1, H] to values [T, 1, 1], float32, whole on every tensor-parallel rank.

    Args:
        hidden_size: H.
        sequence_parallel: each tensor-parallel rank has its part of the T rows.
        device: where the weights are made.
    """

    def __init__(self, hidden_size: int, *, sequence_parallel: bool, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self.sequence_parallel = sequence_parallel
        for parameter in (self.weight, self.bias):
            # with sequence parallelism a rank's gradient is that of its rows: Megatron sums it over the ranks
            parameter.sequence_parallel = sequence_parallel

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """As Megatron's output layer is called; `weight`, that of a tied embedding, is not used."""
        values = nn.functional.linear(hidden.float(), self.weight, self.bias)
        if self.sequence_parallel:
            # what follows is the same on every rank: each takes the gradient of its own rows, and nothing is summed
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def sharded_state_dict(self, prefix: str = "", *_: Any, **__: Any) -> ShardedStateDict:
        """The head's part of a checkpoint."""
        state = make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), CHECKPOINT_PREFIX)
        return {prefix + name.removeprefix(CHECKPOINT_PREFIX): tensor for name, tensor in state.items()}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ValueHead:
        """Follow the model to another device, but not to another precision."""
        return super()._apply(lambda tensor: fn(tensor).to(tensor.dtype), recurse)


def replace_output_layer(model: nn.Module) -> None:
    """Put a value head in the place of a bare GPT's output layer, on the pipeline stage that has one."""
    # on every stage: the last one's copy of a tied embedding is gone, and nothing is to be kept equal to it
    model.share_embeddings_and_output_weights = False
    if getattr(model, HEAD, None) is None:
        return
    config: Any = model.config
    device = next(model.parameters()).device
    setattr(model, HEAD, ValueHead(config.hidden_size, sequence_parallel=config.sequence_parallel, device=device))


def value_head_of(model: nn.Module) -> ValueHead | None:
    """The value head of a model, wrapped or bare; None where it has none."""
    head = getattr(unwrap(model), HEAD, None)
    return head if isinstance(head, ValueHead) else None


def is_of_head(name: str) -> bool:
    """Whether a parameter of a model with a value head is the head's, by its name (wrappers' prefixes allowed)."""
    return f".{HEAD}." in f".{name}"


@torch.no_grad()
def load_head_from_hf(head: ValueHead, reader: SafetensorsReader) -> bool:
    """Take the head of an HF model with one score per token or sequence (`score.weight`, as reward models have it).

    Returns:
        whether there was one; without, the head stays as it is.
    """
    names = reader.names()
    if "score.weight" not in names or (weight := reader.get("score.weight")).shape != head.weight.shape:
        return False
    head.weight.copy_(weight)
    if "score.bias" in names:
        head.bias.copy_(reader.get("score.bias"))
    return True
