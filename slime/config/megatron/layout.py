"""The parallel layout of the trainer: its sizes, and the nearest ones that would work.

It does arithmetic on flags. What is wrong with a layout is said in layout_checks.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slime.config.args import Args
from slime.utils.pipeline_layout import stages_of_text

LARGEST = 16_384
"""No larger size of a layout is proposed."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the trainer's process groups; `of` makes every size at least 1, so that they can be divided by.

    Attributes:
        world: GPUs or slots of the trainer.
        tensor, pipeline, context: sizes whose product is the GPUs of one copy of the model.
        expert, expert_tensor: sizes over which experts are spread instead of context and tensor.
        virtual: pipeline stages per rank.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1

    @classmethod
    def of(cls, args: Args) -> Layout:
        """The layout of the flags."""
        tensor = max(1, args.tensor_model_parallel_size)
        pipeline = max(1, args.pipeline_model_parallel_size)
        return cls(
            world=max(0, args.actor_num_nodes * args.actor_num_gpus_per_node),
            tensor=tensor,
            pipeline=pipeline,
            context=max(1, args.context_parallel_size),
            expert=max(1, args.expert_model_parallel_size),
            expert_tensor=max(1, args.expert_tensor_parallel_size or tensor),
            virtual=virtual_stages(args, pipeline) or 1,
        )

    @property
    def model(self) -> int:
        """GPUs of one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Copies of the model (data-parallel size)."""
        return self.world // self.model


def virtual_stages(args: Args, pipeline: int) -> int | None:
    """Pipeline stages per rank; None without virtual stages, or where the flags contradict each other."""
    if args.pipeline_model_parallel_layout:
        try:
            stages = len(stages_of_text(args.pipeline_model_parallel_layout)) // pipeline
        except ValueError:
            return None
        return stages if stages > 1 else None
    if args.num_virtual_stages_per_pipeline_rank is not None:
        stages = args.num_virtual_stages_per_pipeline_rank
        return stages if stages > 1 else None
    per_stage = args.num_layers_per_virtual_pipeline_stage
    if not per_stage or per_stage < 1 or not args.num_layers:
        return None
    stages = layers_to_split(args) // (pipeline * per_stage)
    return stages if stages > 1 else None


def layers_to_split(args: Args) -> int:
    """Decoder layers, and the embedding and the loss where they count as one each."""
    counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
    return int(args.num_layers + counted)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number that could be a size of a layout, ascending."""
    return [n for n in range(1, min(number, LARGEST) + 1) if number % n == 0]


def nearest_divisor(wanted: int, numbers: Iterable[int]) -> int:
    """The number nearest to `wanted` that divides all of `numbers`; the smaller of two."""
    return min(divisors(math.gcd(*numbers)), key=lambda n: (abs(n - wanted), n))


def query_groups(args: Args) -> int:
    """Key and value heads."""
    return int(args.num_query_groups if args.group_query_attention else args.num_attention_heads)


def ffn_size(args: Args) -> int:
    """Width of the MLP; Megatron's default is four times the hidden size."""
    return int(args.ffn_hidden_size or 4 * args.hidden_size)
