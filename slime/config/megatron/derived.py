"""The parallel layout of the trainer, and other values that follow from Megatron's flags: small pure functions.

Nothing here judges a value, and torch is not needed; a directory's config.json is read for the vocabulary.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.config.derive import first
from slime.plan.pipeline_layout import stages_of_text
from slime.weights.names import read_config, text_config

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
    stages = args.num_virtual_stages_per_pipeline_rank or 1
    if text := args.pipeline_model_parallel_layout:
        try:
            stages = len(stages_of_text(text)) // pipeline
        except ValueError:
            return None
    elif args.num_virtual_stages_per_pipeline_rank is None and args.num_layers:
        per_stage = args.num_layers_per_virtual_pipeline_stage or 0
        stages = layers_to_split(args) // (pipeline * per_stage) if per_stage > 0 else 1
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


CONSTANTS: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "variable_seq_lengths": True,
    "attention_softmax_in_fp32": True,
    "use_persistent_ckpt_worker": True,
    "ckpt_assume_constant_structure": True,
    "ckpt_fully_parallel_load": True,
    "dist_ckpt_save_pre_mcore_014": True,
    "rank": 0,
}
"""What is so whatever the flags say; hooks written for upstream read these."""


def derive_megatron(args: Args) -> dict[str, Any]:
    """Return the values that follow from Megatron's flags: {attribute: value}; changes nothing in `args`."""
    layout, has_deepep_here, dispatcher = Layout.of(args), uses_deepep(args), args.moe_token_dispatcher_type
    bf16 = args.accelerator != "cpu" and not args.fp16
    in_bf16 = args.grad_reduce_in_bf16 or (args.use_precision_aware_optimizer and args.main_grads_dtype == "bf16")
    seq_length, expert_tensor = args.seq_length or 4096, args.expert_tensor_parallel_size
    wants_flash = args.use_flash_attn and args.attention_backend == "auto"
    derived: dict[str, Any] = {
        **CONSTANTS,
        "bf16": bf16,
        # a name: model_provider.torch_type has the type (torch takes a second to import)
        "params_dtype": "bfloat16" if bf16 else "float16" if args.fp16 else "float32",
        # as in Megatron: under bfloat16 unless asked not to
        "grad_reduce_in_fp32": args.grad_reduce_in_fp32 or (bf16 and not in_bf16),
        "attention_backend": "flash" if wants_flash else args.attention_backend,
        "apply_wd_to_qk_layernorm": args.apply_wd_to_qk_layernorm or args.no_weight_decay_cond_type is not None,
        # "allgather" cannot handle lengths that vary
        "moe_token_dispatcher_type": (
            "flex" if has_deepep_here else "alltoall" if dispatcher in ("allgather", "flex") else dispatcher
        ),
        "moe_enable_deepep": has_deepep_here,
        "rope_type": args.rope_type or ("yarn" if args.multi_latent_attention else "rope"),
        "seq_length": seq_length,  # packed micro-batches have their own
        "max_position_embeddings": args.max_position_embeddings or seq_length,
        "start_weight_decay": first(args.start_weight_decay, args.weight_decay),
        "end_weight_decay": first(args.end_weight_decay, args.weight_decay),
        "tokenizer_type": args.tokenizer_type or "HuggingFaceTokenizer",
        "tokenizer_model": args.tokenizer_model or args.hf_checkpoint,
        "world_size": layout.world,
        "data_parallel_size": layout.data,
        "expert_tensor_parallel_size": first(expert_tensor, layout.expert_tensor),
        "virtual_pipeline_model_parallel_size": virtual_stages(args, layout.pipeline),
    }
    for name in ("cp_comm_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "cuda_graph_scope"):
        derived[name] = single(vars(args)[name])
    if args.num_attention_heads and args.hidden_size:
        derived |= model_sizes(args)
        if derived["vocab_size"] and not args.padded_vocab_size:
            # each tensor-parallel rank gets a multiple
            multiple = max(1, args.make_vocab_size_divisible_by) * layout.tensor
            derived["padded_vocab_size"] = -(-derived["vocab_size"] // multiple) * multiple
    return derived


def asks_for_deepep(args: Args) -> bool:
    """Return whether a flag asks that DeepEP's kernels send tokens to their experts."""
    return bool(args.num_moe_experts and (args.moe_enable_deepep or args.moe_token_dispatcher_type == "flex"))


def has_deepep() -> bool:
    """Return whether DeepEP is installed."""
    return importlib.util.find_spec("deep_ep") is not None


def uses_deepep(args: Args) -> bool:
    """Return whether DeepEP is asked for, can be had here, and has ranks to send tokens between."""
    ranks = (args.tensor_model_parallel_size or 1) * (args.expert_model_parallel_size or 1)
    return asks_for_deepep(args) and ranks > 1 and args.accelerator == "cuda" and has_deepep()


def without_deepep(args: Args) -> str | None:
    """Say why a line that asks for DeepEP goes without; None where it does not ask, or gets it."""
    if not asks_for_deepep(args) or uses_deepep(args):
        return None
    flag = "--moe-enable-deepep" if args.moe_enable_deepep else "--moe-token-dispatcher-type flex"
    if args.accelerator != "cuda":
        why = f"DeepEP needs CUDA, and --accelerator is {args.accelerator}"
    elif not has_deepep():
        why = "DeepEP (the package deep_ep) is not installed here"
    else:
        why = "one rank has all experts"
    return f"{flag}: {why}; tokens go to their experts by --moe-token-dispatcher-type alltoall"


def single(value: Any) -> Any:
    """A list of one value as that value; Megatron's options accept one per layer or per loss."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def model_sizes(args: Args) -> dict[str, Any]:
    """Sizes of the model that were left to their defaults."""
    heads = args.num_attention_heads
    known = text_config(read_config(args.hf_checkpoint)).get("vocab_size") if args.hf_checkpoint else None
    return {
        "num_query_groups": query_groups(args),
        # Latent attention has heads of sizes of its own, whatever is given here.
        "kv_channels": (args.v_head_dim if args.multi_latent_attention else args.kv_channels)
        or args.hidden_size // heads,
        "ffn_hidden_size": ffn_size(args),
        "vocab_size": args.vocab_size or (known if isinstance(known, int) else None),
    }


OPTIONS = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
}
"""Sizes whose product is the GPUs of one copy of the model."""


def tensor_parts(args: Args) -> dict[str, int]:
    """What is split over tensor-parallel ranks, apart from keys and values: option -> number."""
    parts = {"--num-attention-heads": args.num_attention_heads, "--ffn-hidden-size": ffn_size(args)}
    if args.padded_vocab_size:
        parts["--padded-vocab-size"] = args.padded_vocab_size
    if args.linear_attention_freq is not None:
        parts["--linear-num-key-heads"] = args.linear_num_key_heads
        parts["--linear-num-value-heads"] = args.linear_num_value_heads
    return parts


def groups_fit(args: Args, tensor: int) -> bool:
    """Heads of keys and values divide over the ranks, or each is shared by as many of them."""
    groups = query_groups(args)
    return not groups or args.multi_latent_attention or tensor % groups == 0 or groups % tensor == 0


def heads_fit(args: Args, ranks: int) -> bool:
    """Heads divide over tensor- and context-parallel ranks where these exchange heads."""
    kinds = args.cp_comm_type if isinstance(args.cp_comm_type, list) else [args.cp_comm_type]
    return "a2a" not in kinds or args.num_attention_heads % ranks == 0


def expert_ffn(args: Args) -> int:
    """Width of an expert."""
    return int(args.moe_ffn_hidden_size or ffn_size(args))


def shared_expert(args: Args) -> int:
    """Width of the shared expert; 0 without one."""
    return int(args.num_moe_experts and args.moe_shared_expert_intermediate_size or 0)


def middle_stages(args: Args, pipeline: int) -> tuple[int, int]:
    """(ranks, layers) apart from a first and a last stage of their own size."""
    given = (args.num_layers_in_first_pipeline_stage, args.num_layers_in_last_pipeline_stage)
    ends = [layers for layers in given if layers is not None]
    return pipeline - len(ends), layers_to_split(args) - sum(ends)
