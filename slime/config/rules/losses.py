"""Rules of sampling, losses, advantages and KL, and of generating ahead of the trainer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from slime.algorithms.estimators import ESTIMATORS
from slime.config.args import Args
from slime.config.derive import keeps_requests_in_flight
from slime.config.problems import NoEffect


def check_sampling(args: Args) -> Iterable[str]:
    """Sampling parameters are ones that an engine accepts and a trainer can divide by (V2)."""
    if args.rollout_temperature <= 0:
        yield f"--rollout-temperature {args.rollout_temperature} must be > 0: the trainer divides its logits by it."
    if args.rollout_fire_temperature is not None and args.rollout_fire_temperature <= 0:
        yield f"--rollout-fire-temperature {args.rollout_fire_temperature} must be > 0."
    for option, value in {"--rollout-top-p": args.rollout_top_p, "--eval-top-p": args.eval_top_p}.items():
        if value is not None and not 0 < value <= 1:
            yield f"{option} {value} must lie in (0, 1]; 1 keeps every token."
    for option, value in {"--rollout-top-k": args.rollout_top_k, "--eval-top-k": args.eval_top_k}.items():
        if value is not None and value != -1 and value < 1:
            yield f"{option} {value} must be -1 (every token) or at least 1."


def check_loss(args: Args) -> Iterable[str]:
    """Losses and their parameters fit each other (V11)."""
    if args.loss_type == "custom_loss" and not args.custom_loss_function_path:
        yield "--loss-type custom_loss needs --custom-loss-function-path."
    fills_advantages = args.compute_advantages_and_returns or args.rollout_data_postprocess_path
    if args.loss_type == "policy_loss" and not fills_advantages:
        yield (
            "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages; use another "
            "loss, or fill them in a --rollout-data-postprocess-path hook."
        )
    if args.loss_agg_mode == "seq-mean-token-sum-norm" and args.rollout_max_response_len is None:
        yield "--loss-agg-mode seq-mean-token-sum-norm needs --rollout-max-response-len, which it divides by."
    if args.calculate_per_token_loss != (args.loss_agg_mode == "token-mean"):
        yield (
            f"--calculate-per-token-loss is --loss-agg-mode token-mean and contradicts --loss-agg-mode "
            f"{args.loss_agg_mode}; leave one of the two out."
        )
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c} must be > 1."
    if args.use_stateless_adam and not (args.optimizer == "adam" and args.no_save_optim):
        yield "--use-stateless-adam keeps no optimizer state: it needs --optimizer adam and --no-save-optim."


def check_critic_only_steps(args: Args, num_rollout: int | None = None) -> Iterable[str]:
    """After the rollouts that train only the critic there are others; `num_rollout` is the run's if args lack it."""
    rollouts = args.num_rollout or num_rollout
    if args.use_critic and rollouts and args.num_critic_only_steps >= rollouts:
        yield (
            f"--num-critic-only-steps {args.num_critic_only_steps} leaves none of the {rollouts} rollouts of the run "
            "to the actor, which would never be trained; lower it."
        )


def check_passes(args: Args) -> Iterable[str]:
    """There are a second pass and a second train step, between which samples can be exchanged."""
    if not args.shuffle_mini_batches:
        return
    if args.ppo_epochs == 1:
        yield NoEffect(
            "--shuffle-mini-batches",
            "with --ppo-epochs 1: it changes the passes after the first",
            "give more passes, or leave it out",
        )
    samples = (args.rollout_batch_size or 0) * args.n_samples_per_prompt
    if samples and args.global_batch_size and samples // args.global_batch_size == 1:
        yield NoEffect(
            "--shuffle-mini-batches",
            f"with --global-batch-size {args.global_batch_size}: a rollout is one train step, which has all samples "
            "in every pass",
            "lower it, or leave the flag out",
        )


def check_advantages(args: Args) -> Iterable[str]:
    """What an estimator is defined by is given, as REINFORCE++'s whitened advantages (V8)."""
    for name in ESTIMATORS[args.advantage_estimator].needs:
        if not vars(args)[name]:
            yield f"--advantage-estimator {args.advantage_estimator} needs --{name.replace('_', '-')}."


def check_mismatch(args: Args) -> Iterable[str]:
    """Corrections between trainer and engine have both log-probs, and bounds in order (V9)."""
    if args.use_rollout_logprobs and args.use_tis:
        yield (
            "--use-rollout-logprobs and --use-tis exclude each other: with the engine's log-probs as the old ones "
            "there is no ratio to truncate; keep one."
        )
    if args.get_mismatch_metrics and not args.custom_tis_function_path:
        yield "--get-mismatch-metrics needs --custom-tis-function-path, the function that measures."
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}; lower it."


def check_nucleus(args: Args) -> Iterable[str]:
    """Log-probs of a nucleus are compared with log-probs of a nucleus only."""
    if args.rollout_top_p == 1.0 or args.loss_type == "sft_loss":
        return
    of_whole_distributions = {
        "--use-tis": args.use_tis,
        "--use-rollout-logprobs": args.use_rollout_logprobs,
        "--get-mismatch-metrics": args.get_mismatch_metrics,
        "--use-opd": args.use_opd,
    }
    for option in (option for option, is_given in of_whole_distributions.items() if is_given):
        whose = "a teacher's" if option == "--use-opd" else "the engine's"
        yield (
            f"--rollout-top-p {args.rollout_top_p} and {option} exclude each other: {whose} log-probs are of the "
            f"whole distribution, the policy's of its nucleus; use --rollout-top-p 1, or leave {option} out."
        )


def check_kl(args: Args) -> Iterable[str]:
    """The KL penalty is either inside the reward or a loss of its own, and needs a reference (V3, V7)."""
    if args.kl_coef and args.kl_loss_coef:
        yield (
            f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef} would count the KL twice, once in the "
            "reward and once in the loss; keep one."
        )
    if (args.kl_coef or args.use_kl_loss) and not args.ref_load:
        asked = "--use-kl-loss" if args.use_kl_loss else f"--kl-coef {args.kl_coef}"
        yield (
            f"{asked} needs --ref-load, the reference checkpoint; it may be an HF directory such as --hf-checkpoint's."
        )
    takes_kl = ESTIMATORS[args.advantage_estimator].takes_kl or args.custom_advantage_function_path
    if args.kl_coef and not takes_kl:
        yield NoEffect(
            f"--kl-coef {args.kl_coef}",
            f"with --advantage-estimator {args.advantage_estimator}, which does not take the KL into its rewards",
            "use --use-kl-loss --kl-loss-coef",
        )
    if args.kl_target is not None and args.kl_target <= 0:
        yield f"--kl-target {args.kl_target} must be > 0: the measured KL is divided by it."
    if args.kl_ctrl == "adaptive" and (args.kl_target is None or args.kl_horizon is None):
        yield "--kl-ctrl adaptive needs --kl-target and --kl-horizon."


def check_distillation(args: Args) -> Iterable[str]:
    """The teacher is in one known place (V4)."""
    if not args.use_opd:
        return  # the other flags say that they need it
    if args.opd_type is None:
        yield "--use-opd needs --opd-type, where the teacher runs: sglang or megatron."
    if args.opd_type == "megatron" and not args.opd_teacher_load:
        yield "--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint."
    if args.opd_type == "sglang" and args.opd_teacher_load:
        yield NoEffect(
            f"--opd-teacher-load {args.opd_teacher_load}",
            "with --opd-type sglang, whose teacher is a server",
            "leave one of the two out",
            instead={"opd_teacher_load": None},
        )
    if args.opd_type == "sglang" and _only_built_in_code(args):
        yield (
            "--opd-type sglang needs samples with the teacher's log-probs, and nothing sets them; give "
            "--custom-rm-path slime.rollout.on_policy_distillation.reward_func and the teacher's --rm-url."
        )


def _only_built_in_code(args: Args) -> bool:
    """Whether no code of the user's could set a field of a sample."""
    hooks = (
        args.custom_rm_path,
        args.custom_generate_function_path,
        args.custom_convert_samples_to_train_data_path,
        args.custom_reward_post_process_path,
        args.load_debug_rollout_data,
    )
    places = (args.rollout_function_path, args.data_source_path)
    return not any(hooks) and all(path.startswith("slime.rollout.") for path in places)


def check_trained_parameters(args: Args) -> Iterable[str]:
    """Parameters are chosen either by name or by exception (V26), with expressions that can be read."""
    for option, patterns in {
        "--only-train-params-name-list": args.only_train_params_name_list,
        "--freeze-params-name-list": args.freeze_params_name_list,
    }.items():
        if patterns == []:
            yield f"{option} needs a regular expression; give one, or leave it out."
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{option} {pattern!r} is no regular expression: {error}; correct it."
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield (
            "--only-train-params-name-list and --freeze-params-name-list exclude each other: the first freezes "
            "everything else already; keep one."
        )


def check_routing_replay(args: Args) -> Iterable[str]:
    """There is a routing of experts to replay (V23)."""
    if args.use_routing_replay and not args.num_moe_experts and not args.custom_model_provider_path:
        given = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
        yield f"{given} needs --num-experts: a dense model routes nothing; leave it out."


LOSS_CHECKS = (
    check_sampling,
    check_loss,
    check_critic_only_steps,
    check_passes,
    check_advantages,
    check_mismatch,
    check_nucleus,
    check_kl,
    check_distillation,
    check_trained_parameters,
    check_routing_replay,
)


def without_effect(args: Args, explicit: Collection[str]) -> Iterable[str]:
    """What a loss or an optimizer leaves without effect: one sentence for each, naming the given flags."""
    of_moments = ("reset_optimizer_states", "adam_beta1", "adam_beta2", "exp_avg_dtype", "exp_avg_sq_dtype")
    if args.use_stateless_adam and (names := [name for name in of_moments if name in explicit and vars(args)[name]]):
        options = " ".join("--" + name.replace("_", "-") for name in names)
        yield f"--use-stateless-adam keeps no moments, so these flags have no effect: {options}."
    samples = (args.rollout_batch_size or 0) * args.n_samples_per_prompt
    is_one_step = args.ppo_epochs == 1 and samples < 2 * args.global_batch_size
    has_old = args.use_rollout_logprobs or args.keep_old_actor
    if args.use_opsm and is_one_step and not (has_old or args.debug_rollout_only):
        yield (
            "--use-opsm has no effect with one train step per rollout, whose old log-probs are of the weights that "
            "are trained; give --use-rollout-logprobs, to compare with the engine's."
        )


# ---- what works later


def sampling_not_built(args: Args) -> Iterable[str]:
    """Rollout sampling must be the distribution whose log-probs the trainer computes."""
    if args.loss_type == "policy_loss" and args.rollout_top_k != -1:
        yield (
            f"--rollout-top-k {args.rollout_top_k} is not supported yet with --loss-type policy_loss (algorithms); "
            "use -1."
        )


UNSUPPORTED = (sampling_not_built,)


def check_fully_async(args: Args) -> Iterable[str]:
    """Engines that never pause have GPUs of their own, and can take groups back."""
    if not keeps_requests_in_flight(args.rollout_function_path):
        return
    path = args.rollout_function_path
    if args.colocate:
        yield f"--rollout-function-path {path} generates while the trainer trains; drop --colocate."
    if args.data_source_path.replace(":", ".") == "slime.rollout.data_source.RolloutDataSource":
        yield (
            f"--rollout-function-path {path} gives groups back to the data source, and --data-source-path "
            f"{args.data_source_path} takes none; use slime.rollout.data_source.RolloutDataSourceWithBuffer."
        )


def check_in_flight(args: Args) -> Iterable[str]:
    """Colocated engines are idle when they get weights."""
    if args.update_weights_in_flight and args.colocate and not keeps_requests_in_flight(args.rollout_function_path):
        yield "--update-weights-in-flight and --colocate exclude each other: no request is in flight then; keep one."


def check_old_actor(args: Args) -> Iterable[str]:
    """The weights of --keep-old-actor are those of one version, so the trained tokens of a rollout are of one."""
    if not args.keep_old_actor:
        return
    if keeps_requests_in_flight(args.rollout_function_path):
        yield (
            f"--keep-old-actor does not go with --rollout-function-path {args.rollout_function_path}, whose rollouts "
            "mix weight versions; use --use-tis or --use-rollout-logprobs there."
        )
    elif args.update_weights_in_flight:
        yield (
            "--keep-old-actor does not go with --update-weights-in-flight, with which one response is of several "
            "weight versions; leave one of them out."
        )
    if args.partial_rollout and not args.mask_offpolicy_in_partial_rollout:
        yield (
            "--keep-old-actor with --partial-rollout needs --mask-offpolicy-in-partial-rollout: resumed responses "
            "have tokens of older weight versions, which must not be trained."
        )


def in_flight_warnings(args: Args) -> Iterable[str]:
    """What a sync with requests in flight costs."""
    if args.update_weights_in_flight:
        yield (
            "requests stay in flight during weight syncs: engines run with --sglang-disable-radix-cache, because "
            "SGLang cannot forget what old weights computed then; --no-update-weights-in-flight aborts them instead."
        )


CORRECTIONS = ("use_rollout_logprobs", "use_tis", "keep_old_actor")
"""Flags that correct the policy loss for the age of the weights that generated; the first is the best measured one.

OPSM is not one: without another it compares the trainer's log-probs with themselves (docs/off_policy.md).
"""


def correction_warnings(args: Args) -> Iterable[str]:
    """Rollouts ahead are of older weights; without a correction, the loss takes their tokens for the trainer's."""
    is_fresh = args.max_weight_staleness == 0 and args.update_weights_interval == 1
    trains = not (args.debug_rollout_only or args.debug_train_only or args.eval_only)
    if is_fresh or not trains or args.loss_type != "policy_loss" or any(vars(args)[name] for name in CORRECTIONS):
        return
    usable = ["--" + name.replace("_", "-") for name in CORRECTIONS if not _refusals(args, name)]
    remedy = f"give {usable[0]}" if usable else "give --max-weight-staleness 0 and --update-weights-interval 1"
    others = f" (or {' or '.join(usable[1:])})" if usable[1:] else ""
    yield (
        "train_async.py trains on responses of older weights as if the trainer's had written them, which costs "
        f"accuracy and may end in a collapse: {remedy}{others}; docs/off_policy.md compares them."
    )


def _refusals(args: Args, name: str) -> list[str]:
    """Why a correction could not be added to a command line."""
    changed = Args.of(vars(args) | {name: True})
    return [*check_old_actor(changed), *check_nucleus(changed)]


ASYNC_CHECKS = (check_fully_async, check_in_flight, check_old_actor)
