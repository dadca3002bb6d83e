"""Runs of train.py whose drafts move with the policy: the parts train and stop of `gpu_speculative.py`.

It does not know the other parts, which ask engines directly.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import prepare_mimo  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    apart,
    colocated,
    not_measured,
    run_train,
    series_of,
)

LENGTH = "rollout/spec_accept_length"
AUTO_OFF = ("--spec-break-even-length", 2.9, "--spec-auto-off")
"""A verification of 2 drafted tokens gives at most 3."""


def train(options: Namespace) -> list[Row]:
    """Rows of two runs: the policy's own layer drafts, trained with it and not."""
    rows = []
    for is_trained in (True, False):
        run = train_run(options, is_trained=is_trained)
        done = run_train(run, options)
        rows.append(judge(series_of(run, options) if done else {}, run.name, is_trained=is_trained))
    return rows


def stop(options: Namespace) -> list[Row]:
    """The row of a run whose drafts lose, and are stopped."""
    run = train_run(options, is_trained=True, name="speculative_auto_off", more=AUTO_OFF)
    done = run_train(run, options)
    return [judge_stop(series_of(run, options) if done else {}, run.name)]


def judge_stop(series: Series, name: str) -> Row:
    """Drafts are on in three rollouts and off afterwards, and nothing of them is counted then."""
    drafts = [value for _, value in sorted(series.get("rollout/spec_drafts", {}).items())]
    speeds = [value for _, value in sorted(series.get("perf/tokens_per_gpu_per_sec", {}).items())]
    what, target = "drafts that lose are stopped (--spec-auto-off)", "on in 3 rollouts, then off"
    if len(drafts) < 6:
        return not_measured(what, name, target, f"{len(drafts)} rollouts logged rollout/spec_drafts")
    on, counted = int(sum(drafts)), len(series.get(LENGTH, {}))
    before, after = (statistics.median(part) for part in (speeds[1:on], speeds[on + 1 :]))
    holds = drafts == [1.0] * 3 + [0.0] * (len(drafts) - 3) and counted == 3
    return Row(what, name, f"{after:,.0f} tok/s", f"{before:,.0f} tok/s before", after / before, target, holds,
               f"on in {on} of {len(drafts)} rollouts")  # fmt: skip


def train_run(options: Namespace, *, is_trained: bool, name: str | None = None, more: Sequence[Any] = ()) -> Run:
    """GRPO towards one letter, with drafts of the model's own layer."""
    more = [*more, *sharing(options)]
    model = prepare_mimo(options.output / "models" / "small-mimo", is_tiny=options.tiny)
    more += ["--mtp-num-layers", 1, "--trust-remote-code", "--check-weight-update-equal"]
    more += ["--enable-mtp-training"] if is_trained else []
    if options.way == "disk":
        more += ["--update-weight-transport", "disk", "--update-weight-disk-dir", options.work / f"sync-{is_trained}"]
    if not options.tiny:  # a CPU engine cannot draft
        more += [
            "--sglang-speculative-algorithm", "EAGLE", "--sglang-speculative-num-steps", 2,
            "--sglang-speculative-eagle-topk", 1, "--sglang-speculative-num-draft-tokens", 3,
        ]  # fmt: skip
    flags = [
        "--input-key", "prompt", "--num-rollout", options.rollouts, "--rollout-batch-size", 16,
        "--n-samples-per-prompt", 8, "--global-batch-size", 128, "--rollout-max-response-len", 64,
        "--rollout-ignore-eos", "--custom-rm-path", f"{Path(__file__).resolve()}:share_of_sevens",
        "--advantage-estimator", "grpo", "--lr", "1e-3", "--lr-decay-style", "constant", "--adam-beta2", 0.95,
        "--use-dynamic-batch-size", "--sglang-server-concurrency", 128, *more,
    ]  # fmt: skip
    name = name or f"speculative_{'trained' if is_trained else 'sent'}_head_{options.way}"
    return Run(name, str(model), tuple(map(str, flags)))


def sharing(options: Namespace) -> list[Any]:
    """Flags of trainer and engine on one GPU, or on one each."""
    return apart(options) if options.way == "nccl" else colocated(options, engine_share=0.4)


async def share_of_sevens(args: Any, sample: Any, **_: Any) -> float:
    """The reward: which share of the response is the digit 7."""
    return sample.response.count("7") / max(1, len(sample.response))


def judge(series: Series, name: str, *, is_trained: bool) -> Row:
    """Acceptance at the start and at the end of a run."""
    lengths = [value for _, value in sorted(series.get(LENGTH, {}).items())]
    what = f"acceptance while the policy moves, its head {'trained with it' if is_trained else 'as it was'}"
    target = "rises by 0.5 tokens" if is_trained else "stays below that of the trained head (read both rows)"
    if len(lengths) < 6:
        return not_measured(what, name, target, f"{len(lengths)} rollouts logged {LENGTH}")
    begin, end = statistics.mean(lengths[:3]), statistics.mean(lengths[-3:])
    rewards = [value for _, value in sorted(series.get("rollout/raw_reward", {}).items())]
    more = f", reward {rewards[0]:.2f} to {rewards[-1]:.2f}" if rewards else ""
    holds = end - begin >= 0.5 if is_trained else True
    note = f"{len(lengths)} rollouts{more}"
    return Row(what, name, f"{end:.2f} tokens", f"{begin:.2f} at the start", end / begin, target, holds, note)
