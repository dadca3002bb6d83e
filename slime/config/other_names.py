"""Other names of our flags: older ones, and what other trainers (verl, TRL, OpenRLHF) call what they do."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

logger = logging.getLogger(__name__)

OLDER_NAMES = {
    "--prompt-key": "--input-key",
    "--rollout-generate-func-path": "--custom-generate-function-path",
    "--reward-fn-path": "--custom-rm-path",
}
CRITIC = "--megatron-config-path, with an entry of the role critic (docs/ppo.md)"
HERE = {
    "learning-rate": "--lr",
    "actor-learning-rate": "--lr",
    "actor-lr": "--lr",
    "critic-lr": CRITIC,
    "critic-learning-rate": CRITIC,
    "critic.optim.lr": CRITIC,
    "lr-scheduler-type": "--lr-decay-style",
    "lr-scheduler": "--lr-decay-style",
    "warmup-style": "--lr-decay-style",
    "warmup-steps": "--lr-warmup-iters",
    "lr-warmup-steps": "--lr-warmup-iters",
    "warmup-ratio": "--lr-warmup-fraction",
    "lr-warmup-ratio": "--lr-warmup-fraction",
    "lr-warmup-steps-ratio": "--lr-warmup-fraction",
    "max-grad-norm": "--clip-grad",
    "grad-clip": "--clip-grad",
    "max-norm": "--clip-grad",
    "l2": "--weight-decay",
    "gradient-checkpointing": "--recompute-granularity",
    "enable-gradient-checkpointing": "--recompute-granularity",
    "model": "--hf-checkpoint",
    "model.path": "--hf-checkpoint",
    "model-name-or-path": "--hf-checkpoint",
    "model-path": "--hf-checkpoint",
    "pretrain": "--hf-checkpoint",
    "ref-pretrain": "--ref-load",
    "ref-model": "--ref-load",
    "remote-rm-url": "--rm-url",
    "reward-pretrain": "--custom-rm-path",
    "reward-fn": "--custom-rm-path",
    "reward-funcs": "--custom-rm-path",
    "custom-reward-function.path": "--custom-rm-path",
    "dataset": "--prompt-data",
    "dataset-name": "--prompt-data",
    "train-files": "--prompt-data",
    "train-data": "--prompt-data",
    "val-files": "--eval-prompt-data",
    "eval-dataset": "--eval-prompt-data",
    "eval-data": "--eval-prompt-data",
    "reward-fn-key": "--rm-type",
    "train-batch-size": "--rollout-batch-size (prompts per rollout) and --global-batch-size (samples per train step)",
    "ppo-mini-batch-size": "--global-batch-size (samples per train step)",
    "mini-batch-size": "--global-batch-size (samples per train step)",
    "per-device-train-batch-size": "--micro-batch-size",
    "micro-train-batch-size": "--micro-batch-size",
    "micro-rollout-batch-size": "--log-probs-max-tokens-per-gpu",
    "ppo-micro-batch-size-per-gpu": "--micro-batch-size",
    "ppo-max-token-len-per-gpu": "--max-tokens-per-gpu",
    "use-dynamic-bsz": "--use-dynamic-batch-size",
    "num-generations": "--n-samples-per-prompt",
    "rollout.n": "--n-samples-per-prompt",
    "temperature": "--rollout-temperature",
    "top-p": "--rollout-top-p",
    "top-k": "--rollout-top-k",
    "prompt-max-len": "--rollout-max-prompt-len",
    "max-prompt-length": "--rollout-max-prompt-len",
    "generate-max-len": "--rollout-max-response-len",
    "max-new-tokens": "--rollout-max-response-len",
    "max-completion-length": "--rollout-max-response-len",
    "max-response-length": "--rollout-max-response-len",
    "response-length": "--rollout-max-response-len",
    "num-train-epochs": "--num-epoch",
    "num-episodes": "--num-epoch",
    "max-epochs": "--ppo-epochs",
    "total-epochs": "--num-epoch",
    "max-steps": "--num-rollout",
    "total-training-steps": "--num-rollout",
    "beta": "--kl-loss-coef",
    "init-kl-coef": "--kl-coef",
    "kl-ctrl.kl-coef": "--kl-coef",
    "epsilon": "--eps-clip",
    "cliprange": "--eps-clip",
    "clip-ratio": "--eps-clip",
    "clip-ratio-low": "--eps-clip",
    "epsilon-high": "--eps-clip-high",
    "clip-ratio-high": "--eps-clip-high",
    "clip-ratio-c": "--eps-clip-c",
    "cliprange-value": "--value-clip",
    "entropy-coeff": "--entropy-coef",
    "entropy-loss-coef": "--entropy-coef",
    "lam": "--lambd",
    "gae-lambda": "--lambd",
    "adv-estimator": "--advantage-estimator",
    "algorithm": "--advantage-estimator",
    "zero-stage": "--tensor-model-parallel-size, --pipeline-model-parallel-size and --use-distributed-optimizer",
    "vllm-gpu-memory-utilization": "--sglang-mem-fraction-static",
    "gpu-memory-utilization": "--sglang-mem-fraction-static",
    "vllm-tensor-parallel-size": "--rollout-num-gpus-per-engine",
    "rollout.tensor-model-parallel-size": "--rollout-num-gpus-per-engine",
    "vllm-num-engines": "--rollout-num-gpus",
    "colocate-all-models": "--colocate",
    "n-gpus-per-node": "--actor-num-gpus-per-node",
    "nnodes": "--actor-num-nodes",
    "eval-steps": "--eval-interval",
    "test-freq": "--eval-interval",
    "save-steps": "--save-interval",
    "save-freq": "--save-interval",
    "save-total-limit": "--keep-checkpoints",
    "max-ckpt-num": "--keep-checkpoints",
    "save-path": "--save",
    "ckpt-path": "--save",
    "default-local-dir": "--save",
    "resume-from-checkpoint": "--resume",
    "load-checkpoint": "--resume auto",
    "resume-mode": "--resume",
    "report-to": "--tracker",
    "project-name": "--wandb-project",
    "experiment-name": "--wandb-group",
    "run-name": "--wandb-group",
}
"""Name without its leading dashes, "-" for "_", or the end of a dotted one -> what to write here."""


def here(name: str, known: Collection[str]) -> str | None:
    """The sentence about another trainer's name of a flag; None where it is no such name.

    Args:
        name: "--learning_rate", or a dotted one: "actor_rollout_ref.actor.optim.lr".
        known: every flag that there is.

    Example:
        >>> here("--learning_rate", ["--lr"])
        'unknown flag --learning_rate: that is --lr here.'
    """
    parts = name.lstrip("-").replace("_", "-").split(".")
    for start in range(len(parts)):
        rest = ".".join(parts[start:])
        if flag := HERE.get(rest) or (f"--{rest}" if len(parts) > 1 and f"--{rest}" in known else None):
            return f"unknown flag {name}: that is {flag} here."
    return None


def with_current_names(tokens: Sequence[str], *, say: bool = True) -> list[str]:
    """The command line with names from older documents replaced; each use prints one line (unless `say` is False)."""
    current = []
    for token in tokens:
        name, equals, value = token.partition("=")
        if say and name in OLDER_NAMES:
            logger.warning("%s is called %s now", name, OLDER_NAMES[name])
        current.append(OLDER_NAMES.get(name, name) + equals + value)
    return current
