"""One readable line a step on the console.

It knows the few metrics worth a line and their short names, and that the generation's values arrive before those of
the train step they belong to. Everything else is in metrics.jsonl.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from slime.observability.gap import GapWatch

# metric -> (short name, format); in the order of the line
COLUMNS = {
    "rollout/raw_reward": ("reward", "{:.3f}"),
    "rollout/response_len/mean": ("length", "{:.1f}"),
    "rollout/truncated_ratio": ("truncated", "{:.1%}"),
    "train/loss": ("loss", "{:.4f}"),
    "train/kl_loss": ("kl", "{:.4f}"),
    "train/entropy_loss": ("entropy", "{:.3f}"),
    "train/grad_norm": ("grad", "{:.3f}"),
    "train/train_rollout_logprob_abs_diff": ("|train-engine|", "{:.1e}"),
    "train/lr-pg_0": ("lr", "{:.2g}"),
    "perf/rollout_time": ("generate", "{:.1f}s"),
    "perf/actor_train_time": ("train", "{:.1f}s"),
}
SHORTEST_STEP_S = 0.05
DULL_WHEN_ZERO = ("rollout/truncated_ratio", "train/kl_loss")


def write_line(line: str) -> None:
    """The default output: stdout, flushed, so that the line is seen at once through a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class ConsoleSink:
    """Holds the generation's values back until the train step's record completes the line.

    A generation that no train step follows gets its own line when the next one arrives, or at the end.
    """

    def __init__(self, write: Callable[[str], None] = write_line) -> None:
        self._write = write
        self._held: dict[str, float] = {}
        self._gap = GapWatch()
        self._shown_rollout = -1.0
        self._last_line_at = time.monotonic()

    def write(self, metrics: Mapping[str, float], step_key: str) -> None:
        """Take one record."""
        if step_key == "eval/step":
            self._flush()
            self._write_eval(metrics)
        elif step_key == "rollout/step":
            self._hold(metrics)
        else:
            self._write_step(metrics, step_key)

    def finish(self) -> None:
        """Write what is still held back."""
        self._flush()

    def _hold(self, metrics: Mapping[str, float]) -> None:
        step = metrics["rollout/step"]
        if step <= self._shown_rollout:
            return  # what the trainer measures after its step (perf/*) is only in metrics.jsonl
        if self._shown_rollout < 0 and not self._held:
            self._last_line_at = time.monotonic()  # the first step's time is without the start of the engines
        if self._held and self._held["rollout/step"] != step:
            self._flush()
        self._held.update(metrics)

    def _flush(self) -> None:
        if self._held:
            self._write_step({}, "rollout/step")

    def _write_step(self, metrics: Mapping[str, float], step_key: str) -> None:
        values, rollout = {**self._held, **metrics}, self._held.get("rollout/step", -1.0)
        self._held = {}
        parts = [
            f"{short} {form.format(values[name]).replace('-0.0000', '0.0000')}"
            for name, (short, form) in COLUMNS.items()
            if name in values and (values[name] or name not in DULL_WHEN_ZERO)
        ]
        if not parts:
            return  # for example the weight sync before the first rollout
        self._shown_rollout = max(self._shown_rollout, rollout)
        now = time.monotonic()
        elapsed, self._last_line_at = now - self._last_line_at, now
        if elapsed >= SHORTEST_STEP_S:  # the train steps of one rollout are logged together
            parts.append(f"| {elapsed:.1f}s")
        parts += self._gap.notes(metrics)
        self._write(f"step {values[step_key]:4.0f} | " + "  ".join(parts))

    def _write_eval(self, metrics: Mapping[str, float]) -> None:
        scores = [
            f"{name.removeprefix('eval/')} {value:.3f}"
            for name, value in metrics.items()
            if name != "eval/step" and name.count("/") == 1 and ("-" not in name or "-pass@" in name)
        ]
        self._write(f"eval {metrics['eval/step']:4.0f} | " + "  ".join(scores))
