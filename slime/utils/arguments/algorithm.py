"""Flags of checkpoints, losses, advantages and rewards, and optimizer defaults that differ from Megatron's.

Declarations only.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils.arguments.flags import flag


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
    save_hf: str | None = flag(None, "HF directory written at each save; {rollout_id} in it keeps every one")


@dataclass
class AlgorithmFlags:
    """Algorithm."""

    advantage_estimator: str = flag("grpo", "how advantages are made from rewards", choices=("grpo",))
    loss_type: str = flag("policy_loss", "which loss", choices=("policy_loss", "sft_loss", "custom_loss"))
    custom_loss_function_path: str | None = flag(
        None, "hook: fn(args, batch, logits, sum_of_sample_mean), with --loss-type custom_loss"
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
        "k1", "KL estimator", choices=("k1", "k2", "k3", "low_var_kl"), needs=("use_kl_loss", "kl_coef")
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", at_least=0)
    calculate_per_token_loss: bool = flag(False, "mean over the tokens of a step instead of over its samples")
    compute_advantages_and_returns: bool = flag(True, "skip old and reference log-probs and advantages")
    grpo_std_normalization: bool = flag(True, "do not divide by the group's standard deviation (Dr.GRPO)")
    rewards_normalization: bool = flag(True, "do not subtract the group's mean either")
    use_rollout_logprobs: bool = flag(False, "take the engine's log-probs as the old ones")
    recompute_old_log_probs: bool = flag(
        False, "always compute old log-probs in a pass of their own, even where the first train step's are the same"
    )
    seed: int = flag(1234, "seed of weights and engines", at_least=0)
    lr: float = flag(1e-6, "learning rate", at_least=0)
    clip_grad: float = flag(1.0, "gradient norm limit", at_least=0)


@dataclass
class RewardFlags:
    """Reward."""

    rm_type: str | None = flag(None, "built-in reward; boxed_ in front takes the content of the last \\boxed{}")
    custom_rm_path: str | None = flag(None, "hook: async fn(args, sample) -> reward; with --group-rm a list")
    reward_key: str | None = flag(None, "key of the training reward where rewards are dicts")
    eval_reward_key: str | None = flag(None, "as --reward-key (default), for evaluation")
    group_rm: bool = flag(False, "score a whole group at once")
    rm_url: str | None = flag(None, "address of the remote_rm service")
    custom_reward_post_process_path: str | None = flag(None, "hook: fn(args, samples) -> (raw_rewards, rewards)")
    custom_convert_samples_to_train_data_path: str | None = flag(None, "hook: fn(args, samples) -> train data")
