"""Flags of checkpoints, losses, advantages and rewards, and optimizer defaults that differ from Megatron's.

Declarations only.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.algorithms.estimators import ESTIMATORS
from slime.config.parser import flag

_DISCOUNTED = tuple(f"advantage_estimator={name}" for name, row in ESTIMATORS.items() if row.discounts)
_WITH_CRITIC = tuple(f"advantage_estimator={name}" for name, row in ESTIMATORS.items() if row.needs_critic)


@dataclass
class CheckpointFlags:
    """Checkpoints. The first of --load, --ref-load, --hf-checkpoint that has weights is what training starts from."""

    load: str | None = flag(
        None, "checkpoint to go on from: Megatron root or HF directory; --load equal to --save resumes"
    )
    ref_load: str | None = flag(None, "reference checkpoint, and initial weights when --load has none")
    ref_ckpt_step: int | None = flag(
        None, "iteration of --ref-load (default: its newest)", needs="ref_load", at_least=0
    )
    save: str | None = flag(None, "checkpoint root to write: after the last rollout, and as --save-interval says")
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
    save_hf: str | None = flag(None, "HF directory written at each save; {rollout_id} in it keeps every one")


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
        needs=(*_DISCOUNTED, "custom_advantage_function_path"),
        at_least=0,
        at_most=1,
    )
    lambd: float = flag(
        1.0,
        "lambda of GAE: 1 = returns minus values, 0 = the critic's one-step errors",
        needs=(*_WITH_CRITIC, "custom_advantage_function_path"),
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
        None, "key of the training reward where rewards are dicts, which are refused without it"
    )
    eval_reward_key: str | None = flag(
        None, "as --reward-key (default), for evaluation", needs=("eval_prompt_data", "eval_config")
    )
    group_rm: bool = flag(False, "score a whole group at once")
    rm_url: str | None = flag(None, "address of the remote_rm service")
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
