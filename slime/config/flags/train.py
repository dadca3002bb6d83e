"""Flags of training: checkpoints, losses and advantages, rewards, distillation, and the trainer's process itself."""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.estimators import ESTIMATORS
from slime.config.parser import flag

_FSDP = "train_backend=fsdp"
_WITH_CRITIC = "advantage_estimator.needs_critic"


@dataclass
class CheckpointFlags:
    """Checkpoints. The first of --load, --ref-load, --hf-checkpoint that has weights is what training starts from."""

    load: str | None = flag(
        None, "checkpoint to go on from: Megatron root or HF directory; --load equal to --save resumes; or its URL"
    )
    ref_load: str | None = flag(None, "reference checkpoint, and initial weights when --load has none")
    ref_ckpt_step: int | None = flag(
        None, "iteration of --ref-load (default: its newest)", needs="ref_load", at_least=0
    )
    save: str | None = flag(
        None, "checkpoint root to write, or its URL: after the last rollout, and as --save-interval says"
    )
    save_interval: int | None = flag(
        None, "save every N rollouts and after the last", needs=("save", "save_hf"), at_least=1
    )
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints", needs="save")
    checkpoint_contents: list[str] | None = flag(
        None,
        "what a checkpoint holds: model, optimizer (with the schedule), rng and hf, an HF export inside the iteration "
        "(default: model,optimizer,rng)",
        nargs="+",
        needs="save",
    )
    keep_checkpoints: int | None = flag(
        None,
        "keep the newest N of what --save and a --save-hf with {rollout_id} write, and delete older ones",
        needs=("save", "save_hf"),
        at_least=1,
    )
    verify_checkpoint: str = flag(
        "full",
        "compare a checkpoint with its manifest before it is loaded: sizes and checksums, sizes alone, or nothing",
        choices=("full", "sizes", "none"),
    )
    async_save: bool = flag(False, "write checkpoints while training goes on", needs="save")
    save_hf: str | None = flag(None, "HF directory (or URL) written at each save; {rollout_id} in it keeps every one")
    push_to_hub: str | None = flag(
        None, "OWNER/NAME of a repository of the Hugging Face Hub that gets each HF export, too", needs="save_hf"
    )


@dataclass
class AlgorithmFlags:
    """Algorithm."""

    advantage_estimator: str = flag(
        "grpo",
        "how advantages are made from rewards",
        choices=tuple(ESTIMATORS),
    )
    loss_type: str = flag("policy_loss", "which loss", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(
        None,
        "hook: fn(args, batch, logits, sum_of_sample_mean), with --loss-type custom_loss",
        needs="loss_type=custom_loss",
    )
    custom_advantage_function_path: str | None = flag(None, "hook: fn(args, rollout_data) sets advantages and returns")
    eps_clip: float = flag(
        0.2, "lower clip range of the ratio; also the upper one without --eps-clip-high", at_least=0
    )
    eps_clip_high: float | None = flag(None, "upper clip range of the ratio (default: --eps-clip)", at_least=0)
    eps_clip_c: float | None = flag(None, "dual-clip constant, > 1")
    kl_coef: float = flag(0.0, "weight of the KL penalty inside the reward", at_least=0)
    use_kl_loss: bool = flag(False, "add the KL from the reference to the loss; needs --ref-load")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss", needs="use_kl_loss", at_least=0)
    kl_loss_type: str = flag(
        "k1",
        "KL estimator",
        choices=("k1", "k2", "k3", "low_var_kl", "abs", "mse"),
        needs=("use_kl_loss", "kl_coef"),
    )
    use_unbiased_kl: bool = flag(False, "weight the KL with the importance ratio", needs="use_kl_loss")
    kl_ctrl: str = flag(
        "fixed",
        "how --kl-coef changes",
        choices=("fixed", "adaptive"),
        needs="kl_coef",
    )
    kl_target: float | None = flag(
        None, "the KL (rollout/kl) that --kl-ctrl adaptive steers to, > 0", needs="kl_ctrl=adaptive"
    )
    kl_horizon: int | None = flag(None, "samples over which it does", needs="kl_ctrl=adaptive", at_least=1)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", at_least=0)
    calculate_per_token_loss: bool = flag(False, "the same as --loss-agg-mode token-mean")
    loss_agg_mode: str = flag(
        "seq-mean-token-mean",
        "how the losses of tokens become one number",
        choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        "hook: fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> reducer",
    )
    gamma: float = flag(
        1.0,
        "discount of a trained token",
        needs=("advantage_estimator.discounts", "custom_advantage_function_path"),
        at_least=0,
        at_most=1,
    )
    lambd: float = flag(
        1.0,
        "lambda of GAE: 1 = returns minus values, 0 = the critic's one-step errors",
        needs=(_WITH_CRITIC, "custom_advantage_function_path"),
        at_least=0,
        at_most=1,
    )
    value_clip: float = flag(
        0.2,
        "how far a value may move from that before the update until its loss stops following it",
        at_least=0,
        needs=_WITH_CRITIC,
    )
    num_critic_only_steps: int = flag(
        0,
        "first rollouts that train only the critic, fewer than the run has",
        at_least=0,
        needs=_WITH_CRITIC,
    )
    normalize_advantages: bool = flag(False, "whiten the advantages over the trained tokens of all ranks")
    ppo_epochs: int = flag(1, "passes over one rollout", at_least=1)
    shuffle_mini_batches: bool = flag(
        False, "in each pass after the first the samples of a rollout are assigned to other train steps"
    )
    pf_ppo_reweight: str | None = flag(
        None,
        "resample responses by reward (policy filtration)",
        choices=("pow", "max_min", "max_random"),
    )
    pf_ppo_weight_pow: float = flag(2.0, "exponent of --pf-ppo-reweight pow", needs="pf_ppo_reweight=pow", at_least=0)
    compute_advantages_and_returns: bool = flag(True, "skip old and reference log-probs and advantages")
    grpo_std_normalization: bool = flag(True, "do not divide by the group's standard deviation (Dr.GRPO)")
    rewards_normalization: bool = flag(True, "do not subtract the group's mean either")
    use_rollout_logprobs: bool = flag(
        False, "take the engine's log-probs as the old ones: corrects for old weights (train_async.py)"
    )
    use_rollout_entropy: bool = flag(False, "log the entropy of each rollout before it is trained on")
    use_tis: bool = flag(False, "weight the loss with the ratio of trainer to engine (TIS): another correction")
    tis_clip: float = flag(2.0, "upper bound of that ratio", needs="use_tis", at_least=0)
    tis_clip_low: float = flag(0, "lower bound of that ratio", needs="use_tis", at_least=0)
    custom_tis_function_path: str | None = flag(
        None,
        "hook: fn(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)",
        needs=("use_tis", "get_mismatch_metrics"),
    )
    get_mismatch_metrics: bool = flag(False, "log how trainer and engine differ")
    use_opsm: bool = flag(False, "leave out samples far from the policy (OPSM)")
    opsm_delta: float = flag(1e-4, "KL per token above which a sample is left out", needs="use_opsm", at_least=0)
    keep_old_actor: bool = flag(
        False, "keep the weights that engines got in host memory, and take old log-probs from those that generated"
    )
    ref_update_interval: int | None = flag(
        None,
        "copy the actor to the reference every N rollouts",
        at_least=1,
        needs=("use_kl_loss", "kl_coef"),
    )
    reset_optimizer_states: bool = flag(False, "forget Adam's moments before each rollout")
    use_stateless_adam: bool = flag(
        False, "Adam that keeps no moments: each update is its first, lr * g / (|g| + eps); needs --no-save-optim"
    )
    recompute_old_log_probs: bool = flag(
        False, "always compute old log-probs in a pass of their own, even where the first train step's are the same"
    )
    seed: int = flag(1234, "seed of weights and engines", at_least=0)
    lr: float = flag(1e-6, "learning rate", at_least=0)
    clip_grad: float = flag(1.0, "gradient norm limit", at_least=0)


@dataclass
class DistillationFlags:
    """On-policy distillation."""

    use_opd: bool = flag(
        False, "subtract the log-ratio of student to teacher, times --opd-kl-coef, from each token's advantage"
    )
    opd_type: str | None = flag(
        None,
        "where the teacher runs: behind a server (its log-probs come with the samples), or in the trainer as a second "
        "set of weights of the same architecture",
        choices=("sglang", "megatron"),
        needs="use_opd",
    )
    opd_kl_coef: float = flag(1.0, "weight of the teacher in the advantages", needs="use_opd", at_least=0)
    opd_teacher_load: str | None = flag(
        None, "the teacher of --opd-type megatron: Megatron checkpoint root or HF directory", needs="use_opd"
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, "iteration of --opd-teacher-load (default: its newest)", needs="opd_teacher_load", at_least=0
    )


@dataclass
class RewardFlags:
    """Reward."""

    rm_type: str | None = flag(None, "built-in reward; boxed_ in front takes the content of the last \\boxed{}")
    custom_rm_path: str | None = flag(None, "hook: async fn(args, sample) -> reward; lists with --group-rm or fan-out")
    reward_key: str | None = flag(
        None,
        "key of the training reward where rewards are dicts, which are refused without it; several with weights, as "
        "correct=1,format=0.2, are summed and logged apart",
    )
    process_reward_path: str | None = flag(
        None, "hook: fn(args, sample) -> a reward of each response token, or of each turn, beside the response's"
    )
    eval_reward_key: str | None = flag(
        None, "as --reward-key (default), for evaluation", needs=("eval_prompt_data", "eval_config")
    )
    group_rm: bool = flag(False, "score a whole group at once")
    rm_url: str | None = flag(None, "address of the remote_rm service")
    rm_concurrency: int = flag(64, "requests to it in flight", at_least=1, needs="rm_url")
    rm_batch_size: int = flag(
        1,
        "samples of a request at most; above 1 it is a list of what waits, answered by a list",
        at_least=1,
        needs="rm_url",
    )
    custom_reward_post_process_path: str | None = flag(None, "hook: fn(args, samples) -> (raw_rewards, rewards)")
    custom_convert_samples_to_train_data_path: str | None = flag(None, "hook: fn(args, samples) -> train data")
    overlong_buffer_len: int | None = flag(
        None,
        "last tokens of --rollout-max-response-len in which a penalty grows",
        at_least=1,
        needs="rollout_max_response_len",
    )
    overlong_penalty_factor: float = flag(
        1.0, "the penalty at the full length", needs="overlong_buffer_len", at_least=0
    )
    reward_model_path: str | None = flag(None, "a classifying model that engines serve as reward")
    reward_model_num_gpus: int | None = flag(
        None, "GPUs (slots) of the reward model, one engine each", at_least=1, needs="reward_model_path"
    )
    code_sandbox_url: str | None = flag(
        None, "address of the service that runs code for --rm-type code; /run_code is added"
    )
    code_sandbox_concurrency: int = flag(64, "requests to it in flight", at_least=1, needs="code_sandbox_url")


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
    train_backend: str = flag(
        "megatron",
        "who trains: megatron, or fsdp, which shards the transformers model of --hf-checkpoint over all ranks",
        choices=("megatron", "fsdp"),
    )
    attn_implementation: str = flag(
        "slime_packed",
        "attention of the transformers model: slime_packed (packed samples without a mask), or transformers' own",
        choices=("slime_packed", "sdpa", "eager"),
        needs=_FSDP,
    )
    fsdp_replicate_size: int = flag(
        1, "copies of the sharded model (HSDP): each is sharded over trainer ranks / this", at_least=1, needs=_FSDP
    )
    fsdp_cpu_offload: bool = flag(
        False, "keep parameters, gradients and optimizer state in host memory, and update them there", needs=_FSDP
    )
    fsdp_reshard_after_forward: bool = flag(
        True, "keep a layer's gathered parameters from its forward to its backward pass", needs=_FSDP
    )
    fsdp_min_group_params: int = flag(
        50_000_000,
        "decoder layers are gathered, and their gradients reduced, together until they have so many parameters",
        at_least=1,
        needs=_FSDP,
    )
    fsdp_forward_prefetch: bool = flag(False, "gather the next layer's parameters while a layer computes", needs=_FSDP)
    fsdp_compile: bool = flag(
        False,
        "let torch.compile make the kernels of a decoder layer, instead of ours for norms and such",
        needs=_FSDP,
    )
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
    freeze_vision_tower: bool = flag(
        False,
        "leave the part of the model that sees images as it is, and let engines keep its embeddings across syncs",
        needs="multimodal_keys",
    )
    use_routing_replay: bool = flag(False, "replay the expert routing of the old-log-prob pass in training (R2)")
    use_rollout_routing_replay: bool = flag(False, "replay the engine's expert routing in training (R3)")
    lora_rank: int | None = flag(
        None, "rank of LoRA adapters to train instead of the weights, which stay as they are", at_least=1
    )
    lora_alpha: float | None = flag(
        None, "adapters are multiplied by alpha / rank (default: twice the rank)", needs="lora_rank"
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "HF's names of the projections that get adapters (default all-linear: all of a decoder layer; lm_head is "
        "named beside it)",
        nargs="+",
        needs="lora_rank",
    )
    lora_serve: str = flag(
        "adapter",
        "adapter: engines hold the model and get the adapter of each version; merged: they get whole weights",
        choices=("adapter", "merged"),
        needs="lora_rank",
    )
    lora_exclude_modules: list[str] | None = flag(
        None, "projections without adapters; experts stands for those of routed experts", nargs="+", needs="lora_rank"
    )
    lora_dropout: float = flag(
        0.0, "share of an adapter's inputs that training leaves out", at_least=0, at_most=0.9, needs="lora_rank"
    )
    lora_init: str = flag(
        "default", "how A is drawn; B starts at 0", choices=("default", "gaussian"), needs="lora_rank"
    )
    lora_use_rslora: bool = flag(False, "multiply by alpha / sqrt(rank), not alpha / rank", needs="lora_rank")
    lora_adapter_path: str | None = flag(
        None, "PEFT directory whose adapter training starts from (a run that resumes has its own)", needs="lora_rank"
    )
    lora_policies: str | None = flag(
        None,
        "YAML file of several policies (name, data, reward, rank, alpha, lr), each with adapters of its own over one "
        "base; --rollout-batch-size is then of each policy",
        needs="lora_rank",
    )
