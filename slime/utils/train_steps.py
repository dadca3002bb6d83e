"""Lengths in train steps, from flags: the whole run, the decay of the learning rate, its warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args


def total_train_steps(args: Args) -> int | None:
    """Train steps of the whole run; None with an --num-epoch that only the data source can turn into a number."""
    if args.num_rollout is None:
        return None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return int(args.num_rollout * max(samples // args.global_batch_size, 1) * args.ppo_epochs)


def decay_steps(args: Args) -> int | None:
    """Train steps until the learning rate has decayed."""
    return args.lr_decay_iters or total_train_steps(args)


def warmup_steps(args: Args) -> float:
    """Train steps of the warm-up."""
    steps = decay_steps(args)
    if args.lr_warmup_fraction is not None and steps is not None:
        return float(args.lr_warmup_fraction * steps)
    return int(args.lr_warmup_iters)
