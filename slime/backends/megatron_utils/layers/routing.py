"""Which experts tokens go to: a router that knows padding and can repeat choices, and what it is told beforehand.

Before a micro-batch every router of a model chunk is told its `Routing`. Padding counts neither in the load-balancing
losses nor in the load by which expert biases move. Choices are recorded in one pass and replayed in another
(`passes.routing_replay` says when); a replayed choice takes the router's present scores, so that its gradient is that
of the present weights. Layers that are recomputed in the backward pass, when routers already know of later
micro-batches, get what they were told at first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    save_to_aux_losses_tracker,
    z_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter

from slime.config.args import Args
from slime.models.hf_config import moe_layer_pattern
from slime.utils import accelerator

LOSSES = ("load_balancing_loss", "z_loss")

Choose = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Routing:
    """One micro-batch, as the routers of one chunk see it. T: rows of this context-parallel rank."""

    padding: torch.Tensor
    """[T] True where the row is no token of a sample."""
    num_trained: torch.Tensor
    """Trained tokens, over all context-parallel ranks."""
    replayed: torch.Tensor | None = None
    """[T, layers of experts in this chunk, topk] experts to take instead of the best."""
    recorded: dict[int, torch.Tensor] | None = None
    """Filled, if not None: place of the layer among those with experts -> [rows of this rank, topk] int16."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What who told it wants to remember."""


class _Choice:
    """What Megatron's top-k calls instead of choosing (the interface of its own RouterReplay)."""

    def __init__(self, router: ReplayRouter) -> None:
        self._router = router

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Choose
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [rows, topk] and indices of the experts of each row."""
        return self._router.choose(scores, lambda: choose(scores, topk, num_groups=num_groups, group_topk=group_topk))


class ReplayRouter(TopKRouter):
    """Megatron's router with what this module's docstring says."""

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.told: Routing | None = None
        """Of the micro-batch whose forward pass comes next, or runs."""
        self.place = 0
        """Among the layers of experts of its chunk."""
        self._now: Routing | None = None
        self._to_recompute: deque[Routing | None] = deque()
        self.router_replay = _Choice(self)

    def forward(self, input: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """[rows, 1, H] -> weights [rows, experts] and choices, bool, of the same shape."""
        self._now = self._of_this_call()
        if self._now is not None:
            padding_mask = self._mine(self._now.padding)
        return super().forward(input, padding_mask)

    def choose(self, scores: torch.Tensor, best: Callable[[], Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay, or take the best; record if asked to."""
        now = self._now
        if now is not None and now.replayed is not None:
            experts = self._mine(now.replayed[:, self.place]).long()
            return scores.gather(1, experts), experts
        values, experts = best()
        if now is not None and now.recorded is not None:
            now.recorded[self.place] = experts.to(torch.int16)
        return values, experts

    def _of_this_call(self) -> Routing | None:
        if torch._C._current_graph_task_id() != -1:  # inside a backward pass: a recomputation
            return self._to_recompute.popleft()
        if self.training and not torch.is_grad_enabled():  # the forward pass of what will be recomputed
            self._to_recompute.append(self.told)
        return self.told

    def _mine(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that this tensor-parallel rank routes."""
        if not self.config.sequence_parallel or self.tp_group.size() == 1:
            return rows
        return rows.chunk(self.tp_group.size())[self.tp_group.rank()]

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """As Megatron's (0.16.1), whose mask has one dimension too few."""
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def attach_and_log_load_balancing_loss(self, *args: Any, **options: Any) -> torch.Tensor:
        """As Megatron's; with --calculate-per-token-loss a micro-batch weighs as many tokens as it trains.

        Megatron divides by the trained tokens of the whole step, but multiplies by all tokens of the micro-batch.
        """
        if self._now is not None:
            options["valid_token_count"] = self._now.num_trained
        return super().attach_and_log_load_balancing_loss(*args, **options)

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """As Megatron's, with the same weight as the load-balancing loss.

        Each rank adds the mean over its rows; Megatron gives all ranks the same weight, whatever padding they have.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        loss = z_loss_func(logits, coefficient, padding_mask=padding_mask) * self._share(logits, padding_mask)
        layers = self.config.num_layers + (self.config.mtp_num_layers or 0)
        save_to_aux_losses_tracker("z_loss", loss / coefficient, self.layer_number, layers)
        if self.calculate_per_token_loss and self._now is not None:
            loss = loss * self._now.num_trained
        return cast(torch.Tensor, MoEAuxLossAutoScaler.apply(logits, loss))

    def _share(self, logits: torch.Tensor, padding_mask: torch.Tensor | None) -> torch.Tensor:
        """Of the rows without padding of all tensor- and context-parallel ranks, those of this one."""
        counted = torch.ones(len(logits), device=logits.device) if padding_mask is None else ~padding_mask
        here = counted.sum(dtype=torch.float32)
        everywhere = here.clone()
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(everywhere, group=self.tp_cp_group)
        return here / everywhere.clamp(min=1.0)


def load_balancing_metrics(args: Args, num_microbatches: int) -> dict[str, float]:
    """The load-balancing losses of a train step, without their coefficients; every rank calls it.

    Each is a mean over the layers with experts, the micro-batches and the data-parallel ranks: `load_balancing_loss`
    is 1 when all experts get equally much, `z_loss` is the mean square of the routers' log-sum-exp.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    if not has_load_balancing_loss(args):
        return {}
    pattern = moe_layer_pattern(args.moe_layer_freq, args.num_layers)
    layers = sum(pattern) + pattern[-1] * (args.mtp_num_layers or 0 if args.enable_mtp_training else 0)
    known = torch.zeros(len(LOSSES), dtype=torch.float64, device=accelerator.current_device())
    for i, name in enumerate(LOSSES):
        if name in tracker:
            known[i] = tracker[name]["values"].double().sum()
    clear_aux_losses_tracker()
    # Tensor- and context-parallel ranks have parts of the loss, pipeline stages have layers of it.
    dist.all_reduce(known)
    copies = parallel_state.get_data_parallel_world_size()
    sums = dict(zip(LOSSES, known.tolist(), strict=True))
    return {name: value / (layers * num_microbatches * copies) for name, value in sums.items() if value}


def has_load_balancing_loss(args: Args) -> bool:
    """Whether a loss on the routers' choices is trained."""
    weights = args.moe_aux_loss_coeff
    return bool(args.moe_z_loss_coeff) or any(weights if isinstance(weights, list) else [weights])


def prediction_routers_of(chunk: torch.nn.Module) -> list[ReplayRouter]:
    """The routers of a bare chunk's layers that predict further tokens: they know padding and replay nothing."""
    predicting: torch.nn.Module = getattr(chunk, "mtp", torch.nn.Module())
    return [module for module in predicting.modules() if isinstance(module, ReplayRouter)]


def routers_of(chunk: torch.nn.Module) -> list[ReplayRouter]:
    """The routers of a bare model chunk, in the order of its layers."""
    layers = getattr(getattr(chunk, "decoder", None), "layers", None) or ()
    found = [getattr(layer.mlp, "router", None) for layer in layers]
    routers = [router for router in found if isinstance(router, ReplayRouter)]
    for place, router in enumerate(routers):
        router.place = place
    return routers
