"""Learning rate and weight decay over the train steps: Megatron's scheduler, from the flags.

Megatron counts its schedule in samples; so does this, so that its checkpoints stay readable. The scheduler also
switches weight decay off for norms and biases (each step it writes `weight_decay * wd_mult` into the optimizer's
groups): without it, Megatron's optimizer would decay them too.
"""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.config.args import Args
from slime.config.rules.batch import check_schedule_length, check_warmup
from slime.utils.errors import UsageError
from slime.utils.train_steps import decay_steps, total_train_steps, warmup_steps


def make_scheduler(args: Args, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The scheduler of a run, at its first step.

    The flags of this command decide; a loaded checkpoint gives only the position, unless
    --use-checkpoint-opt-param-scheduler is set. So a run may be resumed to go further than it was first asked to.

    Raises:
        UsageError: a decay whose length is unknown, or into which the warm-up does not fit.
    """
    # A command line is refused for the same before anything starts, its actor's flags and a critic's entry.
    if problems := [*check_schedule_length(args), *check_warmup(args)]:
        raise UsageError(problems)
    total, decay, warmup = total_train_steps(args), decay_steps(args), warmup_steps(args)
    # Megatron asserts that a warm-up is shorter than the decay, also where nothing decays
    decay = max(decay or 1, int(warmup) + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup * args.global_batch_size,
        lr_decay_steps=decay * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=(total or 1) * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=not args.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=(args.lr_wsd_decay_iters or 0) * args.global_batch_size,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
