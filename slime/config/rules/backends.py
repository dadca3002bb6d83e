"""Rules of --train-backend fsdp: which of Megatron's flags it honours, which models it takes, what is not built.

Nothing that is given is ignored: a flag of Megatron's is honoured, or refused with what does the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from slime.checkpoints.paths import saved_shape
from slime.config.args import Args
from slime.config.lora_policies import policy_problems
from slime.config.megatron.arguments import kernel_problems, megatron_problems
from slime.config.megatron.flag_classes import groups_by_option, refused_flags, registered
from slime.config.megatron.lora_plan import LoraPlan, lora_problems
from slime.config.megatron.precision.int4_plan import check_int4_training
from slime.config.megatron.value_checks import check_ranges
from slime.config.problems import Problems, Rule, broken
from slime.config.rules.batch import check_schedule_length, check_warmup
from slime.models.families import FAMILIES, family_of_config
from slime.utils.errors import sentences
from slime.utils.misc import attempt
from slime.weights.names import read_config, text_config

FSDP = "--train-backend fsdp"
HONOURED = frozenset(
    [
        "accelerator",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "bf16",
        "check_for_nan_in_grad",
        "ckpt_format",
        "ckpt_step",
        "context_parallel_size",
        "deterministic_mode",
        "end_weight_decay",
        "exit_duration_in_mins",
        "exit_on_missing_checkpoint",
        "exit_signal",
        "exit_signal_handler",
        "finetune",
        "grad_reduce_in_fp32",
        "lr_decay_iters",
        "lr_decay_style",
        "lr_warmup_fraction",
        "lr_warmup_init",
        "lr_warmup_iters",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_style",
        "memory_snapshot_path",
        "min_lr",
        "muon_extra_scale_factor",
        "muon_momentum",
        "muon_num_ns_steps",
        "muon_scale_mode",
        "muon_use_nesterov",
        "no_load_optim",
        "no_load_rng",
        "optimizer",
        "recompute_granularity",
        "save_retain_interval",
        "sgd_momentum",
        "start_weight_decay",
        "use_checkpoint_opt_param_scheduler",
        "weight_decay",
        "weight_decay_incr_style",
    ]
)
"""Attributes of Megatron's flags that do the same with FSDP2."""
INSTEAD = {
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size": (
        "every rank has a copy of the model, sharded over all of them"
    ),
    "sequence_parallel": "there is no tensor parallelism",
    "recompute_method recompute_num_layers recompute_modules recompute_activations": (
        "--recompute-granularity full recomputes every layer"
    ),
    "optimizer_cpu_offload optimizer_offload_fraction": "--fsdp-cpu-offload keeps the optimizer in host memory",
    "overlap_param_gather": "--fsdp-forward-prefetch gathers ahead",
    "num_distributed_optimizer_instances": "--fsdp-replicate-size makes several copies",
    "grad_reduce_in_bf16 main_grads_dtype": "gradients are summed in fp32",
    "attention_backend use_flash_attn": "--attn-implementation chooses",
    "fp8 fp8_recipe": "training in fp8 is not built",
    "fp16": "parameters are fp32, or bf16 on GPUs",
    "spec": "the model is the one that transformers makes of --hf-checkpoint",
}
"""Attributes -> what does the same, or why there is nothing to choose."""
OWN_NOT_BUILT = [
    "custom_model_provider_path",
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "megatron_deepgemm_forward_layers",
    "megatron_deepgemm_forward_modules",
    "megatron_deepgemm_moe_forward_layers",
    "megatron_deepgemm_moe_forward_modules",
    "mtp_num_layers",
    "enable_mtp_training",
    "use_routing_replay",
    "use_rollout_routing_replay",
    "lora_policies",
    "only_train_params_name_list",
    "freeze_params_name_list",
    "freeze_indexer",
    "use_stateless_adam",
    "async_save",
    "allgather_cp",
]
"""Flags of slime's that the Megatron backend alone has."""
_SCALES = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}
"""Number of a config -> its value where it changes nothing; what computes log-probs here does not apply it."""
_RECURRENT = ("mamba", "ssm", "conv", "linear_conv", "lru")
"""Beginnings of a config's keys for layers with a state, where it does not say each layer's kind (LFM2, Jamba)."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TO_HF = {"fsdp": "tools/convert_fsdp_to_hf.py", "megatron": "tools/convert_torch_dist_to_hf.py"}
NOT_BUILT = (
    Rule(
        lambda a: a.recompute_granularity not in (None, "full"),
        f"--recompute-granularity {{recompute_granularity}} is Megatron's; {FSDP} recomputes whole layers: give full.",
    ),
    Rule(
        lambda a: (a.actor_num_nodes * a.actor_num_gpus_per_node) % a.context_parallel_size,
        "--context-parallel-size {context_parallel_size} must divide the trainer's ranks (--actor-num-nodes "
        "{actor_num_nodes} x --actor-num-gpus-per-node {actor_num_gpus_per_node}).",
    ),
    Rule(
        lambda a: a.context_parallel_size > 1 and a.attn_implementation != "slime_packed",
        "--context-parallel-size {context_parallel_size}: --attn-implementation {attn_implementation} sees one rank's "
        "part of a sample alone; give slime_packed.",
    ),
    Rule(
        lambda a: a.context_parallel_size > 1 and a.multimodal_keys,
        "--context-parallel-size {context_parallel_size} is not built for images (--multimodal-keys) with "
        f"{FSDP}: every rank would compute the tower of all images; leave it out.",
    ),
    Rule(
        lambda a: (a.actor_num_nodes * a.actor_num_gpus_per_node) % a.fsdp_replicate_size,
        "--fsdp-replicate-size {fsdp_replicate_size} must divide the trainer's ranks (--actor-num-nodes "
        "{actor_num_nodes} x --actor-num-gpus-per-node {actor_num_gpus_per_node}).",
    ),
    Rule(
        lambda a: a.fsdp_cpu_offload and a.accelerator == "cuda" and a.actor_num_nodes * a.actor_num_gpus_per_node > 1,
        "--fsdp-cpu-offload works on one GPU: NCCL would have to sum norms that lie in host memory; train on one, "
        "leave it out, or use --train-backend megatron with --optimizer-cpu-offload.",
    ),
    Rule(
        lambda a: (plan := LoraPlan.of(a)) and plan.has_experts,
        f"--lora-rank {{lora_rank}}: {FSDP} has no adapters for experts, which transformers holds as one tensor; add "
        "--lora-exclude-modules experts, or use --train-backend megatron.",
    ),
    Rule(
        lambda a: a.optimizer == "muon" and a.lora_rank,
        "--optimizer muon does not go with --lora-rank {lora_rank}: it would orthogonalise each factor of an adapter, "
        "not the change of the matrix; use adam or sgd.",
    ),
    Rule(
        lambda a: a.optimizer == "muon" and set(text_config(read_config(a.hf_checkpoint or ""))) & set(_EXPERTS),
        "--optimizer muon does not go with experts, which transformers holds as one tensor; use adam or sgd.",
    ),
    Rule(
        lambda a: a.optimizer == "muon" and a.muon_scale_mode not in ("spectral", "shape_scaling"),
        "--muon-scale-mode {muon_scale_mode} is none of those that torch.optim.Muon has; give spectral or "
        "shape_scaling.",
    ),
    Rule(
        lambda a: a.optimizer == "muon" and not (0 <= a.muon_momentum < 1 and 0 < a.muon_num_ns_steps < 100),
        "--muon-momentum {muon_momentum} must lie in [0, 1), and --muon-num-ns-steps {muon_num_ns_steps} between 1 "
        "and 99.",
    ),
    Rule(
        lambda a: (plan := LoraPlan.of(a)) and not plan.projections,
        "--lora-rank {lora_rank}: which projections --hf-checkpoint {hf_checkpoint} has is not known, as its family "
        "is none of docs/model_families.md; train all weights.",
    ),
)


IMAGES = (
    Rule(
        lambda a: a.custom_model_provider_path,
        "--custom-model-provider-path {custom_model_provider_path} is not given the images of --multimodal-keys; "
        "leave one of the two out.",
    ),
    Rule(
        lambda a: a.lora_rank,
        "--lora-rank {lora_rank} is not built for images (--multimodal-keys); train the weights, with "
        "--freeze-vision-tower if the tower shall stay.",
    ),
    Rule(
        lambda a: a.mtp_num_layers,
        "--mtp-num-layers {mtp_num_layers}: prediction layers are not built for images (--multimodal-keys); give 0.",
    ),
)
"""What is not built for images."""


def backend_problems(args: Args, hf_config: Mapping[str, Any] | None, explicit: Collection[str]) -> Problems:
    """Return everything that is wrong with the flags of a role's trainer; arguments as of `fsdp_problems`."""
    check = fsdp_problems if args.train_backend == "fsdp" else megatron_problems
    return check(args, hf_config, explicit)


def problems_of_run(args: Args, hf_config: Mapping[str, Any] | None) -> Problems:
    """Return what is wrong whatever the role: checkpoints of the other backend, adapters, kernels."""
    problems = Problems()
    problems.environment += foreign_checkpoints(args)
    problems.wrong += lora_problems(args)
    problems.wrong += check_int4_training(args, hf_config)
    if args.multimodal_keys and hf_config is not None and not (args.debug_rollout_only or args.eval_only):
        problems.unsupported += unseen_images(args, hf_config)
    if args.train_backend == "megatron":
        problems.wrong += policy_problems(args)
        problems.extend(kernel_problems(args, hf_config))
    return problems


def fsdp_problems(args: Args, hf_config: Mapping[str, Any] | None, explicit: Collection[str]) -> Problems:
    """Return everything that is wrong with the flags of a trainer that is FSDP2.

    Args:
        args: parsed flags, derived; --load as it was given.
        hf_config: of --hf-checkpoint.
        explicit: attributes whose flags were given.
    """
    derived = vars(args).keys() - set(explicit)
    return Problems(
        wrong=[
            *check_ranges(args, derived),
            *check_schedule_length(args),
            *check_warmup(args),
            *_of_megatron(args, explicit),
        ],
        unsupported=[
            *refused_flags(args, derived),
            *broken(NOT_BUILT, args, explicit),
            *(
                f"--{name.replace('_', '-')} is not built for {FSDP}; leave it out, or use --train-backend megatron."
                for name in OWN_NOT_BUILT
                if name in explicit and vars(args)[name]
            ),
            *(() if hf_config is None else unsupported_models(args, text_config(dict(hf_config)))),
        ],
    )


def unseen_images(args: Args, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence about images that the model of a config would not see, or that its trainer could not train with."""
    family, vision = family_of_config(hf_config), hf_config.get("vision_config")
    if family is None or not family.sees_images or not vision:
        those = ", ".join(name for name, row in FAMILIES.items() if row.sees_images)
        yield (
            f"--multimodal-keys: no part that sees images is known in model_type {hf_config.get('model_type')!r} of "
            f"--hf-checkpoint {args.hf_checkpoint}; it is in {those}; take another checkpoint, or leave the flag out."
        )
        return
    yield from broken(IMAGES, args)
    recomputes = args.train_backend == "megatron" and args.recompute_granularity == "full"
    if recomputes and vision.get("deepstack_visual_indexes"):
        yield (
            "--recompute-granularity full is not built for images of this model, which its first layers take, too; "
            "give selective, or use --train-backend fsdp."
        )


def _of_megatron(args: Args, explicit: Collection[str]) -> Iterator[str]:
    """A sentence for each given flag of Megatron's that has another value than without and is not honoured."""
    instead = {name: why for names, why in INSTEAD.items() for name in names.split()}
    described = []
    for option, action in registered().items():
        group = groups_by_option().get(option)
        given = action.dest in explicit and vars(args)[action.dest] != action.default
        if group is None or group.kind != "used" or not given or action.dest in HONOURED:
            continue
        if action.dest in instead:
            value = "" if action.nargs == 0 else f" {vars(args)[action.dest]}"
            yield f"{option}{value} is Megatron's; with {FSDP} {instead[action.dest]}; leave it out."
        else:
            described.append(option)
    if described:
        yield (
            f"{', '.join(described)}: Megatron's; {FSDP} trains what transformers makes of --hf-checkpoint; "
            "leave them out, or use --train-backend megatron."
        )


def unsupported_models(args: Args, config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each part of a model whose result would not be exact."""
    name, model_type = f"{FSDP}: model_type {config.get('model_type')!r} has", config.get("model_type")
    scales = {key: config.get(key) for key, nothing in _SCALES.items() if config.get(key) not in (None, nothing)}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type"))
    return sentences(
        (
            config.get("vision_config") and str(model_type).startswith("gemma3"),
            f"{name} tokens of an image that attend to each other in both directions, which no packed attention here "
            "does; train its text model (gemma3_text).",
        ),
        *_unsupported_layers(args, config, name),
        (
            model_type == "gpt_oss",
            f"{name} attention sinks, which no --attn-implementation is compared with; use --train-backend megatron.",
        ),
        *((True, f"{name} {key} {n}, which is not built; use --train-backend megatron.") for key, n in scales.items()),
        (
            rope_type in ("dynamic", "longrope"),
            f"{name} rope_type {rope_type}, whose angles depend on a pack's longest sample; use --train-backend "
            "megatron.",
        ),
        (
            config.get("quantization_config"),
            f"{name} quantised weights, which {FSDP} does not sync; take the checkpoint in 16 bit.",
        ),
    )


def _unsupported_layers(args: Args, config: Mapping[str, Any], name: str) -> Iterator[tuple[object, str]]:
    kinds = set(config.get("layer_types") or ())
    kinds |= {"sliding_attention"} if config.get("use_sliding_window") and config.get("sliding_window") else set()
    recurrent = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    other = recurrent or {key for key in config if key.startswith(_RECURRENT)}
    yield (
        other,
        f"{name} layers of {', '.join(sorted(other))}, whose state would pass from one packed sample to the next; use "
        "--train-backend megatron.",
    )
    yield (
        "chunked_attention" in kinds and args.attn_implementation == "slime_packed",
        f"{name} chunked_attention, which --attn-implementation slime_packed has not; give sdpa.",
    )


def foreign_checkpoints(args: Args) -> Iterator[str]:
    """A sentence for each checkpoint that the other backend has written."""
    of_flags = (
        ("--load", args.load, args.ckpt_step),
        ("--ref-load", args.ref_load, args.ref_ckpt_step),
        ("--opd-teacher-load", args.opd_teacher_load, args.opd_teacher_ckpt_step),
    )
    for flag, path, step in of_flags:
        shape, _ = attempt(saved_shape, path, step)  # what is wrong with it is said elsewhere
        saved = args.train_backend if shape is None else shape.get("train_backend", "megatron")
        if saved != args.train_backend:
            yield (
                f"{flag} {path} was written by --train-backend {saved}, which --train-backend {args.train_backend} "
                f"cannot read; turn it into an HF directory with {_TO_HF[saved]}, or use the same backend."
            )
