"""Build the Megatron GPT that the flags describe.

It makes the bare module of this rank's tensor-parallel share, with random weights; wrapping it for 16 bit, data
parallelism and the optimizer is the business of model/setup. `config_kwargs` is the step from flags to the fields of
Megatron's config dataclasses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.backends.megatron_utils.layers.activation_offload import ActivationOffload
from slime.backends.megatron_utils.layers.mtp import PredictingGPT, prediction_spec
from slime.backends.megatron_utils.model.spec import RMSNorm, block_spec, last_layer_spec
from slime.config.args import Args
from slime.config.megatron.flag_classes import fields_without_effect
from slime.utils.misc import load_function


def transformer_config(args: Args) -> TransformerConfig:
    """Return Megatron's config of the model that `args` describes."""
    on_cpu = args.accelerator == "cpu"
    overlaps_p2p = args.overlap_p2p_comm and args.virtual_pipeline_model_parallel_size is not None
    config = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    kwargs = config_kwargs(config, args) | {
        "gated_linear_unit": args.swiglu,
        "activation_func": F.silu if args.swiglu else F.gelu,
        "attention_backend": AttnBackend[args.attention_backend],
        "pipeline_dtype": torch_type(args.params_dtype),
        "use_cpu_initialization": on_cpu,
        # What went to the next stage is needed there alone; Megatron frees it under an overlapped message, too.
        "deallocate_pipeline_outputs": not overlaps_p2p,
        # Only interleaved stages have something to overlap with; then messages cannot go in one batch.
        "overlap_p2p_comm": overlaps_p2p,
        "batch_p2p_comm": not overlaps_p2p,
        # It has the host wait for the GPU after each batch, for the sake of torch of years ago.
        "batch_p2p_sync": False,
        # megatron_patch.gradient_accumulation stands in for Apex's kernel
        "gradient_accumulation_fusion": args.gradient_accumulation_fusion,
        "bias_activation_fusion": args.swiglu and args.bias_swiglu_fusion and not on_cpu,  # it is torch.compile
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "mtp_num_layers": args.mtp_num_layers or None,
        "fp8": None,  # layers.fp8_linears does it; Megatron's own needs TransformerEngine
        # Its default asserts MoE settings even of dense models when sequence lengths vary.
        "moe_token_dispatcher_type": "flex" if args.moe_enable_deepep else "alltoall",
        # model.activation_offload does it; Megatron's own needs TransformerEngine
        **{"cpu_offloading": False, "cpu_offloading_num_layers": 0, "fine_grained_activation_offloading": False},
    }
    if args.experimental_attention_variant is None:
        return config(**kwargs)
    # Megatron (0.16.1) has no layer of these kinds for context parallelism, and says so here; slime_plugins' are.
    found = config(**kwargs | {"context_parallel_size": 1})
    found.context_parallel_size = args.context_parallel_size
    return found


def get_model_provider_func(args: Args) -> Callable[..., Any]:
    """Return fn(pre_process=True, post_process=True, vp_stage=None) -> model of this rank.

    The model maps (input_ids [1, T], position_ids, attention_mask=None, packed_seq_params=...) to logits
    [1, T, V / tp];
    the columns of padding vocabulary hold -1e9. `--custom-model-provider-path` replaces it.
    """
    if args.custom_model_provider_path:
        return load_function(args.custom_model_provider_path)

    def provide(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> GPTModel:
        return build_gpt(args, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)

    return provide


def virtual_stages_here(args: Args) -> list[int | None]:
    """Numbers of the pipeline stages of a rank, one for each chunk of its model; [None] without interleaving."""
    count = args.virtual_pipeline_model_parallel_size
    return [None] if count is None else list(range(count))


def build_stage(args: Args, vp_stage: int | None = None) -> Any:
    """The bare module of one of this rank's pipeline stages, with what belongs to the first and the last one."""
    where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
    return get_model_provider_func(args)(
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        **({} if vp_stage is None else {"vp_stage": vp_stage}),  # a hook need not know of it
    )


def build_gpt(
    args: Args, *, pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None
) -> GPTModel:
    """Return the GPT of the flags, with the embedding and the output layer where asked for."""
    config = transformer_config(args)
    more: dict[str, Any] = {}
    if args.mtp_num_layers:
        layer = last_layer_spec(config, args)
        spec = prediction_spec(layer, norm=RMSNorm, num_layers=args.mtp_num_layers)
        more = {"predictions": spec, "are_trained": args.enable_mtp_training}
    kind: Any = PredictingGPT if more else GPTModel
    if args.multimodal_keys:
        kind = load_function("slime_plugins.models.qwen3_5_vl.SeeingGPT")
        more = {"checkpoint": args.hf_checkpoint, "is_frozen": args.freeze_vision_tower}
    model = kind(
        config=config,
        transformer_layer_spec=block_spec(config, args, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
        **more,
    )
    if args.mtp_num_layers and post_process and not args.enable_mtp_training:
        model.mtp.requires_grad_(False)
    if args.use_rope_scaling:
        _scale_rope(model.rotary_pos_emb, args)
    if args.num_moe_experts:
        _reduce_experts_over_their_own_ranks(model)
    if post_process and args.vocab_size < args.padded_vocab_size:
        mask_padded_vocab(model.output_layer, args.vocab_size)
    _offload_activations(model.decoder.layers, args)
    return model


def _offload_activations(layers: Sequence[torch.nn.Module], args: Args) -> None:
    """Let what layers save wait in host memory, as far as the flags say so."""
    if args.cpu_offloading:
        ActivationOffload(layers, args.cpu_offloading_num_layers, min_size=args.min_offloaded_tensor_size)
    elif args.fine_grained_activation_offloading:
        modules, min_size = args.offload_modules, args.min_offloaded_tensor_size
        ActivationOffload(layers, len(layers), min_size=min_size, modules=modules)


def _scale_rope(rotary: Any, args: Args) -> None:
    """Scale the frequencies as Llama 3.1 does; GPTModel itself takes the factor alone, models differ in all four."""
    rotary.inv_freq = rotary._apply_scaling(
        rotary.inv_freq,
        factor=args.rope_scaling_factor,
        low_freq_factor=args.rope_scaling_low_freq_factor,
        high_freq_factor=args.rope_scaling_high_freq_factor,
        original_max_position_embeddings=args.rope_scaling_original_max_position_embeddings,
    )


def _reduce_experts_over_their_own_ranks(model: torch.nn.Module) -> None:
    """Let gradients of experts be averaged over the ranks that hold the same experts.

    Megatron (0.16.1) marks them so with --expert-model-parallel-size above 1 alone; with 1 and an expert tensor
    parallelism that is not the model's, it would average shares of different rows, or leave out ranks.
    """
    for name, param in model.named_parameters():
        if ".local_experts." in name:
            param.allreduce = False


def mask_padded_vocab(output_layer: torch.nn.Module, vocab_size: int) -> None:
    """Let the logits of padding vocabulary be -1e9: no probability, no gradient, and still finite in an entropy.

    The padding rows exist so that the vocabulary divides by TP; the engine does not have them, and with them in the
    softmax the trainer's log-probs would differ from the engine's.
    """

    def mask(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        first_padding = max(vocab_size - parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1], 0)
        if first_padding < logits.shape[-1]:
            logits[..., first_padding:] = -1e9 if logits.dtype != torch.float16 else -6e4
        return logits, bias

    output_layer.register_forward_hook(mask)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the bare model inside Megatron's wrappers (data parallel, 16 bit)."""
    while hasattr(module, "module") and isinstance(module.module, torch.nn.Module):
        module = module.module
    return module


_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}
_TYPED = ("params_dtype", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def config_kwargs(config: type, args: Args) -> dict[str, Any]:
    """Return {field: value} for the fields that `args` has.

    Fields whose option has no effect here (`warned` in megatron_flags.py) keep the config's default, and names of
    types ("fp32") become torch's types.
    """
    values, without_effect = vars(args), fields_without_effect()
    return {
        field.name: torch_type(values[field.name]) if field.name in _TYPED else values[field.name]
        for field in dataclasses.fields(config)
        if field.name in values and field.name not in without_effect
    }


def torch_type(name: Any) -> Any:
    """Return the torch type with this name, torch's own ("bfloat16") or Megatron's ("bf16"); what is no name stays."""
    return getattr(torch, _TYPES.get(name, name)) if isinstance(name, str) else name
