"""What each metric means: one row per name or pattern, for docs/reference/metrics.md and for the page that shows it.

In a pattern `<stat>` is mean, median, max, min, p10 or p90, and any other `<word>` stands for a text of the run: a
data set, a reason, a phase. `slime.log` and hooks add names of their own, which have no row.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

GENERATION = "slime/observability/rollout_metrics.py"
COLLECTOR = "slime/rollout/collector.py"
LOSS = "slime/algorithms/policy.py"
CORRECTIONS = "slime/algorithms/policy.py"
UPDATE = "slime/backends/megatron_utils/passes/forward.py"
REPORTS = "slime/training/reports.py"
TRAINER = "slime/training/trainer.py"
SYNC = "slime/backends/megatron_utils/update_weight/"
ASYNC = "slime/rollout/fully_async_rollout.py"
RUN = "slime/ray/"
TURNS = "slime/rollout/multi_turn.py"
STATS = ("mean", "median", "max", "min", "p10", "p90")
SET_MEAN = re.compile(r"eval/([^/]+)")
OF_SET = re.compile(r"-(truncated_ratio|failed_samples|pass@\d+)$")


@dataclass(frozen=True)
class MetricRow:
    """One metric, or all that a pattern names.

    Attributes:
        source: where it is made.
        name: as in metrics.jsonl, perhaps with `<...>`.
        meaning: a phrase.
        unit: of the value; empty for a number without one.
        healthy: what a run that learns shows; empty where any value may be right.
    """

    source: str
    name: str
    meaning: str
    unit: str = ""
    healthy: str = ""


def _rows(source: str, *rows: tuple[str, ...]) -> tuple[MetricRow, ...]:
    return tuple(MetricRow(source, *row) for row in rows)


FAMILIES: dict[str, tuple[MetricRow, ...]] = {
    "Steps": _rows(
        "slime/observability/logging_utils.py",
        ("rollout/step", "the rollout that a record is of, from 0"),
        ("train/step", "the train step (optimizer update) that a record is of, over the whole run"),
        ("eval/step", "rollouts that the evaluated weights were trained on"),
    ),
    "Rewards and responses": (
        *_rows(
            REPORTS,
            ("rollout/raw_reward", "mean reward of the samples, as scored; untrusted ones left out", "", "rises"),
            ("rollout/rewards", "mean reward after the group's baseline is subtracted", "", "near 0 with a baseline"),
            ("rollout/advantages", "mean advantage over trained tokens", "", "near 0"),
            ("rollout/returns", "mean return over trained tokens"),
            ("rollout/token_rewards", "mean reward of a trained token itself, after the group's baseline"),
            ("rollout/values", "mean value that the critic gave before the update (PPO)"),
            ("rollout/response_lengths", "mean tokens of a response, those of tools included", "tokens"),
            ("rollout/total_lengths", "mean tokens of prompt and response", "tokens"),
            ("rollout/truncated", "share of the trained samples that a length limit ended", "share", "below 0.25"),
            ("rollout/round_number", "mean turns of a sample, of those that were trained", "turns"),
            ("rollout/log_probs", "mean log-probability of trained tokens, by the trainer before the update", "nats"),
            ("rollout/rollout_log_probs", "mean log-probability of trained tokens, by the engine", "nats"),
            ("rollout/ref_log_probs", "mean log-probability of trained tokens, by the reference", "nats"),
            ("rollout/teacher_log_probs", "mean log-probability of trained tokens, by the teacher", "nats"),
            (
                "rollout/opd_reverse_kl",
                "mean log-probability of the student minus the teacher's",
                "nats",
                "falls to 0",
            ),
            ("rollout/kl", "mean KL from the policy to the reference, before the update", "nats", "grows slowly"),
            ("rollout/entropy", "mean entropy of the policy before the update (--use-rollout-entropy)", "nats"),
        ),
        *_rows(TRAINER, ("rollout/kl_coef", "weight of the KL in the rewards; moves with --kl-ctrl adaptive")),
        *_rows(
            GENERATION,
            ("rollout/response_len/<stat>", "trained tokens of a response", "tokens", "no steady growth to the limit"),
            ("rollout/truncated_ratio", "share of the samples that a length limit ended", "share", "below 0.25"),
            (
                "rollout/repetition_frac",
                "share of the samples whose last 10,000 characters repeat themselves (compress tenfold)",
                "share",
                "near 0",
            ),
            (
                "rollout/zero_std/fraction",
                "share of the groups of several samples that all got one reward: GRPO learns nothing from them",
                "share",
                "below 0.5",
            ),
            ("rollout/zero_std/count_<reward>", "groups all of whose samples got this reward", "groups"),
            ("rollout/reward_part/<name>", "mean of a part of the reward, where --reward-key names several"),
            ("rollout/process_reward", "mean over samples of what their tokens or turns earned, summed"),
            (
                "rollout/source/<set>/share",
                "share of the samples whose prompt is of this data set of a mixture",
                "share",
            ),
            ("rollout/source/<set>/reward", "mean reward of the data set's samples"),
            ("rollout/source/<set>/response_len", "mean trained tokens of the data set's responses", "tokens"),
            ("rollout/source/<set>/truncated_ratio", "share of the data set's samples that were cut off", "share"),
            (
                "rollout/source/<set>/zero_std_fraction",
                "share of the data set's groups that all got one reward",
                "share",
                "below 0.5",
            ),
            (
                "rollout/end_reason/<reason>",
                "share of the samples that ended so: done, max_turns, length, budget, env_error, grader_error, "
                "transport or aborted",
                "share",
            ),
            (
                "rollout/untrusted_reward",
                "share of the samples whose reward is not trusted (--on-untrusted-reward)",
                "share",
                "0",
            ),
            ("rollout/error_cat/<value>", "share of the samples with this value of --log-reward-category", "share"),
            ("rollout/correct_ratio", "share of the samples with a reward of 1 (--log-correct-samples)", "share"),
            ("rollout/correct_response_len/<stat>", "trained tokens of the samples with a reward of 1", "tokens"),
            ("rollout/correct_<metric>", "the metric `rollout/<metric>` of the samples with a reward of 1"),
            ("rollout/prefix_cache_hit_rate", "prompt tokens that engines found in their prefix cache", "share"),
            ("rollout/avg_cached_tokens_per_sample", "prompt tokens that came from the prefix cache", "tokens"),
            ("rollout/spec_accept_rate", "drafted tokens that the engine accepted, of those it checked", "share"),
            (
                "rollout/spec_accept_length",
                "tokens that a verification of drafts gives: those accepted and one",
                "tokens",
            ),
            ("rollout/spec_accept_rate_pos_<k>", "verifications that accepted k drafted tokens or more", "share"),
            (
                "rollout/spec_break_even",
                "--spec-break-even-length over rollout/spec_accept_length",
                "ratio",
                "below 1",
            ),
            ("rollout/spec_drafts", "1 while engines draft, 0 after --spec-auto-off has stopped them"),
            ("rollout/overlong_penalty", "mean penalty for long responses (--overlong-buffer-len)", "", "near 0"),
            ("rollout/overlong_ratio", "share of the responses that got that penalty", "share", "below 0.25"),
            ("passrate/pass@<k>", "chance that one of k samples of a prompt has reward 1, unbiased", "share", "rises"),
        ),
    ),
    "Collecting groups": (
        *_rows(
            COLLECTOR,
            ("rollout/dropped_ratio", "share of the finished groups that the dynamic filter dropped", "share"),
            (
                "rollout/sample_errors/<what>",
                "samples on which a hook failed (--on-sample-error)",
                "samples",
                "0",
            ),
            ("rollout/reward_failures", "samples whose reward failed (--on-sample-error)", "samples", "0"),
            ("rollout/untrusted_retries", "samples made again (--on-untrusted-reward retry)", "samples", "0"),
            ("rollout/tool_timeouts", "tool calls that ran into their deadline", "calls", "0"),
            (
                "rollout/aborted_ratio",
                "share of the groups that engines, or a sync, aborted before they were done; where there were any",
                "share",
                "near 0",
            ),
            ("rollout/partial_rollout/resumed_samples", "samples that went on from an earlier rollout", "samples"),
            ("rollout/curriculum/pass_rate", "share of the responses that passed, dropped groups included", "share"),
            ("rollout/curriculum/retired", "prompts that the curriculum has retired: solved", "prompts"),
            ("rollout/curriculum/seen", "prompts of which the curriculum knows a pass rate", "prompts"),
            ("rollout/curriculum/passed_by", "prompts that it drew and did not use", "prompts"),
            ("rollout/greedy_reward", "mean reward of the greedy responses (--advantage-estimator remax)"),
        ),
        *_rows(
            "slime/rollout/filter_hub/base_types.py",
            (
                "rollout/dynamic_filter/drop_<reason>",
                "groups that the filter dropped for this reason",
                "groups",
            ),
        ),
        *_rows(
            ASYNC,
            ("rollout/fully_async/crashed_groups", "groups given up after --max-group-retries", "groups", "0"),
            ("rollout/fully_async/retried_groups", "groups that were generated again after a crash", "groups", "0"),
            ("rollout/fully_async/stale_groups", "groups dropped by --max-weight-staleness", "groups", "few"),
            ("rollout/fully_async/aborted_groups", "groups that a rollout's end cut off", "groups"),
            ("rollout/fully_async/queue_size", "finished groups that wait for the trainer", "groups", "not growing"),
            ("rollout/fully_async/in_flight", "groups that are being generated", "groups"),
        ),
        *_rows(
            "slime/rollout/sampling/weight_versions.py",
            (
                "rollout/weight_staleness/<what>",
                "weight syncs between the weights that wrote a sample and the trainer's, mean and max",
                "versions",
                "0 in train.py, about 1 in train_async.py",
            ),
        ),
    ),
    "Several turns": _rows(
        TURNS,
        ("multi_turn/raw_response_length/<stat>", "tokens of a response with what tools and users wrote", "tokens"),
        ("multi_turn/wo_obs_response_length/<stat>", "tokens of a response that the model wrote", "tokens"),
        ("multi_turn/multi_turn_metric/round_number_<stat>", "turns of a sample", "turns"),
        ("multi_turn/tool_call_rate", "share of the samples with a tool call", "share"),
        ("multi_turn/tool_error_rate", "share of the tool calls that failed", "share", "near 0"),
        (
            "multi_turn/template_drift",
            "tokens per sample that the chat template renders in another way than they were generated",
            "tokens",
            "0",
        ),
    ),
    "Losses": (
        *_rows(
            LOSS,
            ("train/loss", "the loss that is minimised: policy, entropy and KL terms together, or that of SFT"),
            ("train/pg_loss", "the policy's part of the loss", "", "small; its sign says nothing"),
            ("train/entropy_loss", "mean entropy of the policy over trained tokens", "nats", "falls slowly, not to 0"),
            ("train/pg_clipfrac", "share of the tokens whose ratio is clipped", "share", "below 0.2"),
            ("train/ppo_kl", "mean old minus new log-probability of trained tokens", "nats", "near 0"),
            ("train/kl_loss", "mean KL from the policy to the reference", "nats", "grows slowly"),
            (
                "train/train_rollout_logprob_abs_diff",
                "mean distance between the log-probabilities of trainer and engine for the same tokens",
                "nats",
                "below 0.05; larger with fp8 or stale weights",
            ),
            ("train/top_p_kept_vocab_per_token", "mean tokens that --rollout-top-p leaves to sample from", "tokens"),
            ("train/opd_reverse_kl", "mean log-probability of the student minus the teacher's", "nats", "falls to 0"),
            ("train/opsm_clipfrac", "share of the tokens that off-policy sequence masking left out", "share"),
            ("train/ois", "mean ratio of the new to the old policy", "", "near 1"),
        ),
        *_rows(
            CORRECTIONS,
            ("train/tis", "mean ratio of the trainer to the engine (--use-tis)", "", "near 1"),
            ("train/tis_clipfrac", "share of the tokens whose ratio is clipped or dropped", "share", "below 0.1"),
            ("train/tis_abs", "mean distance of that ratio from 1", "", "near 0"),
        ),
        *_rows(
            UPDATE,
            ("train/grad_norm", "norm of the gradient before it is clipped", "", "steady, no spikes"),
            ("train/global_batch_size", "samples (executions) of the train step", "samples"),
            ("train/num_zeros_in_grad", "zeros in the gradient (--log-num-zeros-in-grad)"),
            ("train/lr-pg_<group>", "learning rate of a parameter group"),
            ("train/mtp_grad_norm", "norm of the gradients of these layers before clipping, not in train/grad_norm"),
            ("train/mtp_loss", "mean loss of the layers that predict further tokens", "", "falls"),
            ("train/mtp_<layer>_loss", "loss of one of these layers", "", "falls"),
            ("train/load_balancing_loss", "loss of uneven use of the experts, without its coefficient", "", "near 1"),
            ("train/z_loss", "loss of large router logits, without its coefficient"),
            ("train/critic-value_loss", "the critic's loss (PPO)", "", "falls"),
            ("train/critic-value_clipfrac", "share of the tokens whose value is clipped", "share", "below 0.2"),
            ("train/critic-<metric>", "the metric `train/<metric>` of the critic"),
        ),
    ),
    "Evaluation": (
        *_rows(
            GENERATION,
            ("eval/<set>-truncated_ratio", "share of the set's answers that a length limit ended", "share", "near 0"),
            (
                "eval/<set>-pass@<k>",
                "chance that one of k answers has reward 1, unbiased",
                "share",
                "rises",
            ),
            ("eval/<set>/response_len/<stat>", "tokens of the set's answers", "tokens"),
            ("eval/<set>/repetition_frac", "share of the set's answers that repeat themselves", "share", "near 0"),
            ("eval/<set>/prefix_cache_hit_rate", "prompt tokens found in the prefix cache", "share"),
            ("eval/<set>/avg_cached_tokens_per_sample", "prompt tokens from the prefix cache", "tokens"),
            ("eval/<set>/end_reason/<reason>", "share of the set's answers that ended so", "share"),
            (
                "eval/<set>-untrusted_samples",
                "answers whose reward is not trusted: they are in no other metric of the set",
                "samples",
                "0",
            ),
            ("eval/<set>/multi_turn/<metric>", "the metric `multi_turn/<metric>` of the set's answers"),
        ),
        *_rows(
            "slime/rollout/eval.py",
            ("eval/<set>-failed_samples", "answers whose generation or reward failed", "samples", "0"),
        ),
        *_rows(GENERATION, ("eval/<set>", "mean reward of the set's answers", "", "rises")),
    ),
    "Time and throughput": (
        *_rows(
            GENERATION,
            ("perf/rollout_time", "generation of a rollout", "s"),
            ("perf/tokens_per_gpu_per_sec", "response tokens per engine GPU and second", "tokens/s"),
            ("perf/effective_tokens_per_gpu_per_sec", "trained response tokens per engine GPU and second", "tokens/s"),
            ("perf/longest_sample_tokens_per_sec", "tokens per second of the longest response", "tokens/s"),
            ("perf/longest_effective_sample_tokens_per_sec", "trained tokens per second of the longest", "tokens/s"),
            ("perf/longest_<kind>_non_generation_time", "time outside engines of the longest response", "s"),
            ("perf/longest_<kind>_without_non_generation", "tokens per second of it, without that time", "tokens/s"),
            ("perf/non_generation_time/<stat>", "time outside engines: tools, sandboxes", "s"),
            ("perf/request/e2e_latency/<stat>", "from a request to its answer, of traced samples", "s"),
            ("perf/request/queue_time/<stat>", "queued in the engine, of traced samples", "s", "near 0"),
            ("perf/decode/throughput/<stat>", "tokens per second of one request, of traced samples", "tokens/s"),
        ),
        *_rows(
            REPORTS,
            ("perf/step_time", "from the end of one training to the end of the next", "s"),
            ("perf/wait_time_ratio", "share of the step that the trainer waited", "share", "low on GPUs of its own"),
            ("perf/actor_train_tflops", "achieved by one GPU in training", "TFLOP/s", "40% of its peak, dense bf16"),
            (
                "perf/actor_train_mfu",
                "that over the device's peak, dense bf16, where it is known",
                "share",
                "0.4",
            ),
            ("perf/<pass>_tflops", "achieved by one GPU in a pass without gradients", "TFLOP/s"),
            ("perf/actor_train_tok_per_s", "tokens that one copy of the model trains per second", "tokens/s"),
            ("perf/actor_train_tok_per_gpu_per_sec", "tokens trained per trainer GPU and second", "tokens/s"),
            ("perf/train_time", "training on a rollout, passes without gradients included", "s"),
            ("perf/train_wait_time", "from the end of one training to the begin of the next", "s"),
            ("perf/data_preprocess_time", "fetching and packing a rank's share", "s", "below 1% of the step"),
            ("perf/log_probs_time", "pass for the old log-probs", "s"),
            ("perf/ref_log_probs_time", "pass of the reference", "s"),
            ("perf/teacher_log_probs_time", "pass of the teacher", "s"),
            ("perf/critic_values_time", "pass for the critic's values", "s"),
            ("perf/actor_train_time", "the policy's updates", "s"),
            ("perf/critic_train_time", "the critic's updates", "s"),
            ("perf/ref_model_update_time", "moving the reference to the policy", "s"),
        ),
        *_rows(
            "slime/observability/timer.py",
            ("perf/other_time", "rest of the step: neither generation nor passes", "s", "below 10% of the step"),
        ),
        *_rows(
            "slime/observability/timer.py",
            (
                "perf/slowest_rank_ratio",
                "time of the slowest trainer rank in passes without gradients, over the median of all ranks",
                "",
                "near 1",
            ),
        ),
        *_rows(
            SYNC,
            ("perf/update_weights_time", "a weight sync", "s"),
            ("perf/update_weights_pause_time", "part of it in which engines are paused", "s"),
            ("perf/update_weights_send_time", "part of it in which weights are sent", "s"),
            ("perf/update_weights_copy_time", "copying weight files to where engines read them", "s"),
            ("perf/update_weights_write_time", "writing weight files", "s"),
            ("perf/update_weights_pack_time", "gathering and checking an adapter, before the pause", "s"),
            ("perf/update_weights_density", "share of the weights that changed (delta)", "share"),
            ("perf/update_weights_wire_bytes", "written for engines (delta)", "bytes"),
        ),
        *_rows(
            RUN,
            ("perf/critic_<what>_time", "the time `perf/<what>_time` of the critic", "s"),
            ("perf/sleep_time", "the trainer leaves the GPU", "s"),
            ("perf/wake_up_time", "the trainer comes back to the GPU", "s"),
            ("perf/engine_release_time", "engines leave the GPU", "s"),
            ("perf/engine_resume_time", "engines come back to the GPU", "s"),
            ("perf/save_model_time", "writing a checkpoint, as far as the run waits for it", "s"),
            ("perf/checkpoint_not_written", "1 where a checkpoint found no room", "", "0"),
            ("perf/hf_export_not_written", "1 where an HF export found no room", "", "0"),
            ("perf/peer_copy_bytes", "state copied to other hosts (--peer-checkpoint-interval)", "bytes"),
            ("perf/peer_copy_time", "making that copy", "s"),
            ("perf/<timer>_time", "a timer of this name (slime.observability.timer)", "s"),
        ),
    ),
    "Engines and memory": (
        *_rows(
            RUN + "rollout/",
            ("rollout/engines", "engines that serve", "engines", "all of them"),
            ("rollout/engines_lost", "engines lost so far", "engines", "0"),
            ("rollout/engines_replaced", "engines started in place of lost ones so far", "engines"),
            ("rollout/engines_joined", "engines that joined so far (--elastic-rollout)", "engines"),
            ("rollout/engines_left", "of those, engines that have left or were lost", "engines"),
            ("rollout/engine_loads/running", "requests that an engine runs, mean while any are", "requests"),
            ("rollout/engine_loads/queued", "requests that wait in an engine", "requests", "near 0"),
            ("rollout/engine_loads/tokens_per_s", "tokens that an engine generates", "tokens/s"),
            ("rollout/engine_loads/kv_use", "KV cache of an engine in use", "share", "below 0.9"),
            ("rollout/engine_loads/cache_hits", "prompt tokens that an engine found in its prefix cache", "share"),
            (
                "rollout/engine_loads/full_ratio",
                "share of the time in which requests of the fullest engine wait for KV cache",
                "share",
                "near 0",
            ),
            (
                "rollout/engine_loads/slowest_ratio",
                "how many times as fast as the slowest engine the median one serves a request",
                "",
                "near 1",
            ),
            ("rollout/router_restarts", "restarts of the router so far", "", "0"),
        ),
        *_rows(
            "slime/observability/profiler.py",
            ("memory/after_<phase>/host_rss_gb", "resident memory of trainer rank 0 after a phase", "GB", "steady"),
            ("memory/after_<phase>/gpu_used_gb", "memory of its GPU that any process holds", "GB", "steady"),
            ("memory/after_<phase>/gpu_process_gb", "memory of its GPU that it holds", "GB", "steady"),
            ("memory/after_<phase>/torch_allocated_gb", "memory in torch's tensors", "GB", "steady"),
            ("memory/after_<phase>/torch_reserved_gb", "memory that torch's allocator holds", "GB", "steady"),
        ),
    ),
}


def evaluation_sets(names: Iterable[str]) -> list[str]:
    """Return the data sets whose mean reward is among the names of metrics, in their order.

    Example:
        >>> evaluation_sets(["eval/step", "eval/math-500", "eval/math-500-pass@4", "eval/math-500/response_len/mean"])
        ['math-500']
    """
    found = (SET_MEAN.fullmatch(name) for name in names if name != "eval/step")
    return [match[1] for match in found if match and not OF_SET.search(match[1])]


def describe(name: str) -> MetricRow | None:
    """Return the row of a metric; None for one of the user's own.

    Example:
        >>> describe("rollout/response_len/max").name
        'rollout/response_len/<stat>'
        >>> describe("mine/score") is None
        True
    """
    exact, patterns = _index()
    if (row := exact.get(name)) is not None:
        return row
    return next((row for pattern, row in patterns if pattern.fullmatch(name)), None)


@functools.cache
def _index() -> tuple[dict[str, MetricRow], list[tuple[re.Pattern[str], MetricRow]]]:
    rows = [row for family in FAMILIES.values() for row in family]
    exact = {row.name: row for row in rows if "<" not in row.name}
    return exact, [(_pattern(row.name), row) for row in rows if "<" in row.name]


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    texts = {"<stat>": f"(?:{'|'.join(STATS)})"}
    return re.compile("".join(texts.get(p, ".+" if p.startswith("<") else re.escape(p)) for p in parts))
