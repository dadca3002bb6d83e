"""All rules together; which given flags have no effect; numbers out of their range.

What a single flag needs is said where it is declared (`needs=`, `at_least=` of `parser.flag`); `POINTLESS` has
the modes that switch a group of flags off. A debug mode is added to a command line that was written for a whole
run, so what it leaves without effect is no error there: `without_effect` names it for a warning. Rules are rows of
tables in the other modules; files, ports and hooks are judged in files.py and hooks.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from slime.algorithms.estimators import ESTIMATORS
from slime.checkpoints.paths import classify_checkpoint
from slime.config.args import Args
from slime.config.parser import default_of, option_name
from slime.config.problems import Check, Effect, NoEffect, Problems, Rule, broken, check_effects, plain_option
from slime.config.rules import batch, debug, devices, generation, losses
from slime.config.rules.devices import no_engines_flag
from slime.plugins import Table
from slime.utils.errors import sentences
from slime.utils.eval_config import sources_of
from slime.weights.transports import TRANSPORTS

Fields = Iterable[dataclasses.Field[Any]]
_TABLES: dict[str, Table[Any]] = {"advantage_estimator": ESTIMATORS, "update_weight_transport": TRANSPORTS}


def _draws_as_we_do(args: Args) -> bool:
    """Whether prompts come from no code of a user's, which may read any flag of the data."""
    return all(path.startswith("slime.") for path in (args.data_source_path, args.rollout_function_path))


_ONE = "leave one or the other out"
POINTLESS: tuple[Effect, ...] = (
    Effect("micro_batch_size", lambda a: not a.use_dynamic_batch_size, "with --use-dynamic-batch-size", _ONE),
    Effect(
        "recompute_old_log_probs keep_old_actor",
        lambda a: not a.use_rollout_logprobs,
        "with --use-rollout-logprobs",
        _ONE,
    ),
    Effect(
        "advantage_estimator eps_clip eps_clip_high eps_clip_c kl_coef use_kl_loss entropy_coef use_rollout_logprobs "
        "recompute_old_log_probs use_tis get_mismatch_metrics use_opsm use_rollout_entropy pf_ppo_reweight use_opd "
        "keep_old_actor custom_pg_loss_reducer_function_path normalize_advantages gamma "
        "custom_advantage_function_path overlong_buffer_len",
        lambda a: a.loss_type != "sft_loss",
        "with --loss-type sft_loss",
        _ONE,
    ),
    Effect(  # not the estimator, which also names the loss and the baseline of the rewards
        "kl_coef normalize_advantages custom_advantage_function_path use_opd use_rollout_entropy keep_old_actor",
        lambda a: a.compute_advantages_and_returns or a.rollout_data_postprocess_path,
        "with --disable-compute-advantages-and-returns",
        _ONE,
    ),
    Effect(
        "grpo_std_normalization",
        lambda a: ESTIMATORS[a.advantage_estimator].divides_by_std,
        "with an --advantage-estimator that does not divide by the group's standard deviation",
        _ONE,
    ),
    Effect(
        "rewards_normalization",
        lambda a: ESTIMATORS[a.advantage_estimator].baseline is not None,
        "with an --advantage-estimator that subtracts no baseline of a group",
        _ONE,
    ),
    Effect(
        "eps_clip_c",
        lambda a: ESTIMATORS[a.advantage_estimator].loss != "cispo",
        "with an --advantage-estimator whose loss is CISPO's",
        _ONE,
    ),
    Effect(
        "pf_ppo_reweight",
        lambda a: not a.custom_convert_samples_to_train_data_path,
        "with --custom-convert-samples-to-train-data-path",
        _ONE,
    ),
    Effect(
        "curriculum_target curriculum_lookahead curriculum_retire_after curriculum_pass_reward",
        lambda a: not a.data_source_path.startswith("slime.rollout.data_source"),
        "with a --data-source-path that is no curriculum",
        "give --data-source-path slime.rollout.sampling.curriculum:CurriculumDataSource",
    ),
    Effect("offload_train", lambda a: not a.release_train, "with --release-train", _ONE),
    Effect("fsdp_compile", lambda a: a.accelerator != "cpu", "with --accelerator cpu", _ONE),
    Effect(
        "rollout_num_gpus colocate",
        lambda a: not a.rollout_external_engine_addrs,
        "with --rollout-external-engine-addrs",
        _ONE,
    ),
    Effect("save_debug_rollout_data save_debug_train_data", lambda a: not a.dump_details, "with --dump-details", _ONE),
    Effect(
        "rollout_shuffle rollout_max_prompt_len",
        lambda a: a.rollout_global_dataset or not _draws_as_we_do(a),
        "with --disable-rollout-global-dataset",
        _ONE,
    ),
    Effect(
        "prompt_data",  # a buffer's generator reads the file
        lambda a: a.rollout_global_dataset or a.rollout_buffer_url or not _draws_as_we_do(a),
        "with --disable-rollout-global-dataset",
        _ONE,
    ),
)

_ENGINES = (
    "rollout_num_gpus",
    "rollout_num_gpus_per_engine",
    "colocate",
    "offload",
    "offload_rollout",
    "offload_train",
    "update_weights_interval",
    "update_weight_buffer_size",
    "update_weight_transport",
    "update_weight_mode",
    "check_weight_update_equal",
    "use_fault_tolerance",
    "keep_old_actor",
)
_TRAINERS = (
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "colocate",
    "offload",
    "offload_train",
    "offload_rollout",
    "save",
    "save_hf",
    "save_interval",
    "peer_checkpoint_interval",
    "save_debug_train_data",
    "record_memory_history",
    "ci_test",
)
_GENERATION = (
    "prompt_data",
    "rollout_function_path",
    "custom_generate_function_path",
    "rm_type",
    "custom_rm_path",
    "process_reward_path",
    "dynamic_sampling_filter_path",
    "over_sampling_batch_size",
    "partial_rollout",
    "max_weight_staleness",
)

_TRAINING = ("prompt_data", "rollout_shuffle", "num_epoch", "save_interval", "save_hf", "update_weights_interval")


def check_needs(args: Args, explicit: set[str], fields: Fields) -> Iterable[NoEffect]:
    """Say which given flags need another one that is not set; read after derivation."""
    needing = [field for field in fields if field.metadata["needs"]]
    rows = [
        Effect(
            field.name,
            partial(_is_any_met, needs=field.metadata["needs"]),
            f"without {' or '.join(map(_text_of, field.metadata['needs']))}",
            "",
        )
        for field in needing
    ]
    options = {field.name: option_name(field) for field in needing}
    return check_effects(rows, args, _asking(args, explicit), option_of=options.__getitem__, defaults={})


def _asking(args: Args, explicit: set[str]) -> set[str]:
    """The given flags that ask for something; a coefficient of 0 is as good as none."""
    values = {name: vars(args).get(name) for name in explicit}
    return {name for name, value in values.items() if type(value) not in (int, float) or value != 0}


def _is_any_met(args: Args, needs: Iterable[str]) -> bool:
    parts = (need.partition("=") for need in needs)
    return any(str(vars(args)[n]) == value if equals else bool(_said(args, n)) for n, equals, value in parts)


def _said(args: Args, need: str) -> Any:
    """The value of a flag, or of a data set that has its own; or ("flag.fact") what the row says that it names."""
    name, _, fact = need.partition(".")
    value = vars(args)[name]
    of_sets = (vars(one).get(name.removeprefix("rollout_")) for one in sources_of(args))
    return getattr(_TABLES[name][value], fact) if fact else value or any(of_sets)


def _text_of(need: str) -> str:
    name, _, value = need.partition("=")
    if "." in name:
        name, _, fact = name.partition(".")
        values = [value for value, row in _TABLES[name].own.items() if getattr(row, fact)]
        return " or ".join(f"{plain_option(name)} {value}" for value in values)
    return f"{plain_option(name)} {value}".strip()


def check_pointless(args: Args, explicit: set[str], fields: Fields) -> Iterable[NoEffect]:
    """Say which given flags a mode switches off; read before derivation or after it."""
    by_name = {field.name: field for field in fields}
    return check_effects(
        POINTLESS,
        args,
        _asking(args, explicit),
        option_of=lambda name: option_name(by_name[name]),
        defaults={name: default_of(field) for name, field in by_name.items()},
    )


# --offload stands for both of its parts, which are not given next to it
_OFFLOADS = "{option} and --offload, which is short for both, exclude each other; keep one."
GIVEN_CHECKS: tuple[Check, ...] = (
    devices.check_nodes,
    Rule(lambda a: a.offload, _OFFLOADS.format(option="--offload-train"), given="offload_train"),
    Rule(lambda a: a.offload, _OFFLOADS.format(option="--offload-rollout"), given="offload_rollout"),
)
"""Rows that take the given attributes, too."""


def without_effect(args: Args, explicit: Iterable[str]) -> Iterable[str]:
    """What a debug mode leaves without effect: one sentence for each mode, naming the given flags."""
    given, replays = sorted(explicit), args.load_debug_rollout_data is not None
    ended = {
        f"{no_engines_flag(args)} starts no engines": args.debug_train_only
        and [
            *(name for name in given if name in _ENGINES or name.startswith(("sglang_", "router_"))),
            *(name for name in given if replays and name in _GENERATION),
        ],
        "--debug-rollout-only starts no trainers": args.debug_rollout_only
        and [name for name in given if name in _TRAINERS],
        "--eval-only trains nothing": args.eval_only and [name for name in given if name in _TRAINING],
    }
    for mode, names in ended.items():
        if names:
            yield f"{mode}, so these flags have no effect: {' '.join(map(plain_option, names))}."
    if args.num_epoch is not None and not args.eval_only and {"num_rollout", "num_epoch"} <= set(given):
        yield f"--num-epoch {args.num_epoch} has no effect: --num-rollout {args.num_rollout} says how long to train."


CHECKS: tuple[Check, ...] = (
    *batch.CHECKS,
    *devices.DEVICE_CHECKS,
    *losses.ASYNC_CHECKS,
    *losses.LOSS_CHECKS,
    *generation.ROLLOUT_CHECKS,
    *debug.CHECKS,
    *generation.GENERATION_CHECKS,
    *devices.TRAINER_CHECKS,
)
UNSUPPORTED: tuple[Check, ...] = (*losses.UNSUPPORTED, *generation.UNSUPPORTED)


def collect(args: Args, explicit: set[str], fields: Fields) -> Problems:
    """The sentences of all rules, in order.

    Args:
        explicit: attributes whose flags are on the command line.
        fields: the dataclass fields of slime's flags.
    """
    wrong = list(broken(CHECKS, args))
    wrong += broken(GIVEN_CHECKS, args, explicit)
    for check in (check_range, check_needs, check_pointless):
        wrong += check(args, explicit, fields)
    return Problems(wrong=wrong, unsupported=list(broken(UNSUPPORTED, args)))


def check_range(args: Args, explicit: set[str], fields: Fields) -> Iterable[str]:
    """Every given number is finite, and neither smaller nor larger than makes sense."""
    for field in fields:
        option, value = option_name(field), vars(args)[field.name]
        least, most = field.metadata["at_least"], field.metadata["at_most"]
        if field.name in explicit and value is not None:
            yield from sentences(
                (isinstance(value, float) and not math.isfinite(value), f"{option} {value} is no finite number."),
                (least is not None and value < least, f"{option} {value} must be at least {least}."),
                (most is not None and value > most, f"{option} {value} must be at most {most}."),
            )


def _trains_policy(args: Args) -> bool:
    return args.loss_type == "policy_loss" and not args.debug_train_only and not args.eval_only


WARNINGS: tuple[Check, ...] = (
    losses.IN_FLIGHT_WARNING,
    Rule(
        lambda a: not a.debug_rollout_only and classify_checkpoint(a.load) != "megatron",
        "--ckpt-step {ckpt_step} has no effect: what is loaded, {load}, is no Megatron checkpoint with iterations.",
        given="ckpt_step",
    ),
    Rule(
        lambda a: (
            a.n_samples_per_prompt == 1
            and a.rewards_normalization
            and ESTIMATORS[a.advantage_estimator].compares_groups
            and _trains_policy(a)
        ),
        "--n-samples-per-prompt 1: a group of one minus its mean is 0, so nothing is learned; use more, or "
        "--disable-rewards-normalization.",
    ),
    Rule(
        lambda a: a.rollout_min_new_tokens and _trains_policy(a),
        "--rollout-min-new-tokens {rollout_min_new_tokens}: up to there the engine samples without the end token, but "
        "the trainer's log-probs count it in, so the two differ by its probability.",
    ),
    Rule(
        lambda a: ESTIMATORS[a.advantage_estimator].loss == "cispo" and a.eps_clip < 1,
        "--advantage-estimator {advantage_estimator} with --eps-clip {eps_clip} also bounds the ratio from below, "
        "which CISPO does not; give --eps-clip 1 or more to turn that off.",
    ),
)


def warnings(args: Args, explicit: Collection[str], *, given_load: str | None) -> Iterable[str]:
    """What works but is seldom meant.

    Args:
        explicit: attributes whose flags are on the command line.
        given_load: --load before derivation.
    """
    yield from without_effect(args, explicit)
    yield from losses.without_effect(args, explicit)
    if given_load not in (None, args.load, args.save):
        yield f"--load {given_load} has no checkpoint: training starts from {args.load}."
    yield from broken(WARNINGS, args, explicit)
