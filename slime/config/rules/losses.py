"""Rules of sampling, losses, advantages and KL, and of generating ahead of the trainer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from slime.algorithms.estimators import ESTIMATORS
from slime.config.args import Args
from slime.config.derive import keeps_requests_in_flight
from slime.config.problems import Check, Rule, WithoutEffect, broken, each, for_each, plain_option, where
from slime.utils.eval_config import sources_of
from slime.utils.rewards import reward_weights


def _keeps_requests(args: Args) -> bool:
    return keeps_requests_in_flight(args.rollout_function_path)


def check_critic_only_steps(args: Args, num_rollout: int | None = None) -> Iterable[str]:
    """After the rollouts that train only the critic there are others; `num_rollout` is the run's if args lack it."""
    rollouts = args.num_rollout or num_rollout
    if args.use_critic and rollouts and args.num_critic_only_steps >= rollouts:
        yield (
            f"--num-critic-only-steps {args.num_critic_only_steps} leaves none of the {rollouts} rollouts of the run "
            "to the actor, which would never be trained; lower it."
        )


def _samples(args: Args) -> int:
    """Of a rollout."""
    return (args.rollout_batch_size or 0) * args.n_samples_per_prompt


def _only_built_in_code(args: Args) -> bool:
    """Whether no code of the user's could set a field of a sample."""
    hooks = (
        args.custom_rm_path,
        args.custom_generate_function_path,
        args.custom_convert_samples_to_train_data_path,
        args.custom_reward_post_process_path,
        args.load_debug_rollout_data,
        *(one.custom_rm_path or one.custom_generate_function_path for one in sources_of(args)),
    )
    places = (args.rollout_function_path, args.data_source_path)
    return not any(hooks) and all(path.startswith("slime.rollout.") for path in places)


def _check_reward_keys(args: Args) -> Iterable[str]:
    """Parts of a reward have weights."""
    for option, key in {"--reward-key": args.reward_key, "--eval-reward-key": args.eval_reward_key}.items():
        try:
            reward_weights(key or "")
        except ValueError as error:
            yield f"{option} {key}: {error}."


def _check_expressions(args: Args) -> Iterable[str]:
    """Parameters are chosen with expressions that can be read."""
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


# ---- generating ahead of the trainer, and weight syncs with requests in flight

OLD_ACTOR = where(  # its weights are those of one version, so the trained tokens of a rollout are of one
    lambda a: a.keep_old_actor,
    Rule(
        _keeps_requests,
        "--keep-old-actor does not go with --rollout-function-path {rollout_function_path}, whose rollouts mix weight "
        "versions; use --use-tis or --use-rollout-logprobs there.",
    ),
    Rule(
        lambda a: a.update_weights_in_flight and not _keeps_requests(a),
        "--keep-old-actor does not go with --update-weights-in-flight, with which one response is of several weight "
        "versions; leave one of them out.",
    ),
    Rule(
        lambda a: a.partial_rollout and not a.mask_offpolicy_in_partial_rollout,
        "--keep-old-actor with --partial-rollout needs --mask-offpolicy-in-partial-rollout: resumed responses have "
        "tokens of older weight versions, which must not be trained.",
    ),
)
ASYNC_CHECKS: tuple[Check, ...] = (
    where(  # engines that never pause have GPUs of their own, and can take groups back
        _keeps_requests,
        Rule(
            lambda a: a.colocate,
            "--rollout-function-path {rollout_function_path} generates while the trainer trains; drop --colocate.",
        ),
        Rule(
            lambda a: a.data_source_path.replace(":", ".") == "slime.rollout.data_source.RolloutDataSource",
            "--rollout-function-path {rollout_function_path} gives groups back to the data source, and "
            "--data-source-path {data_source_path} takes none; use "
            "slime.rollout.data_source.RolloutDataSourceWithBuffer.",
        ),
    ),
    Rule(
        lambda a: a.update_weights_in_flight and a.colocate and not _keeps_requests(a),
        "--update-weights-in-flight and --colocate exclude each other: no request is in flight then; keep one.",
    ),
    OLD_ACTOR,
)
IN_FLIGHT_WARNING = Rule(
    lambda a: a.update_weights_in_flight,
    "requests stay in flight during weight syncs: engines run with --sglang-disable-radix-cache, because SGLang "
    "cannot forget what old weights computed then; --no-update-weights-in-flight aborts them instead.",
)

# ---- losses

NUCLEUS = where(  # log-probs of a nucleus are compared with log-probs of a nucleus only
    lambda a: a.rollout_top_p != 1.0 and a.loss_type != "sft_loss",
    *each(
        "use_tis use_rollout_logprobs get_mismatch_metrics",
        bool,
        "--rollout-top-p {rollout_top_p} and {option} exclude each other: the engine's log-probs are of the whole "
        "distribution, the policy's of its nucleus; use --rollout-top-p 1, or leave {option} out.",
    ),
    Rule(
        lambda a: a.use_opd,
        "--rollout-top-p {rollout_top_p} and --use-opd exclude each other: a teacher's log-probs are of the whole "
        "distribution, the policy's of its nucleus; use --rollout-top-p 1, or leave --use-opd out.",
    ),
)
LOSS_CHECKS: tuple[Check, ...] = (
    # sampling parameters are ones that an engine accepts and a trainer can divide by
    Rule(
        lambda a: a.rollout_temperature <= 0,
        "--rollout-temperature {rollout_temperature} must be > 0: the trainer divides its logits by it.",
    ),
    *each(
        "rollout_top_p eval_top_p",
        lambda top_p: top_p is not None and not 0 < top_p <= 1,
        "{option} {value} must lie in (0, 1]; 1 keeps every token.",
    ),
    *each(
        "rollout_top_k eval_top_k",
        lambda top_k: top_k not in (None, -1) and top_k < 1,
        "{option} {value} must be -1 (every token) or at least 1.",
    ),
    # losses and their parameters fit each other
    Rule(
        lambda a: a.loss_type == "custom_loss" and not a.custom_loss_function_path,
        "--loss-type custom_loss needs --custom-loss-function-path.",
    ),
    Rule(
        lambda a: (
            a.loss_type == "policy_loss" and not (a.compute_advantages_and_returns or a.rollout_data_postprocess_path)
        ),
        "--disable-compute-advantages-and-returns leaves --loss-type policy_loss without advantages; use another "
        "loss, or fill them in a --rollout-data-postprocess-path hook.",
    ),
    Rule(
        lambda a: a.loss_agg_mode == "seq-mean-token-sum-norm" and a.rollout_max_response_len is None,
        "--loss-agg-mode seq-mean-token-sum-norm needs --rollout-max-response-len, which it divides by.",
    ),
    Rule(
        lambda a: a.calculate_per_token_loss != (a.loss_agg_mode == "token-mean"),
        "--calculate-per-token-loss is --loss-agg-mode token-mean and contradicts --loss-agg-mode {loss_agg_mode}; "
        "leave one of the two out.",
    ),
    Rule(lambda a: a.eps_clip_c is not None and a.eps_clip_c <= 1, "--eps-clip-c {eps_clip_c} must be > 1."),
    Rule(
        lambda a: a.use_stateless_adam and not (a.optimizer == "adam" and a.no_save_optim),
        "--use-stateless-adam keeps no optimizer state: it needs --optimizer adam and --no-save-optim.",
    ),
    check_critic_only_steps,
    where(  # there are a second pass and a second train step, between which samples can be exchanged
        lambda a: a.shuffle_mini_batches,
        WithoutEffect(
            lambda a: a.ppo_epochs == 1,
            "--shuffle-mini-batches",
            "with --ppo-epochs 1: it changes the passes after the first",
            "give more passes, or leave it out",
        ),
        WithoutEffect(
            lambda a: _samples(a) and a.global_batch_size and _samples(a) // a.global_batch_size == 1,
            "--shuffle-mini-batches",
            "with --global-batch-size {global_batch_size}: a rollout is one train step, which has all samples in "
            "every pass",
            "lower it, or leave the flag out",
        ),
    ),
    for_each(  # what an estimator is defined by is given, as REINFORCE++'s whitened advantages
        lambda a: ESTIMATORS[a.advantage_estimator].needs,
        lambda a, name: not vars(a).get(name),
        lambda a, name: f"--advantage-estimator {a.advantage_estimator} needs {plain_option(name)}.",
    ),
    # rewards of tokens and turns go to an estimator that uses them
    Rule(
        lambda a: (
            a.process_reward_path
            and not (ESTIMATORS[a.advantage_estimator].process or a.custom_advantage_function_path)
        ),
        lambda a: (
            f"--process-reward-path {a.process_reward_path}: --advantage-estimator {a.advantage_estimator} does not "
            "use rewards of tokens or turns; choose one of "
            f"{', '.join(name for name, row in ESTIMATORS.items() if row.process)}."
        ),
    ),
    Rule(
        lambda a: (a.process_reward_path or "").endswith("rm_hub.service:score_turns") and not a.reward_model_path,
        "--process-reward-path {process_reward_path} needs --reward-model-path, the model that it asks.",
    ),
    WithoutEffect(
        lambda a: a.advantage_estimator == "turn_grpo" and not a.process_reward_path and _only_built_in_code(a),
        "--advantage-estimator turn_grpo",
        "where no sample has rewards of turns, and nothing sets them: it is grpo then",
        "give --process-reward-path, or use grpo",
    ),
    _check_reward_keys,
    Rule(
        lambda a: a.advantage_range_max is not None and a.advantage_range_max < a.advantage_range_min,
        "--advantage-range-max {advantage_range_max} is below --advantage-range-min {advantage_range_min}, so that no "
        "group would be kept; raise it.",
    ),
    # corrections between trainer and engine have both log-probs, and bounds in order
    Rule(
        lambda a: a.use_rollout_logprobs and a.use_tis,
        "--use-rollout-logprobs and --use-tis exclude each other: with the engine's log-probs as the old ones there "
        "is no ratio to truncate; keep one.",
    ),
    Rule(
        lambda a: a.get_mismatch_metrics and not a.custom_tis_function_path,
        "--get-mismatch-metrics needs --custom-tis-function-path, the function that measures.",
    ),
    Rule(
        lambda a: a.tis_clip_low > a.tis_clip,
        "--tis-clip-low {tis_clip_low} is above --tis-clip {tis_clip}; lower it.",
    ),
    NUCLEUS,
    # the KL penalty is either inside the reward or a loss of its own, and needs a reference
    Rule(
        lambda a: a.kl_coef and a.kl_loss_coef,
        "--kl-coef {kl_coef} and --kl-loss-coef {kl_loss_coef} would count the KL twice, once in the reward and once "
        "in the loss; keep one.",
    ),
    Rule(
        lambda a: (a.kl_coef or a.use_kl_loss) and not a.ref_load,
        lambda a: (
            f"{'--use-kl-loss' if a.use_kl_loss else f'--kl-coef {a.kl_coef}'} needs --ref-load, the reference "
            "checkpoint; it may be an HF directory such as --hf-checkpoint's."
        ),
    ),
    WithoutEffect(
        lambda a: a.kl_coef and not (ESTIMATORS[a.advantage_estimator].takes_kl or a.custom_advantage_function_path),
        "--kl-coef {kl_coef}",
        "with --advantage-estimator {advantage_estimator}, which does not take the KL into its rewards",
        "use --use-kl-loss --kl-loss-coef",
    ),
    Rule(
        lambda a: a.kl_target is not None and a.kl_target <= 0,
        "--kl-target {kl_target} must be > 0: the measured KL is divided by it.",
    ),
    Rule(
        lambda a: a.kl_ctrl == "adaptive" and (a.kl_target is None or a.kl_horizon is None),
        "--kl-ctrl adaptive needs --kl-target and --kl-horizon.",
    ),
    where(  # the teacher is in one known place; the other flags say themselves that they need --use-opd
        lambda a: a.use_opd,
        Rule(
            lambda a: a.opd_type is None,
            "--use-opd needs --opd-type, where the teacher runs: sglang or megatron.",
        ),
        Rule(
            lambda a: a.opd_type == "megatron" and not a.opd_teacher_load,
            "--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint.",
        ),
        WithoutEffect(
            lambda a: a.opd_type == "sglang" and a.opd_teacher_load,
            "--opd-teacher-load {opd_teacher_load}",
            "with --opd-type sglang, whose teacher is a server",
            "leave one of the two out",
            {"opd_teacher_load": None},
        ),
        Rule(
            lambda a: a.opd_type == "sglang" and _only_built_in_code(a),
            "--opd-type sglang needs samples with the teacher's log-probs, and nothing sets them; give "
            "--custom-rm-path slime.rollout.on_policy_distillation.reward_func and the teacher's --rm-url.",
        ),
    ),
    _check_expressions,
    Rule(
        lambda a: a.only_train_params_name_list and a.freeze_params_name_list,
        "--only-train-params-name-list and --freeze-params-name-list exclude each other: the first freezes everything "
        "else already; keep one.",
    ),
    Rule(  # there is a routing of experts to replay
        lambda a: a.use_routing_replay and not a.num_moe_experts and not a.custom_model_provider_path,
        lambda a: (
            f"{'--use-rollout-routing-replay' if a.use_rollout_routing_replay else '--use-routing-replay'} needs "
            "--num-experts: a dense model routes nothing; leave it out."
        ),
    ),
)
UNSUPPORTED: tuple[Check, ...] = (
    Rule(  # rollout sampling must be the distribution whose log-probs the trainer computes
        lambda a: a.loss_type == "policy_loss" and a.rollout_top_k != -1,
        "--rollout-top-k {rollout_top_k} is not supported with --loss-type policy_loss: the trainer computes "
        "log-probs of all tokens, not of the k that are sampled from; use -1, or --rollout-top-p.",
    ),
)

# ---- warnings

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
    with_each = {name: Args.of(vars(args) | {name: True}) for name in CORRECTIONS}
    usable = [plain_option(name) for name in CORRECTIONS if not any(broken((OLD_ACTOR, NUCLEUS), with_each[name]))]
    remedy = f"give {usable[0]}" if usable else "give --max-weight-staleness 0 and --update-weights-interval 1"
    others = f" (or {' or '.join(usable[1:])})" if usable[1:] else ""
    yield (
        "train_async.py trains on responses of older weights as if the trainer's had written them, which costs "
        f"accuracy and may end in a collapse: {remedy}{others}; docs/off_policy.md compares them."
    )


def without_effect(args: Args, explicit: Collection[str]) -> Iterable[str]:
    """What a loss or an optimizer leaves without effect: one sentence for each, naming the given flags."""
    of_moments = ("reset_optimizer_states", "adam_beta1", "adam_beta2", "exp_avg_dtype", "exp_avg_sq_dtype")
    if args.use_stateless_adam and (names := [name for name in of_moments if name in explicit and vars(args)[name]]):
        options = " ".join(map(plain_option, names))
        yield f"--use-stateless-adam keeps no moments, so these flags have no effect: {options}."
    for kind in ("muon", "sgd"):
        if args.optimizer != kind and (names := [n for n in explicit if n.startswith(f"{kind}_")]):
            options = " ".join(map(plain_option, sorted(names)))
            yield f"--optimizer {args.optimizer} leaves these flags without effect: {options}."
    is_one_step = args.ppo_epochs == 1 and _samples(args) < 2 * args.global_batch_size
    has_old = args.use_rollout_logprobs or args.keep_old_actor
    if args.use_opsm and is_one_step and not (has_old or args.debug_rollout_only):
        yield (
            "--use-opsm has no effect with one train step per rollout, whose old log-probs are of the weights that "
            "are trained; give --use-rollout-logprobs, to compare with the engine's."
        )
