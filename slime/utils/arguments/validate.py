"""Checks of flag values against each other: one small function per rule, each returning what is wrong.

A check reads `args` after derivation and nothing else; files, ports and hooks are judged elsewhere. Every sentence
names the value, the flag and the remedy. All checks always run, so that one error lists everything.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from slime.utils.arguments.check_trainer import TRAINER_CHECKS
from slime.utils.arguments.flags import option_name

Check = Callable[[argparse.Namespace], Iterable[str]]
DEFAULT_ROLLOUT = "slime.rollout.sglang_rollout.generate_rollout"


def option_of(attribute: str) -> str:
    """The flag of an attribute that has a plain name."""
    return "--" + attribute.replace("_", "-")


def check_required(args: argparse.Namespace) -> Iterable[str]:
    """What no run can do without."""
    if args.rollout_batch_size is None:
        yield "--rollout-batch-size is required: the number of prompts per rollout."
    if args.num_rollout is None and args.num_epoch is None:
        yield "--num-rollout or --num-epoch is required: how long to train."
    if args.hf_checkpoint is None:
        yield "--hf-checkpoint is required: the HF directory of the model (engines, tokenizer, config)."


def check_sampling(args: argparse.Namespace) -> Iterable[str]:
    """Rollout sampling must be the distribution whose log-probs the trainer computes."""
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature {args.rollout_temperature} must be > 0: the trainer divides its logits by it."
    if args.loss_type != "policy_loss":
        return
    if args.rollout_top_p != 1.0:
        yield f"--rollout-top-p {args.rollout_top_p} is not supported yet with --loss-type policy_loss; use 1.0."
    if args.rollout_top_k != -1:
        yield f"--rollout-top-k {args.rollout_top_k} is not supported yet with --loss-type policy_loss; use -1."


def check_lengths(args: argparse.Namespace) -> Iterable[str]:
    """A context limit leaves room for a response."""
    context, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt > context - 1:
        yield (
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}; "
            "lower it."
        )


def check_batch(args: argparse.Namespace) -> Iterable[str]:
    """The samples of a rollout divide into train steps."""
    if args.rollout_batch_size is None:
        return
    product = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt}"
    total, steps, step = (
        args.rollout_batch_size * args.n_samples_per_prompt,
        args.num_steps_per_rollout,
        args.global_batch_size,
    )
    if total < 1 or step < 1:
        return  # check_range says so
    if steps is not None and steps > 0 and total % steps:
        yield f"{product} = {total} samples do not divide into --num-steps-per-rollout {steps}."
    elif steps is not None and steps > 0 and step * steps != total:
        yield (
            f"{product} = {total} samples in --num-steps-per-rollout {steps} make {total // steps} a step, but "
            "--global-batch-size is "
            f"{step}; leave one of the two out."
        )
    elif total % step:
        yield f"{product} = {total} samples do not divide into steps of --global-batch-size {step}."
    if args.over_sampling_batch_size is not None and args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least --rollout-batch-size "
            f"{args.rollout_batch_size}."
        )


def check_micro_batches(args: argparse.Namespace) -> Iterable[str]:
    """Every data-parallel rank gets the same number of micro-batches."""
    if args.log_probs_chunk_size != -1 and args.log_probs_chunk_size < 1:
        yield f"--log-probs-chunk-size {args.log_probs_chunk_size} must be -1 (one chunk) or at least 1."
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu, the token budget of a micro-batch."
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    dp_size = world // max(1, args.tensor_model_parallel_size)
    step, micro = args.global_batch_size, args.micro_batch_size
    if min(dp_size, step, micro) < 1:
        return  # said by check_range and check_trainer
    if args.use_dynamic_batch_size and step < dp_size:
        yield f"--global-batch-size {step} is too small: {dp_size} data-parallel ranks need at least one sample each."
    if not args.use_dynamic_batch_size and step % (dp_size * micro):
        yield (
            f"--global-batch-size {step} does not divide into micro-batches: {dp_size} data-parallel ranks x "
            "--micro-batch-size "
            f"{micro} = {dp_size * micro}; change one of them or use --use-dynamic-batch-size."
        )


def check_trainer(args: argparse.Namespace) -> Iterable[str]:
    """A size that others divide by (that it divides the trainer's GPUs is checked with Megatron's flags)."""
    if args.tensor_model_parallel_size < 1:
        yield f"--tensor-model-parallel-size {args.tensor_model_parallel_size} must be at least 1."


def check_engines(args: argparse.Namespace) -> Iterable[str]:
    """There are engines, each gets its GPUs, and shared GPUs exist."""
    if args.debug_train_only:
        return
    gpus, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    actor_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    if gpus is None:
        yield "--rollout-num-gpus is required without --colocate: the GPUs (slots) of all engines together."
        return
    if gpus < 1:
        yield (
            f"--rollout-num-gpus {gpus}: runs without engines of their own are not supported yet; give at least 1, or "
            "--debug-train-only."
        )
    if per_engine > 0 and gpus % per_engine:
        yield f"--rollout-num-gpus {gpus} does not divide into engines of --rollout-num-gpus-per-engine {per_engine}."
    if args.colocate and gpus > actor_gpus:
        yield (
            f"--colocate: --rollout-num-gpus {gpus} is more than the trainer's {actor_gpus} GPUs (slots), which the "
            "engines share; "
            "lower it or raise --actor-num-gpus-per-node."
        )
    if args.accelerator == "cpu" and per_engine > 1:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is not supported with --accelerator cpu; use 1 and more "
            "engines."
        )
    if per_engine > args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {per_engine} is more than --num-gpus-per-node {args.num_gpus_per_node}; "
            "engines over several "
            "nodes are not supported yet."
        )


def check_offload(args: argparse.Namespace) -> Iterable[str]:
    """Releasing memory is refused where it cannot do anything."""
    for name in ("offload_train", "offload_rollout"):
        flag = f"{option_of(name)} (or --offload)"
        if vars(args)[name] and args.accelerator == "cpu":
            yield f"{flag} has no effect with --accelerator cpu, where nothing could be freed; leave it out."
        elif vars(args)[name]:
            yield f"{flag} is not supported yet; use --no-{name.replace('_', '-')}."


def check_colocate(args: argparse.Namespace, explicit: set[str]) -> Iterable[str]:
    """Sharing a GPU without releasing memory is a choice that has to be made knowingly."""
    missing = {"offload_train", "offload_rollout"} - explicit
    if args.colocate and args.accelerator == "cuda" and missing and not (args.offload_train or args.offload_rollout):
        yield (
            "--colocate on GPUs keeps trainer and engines in memory side by side, since offloading is not supported "
            "yet; say so with "
            "--no-offload-train --no-offload-rollout, and leave room with --sglang-mem-fraction-static."
        )


def check_loss(args: argparse.Namespace) -> Iterable[str]:
    """Losses and their parameters fit each other."""
    if args.loss_type == "custom_loss" and not args.custom_loss_function_path:
        yield "--loss-type custom_loss needs --custom-loss-function-path."
    if args.custom_loss_function_path and args.loss_type != "custom_loss":
        yield (
            f"--custom-loss-function-path has no effect with --loss-type {args.loss_type}; use --loss-type "
            "custom_loss."
        )
    fills_advantages = args.compute_advantages_and_returns or args.rollout_data_postprocess_path
    if args.loss_type == "policy_loss" and not fills_advantages:
        yield (
            "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages; use another "
            "loss, or fill them in a --rollout-data-postprocess-path hook."
        )
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c} must be > 1."
    if args.use_rollout_logprobs and args.recompute_old_log_probs:
        yield (
            "--recompute-old-log-probs has no effect with --use-rollout-logprobs; choose where the old log-probs come "
            "from."
        )


def check_kl(args: argparse.Namespace) -> Iterable[str]:
    """The KL penalty is either inside the reward or a loss of its own, and needs a reference."""
    if args.kl_coef and args.kl_loss_coef:
        yield (
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} would count the KL twice, once in the "
            "reward and once in "
            "the loss; keep one."
        )
    if (args.kl_coef or args.use_kl_loss) and not args.ref_load:
        asked = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
        yield (
            f"{asked} needs --ref-load, the reference checkpoint; it may be an HF directory such as --hf-checkpoint's."
        )


def check_eval(args: argparse.Namespace) -> Iterable[str]:
    """Evaluation has data when it is asked for."""
    if args.eval_interval is not None and not (args.eval_prompt_data or args.eval_config):
        yield f"--eval-interval {args.eval_interval} needs --eval-prompt-data or --eval-config."
    if args.eval_interval is not None and args.debug_train_only:
        yield f"--eval-interval {args.eval_interval} has no effect with --debug-train-only, which starts no engines."
    if args.eval_config and args.eval_prompt_data:
        yield "--eval-prompt-data has no effect with --eval-config; list all data sets in one of them."
    if len(args.eval_prompt_data or []) > 1 and len(args.eval_prompt_data) % 2:
        yield (
            f"--eval-prompt-data takes NAME PATH pairs, not {len(args.eval_prompt_data)} values: "
            f"{' '.join(args.eval_prompt_data)}."
        )
    if args.num_rollout == 0 and args.eval_interval is None:
        yield "--num-rollout 0 means evaluation only and needs --eval-interval."
    if args.num_rollout == 0 and args.skip_eval_before_train:
        yield "--skip-eval-before-train has no effect with --num-rollout 0, which only evaluates; leave one out."


def check_rollout_source(args: argparse.Namespace) -> Iterable[str]:
    """The default rollout has prompts, and engines to complete them."""
    if args.rollout_function_path != DEFAULT_ROLLOUT:
        return
    if args.debug_train_only:
        yield (
            "--debug-train-only starts no engines, which the default rollout needs; give a --rollout-function-path "
            "that uses none, such as "
            "slime.rollout.sft_rollout.generate_rollout."
        )
    if args.group_rm and args.custom_generate_function_path and not args.custom_rm_path and not args.rm_type:
        yield "--group-rm needs --custom-rm-path or --rm-type."


CHECKS: tuple[Check, ...] = (
    check_required,
    check_batch,
    check_micro_batches,
    check_engines,
    check_offload,
    check_sampling,
    check_lengths,
    check_loss,
    check_kl,
    check_eval,
    check_rollout_source,
    *TRAINER_CHECKS,
)


def check_range(
    args: argparse.Namespace, explicit: set[str], fields: Iterable[dataclasses.Field[Any]]
) -> Iterable[str]:
    """No given number is smaller than makes sense."""
    for field in fields:
        value, least = vars(args)[field.name], field.metadata["at_least"]
        if field.name in explicit and None not in (value, least) and value < least:
            yield f"{option_name(field)} {value} must be at least {least}."


def check_has_effect(
    args: argparse.Namespace, explicit: set[str], fields: Iterable[dataclasses.Field[Any]]
) -> Iterable[str]:
    """No given flag is without effect: what its `needs` names is set."""
    for field in fields:
        needs = field.metadata["needs"]
        if field.name in explicit and needs and not any(vars(args)[name] for name in needs):
            yield f"{option_name(field)} has no effect without {' or '.join(map(option_of, needs))}."
    if args.use_dynamic_batch_size and "micro_batch_size" in explicit:
        yield f"--micro-batch-size {args.micro_batch_size} has no effect with --use-dynamic-batch-size; leave one out."


def warnings(args: argparse.Namespace, *, given_load: str | None) -> Iterable[str]:
    """What works but is seldom meant.

    Args:
        given_load: --load before derivation.
    """
    if given_load not in (None, args.load, args.save):
        yield f"--load {given_load} has no checkpoint: training starts from {args.load}."
    if (
        args.n_samples_per_prompt == 1
        and args.rewards_normalization
        and args.loss_type == "policy_loss"
        and not args.debug_train_only
    ):
        yield (
            "--n-samples-per-prompt 1: a group of one minus its mean is 0, so nothing is learned; use more, or "
            "--disable-rewards-normalization."
        )


def collect(args: argparse.Namespace, explicit: set[str], fields: Sequence[dataclasses.Field[Any]]) -> list[str]:
    """All sentences of all checks, in order."""
    problems = [sentence for check in CHECKS for sentence in check(args)]
    problems += check_range(args, explicit, fields)
    problems += check_colocate(args, explicit)
    return problems + list(check_has_effect(args, explicit, fields))
