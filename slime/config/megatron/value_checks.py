"""What contradicts what among Megatron's flags, apart from the parallel layout (layout_checks.py).

Each check reads `args` and returns sentences. `explicit` holds the attributes whose flags were given: some values are
derived before the checks run, and only what was given can be without effect.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator
from typing import Any

from slime.config.args import Args
from slime.config.megatron.derived import virtual_stages
from slime.config.megatron.flag_classes import option_of, registered
from slime.config.megatron.model_checks import as_list
from slime.config.problems import Check, Effect, NoEffect, Rule, WithoutEffect, check_effects, where
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
    Effect("fp8_recipe", lambda a: a.fp8, "without --fp8-format"),
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


def check_megatron_effects(args: Args, explicit: Collection[str], derived: Collection[str] = ()) -> Iterator[NoEffect]:
    """Say which given flags have no effect together with the others.

    Args:
        derived: attributes that `derive_megatron` sets, and which therefore keep their values.
    """
    defaults = {action.dest: action.default for action in registered().values() if action.dest not in derived}
    asking = [name for name in explicit if _asks(name, vars(args).get(name))]
    return check_effects(EFFECTS, args, asking, option_of=option_of, defaults=defaults)


def _asks(name: str, value: Any) -> bool:
    """Whether a given flag asks for something: a switch is on, or one that says no is off."""
    if option_of(name).startswith("--no-") and not name.startswith("no_"):
        return value is False
    return value not in (None, False)


def _weight_decay_ends(args: Args) -> tuple[float, float]:
    first, last = args.start_weight_decay, args.end_weight_decay
    return args.weight_decay if first is None else first, args.weight_decay if last is None else last


def _is_one_weight_decay(args: Args) -> bool:
    first, last = _weight_decay_ends(args)
    return first == last


def _missing_recomputation(args: Args) -> list[str]:
    return [option_of(name) for name in ("recompute_method", "recompute_num_layers") if not vars(args)[name]]


def _unknown_modules(args: Args) -> list[str]:
    return sorted(set(args.recompute_modules or ()) - set(RECOMPUTED))


TRAINING: tuple[Check, ...] = (
    WithoutEffect(
        bool,
        "--make-vocab-size-divisible-by",
        "with --padded-vocab-size",
        "leave one out",
        given="make_vocab_size_divisible_by padded_vocab_size",
    ),
    # the size of gradient buckets is given once, and gradients can be averaged while they are reduced
    Rule(
        bool,
        "--ddp-num-buckets and --ddp-bucket-size exclude each other; give one.",
        given="ddp_num_buckets bucket_size",
    ),
    Rule(
        lambda a: a.average_in_collective and a.calculate_per_token_loss,
        "--ddp-average-in-collective does not go with --calculate-per-token-loss (--loss-agg-mode token-mean): "
        "gradients are summed over ranks and divided by the tokens of all; leave --ddp-average-in-collective out.",
    ),
    Rule(
        lambda a: a.average_in_collective and a.reduce_scatter_with_fp32_accumulation,
        "--ddp-average-in-collective does not go with --ddp-reduce-scatter-with-fp32-accumulation, which sums; leave "
        "one out.",
    ),
    # one precision, and gradients of one type
    Rule(lambda a: a.fp16, "--bf16 and --fp16 exclude each other; give one.", given="bf16"),
    Rule(
        lambda a: a.grad_reduce_in_bf16,
        "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; give one.",
        given="grad_reduce_in_fp32",
    ),
    Rule(
        lambda a: a.use_flash_attn and a.attention_backend == "unfused",
        "--use-flash-attn and --attention-backend unfused exclude each other; give one.",
    ),
    # learning rate and weight decay move as their styles say
    Rule(
        lambda a: a.lr_warmup_fraction is not None and a.lr_warmup_iters,
        "--lr-warmup-fraction and --lr-warmup-iters exclude each other; give one.",
    ),
    Rule(
        lambda a: a.lr_warmup_fraction is not None and not 0 <= a.lr_warmup_fraction < 1,
        "--lr-warmup-fraction {lr_warmup_fraction} must lie in [0, 1).",
    ),
    Rule(lambda a: a.lr is not None and a.min_lr > a.lr, "--min-lr {min_lr} is above --lr {lr}."),
    Rule(
        lambda a: a.lr is not None and a.lr_warmup_init > a.lr, "--lr-warmup-init {lr_warmup_init} is above --lr {lr}."
    ),
    Rule(
        lambda a: a.lr_decay_style == "WSD" and a.lr_wsd_decay_iters is None,
        "--lr-decay-style WSD needs --lr-wsd-decay-iters, the train steps of its decay.",
    ),
    # weight decay moves as its style says
    Rule(
        lambda a: a.weight_decay_incr_style != "constant" and _is_one_weight_decay(a),
        "--weight-decay-incr-style {weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay.",
    ),
    Rule(
        lambda a: a.weight_decay_incr_style == "constant" and not _is_one_weight_decay(a),
        lambda a: (
            "--start-weight-decay {} and --end-weight-decay {} need --weight-decay-incr-style linear or "
            "cosine.".format(*_weight_decay_ends(a))
        ),
    ),
    WithoutEffect(  # a critic starts from it where only the actor's entry gives the ends
        lambda a: a.weight_decay not in _weight_decay_ends(a) and not a.use_critic,
        "--weight-decay {weight_decay}",
        lambda a: "with --start-weight-decay {} and --end-weight-decay {}".format(*_weight_decay_ends(a)),
        "leave it out",
        given="weight_decay",
    ),
    Rule(
        lambda a: operator.gt(*_weight_decay_ends(a)),
        lambda a: "--end-weight-decay {1} is below --start-weight-decay {0}; Megatron only raises it.".format(
            *_weight_decay_ends(a)
        ),
    ),
    Rule(
        lambda a: a.use_checkpoint_opt_param_scheduler,
        "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other; give one.",
        given="override_opt_param_scheduler",
    ),
    # recomputation says which layers or modules, and gathers overlap where reductions do
    Rule(
        lambda a: a.recompute_granularity == "full" and _missing_recomputation(a),
        lambda a: f"--recompute-granularity full needs {' and '.join(_missing_recomputation(a))}.",
    ),
    Rule(
        lambda a: a.recompute_granularity == "full" and a.distribute_saved_activations and a.sequence_parallel,
        "--distribute-saved-activations and --sequence-parallel exclude each other; give one.",
    ),
    Rule(
        _unknown_modules,
        lambda a: f"--recompute-modules {' '.join(_unknown_modules(a))}: choose from {', '.join(RECOMPUTED)}.",
    ),
    Rule(
        lambda a: a.overlap_param_gather and not a.overlap_grad_reduce,
        "--overlap-param-gather needs --overlap-grad-reduce.",
    ),
)
ON_CPU: tuple[Check, ...] = (
    Rule(bool, "--bf16: the trainer computes in fp32 on --accelerator cpu; leave it out.", given="bf16"),
    Rule(lambda a: a.fp16, "--fp16: the trainer computes in fp32 on --accelerator cpu; leave it out.", given="fp16"),
    Rule(
        lambda a: a.grad_reduce_in_bf16,
        "--grad-reduce-in-bf16: the trainer computes in fp32 on --accelerator cpu; leave it out.",
        given="grad_reduce_in_bf16",
    ),
    Rule(
        lambda a: a.main_grads_dtype != "fp32",
        "--main-grads-dtype {main_grads_dtype}: gradients are fp32 on --accelerator cpu; leave it out.",
    ),
    Rule(
        lambda a: a.attention_backend == "flash",
        lambda a: (
            f"{'--use-flash-attn' if a.use_flash_attn else '--attention-backend flash'} needs CUDA; leave it out on "
            "--accelerator cpu."
        ),
    ),
)
"""What only a GPU can do."""


def _recomputable(args: Args) -> list[str]:
    """What selective recomputation can recompute of the model; num_layers is given."""
    has_experts = bool(args.num_moe_experts)
    has = {
        "mla_up_proj": args.multi_latent_attention,
        "mlp": not has_experts or 0 in moe_layer_pattern(args.moe_layer_freq, args.num_layers),
        "moe": has_experts,
        "moe_act": has_experts,
        "shared_experts": has_experts and args.moe_shared_expert_intermediate_size,
    }
    return [name for name in RECOMPUTED if has.get(name, True)]


def _not_recomputable(args: Args) -> list[str]:
    return [name for name in args.recompute_modules or () if name in RECOMPUTED and name not in _recomputable(args)]


check_recomputed_modules = where(
    lambda a: a.recompute_granularity == "selective" and a.recompute_modules,
    Rule(
        _not_recomputable,
        lambda a: (
            f"--recompute-modules {' '.join(_not_recomputable(a))}: the model has none; choose from "
            f"{', '.join(_recomputable(a))}."
        ),
    ),
    Rule(
        lambda a: "layernorm" in (a.recompute_modules or ()) and a.transformer_impl != "transformer_engine",
        "--recompute-modules layernorm: Megatron recomputes norms with functions of TransformerEngine; add "
        "--transformer-impl transformer_engine, or leave layernorm out.",
    ),
    Rule(
        lambda a: "moe_act" in (a.recompute_modules or ()) and a.num_moe_experts and not a.moe_grouped_gemm,
        "--recompute-modules moe_act recomputes the activations of grouped experts; add --moe-grouped-gemm.",
    ),
)


def _head_size(args: Args) -> int:
    return args.kv_channels or args.hidden_size // args.num_attention_heads


MODEL: tuple[Check, ...] = (
    Rule(
        lambda a: a.kv_channels is None and a.hidden_size % a.num_attention_heads,
        "--hidden-size {hidden_size} does not divide by --num-attention-heads {num_attention_heads}; give "
        "--kv-channels, the size of a head.",
    ),
    Rule(
        lambda a: (
            a.position_embedding_type == "rope"
            and not a.multi_latent_attention
            and _head_size(a) * a.rotary_percent % 2
        ),
        lambda a: (
            f"--rotary-percent {a.rotary_percent} of --kv-channels {_head_size(a)} is not an even number of channels, "
            "which rotary embeddings turn in pairs; change one of them."
        ),
    ),
    Rule(
        lambda a: None not in (a.padded_vocab_size, a.vocab_size) and a.padded_vocab_size < a.vocab_size,
        "--padded-vocab-size {padded_vocab_size} is below the vocabulary of {vocab_size}.",
    ),
    where(
        lambda a: a.num_moe_experts,
        Rule(
            lambda a: isinstance(a.moe_layer_freq, list) and len(a.moe_layer_freq) != a.num_layers,
            lambda a: (
                f"--moe-layer-freq lists {len(as_list(a.moe_layer_freq))} layers, --num-layers says {a.num_layers}."
            ),
        ),
        Rule(
            lambda a: a.moe_router_topk > (a.num_moe_experts or 0),
            "--moe-router-topk {moe_router_topk} is more than --num-experts {num_moe_experts}.",
        ),
        Rule(
            lambda a: a.moe_router_num_groups and (a.num_moe_experts or 0) % a.moe_router_num_groups,
            "--num-experts {num_moe_experts} does not divide by --moe-router-num-groups {moe_router_num_groups}.",
        ),
    ),
    Rule(
        lambda a: a.moe_router_group_topk and a.moe_router_group_topk > (a.moe_router_num_groups or 0),
        lambda a: (
            f"--moe-router-group-topk {a.moe_router_group_topk} is more than --moe-router-num-groups "
            f"{a.moe_router_num_groups or 0}."
        ),
    ),
    check_recomputed_modules,
)
"""The numbers of the model fit each other; num_layers, hidden_size and num_attention_heads are given."""
_OURS = "is not supported: no family of docs/model_families.md has it;"
BUILT_MODELS: tuple[Check, ...] = (
    Rule(
        lambda a: a.normalization != "RMSNorm",
        f"--normalization {{normalization}} {_OURS} give --normalization RMSNorm.",
    ),
    Rule(lambda a: not a.swiglu, f"an MLP without --swiglu {_OURS} give it."),
    Rule(lambda a: a.add_bias_linear, f"a model with biases {_OURS} give --disable-bias-linear."),
    Rule(
        lambda a: a.attention_dropout,
        "--attention-dropout {attention_dropout} is not supported: our attention has no dropout; use 0.",
    ),
)
"""What our models lack."""
