"""Flags of the training process itself, beside Megatron's own. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag


@dataclass
class TrainFlags:
    """Training process."""

    model_args_from_hf: bool = flag(False, "take every Megatron model flag that is not given from the HF config")
    require_deepep: bool = flag(
        False, "refuse a run that asks for DeepEP and cannot have it, instead of sending tokens by all-to-all"
    )
    deterministic: bool = flag(
        False,
        "every run of this line does the same, bit for bit: --deterministic-mode, engines that sample with a seed per "
        "sample, sums in one order; refuses what takes samples as they end",
    )
    train_env_vars: dict[str, str] = flag({}, "JSON: more environment variables for trainer processes", is_json=True)
    recompute_loss_function: bool = flag(
        False,
        "compute logits a chunk of --log-probs-chunk-size rows (1024 if that is -1) at a time and again in the "
        "backward pass: no more than a chunk of them is in memory",
    )
    log_probs_chunk_size: int = flag(-1, "tokens per chunk when log-probs and entropy are computed; -1 = one chunk")
    only_train_params_name_list: list[str] | None = flag(
        None,
        "regular expressions (searched in Megatron's parameter names) of the actor's parameters to train; others are "
        "frozen (the critic's: in its entry of --megatron-config-path)",
        nargs="*",
    )
    freeze_params_name_list: list[str] | None = flag(
        None,
        "regular expressions (searched in Megatron's parameter names) of the actor's parameters to freeze (the "
        "critic's: in its entry of --megatron-config-path)",
        nargs="*",
    )
    freeze_indexer: bool = flag(
        False, "demand that the model has indexers of sparse attention, which are frozen in any case"
    )
    qwen_gdn_backend: str = flag(
        "fla",
        "kernels of Qwen's gated delta net: fla is flash-linear-attention on CUDA where it is installed, and torch's "
        "operations elsewhere; flashqla is the package flash-qla (heads of 128 channels, 16 bit, Hopper or Blackwell)",
        choices=("fla", "flashqla"),
    )
    allgather_cp: bool = flag(
        False, "let context-parallel ranks gather all keys; for sparse attention alone, which does so in any case"
    )
    megatron_config_path: str | None = flag(None, "YAML file with argument overrides per role (actor, critic)")
    custom_config_path: str | None = flag(
        None, "YAML file of flags (as if given here) and of attributes of your own for hooks"
    )
    train_backend: str = flag("megatron", "training backend", choices=("megatron",))
    data_pad_size_multiplier: int = flag(
        128, "packed tokens of a micro-batch are padded to a multiple of this x tensor parallel size", at_least=1
    )
    custom_model_provider_path: str | None = flag(
        None, "hook: fn(pre_process=, post_process=[, vp_stage=]) builds the Megatron model"
    )
    custom_megatron_init_path: str | None = flag(None, "hook: fn(args), after Megatron's start on every rank")
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "hook: fn(args, model, store_prefix), before each forward-only pass"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "hook: fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), before each train step",
    )
    megatron_deepgemm_forward_layers: list[int] | None = flag(
        None,
        "decoder layers, from 0, whose linear layers outside of experts compute their forward pass as an fp8 engine "
        "does (DeepGEMM, Hopper); gradients stay those of bf16",
        nargs="+",
    )
    megatron_deepgemm_forward_modules: list[str] | None = flag(
        None,
        "ends of the names of the linear layers that do, as self_attention.linear_proj or linear_fc2 (default: all "
        "that the checkpoint has in fp8)",
        nargs="+",
        needs="megatron_deepgemm_forward_layers",
    )
    megatron_deepgemm_moe_forward_layers: list[int] | None = flag(
        None, "decoder layers, from 0, whose experts do, as one grouped product (--moe-grouped-gemm)", nargs="+"
    )
    megatron_deepgemm_moe_forward_modules: list[str] | None = flag(
        None,
        "ends of the names of the experts that do (default, and all that there is: mlp.experts)",
        nargs="+",
        needs="megatron_deepgemm_moe_forward_layers",
    )


@dataclass
class ModelPartFlags:
    """Multi-token prediction, routing replay and LoRA."""

    mtp_num_layers: int | None = flag(
        None, "multi-token prediction layers that are loaded, saved and sent to engines", at_least=0
    )
    mtp_loss_scaling_factor: float = flag(0.2, "weight of their loss", at_least=0, needs="enable_mtp_training")
    enable_mtp_training: bool = flag(
        False, "train them, as drafts of the policy: its own gradients do not change", needs="mtp_num_layers"
    )
    use_routing_replay: bool = flag(False, "replay the expert routing of the old-log-prob pass in training (R2)")
    use_rollout_routing_replay: bool = flag(False, "replay the engine's expert routing in training (R3)")
    lora_rank: int | None = flag(None, "rank of LoRA adapters to train instead of the weights", later="LoRA")
    lora_alpha: float | None = flag(None, "scale of the adapters", later="LoRA", needs="lora_rank")
    lora_target_modules: list[str] | None = flag(
        None, "modules that get adapters", nargs="+", later="LoRA", needs="lora_rank"
    )
