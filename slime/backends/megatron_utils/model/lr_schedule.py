"""Learning rate and weight decay over the train steps: Megatron's scheduler, from the flags.

Megatron counts its schedule in samples; so does this, so that its checkpoints stay readable. The scheduler also
switches weight decay off for norms and biases (each step it writes `weight_decay * wd_mult` into the optimizer's
groups): without it, Megatron's optimizer would decay them too.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.utils.errors import UsageError


def total_train_steps(args: Any) -> int | None:
    """Train steps of the whole run; None with an --num-epoch that only the data source can turn into a number."""
    if args.num_rollout is None:
        return None
    samples = args.rollout_batch_size * args.n_samples_per_prompt
    return args.num_rollout * max(samples // args.global_batch_size, 1) * args.ppo_epochs


def make_scheduler(args: Any, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler of a run, at its first step.

    The flags of this command decide; a loaded checkpoint gives only the position, unless
    --use-checkpoint-opt-param-scheduler is set. So a run may be resumed to go further than it was first asked to.

    Raises:
        UsageError: a decay whose length is unknown.
    """
    decay_steps = args.lr_decay_iters or total_train_steps(args)
    changes = {args.lr_decay_style, args.weight_decay_incr_style} != {"constant"}
    if decay_steps is None and (changes or args.lr_warmup_fraction is not None):
        raise UsageError(  # arguments.check_batch says so before anything starts
            f"--lr-decay-style {args.lr_decay_style}, --lr-warmup-fraction {args.lr_warmup_fraction} and "
            f"--weight-decay-incr-style {args.weight_decay_incr_style} need to know how long the run lasts; give "
            "--lr-decay-iters or --num-rollout"
        )
    warmup_steps = args.lr_warmup_iters
    if args.lr_warmup_fraction is not None and decay_steps is not None:
        warmup_steps = args.lr_warmup_fraction * decay_steps
    # Megatron refuses a warm-up that is not shorter than the decay, also where nothing decays
    decay_steps = max(decay_steps or 1, int(warmup_steps) + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps * args.global_batch_size,
        lr_decay_steps=decay_steps * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=decay_steps * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=not args.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=(args.lr_wsd_decay_iters or 0) * args.global_batch_size,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
