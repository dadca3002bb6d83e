"""Rules of the batch arithmetic: how many rollouts, and how their samples divide into steps and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

from slime.config.args import Args
from slime.config.problems import Check, Rule, where
from slime.utils.dp_schedule import decay_steps, warmup_steps

_NEEDS_STEPS = (
    "needs the number of train steps, which does not follow from --num-epoch {num_epoch}: the data source has no "
    "length; give --num-rollout"
)
check_schedule_length = where(
    lambda a: a.num_rollout is None and a.num_epoch is not None,
    where(
        lambda a: a.lr_decay_iters is None,
        Rule(
            lambda a: a.lr_decay_style != "constant",
            f"--lr-decay-style {{lr_decay_style}} {_NEEDS_STEPS} or --lr-decay-iters.",
        ),
        Rule(
            lambda a: a.lr_warmup_fraction is not None,
            f"--lr-warmup-fraction {{lr_warmup_fraction}} {_NEEDS_STEPS} or --lr-decay-iters.",
        ),
    ),
    Rule(
        lambda a: a.weight_decay_incr_style != "constant",
        f"--weight-decay-incr-style {{weight_decay_incr_style}} {_NEEDS_STEPS}.",
    ),
)
"""What changes over the whole run needs to know how long that is; checked once the prompts of --num-epoch are counted.
"""


def check_warmup(args: Args) -> Iterable[str]:
    """Warm-up and final decay fit into the decay of the learning rate.

    Otherwise Megatron would go from the warm-up straight to --min-lr, or begin in the middle of the final decay.
    """
    if args.debug_rollout_only or args.lr_decay_style == "constant":
        return
    if (args.rollout_batch_size or 0) < 1 or args.global_batch_size < 1:
        return  # other checks say so
    steps, warmup = decay_steps(args), warmup_steps(args)
    if not steps:  # evaluation only, or as many as the data source will say
        return
    length = f"the {steps} train steps of " + ("--lr-decay-iters" if args.lr_decay_iters else "the run")
    if warmup >= steps:
        yield (
            f"--lr-warmup-iters {args.lr_warmup_iters} must be less than {length}, over which --lr-decay-style "
            f"{args.lr_decay_style} decays; lower it."
        )
    elif args.lr_decay_style == "WSD" and (args.lr_wsd_decay_iters or 0) > steps - warmup + 1e-6:  # 0.56 * 50 > 28
        yield (
            f"--lr-wsd-decay-iters {args.lr_wsd_decay_iters} and a warm-up of {warmup:g} train steps are more than "
            f"{length}; lower one of them."
        )


def check_batch(args: Args) -> Iterable[str]:
    """The samples of a rollout divide into train steps, or the rest may be dropped."""
    total, steps = args.rollout_batch_size * args.n_samples_per_prompt, args.num_steps_per_rollout
    step, may_drop = args.global_batch_size, args.drop_last_rollouts
    if total < 1 or step < 1 or (steps is not None and steps < 1):
        return  # check_range says so
    samples = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} = "
        f"{total} samples"
    )
    in_steps = f"{samples} in --num-steps-per-rollout {steps} make"
    cases = {
        f"{samples} do not divide into --num-steps-per-rollout {steps}; change one, or give --drop-last-rollouts.": (
            steps and total % steps and not may_drop
        ),
        f"{in_steps} {step} a step, of which there are {total // step}; give --global-batch-size instead.": (
            steps and step == total // steps and total // step != steps
        ),
        f"{in_steps} {total // (steps or 1)} a step, but --global-batch-size is {step}; leave one of the two out.": (
            steps and step != total // steps
        ),
        f"{samples} do not divide into steps of --global-batch-size {step}; change one"
        + ("." if step > total else ", or give --drop-last-rollouts."): step > total
        or (total % step and not may_drop),
    }
    yield from [sentence for sentence, is_wrong in cases.items() if is_wrong][:1]


def _check_divisions(args: Args) -> Iterable[str]:
    """Every data-parallel rank gets the same number of micro-batches."""
    dp_size, group = data_parallel_size(args), 1
    if args.virtual_pipeline_model_parallel_size is not None:  # micro-batches that its stages take at a time
        group = int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)
    step, micro = args.global_batch_size, args.micro_batch_size
    if min(dp_size, group, step, micro) < 1:
        return  # said by check_range and check_trainer
    interleaved = f" x {group} micro-batches that virtual pipeline stages take at a time" if group > 1 else ""
    if args.use_dynamic_batch_size and step < dp_size * group:
        each = "one sample each" if group == 1 else f"{group} each, which virtual pipeline stages take at a time"
        yield (
            f"--global-batch-size {step} is too small: {dp_size} data-parallel ranks need at least {each}"
            f"{_smaller_group(args, range(step // dp_size, 0, -1))}."
        )
    if not args.use_dynamic_batch_size and step % (dp_size * group * micro):
        works = (n for n in range(step, 0, -1) if step % (dp_size * n * micro) == 0)
        other = "; change one of them" + (" or use --use-dynamic-batch-size" if step >= dp_size * group else "")
        yield (
            f"--global-batch-size {step} does not divide into micro-batches: {dp_size} data-parallel ranks"
            f"{interleaved} x --micro-batch-size {micro} = {dp_size * group * micro}"
            f"{_smaller_group(args, works) or other}."
        )


def _smaller_group(args: Args, works: Iterable[int]) -> str:
    """The first of the micro-batches at a time that work, fewer than given, as the end of a sentence; "" without."""
    given, least = args.microbatch_group_size_per_vp_stage, args.pipeline_model_parallel_size
    if args.virtual_pipeline_model_parallel_size is None or given is None:
        return ""
    found = next((n for n in works if least <= n < given), None)
    option = "--microbatch-group-size-per-virtual-pipeline-stage"
    return "" if found is None else f"; the largest {option} that works is {found}"


def data_parallel_size(args: Args) -> int:
    """Copies of the model that share a train step's samples; 0 where the trainer has too few GPUs for one."""
    one_copy = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    return args.actor_num_nodes * args.actor_num_gpus_per_node // max(1, one_copy)


check_micro_batches = where(lambda a: not (a.debug_rollout_only or a.eval_only), _check_divisions)
"""Nothing is trained otherwise."""
CHECKS: tuple[Check, ...] = (
    Rule(
        lambda a: a.rollout_batch_size is None,
        "--rollout-batch-size is required: the number of prompts per rollout.",
    ),
    Rule(
        lambda a: a.num_rollout is None and a.num_epoch is None,
        "--num-rollout or --num-epoch is required: how long to train.",
    ),
    Rule(
        lambda a: a.hf_checkpoint is None,
        "--hf-checkpoint is required: the HF directory of the model (engines, tokenizer, config).",
    ),
    Rule(
        lambda a: a.num_rollout is None and a.num_epoch is not None and not a.rollout_global_dataset,
        "--num-epoch {num_epoch} needs prompts to count, which --disable-rollout-global-dataset leaves to the data "
        "source; give --num-rollout.",
    ),
    Rule(
        lambda a: a.start_rollout_id is not None and 0 < (a.num_rollout or 0) <= a.start_rollout_id,
        lambda a: (
            f"--start-rollout-id {a.start_rollout_id} leaves nothing to do: the last of --num-rollout "
            f"{a.num_rollout} is {(a.num_rollout or 0) - 1}."
        ),
    ),
    check_warmup,
    where(
        lambda a: a.rollout_batch_size is not None and not a.eval_only,
        check_batch,
        Rule(
            lambda a: a.over_sampling_batch_size is not None and a.over_sampling_batch_size < a.rollout_batch_size,
            "--over-sampling-batch-size {over_sampling_batch_size} must be at least --rollout-batch-size "
            "{rollout_batch_size}.",
        ),
    ),
    Rule(
        lambda a: a.log_probs_chunk_size != -1 and a.log_probs_chunk_size < 1,
        "--log-probs-chunk-size {log_probs_chunk_size} must be -1 (one chunk) or at least 1.",
    ),
    Rule(
        lambda a: a.use_dynamic_batch_size and a.max_tokens_per_gpu is None,
        "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch.",
    ),
    check_micro_batches,
    Rule(
        lambda a: (
            a.rollout_max_context_len is not None
            and a.rollout_max_prompt_len is not None
            and a.rollout_max_prompt_len > a.rollout_max_context_len - 1
        ),
        "--rollout-max-prompt-len {rollout_max_prompt_len} leaves no room for a response in --rollout-max-context-len "
        "{rollout_max_context_len}; lower it.",
    ),
    where(
        lambda a: a.rollout_max_response_len is not None,
        Rule(
            lambda a: a.rollout_min_new_tokens > (a.rollout_max_response_len or 0),
            "--rollout-min-new-tokens {rollout_min_new_tokens} is more than --rollout-max-response-len "
            "{rollout_max_response_len}; lower it.",
        ),
        Rule(
            lambda a: (a.overlong_buffer_len or 0) > (a.rollout_max_response_len or 0),
            "--overlong-buffer-len {overlong_buffer_len} is longer than --rollout-max-response-len "
            "{rollout_max_response_len}; lower it.",
        ),
    ),
)
