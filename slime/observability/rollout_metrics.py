"""From finished samples to the metrics of a rollout or of an evaluation, under the names of the contract.

It reads samples and a few flags. `rollout/raw_reward`, `rollout/log_probs` and the like are columns of the trainer,
which logs them itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from slime.algorithms.estimators import overlong_metrics, overlong_penalties
from slime.config.args import Args
from slime.observability import logging_utils
from slime.observability.metric_utils import (
    compute_pass_rate,
    compute_rollout_step,
    compute_spread,
    dict_add_prefix,
    has_repetition,
)
from slime.utils.eval_config import sources_of
from slime.utils.misc import is_finite_number
from slime.utils.rewards import reward_weights
from slime.utils.types import Sample

# Family of metrics -> attribute of a sample's trace (slime.observability.trace_utils)
ENGINE_SAYS = {
    "request/e2e_latency": "sglang_e2e_latency",
    "request/queue_time": "sglang_queue_time",
    "decode/throughput": "sglang_decode_throughput",
}


def log_rollout_data(
    rollout_id: int,
    args: Args,
    samples: Sequence[Sample],
    rollout_extra_metrics: Mapping[str, float] | None,
    rollout_time: float,
) -> None:
    """Log the metrics of a rollout, as --custom-rollout-log-function-path is called; no hook is called here.

    Args:
        rollout_id: which.
        args: see `compute_rollout_metrics`.
        samples: every sample of the batch, flat.
        rollout_extra_metrics: logged, too; of two equal names these win.
        rollout_time: wall-clock seconds that the generation took.
    """
    step = {"rollout/step": compute_rollout_step(args, rollout_id)}
    metrics = compute_rollout_metrics(args, samples, rollout_time)
    logging_utils.log(args, {**metrics, **(rollout_extra_metrics or {}), **step}, "rollout/step")


def log_eval_rollout_data(
    rollout_id: int,
    args: Args,
    data: Mapping[str, Mapping[str, Any]],
    extra_metrics: Mapping[str, float] | None = None,
) -> None:
    """Log the metrics of an evaluation, as --custom-eval-rollout-log-function-path is called; no hook is called here.

    Args:
        rollout_id: value of "eval/step".
        args: see `compute_eval_metrics`.
        data: likewise.
        extra_metrics: logged, too; of two equal names these win.
    """
    step = {"eval/step": compute_rollout_step(args, rollout_id)}
    logging_utils.log(args, {**compute_eval_metrics(args, data), **(extra_metrics or {}), **step}, "eval/step")


def compute_rollout_metrics(args: Args, samples: Sequence[Sample], rollout_time: float) -> dict[str, float]:
    """Metrics of one generated batch: families `rollout/`, `perf/`, `passrate/` and `multi_turn/` where asked,
    and `agent/` where slime.agent made the samples.

    Args:
        args: reads `reward_key`, `rollout_num_gpus`, `n_samples_per_prompt`, `log_passrate`, `log_multi_turn`,
            `log_reward_category`, `log_correct_samples`, `overlong_buffer_len` and what goes with it.
        samples: every sample of the batch, flat.
        rollout_time: wall-clock seconds that the generation took.

    Raises:
        ValueError: a reward has no such key as `log_reward_category`.
    """
    metrics = dict_add_prefix(compute_metrics_from_samples(args, samples), "rollout/")
    metrics |= dict_add_prefix(compute_perf_metrics_from_samples(args, samples, rollout_time), "perf/")
    if args.log_passrate:
        lost = {sample.group_index for sample in samples if not sample.counts(args)}
        whole = [sample for sample in samples if sample.counts(args) and sample.group_index not in lost]
        metrics |= dict_add_prefix(pass_rate(_rewards(args, whole), whole, args.n_samples_per_prompt), "passrate/")
    if args.log_multi_turn:
        metrics |= dict_add_prefix(multi_turn_metrics(samples), "multi_turn/")
    return metrics | dict_add_prefix(agent_metrics(samples), "agent/")


def compute_metrics_from_samples(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """What is logged as `rollout/`, without the prefix: of samples and their rewards, but not of time.

    Args:
        args: reads `reward_key`, `log_reward_category`, `log_correct_samples`, `overlong_buffer_len` and its kin.
        samples: every sample of a batch, flat.

    Raises:
        ValueError: a reward has no such key as `log_reward_category`.
    """
    known = [sample for sample in samples if sample.counts(args)]
    metrics = sample_metrics(samples) | end_reasons(samples) | zero_std_counts(args, known) | of_sources(args, known)
    if samples:
        metrics["untrusted_reward"] = _mean([not sample.reward_is_trusted for sample in samples])
    metrics |= reward_parts(args, known) | draft_metrics(samples)
    if args.overlong_buffer_len is not None:
        metrics |= overlong_metrics(overlong_penalties(args, known))
    if args.log_reward_category:
        metrics |= dict_add_prefix(reward_categories(known, args.log_reward_category), "error_cat/")
    if args.log_correct_samples:
        metrics |= dict_add_prefix(correct_metrics(_rewards(args, known), known), "correct_")
    return metrics


def of_sources(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """For each data set of a mixture: its share of the samples, mean reward, truncation, length, and the share of its
    groups whose rewards are all the same.
    """
    metrics: dict[str, float] = {}
    for name in (source.name for source in sources_of(args) if source.is_named):
        if not (own := [sample for sample in samples if sample.metadata.get("source_name") == name]):
            continue
        scored = [s for s in own if s.reward is not None and is_finite_number(s.get_reward_value(args))]
        found = {
            "share": len(own) / len(samples),
            "response_len": _mean([s.effective_response_length for s in own]),
            "truncated_ratio": _mean([s.status == Sample.Status.TRUNCATED for s in own]),
        }
        if scored:
            found["reward"] = _mean([float(s.get_reward_value(args)) for s in scored])
        if (fraction := zero_std_counts(args, own).get("zero_std/fraction")) is not None:
            found["zero_std_fraction"] = fraction
        metrics |= dict_add_prefix(found, f"source/{name}/")
    return metrics


def reward_parts(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """Mean of each part that --reward-key names where it names several, and of what the tokens or turns of a sample
    earned together.
    """
    dicts = [sample.reward for sample in samples if isinstance(sample.reward, dict)]
    names = list(reward_weights(args.reward_key)) if args.reward_key and "=" in args.reward_key else []
    values = {name: [reward[name] for reward in dicts if is_finite_number(reward.get(name))] for name in names}
    metrics = {f"reward_part/{name}": _mean(found) for name, found in values.items() if found}
    of_steps = [
        sum(value or 0.0 for value in given)
        for sample in samples
        if (given := sample.token_rewards if sample.turn_rewards is None else sample.turn_rewards) is not None
    ]
    return metrics | ({"process_reward": _mean(of_steps)} if of_steps else {})


def end_reasons(samples: Sequence[Sample]) -> dict[str, float]:
    """Share of the samples for each reason of their end."""
    counts = Counter(sample.end_reason for sample in samples if sample.end_reason)
    return {f"end_reason/{reason}": count / len(samples) for reason, count in sorted(counts.items())}


def compute_eval_metrics(args: Args, data: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of one evaluation.

    Args:
        args: reads `log_passrate`, `log_multi_turn`, `eval_datasets`, `n_samples_per_eval_prompt`.
        data: per data set `{"rewards": list[float], "truncated": list[bool], "samples": list[Sample]}`, and
            "untrusted", the samples that are in none of these lists because their reward is not trusted.

    Returns:
        `eval/<set>` (mean reward), `eval/<set>-truncated_ratio`, `eval/<set>/<sample metric>`, `eval/<set>-pass@k`
        (of the prompts of which no sample is untrusted), `eval/<set>-untrusted_samples` where there are any.
    """
    metrics: dict[str, float] = {}
    own = {config.name: config.n_samples_per_eval_prompt for config in args.eval_datasets}
    for name, result in data.items():
        rewards = [float(reward) for reward in result["rewards"]]
        samples: Sequence[Sample] = result.get("samples") or []
        untrusted: Sequence[Sample] = result.get("untrusted") or []
        if untrusted:
            metrics[f"eval/{name}-untrusted_samples"] = float(len(untrusted))
        metrics |= dict_add_prefix(end_reasons([*samples, *untrusted]), f"eval/{name}/")
        if rewards:
            metrics[f"eval/{name}"] = sum(rewards) / len(rewards)
        if samples:
            of_samples = sample_metrics(samples)
            metrics[f"eval/{name}-truncated_ratio"] = of_samples.pop("truncated_ratio")
            metrics |= dict_add_prefix(of_samples, f"eval/{name}/")
            if args.log_multi_turn:
                metrics |= dict_add_prefix(multi_turn_metrics(samples), f"eval/{name}/multi_turn/")
        if result.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = sum(map(bool, result["truncated"])) / len(result["truncated"])
        if args.log_passrate:
            repetitions = own.get(name, args.n_samples_per_eval_prompt)
            if untrusted:
                lost = {sample.group_index for sample in untrusted}
                pairs = zip(rewards, samples, strict=True)
                whole = [(reward, sample) for reward, sample in pairs if sample.group_index not in lost]
                rewards, samples = [reward for reward, _ in whole], [sample for _, sample in whole]
            metrics |= dict_add_prefix(pass_rate(rewards, samples, repetitions), f"eval/{name}-")
    return metrics


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics that need only the samples: response lengths, truncation, repetition, prefix cache."""
    if not samples:
        return {}
    metrics = dict_add_prefix(compute_spread([s.effective_response_length for s in samples]), "response_len/")
    metrics |= {
        "truncated_ratio": _mean([s.status == Sample.Status.TRUNCATED for s in samples]),
        "repetition_frac": _mean([has_repetition(s.response) for s in samples]),
    }
    prompt_tokens = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    if prompt_tokens:
        cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
        metrics |= {
            "prefix_cache_hit_rate": cached / prompt_tokens,
            "avg_cached_tokens_per_sample": cached / len(samples),
        }
    return metrics


def draft_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Acceptance of drafted tokens (speculative decoding), pooled over the samples; nothing where none were verified.

    Returns:
        `spec_accept_rate` (accepted / drafted tokens), `spec_accept_length` (tokens that a verification gives on
        average: those accepted and the one sampled behind them), `spec_accept_rate_pos_k` (share of the verifications
        that accepted k drafted tokens or more, for each depth k that any of them reached).
    """
    pooled = Sample.SpecInfo()
    for sample in samples:
        pooled.include(sample.spec_info)
    if not pooled.spec_verify_ct:
        return {}
    # SpecInfo.spec_accept_length also counts each prompt's first token, which no verification gives: too much for
    # short responses, so it says nothing of break-even.
    length = 1 + pooled.spec_accept_token_num / pooled.spec_verify_ct
    metrics = {"spec_accept_rate": pooled.spec_accept_rate, "spec_accept_length": length}
    counts = pooled.spec_accept_counts
    return metrics | {f"spec_accept_rate_pos_{k}": sum(counts[k:]) / sum(counts) for k in range(1, len(counts))}


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Response lengths with and without what tools and users wrote, turns (metadata["round_number"], else 1), and what
    slime.rollout.multi_turn noted: samples with a tool call, failed calls, and tokens of template drift per sample.
    """
    families = {
        "raw_response_length/": [s.response_length for s in samples],
        "wo_obs_response_length/": [s.effective_response_length for s in samples],
        "multi_turn_metric/round_number_": [int(s.metadata.get("round_number", 1)) for s in samples],
    }
    metrics = {
        name: value
        for prefix, values in families.items()
        for name, value in dict_add_prefix(compute_spread(values), prefix).items()
    }
    if with_tools := [s.metadata for s in samples if "tool_calls" in s.metadata]:
        calls = sum(metadata["tool_calls"] for metadata in with_tools)
        metrics |= {
            "tool_call_rate": _mean([metadata["tool_calls"] > 0 for metadata in with_tools]),
            "tool_error_rate": sum(metadata["tool_errors"] for metadata in with_tools) / max(calls, 1),
        }
    if drifts := [s.metadata["template_drift"] for s in samples if "template_drift" in s.metadata]:
        metrics["template_drift"] = sum(drifts) / len(drifts)
    return metrics


def agent_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Sums of what slime.agent counted: samples that begin anew because tokens differ (breaks) or because the history
    does (forks), generated tokens that are not trained; and means: turns, tokens of template drift, malformed calls.
    """
    made = [sample.metadata for sample in samples if isinstance(sample.metadata.get("agent"), dict)]
    if not made:
        return {}
    sums = {name: sum(m["agent"][name] for m in made) for name in ("breaks", "forks", "masked_tokens")}
    means = {name: _mean([m["agent"][name] for m in made]) for name in ("turns", "template_drift")}
    return {**sums, **means, "ill_formed": _mean([bool(m.get("ill_formed")) for m in made])}


def reward_categories(samples: Sequence[Sample], key: str) -> dict[str, float]:
    """Share of the scored samples for each value of one key of their dict rewards."""
    counts: Counter[str] = Counter()
    for sample in samples:
        if sample.reward is None:
            continue
        if not isinstance(sample.reward, dict) or key not in sample.reward:
            raise ValueError(f"--log-reward-category {key}: the reward {sample.reward!r} has no such key")
        counts[str(sample.reward[key])] += 1
    return {value: count / counts.total() for value, count in sorted(counts.items())}


def correct_metrics(rewards: Sequence[float], samples: Sequence[Sample]) -> dict[str, float]:
    """Share of the samples with a reward of exactly 1 (as pass@k counts), and metrics of these alone."""
    if not samples:
        return {}
    correct = [sample for sample, reward in zip(samples, rewards, strict=True) if reward == 1]
    return {"ratio": len(correct) / len(samples), **sample_metrics(correct)}


def zero_std_counts(args: Args, samples: Sequence[Sample]) -> dict[str, float]:
    """How many groups got one and the same reward throughout (no signal for GRPO), by that reward, and their share of
    the groups with several samples.

    Rewards that are no numbers, which only a hook of the user's reads, are left out.
    """
    scored = [s for s in samples if s.reward is not None and s.group_index is not None]
    scored = [s for s in scored if is_finite_number(s.get_reward_value(args))]
    scored.sort(key=lambda s: s.group_index or 0)
    counts: Counter[float] = Counter()
    is_equal: list[bool] = []  # of groups with several samples; one alone has nothing to differ from
    for _, members in groupby(scored, key=lambda s: s.group_index):
        rewards = [float(member.get_reward_value(args)) for member in members]
        if len(rewards) > 1:
            is_equal.append(len(set(rewards)) == 1)
        if len(set(rewards)) == 1:
            counts[round(rewards[0], 1)] += 1
    metrics = {f"zero_std/count_{reward:g}": float(count) for reward, count in sorted(counts.items())}
    return metrics | ({"zero_std/fraction": _mean(is_equal)} if is_equal else {})


def compute_perf_metrics_from_samples(args: Args, samples: Sequence[Sample], rollout_time: float) -> dict[str, float]:
    """What is logged as `perf/`, without the prefix: seconds and token rates; "effective" counts trained tokens only.

    Args:
        args: reads `rollout_num_gpus`.
        samples: every sample of a batch, flat.
        rollout_time: wall-clock seconds that the generation took.
    """
    metrics = {"rollout_time": rollout_time}
    if not samples or rollout_time <= 0:
        return metrics
    lengths = [s.response_length for s in samples]
    effective = [s.effective_response_length for s in samples]
    gpus = max(args.rollout_num_gpus, 1)
    metrics |= {
        "tokens_per_gpu_per_sec": sum(lengths) / rollout_time / gpus,
        "effective_tokens_per_gpu_per_sec": sum(effective) / rollout_time / gpus,
        "longest_sample_tokens_per_sec": max(lengths) / rollout_time,
        "longest_effective_sample_tokens_per_sec": max(effective) / rollout_time,
        **request_metrics(samples),
    }
    waits = [s.non_generation_time for s in samples]
    if any(waits):
        metrics |= dict_add_prefix(compute_spread(waits), "non_generation_time/")
        for name, of_kind in (("", lengths), ("effective_", effective)):
            longest = of_kind.index(max(of_kind))
            rate = of_kind[longest] / max(rollout_time - waits[longest], 1e-9)
            metrics |= {
                f"longest_{name}sample_non_generation_time": waits[longest],
                f"longest_{name}sample_tokens_per_sec_without_non_generation": rate,
            }
    return metrics


def request_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """What engines said of their calls, by sample traces: seconds from request to answer, seconds queued, tokens/s."""
    said = [
        event["attrs"] for s in samples for event in (vars(s).get("trace") or {}).get("events", ()) if event["attrs"]
    ]
    metrics: dict[str, float] = {}
    for family, key in ENGINE_SAYS.items():
        values = [attrs[key] for attrs in said if isinstance(attrs.get(key), int | float)]
        metrics |= dict_add_prefix(compute_spread(values), f"{family}/")
    return metrics


def pass_rate(rewards: Sequence[float], samples: Sequence[Sample], group_size: int) -> dict[str, float]:
    """`pass@k` when the batch consists of whole groups of `group_size`, else nothing (a fan-out changes the sizes)."""
    if samples and all(s.group_index is not None for s in samples):
        order = sorted(range(len(samples)), key=lambda i: samples[i].group_index or 0)
        rewards = [rewards[i] for i in order]
        sizes = {len(list(group)) for _, group in groupby(order, key=lambda i: samples[i].group_index)}
        if sizes != {group_size}:
            return {}
    elif len(rewards) % group_size:
        return {}
    return compute_pass_rate(rewards, group_size)


def _rewards(args: Args, samples: Sequence[Sample]) -> list[float]:
    return [0.0 if s.reward is None else float(s.get_reward_value(args)) for s in samples]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
