"""What contradicts what among Megatron's flags, apart from the parallel layout (layout_checks.py).

Each check reads `args` and returns sentences. `explicit` holds the attributes whose flags were given: some values are
derived before the checks run, and only what was given can be without effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from slime.config.args import Args
from slime.config.megatron.derived import virtual_stages
from slime.config.megatron.flag_classes import option_of, registered
from slime.config.problems import NoEffect
from slime.models.hf_config import moe_layer_pattern

AT_LEAST: dict[int, str] = {
    1: """num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size vocab_size
    make_vocab_size_divisible_by padded_vocab_size seq_length max_position_embeddings lr_decay_iters
    lr_wsd_decay_iters recompute_num_layers bucket_size ddp_num_buckets kv_channels
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
    expert_tensor_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    microbatch_group_size_per_vp_stage
    exit_duration_in_mins save_retain_interval num_distributed_optimizer_instances
    moe_router_topk moe_router_num_groups moe_router_group_topk moe_ffn_hidden_size
    moe_shared_expert_intermediate_size loss_scale_window hysteresis""",
    0: """lr_warmup_iters lr_warmup_init min_lr decoupled_lr decoupled_min_lr weight_decay start_weight_decay
    end_weight_decay ckpt_step hidden_dropout attention_dropout adam_beta1 adam_beta2 adam_eps init_method_std
    embedding_init_method_std layernorm_epsilon rotary_base rotary_percent num_moe_experts loss_scale
    moe_z_loss_coeff moe_router_bias_update_rate moe_router_topk_scaling_factor""",
}
AT_MOST: dict[int, str] = {
    1: "hidden_dropout attention_dropout adam_beta1 adam_beta2 rotary_percent",
    10_000: "num_layers",
    2**31 - 1: """hidden_size ffn_hidden_size vocab_size num_attention_heads num_query_groups kv_channels
    make_vocab_size_divisible_by padded_vocab_size tensor_model_parallel_size pipeline_model_parallel_size
    context_parallel_size expert_model_parallel_size expert_tensor_parallel_size num_moe_experts""",
}
RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def check_ranges(args: Args, derived: Collection[str] = ()) -> Iterator[str]:
    """No number is smaller or larger than makes sense; what was derived from another is left to that one."""
    values = vars(args)
    for action in registered().values():
        value = values.get(action.dest)
        if isinstance(value, float) and not math.isfinite(value) and action.dest not in derived:
            yield f"{option_of(action.dest)} {value} must be a finite number."
    for bounds, word, too_far in ((AT_LEAST, "least", operator.lt), (AT_MOST, "most", operator.gt)):
        for bound, names in bounds.items():
            for name in names.split():
                if values[name] is not None and name not in derived and too_far(values[name], bound):
                    yield f"{option_of(name)} {values[name]} must be at {word} {bound}."


class Effect(NamedTuple):
    """When the flags of some attributes have an effect.

    Attributes:
        names: the attributes.
        holds: whether they have one, from args.
        otherwise: the end of the sentence "<flag> has no effect ...".
    """

    names: str
    holds: Callable[[Any], object]
    otherwise: str


EFFECTS: tuple[Effect, ...] = (
    Effect("exit_signal", lambda a: a.exit_signal_handler, "without --exit-signal-handler"),
    Effect("save_retain_interval", lambda a: a.save or a.save_hf, "without --save or --save-hf"),
    Effect(
        "sequence_parallel",
        lambda a: a.tensor_model_parallel_size > 1,
        "with --tensor-model-parallel-size 1, which leaves nothing to split (the nearest that works is 2)",
    ),
    Effect(
        "expert_tensor_parallel_size",
        lambda a: a.num_moe_experts or a.expert_tensor_parallel_size == 1,
        "without --num-experts",
    ),
    Effect(
        "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
        "linear_num_value_heads",
        lambda a: a.experimental_attention_variant == "gated_delta_net",
        "without --experimental-attention-variant gated_delta_net",
    ),
    Effect(
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk",
        lambda a: a.experimental_attention_variant == "dsa",
        "without --experimental-attention-variant dsa",
    ),
    Effect(
        "add_qkv_bias",
        lambda a: not a.multi_latent_attention,
        "with --multi-latent-attention, which has no biases",
    ),
    Effect("num_query_groups", lambda a: a.group_query_attention, "without --group-query-attention"),
    Effect(
        "rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor "
        "rope_scaling_original_max_position_embeddings",
        lambda a: a.use_rope_scaling,
        "without --use-rope-scaling",
    ),
    Effect(
        "rope_type",
        lambda a: a.multi_latent_attention or a.rope_type == "rope",
        "without --multi-latent-attention",
    ),
    Effect(
        "recompute_method recompute_num_layers distribute_saved_activations",
        lambda a: a.recompute_granularity == "full",
        "without --recompute-granularity full",
    ),
    Effect(
        "recompute_modules",
        lambda a: a.recompute_granularity == "selective",
        "without --recompute-granularity selective",
    ),
    Effect(
        "distribute_saved_activations",
        lambda a: a.tensor_model_parallel_size > 1 or a.recompute_granularity != "full",
        "with --tensor-model-parallel-size 1",
    ),
    Effect(
        "microbatch_group_size_per_vp_stage overlap_p2p_comm",
        lambda a: virtual_stages(a, max(1, a.pipeline_model_parallel_size)),
        "without --num-virtual-stages-per-pipeline-rank",
    ),
    Effect(
        "moe_grouped_gemm moe_layer_freq moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
        "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_ffn_hidden_size moe_router_topk "
        "moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_router_topk_scaling_factor "
        "moe_router_score_function moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate",
        lambda a: a.num_moe_experts,
        "without --num-experts",
    ),
    Effect(
        "moe_aux_loss_coeff",
        lambda a: a.moe_router_load_balancing_type != "none" or not a.num_moe_experts,
        "with --moe-router-load-balancing-type none",
    ),
    Effect(
        "moe_router_bias_update_rate",
        lambda a: a.moe_router_enable_expert_bias or not a.num_moe_experts,
        "without --moe-router-enable-expert-bias",
    ),
    Effect("cpu_offloading_num_layers", lambda a: a.cpu_offloading, "without --cpu-offloading"),
    Effect(
        "offload_modules",
        lambda a: a.fine_grained_activation_offloading,
        "without --fine-grained-activation-offloading",
    ),
    Effect(
        "min_offloaded_tensor_size",
        lambda a: a.cpu_offloading or a.fine_grained_activation_offloading,
        "without --cpu-offloading or --fine-grained-activation-offloading",
    ),
    Effect(
        "optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d",
        lambda a: a.optimizer_cpu_offload,
        "without --optimizer-cpu-offload",
    ),
    Effect(
        "main_grads_dtype exp_avg_dtype",
        lambda a: a.use_precision_aware_optimizer,
        "without --use-precision-aware-optimizer",
    ),
    Effect("bucket_size ddp_num_buckets", lambda a: a.overlap_grad_reduce, "without --overlap-grad-reduce"),
    Effect(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
        lambda a: a.fp16 and a.loss_scale is None,
        "but with --fp16 and without --loss-scale",
    ),
    Effect("grad_reduce_in_bf16", lambda a: not a.fp16, "with --fp16"),
    Effect("decoupled_min_lr", lambda a: a.decoupled_lr is not None, "without --decoupled-lr"),
    Effect("min_lr", lambda a: a.lr_decay_style != "constant", "with --lr-decay-style constant"),
    Effect(
        "lr_decay_iters",
        lambda a: a.lr_decay_style != "constant" or a.lr_warmup_fraction is not None,
        "with --lr-decay-style constant",
    ),
    Effect(
        "lr_wsd_decay_style lr_wsd_decay_iters", lambda a: a.lr_decay_style == "WSD", "without --lr-decay-style WSD"
    ),
    Effect("lr_warmup_init", lambda a: a.lr_warmup_iters or a.lr_warmup_fraction, "without a warm-up"),
    Effect("apply_wd_to_qk_layernorm no_weight_decay_cond_type", lambda a: a.qk_layernorm, "without --qk-layernorm"),
)


def check_effects(args: Args, explicit: Collection[str], derived: Collection[str] = ()) -> Iterator[NoEffect]:
    """Say which given flags have no effect together with the others.

    Args:
        derived: attributes that `derive_megatron` sets, and which therefore keep their values.
    """
    default_of = {action.dest: action.default for action in registered().values()}
    for effect in EFFECTS:
        given = [name for name in effect.names.split() if name in explicit and _asks(name, vars(args)[name])]
        if given and not effect.holds(args):
            defaults = {name: default_of[name] for name in given if name not in derived}
            yield NoEffect(map(option_of, given), effect.otherwise, "leave it out", instead=defaults)
    if "make_vocab_size_divisible_by" in explicit and "padded_vocab_size" in explicit:
        yield NoEffect("--make-vocab-size-divisible-by", "with --padded-vocab-size", "leave one out")


def _asks(name: str, value: Any) -> bool:
    """Whether a given flag asks for something: a switch is on, or one that says no is off."""
    if option_of(name).startswith("--no-") and not name.startswith("no_"):
        return value is False
    return value not in (None, False)


def check_buckets(args: Args, explicit: Collection[str]) -> Iterator[str]:
    """The size of gradient buckets is given once, and gradients can be averaged while they are reduced."""
    if {"ddp_num_buckets", "bucket_size"} <= set(explicit):
        yield "--ddp-num-buckets and --ddp-bucket-size exclude each other; give one."
    if args.average_in_collective and args.calculate_per_token_loss:
        yield (
            "--ddp-average-in-collective does not go with --calculate-per-token-loss (--loss-agg-mode token-mean): "
            "gradients are summed over ranks and divided by the tokens of all; leave --ddp-average-in-collective out."
        )
    if args.average_in_collective and args.reduce_scatter_with_fp32_accumulation:
        yield (
            "--ddp-average-in-collective does not go with --ddp-reduce-scatter-with-fp32-accumulation, which sums; "
            "leave one out."
        )


def check_precision(args: Args, explicit: Collection[str]) -> Iterator[str]:
    """One precision, and gradients of one type."""
    if args.fp16 and "bf16" in explicit:
        yield "--bf16 and --fp16 exclude each other; give one."
    if args.grad_reduce_in_bf16 and "grad_reduce_in_fp32" in explicit:
        yield "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; give one."
    if args.use_flash_attn and args.attention_backend == "unfused":
        yield "--use-flash-attn and --attention-backend unfused exclude each other; give one."


def check_device(args: Args, explicit: Collection[str]) -> Iterator[str]:
    """What only a GPU can do is not asked of a CPU."""
    if args.accelerator != "cpu":
        return
    for name in ("bf16", "fp16", "grad_reduce_in_bf16"):
        if name in explicit and (vars(args)[name] or name == "bf16"):
            yield f"{option_of(name)}: the trainer computes in fp32 on --accelerator cpu; leave it out."
    if args.main_grads_dtype != "fp32":
        yield f"--main-grads-dtype {args.main_grads_dtype}: gradients are fp32 on --accelerator cpu; leave it out."
    if args.attention_backend == "flash":
        option = "--use-flash-attn" if args.use_flash_attn else "--attention-backend flash"
        yield f"{option} needs CUDA; leave it out on --accelerator cpu."


def check_schedule(args: Args, explicit: Collection[str]) -> Iterator[str]:
    """Learning rate and weight decay move as their styles say."""
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield "--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one."
    if args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1:
        yield f"--lr-warmup-fraction {args.lr_warmup_fraction} must lie in [0, 1)."
    if args.lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}."
    if args.lr is not None and args.lr_warmup_init > args.lr:
        yield f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}."
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the train steps of its decay."
    first, last = args.start_weight_decay, args.end_weight_decay
    first, last = (args.weight_decay if end is None else end for end in (first, last))
    style = args.weight_decay_incr_style
    if style != "constant" and first == last:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay."
    elif style == "constant" and first != last:
        yield (
            f"--start-weight-decay {first} and --end-weight-decay {last} need --weight-decay-incr-style linear or "
            "cosine."
        )
    # A critic starts from it where only the actor's entry gives the ends.
    if "weight_decay" in explicit and args.weight_decay not in (first, last) and not args.use_critic:
        yield NoEffect(
            f"--weight-decay {args.weight_decay}",
            f"with --start-weight-decay {first} and --end-weight-decay {last}",
            "leave it out",
        )
    if last < first:
        yield f"--end-weight-decay {last} is below --start-weight-decay {first}; Megatron only raises it."
    if "override_opt_param_scheduler" in explicit and args.use_checkpoint_opt_param_scheduler:
        yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one."


def check_recompute(args: Args) -> Iterator[str]:
    """Recomputation says which layers or modules, and gathers overlap where reductions do."""
    kind = args.recompute_granularity
    needed = ("recompute_method", "recompute_num_layers")
    if kind == "full" and (missing := [option_of(name) for name in needed if not vars(args)[name]]):
        yield f"--recompute-granularity full needs {' and '.join(missing)}."
    if kind == "full" and args.distribute_saved_activations and args.sequence_parallel:
        yield "--distribute-saved-activations and --sequence-parallel exclude each other; give one."
    if wrong := sorted(set(args.recompute_modules or ()) - set(RECOMPUTED)):
        yield f"--recompute-modules {' '.join(wrong)}: choose from {', '.join(RECOMPUTED)}."
    if args.overlap_param_gather and not args.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce."


def check_recomputed_modules(args: Args) -> Iterator[str]:
    """The model has what is recomputed; num_layers is given."""
    if args.recompute_granularity != "selective" or not args.recompute_modules:
        return
    has_experts = bool(args.num_moe_experts)
    has = {
        "mla_up_proj": args.multi_latent_attention,
        "mlp": not has_experts or 0 in moe_layer_pattern(args.moe_layer_freq, args.num_layers),
        "moe": has_experts,
        "moe_act": has_experts,
        "shared_experts": has_experts and args.moe_shared_expert_intermediate_size,
    }
    possible = [name for name in RECOMPUTED if has.get(name, True)]
    if lacking := [name for name in args.recompute_modules if name in RECOMPUTED and name not in possible]:
        yield f"--recompute-modules {' '.join(lacking)}: the model has none; choose from {', '.join(possible)}."
    if "layernorm" in args.recompute_modules and args.transformer_impl != "transformer_engine":
        yield (
            "--recompute-modules layernorm: Megatron recomputes norms with functions of TransformerEngine; add "
            "--transformer-impl transformer_engine, or leave layernorm out."
        )
    if "moe_act" in args.recompute_modules and has_experts and not args.moe_grouped_gemm:
        yield "--recompute-modules moe_act recomputes the activations of grouped experts; add --moe-grouped-gemm."


def check_model(args: Args) -> Iterator[str]:
    """The numbers of the model fit each other; num_layers, hidden_size and num_attention_heads are given."""
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        yield (
            f"--hidden-size {args.hidden_size} does not divide by --num-attention-heads {args.num_attention_heads}; "
            "give --kv-channels, the size of a head."
        )
    head = args.kv_channels or args.hidden_size // args.num_attention_heads
    if args.position_embedding_type == "rope" and not args.multi_latent_attention and head * args.rotary_percent % 2:
        yield (
            f"--rotary-percent {args.rotary_percent} of --kv-channels {head} is not an even number of channels, which "
            "rotary embeddings turn in pairs; change one of them."
        )
    if None not in (args.padded_vocab_size, args.vocab_size) and args.padded_vocab_size < args.vocab_size:
        yield f"--padded-vocab-size {args.padded_vocab_size} is below the vocabulary of {args.vocab_size}."
    experts, layers = args.num_moe_experts, args.moe_layer_freq
    if experts and isinstance(layers, list) and len(layers) != args.num_layers:
        yield f"--moe-layer-freq lists {len(layers)} layers, --num-layers says {args.num_layers}."
    if experts and args.moe_router_topk > experts:
        yield f"--moe-router-topk {args.moe_router_topk} is more than --num-experts {experts}."
    if experts and args.moe_router_num_groups and experts % args.moe_router_num_groups:
        yield f"--num-experts {experts} does not divide by --moe-router-num-groups {args.moe_router_num_groups}."
    if args.moe_router_group_topk and args.moe_router_group_topk > (args.moe_router_num_groups or 0):
        yield (
            f"--moe-router-group-topk {args.moe_router_group_topk} is more than --moe-router-num-groups "
            f"{args.moe_router_num_groups or 0}."
        )


def check_built_models(args: Args) -> Iterator[str]:
    """What our models lack: sentences about models that cannot be trained yet."""
    ours = "is not supported: no family of docs/model_families.md has it;"
    if args.normalization != "RMSNorm":
        yield f"--normalization {args.normalization} {ours} give --normalization RMSNorm."
    if not args.swiglu:
        yield f"an MLP without --swiglu {ours} give it."
    if args.add_bias_linear:
        yield f"a model with biases {ours} give --disable-bias-linear."
    if args.attention_dropout:
        yield f"--attention-dropout {args.attention_dropout} is not supported: our attention has no dropout; use 0."
