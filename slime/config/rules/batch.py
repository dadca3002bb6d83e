"""Rules of the batch arithmetic: how many rollouts, and how their samples divide into steps and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

from slime.config.args import Args
from slime.utils.train_steps import decay_steps, warmup_steps


def check_required(args: Args) -> Iterable[str]:
    """What no run can do without (V22)."""
    if args.rollout_batch_size is None:
        yield "--rollout-batch-size is required: the number of prompts per rollout."
    if args.num_rollout is None and args.num_epoch is None:
        yield "--num-rollout or --num-epoch is required: how long to train."
    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is required: the HF directory of the model (engines, tokenizer, config)."


def check_length_of_run(args: Args) -> Iterable[str]:
    """A number of epochs can be counted, and something is left to do (V22)."""
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        yield (
            f"--num-epoch {args.num_epoch} needs prompts to count, which --disable-rollout-global-dataset leaves to "
            "the data source; give --num-rollout."
        )
    if args.num_rollout and args.start_rollout_id is not None and args.start_rollout_id >= args.num_rollout:
        yield (
            f"--start-rollout-id {args.start_rollout_id} leaves nothing to do: the last of --num-rollout "
            f"{args.num_rollout} is {args.num_rollout - 1}."
        )


def check_schedule_length(args: Args) -> Iterable[str]:
    """What changes over the whole run needs to know how long that is; the prompts of --num-epoch are counted."""
    if args.num_rollout is not None or args.num_epoch is None:
        return
    has_decay = args.lr_decay_iters is not None
    schedules = {
        f"--lr-decay-style {args.lr_decay_style}": args.lr_decay_style != "constant" and not has_decay,
        f"--lr-warmup-fraction {args.lr_warmup_fraction}": args.lr_warmup_fraction is not None and not has_decay,
        f"--weight-decay-incr-style {args.weight_decay_incr_style}": args.weight_decay_incr_style != "constant",
    }
    for option in (option for option, is_used in schedules.items() if is_used):
        other = "" if option.startswith("--weight-decay") else " or --lr-decay-iters"
        yield (
            f"{option} needs the number of train steps, which does not follow from --num-epoch {args.num_epoch}: the "
            f"data source has no length; give --num-rollout{other}."
        )


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
    """The samples of a rollout divide into train steps, or the rest may be dropped (V19, V21)."""
    if args.rollout_batch_size is None or args.eval_only:
        return
    total, steps, step = (
        args.rollout_batch_size * args.n_samples_per_prompt,
        args.num_steps_per_rollout,
        args.global_batch_size,
    )
    if total < 1 or step < 1 or (steps is not None and steps < 1):
        return  # check_range says so
    samples = (
        f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} = "
        f"{total} samples"
    )
    may_drop = args.drop_last_rollouts
    if steps is not None and total % steps and not may_drop:
        yield (
            f"{samples} do not divide into --num-steps-per-rollout {steps}; change one, or give --drop-last-rollouts."
        )
    elif steps is not None and step == total // steps and total // step != steps:
        yield (
            f"{samples} in --num-steps-per-rollout {steps} make {step} a step, of which there are {total // step}; "
            "give --global-batch-size instead."
        )
    elif steps is not None and step != total // steps:
        yield (
            f"{samples} in --num-steps-per-rollout {steps} make {total // steps} a step, but --global-batch-size is "
            f"{step}; leave one of the two out."
        )
    elif step > total or (total % step and not may_drop):
        yield (
            f"{samples} do not divide into steps of --global-batch-size {step}; change one"
            + ("." if step > total else ", or give --drop-last-rollouts.")
        )
    if args.over_sampling_batch_size is not None and args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least --rollout-batch-size "
            f"{args.rollout_batch_size}."
        )


def check_micro_batches(args: Args) -> Iterable[str]:
    """Every data-parallel rank gets the same number of micro-batches (V10)."""
    if args.log_probs_chunk_size != -1 and args.log_probs_chunk_size < 1:
        yield f"--log-probs-chunk-size {args.log_probs_chunk_size} must be -1 (one chunk) or at least 1."
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch."
    if args.debug_rollout_only or args.eval_only:
        return  # nothing is trained
    dp_size, group = data_parallel_size(args), interleaved_group(args)
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


def interleaved_group(args: Args) -> int:
    """Micro-batches that a rank's virtual pipeline stages take at a time; 1 without such stages."""
    if args.virtual_pipeline_model_parallel_size is None:
        return 1
    return int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)


def check_lengths(args: Args) -> Iterable[str]:
    """A context limit leaves room for a response (V25)."""
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}; "
            "lower it."
        )
    response, buffer = args.rollout_max_response_len, args.overlong_buffer_len
    least = args.rollout_min_new_tokens
    if response is not None and least > response:
        yield f"--rollout-min-new-tokens {least} is more than --rollout-max-response-len {response}; lower it."
    if buffer is not None and response is not None and buffer > response:
        yield f"--overlong-buffer-len {buffer} is longer than --rollout-max-response-len {response}; lower it."


CHECKS = (
    check_required,
    check_length_of_run,
    check_warmup,
    check_batch,
    check_micro_batches,
    check_lengths,
)
