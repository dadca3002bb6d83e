"""`--tune`: the layout, micro-batches, recomputation, offloading and engines that the plan of a run likes best.

The plan's model of memory and time (slime.plan) judges each command line; nothing runs. The search changes one idea at
a time (`knobs`) and keeps the best of its values, until no change helps: the whole product would take hours. Of lines
that fit, the one with the shortest rollout is best, and of equal ones that with the least model parallelism; one that
does not fit is the better, the less it lacks. A line that a run would refuse is never taken.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from slime.plan import Plan

Judge = Callable[[Sequence[str]], Plan | None]
"""The plan of a command line, None where a run would be refused."""

LEAST_GAIN = 0.01  # share of a rollout below which a change is not worth its flags
SIZES = (1, 2, 4, 8, 16)
TOKENS = tuple(2**n for n in range(10, 18))
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True)
class Knob:
    """An idea that is tuned.

    Attributes:
        what: in words.
        options: its flags and how many values each takes; they leave the command line when the idea is changed.
        choices: what may be put in their place.
    """

    what: str
    options: dict[str, int]
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Trial:
    """A command line and its plan."""

    argv: tuple[str, ...]
    plan: Plan

    @property
    def lacks(self) -> int:
        """Bytes that its fullest device lacks."""
        return max((moment.total - moment.limit for moment in self.plan.fit if not moment.fits), default=0)

    @property
    def rank(self) -> tuple[int, float, int]:
        """What makes one command line better than another; the least is best."""
        layout = self.plan.layout
        parts = layout.tp * layout.pp * layout.cp if layout else 1
        return self.lacks, self.plan.rollout_seconds, parts


@dataclass(frozen=True)
class Change:
    """A change that helped: what it was of, from which flags to which, and the plans before and after."""

    what: str
    before: str
    after: str
    was: Trial
    now: Trial


def knobs(num_gpus: int, *, has_experts: bool, colocated: bool) -> Iterator[Knob]:
    """The ideas that a run on that many trainer GPUs may change."""
    sizes = [size for size in SIZES if size <= num_gpus]
    layouts = [(tp, pp, cp) for tp, pp, cp in product(sizes, repeat=3) if num_gpus % (tp * pp * cp) == 0]
    yield Knob(
        "layout of the trainer",
        {
            "--tensor-model-parallel-size": 1,
            "--pipeline-model-parallel-size": 1,
            "--context-parallel-size": 1,
            "--sequence-parallel": 0,
        },
        tuple(
            f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --context-parallel-size {cp}"
            + " --sequence-parallel" * (tp > 1)
            for tp, pp, cp in layouts
        ),
    )
    if has_experts:
        ways = tuple(f"--expert-model-parallel-size {size}" for size in sizes)
        yield Knob("layout of the experts", {"--expert-model-parallel-size": 1}, ways)
    yield Knob(
        "tokens of a micro-batch",
        {"--use-dynamic-batch-size": 0, "--max-tokens-per-gpu": 1, "--micro-batch-size": 1},
        tuple(f"--use-dynamic-batch-size --max-tokens-per-gpu {tokens}" for tokens in TOKENS),
    )
    options = {word: 1 for word in RECOMPUTE.split() if word.startswith("--")}
    yield Knob("recomputation", options | {"--recompute-modules": 1}, ("", RECOMPUTE))
    yield Knob("the optimizer's memory", {"--optimizer-cpu-offload": 0}, ("", "--optimizer-cpu-offload"))
    engines = tuple(f"--rollout-num-gpus-per-engine {size}" for size in sizes)
    yield Knob("GPUs of an engine", {"--rollout-num-gpus-per-engine": 1}, engines)
    shares = tuple(f"--sglang-mem-fraction-static {share}" for share in SHARES)
    yield Knob("memory of an engine", {"--sglang-mem-fraction-static": 1}, shares)
    if colocated:
        offload = {"--offload": 0, "--offload-train": 0, "--no-offload-train": 0}
        yield Knob("the trainer's rest", offload, ("", "--no-offload-train"))


def tune(argv: Sequence[str], plan: Plan, judge: Judge, ideas: Sequence[Knob]) -> tuple[Trial, list[Change]]:
    """Find a better command line.

    Args:
        argv: the flags of a run.
        plan: of them.
        judge: plans others.
        ideas: what may be changed.

    Returns:
        the best that was found, and the changes that led to it.
    """
    best, changes = Trial(tuple(argv), plan), []
    helped = True
    while helped:
        helped = False
        for knob in ideas:
            rest, before = without(best.argv, knob.options)
            found = min(_trials(rest, knob, judge), key=lambda trial: trial.rank, default=best)
            if _is_better(found, best):
                after = shown(found.argv[len(rest) :])
                changes.append(Change(knob.what, shown(before), after, best, found))
                best, helped = found, True
    return best, changes


def tuned_lines(best: Trial, changes: Sequence[Change]) -> Iterator[str]:
    """The changes with what each gains, and the command line, for a terminal."""
    yield "\nTuned, by the plan's estimates"
    if not changes:
        yield f"no change that was tried saves {LEAST_GAIN:.0%} of a rollout"
        return
    for change in changes:
        yield f"{change.what}: {change.before} -> {change.after}: {_gain(change.was, change.now)}"
    yield "the command line, to be measured before it is believed:"
    yield shlex.join(without(best.argv, {"--dry-run": 0, "--tune": 0, "--dry-run-json": 1, "--plan-device": 1})[0])


def _gain(was: Trial, now: Trial) -> str:
    """What a change gains: memory that was lacking, or the phase that became shorter most."""
    if was.lacks:
        left = f", {now.lacks / 1e9:.1f} GB still" if now.lacks else ""
        return f"{was.lacks / 1e9:.1f} GB were lacking on a device{left}"
    before = {phase.name: phase for phase in was.plan.phases}
    gains = {phase.name: before[phase.name].seconds - phase.seconds for phase in now.plan.phases}
    name = max(gains, key=lambda name: gains[name], default="")
    if not name or gains[name] <= 0:
        return "the same time with less model parallelism"
    after = next(phase for phase in now.plan.phases if phase.name == name)
    whole = f"a rollout {was.plan.rollout_seconds:.1f} -> {now.plan.rollout_seconds:.1f} s"
    return f"{whole}, of it {name} {before[name].seconds:.1f} -> {after.seconds:.1f} s ({after.formula})"


def without(argv: Sequence[str], options: dict[str, int]) -> tuple[list[str], list[str]]:
    """Split a command line: (what is not of these options, what is).

    Example:
        >>> without(["--a", "1", "--b", "--c=2"], {"--a": 1, "--b": 0})
        (['--c=2'], ['--a', '1', '--b'])
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for option, num_values in options.items():
        parser.add_argument(option, action="store" if num_values else "store_true")
    _, rest = parser.parse_known_args(list(argv))
    kept = list(rest)
    removed = [word for word in argv if not (kept and word == kept[0] and kept.pop(0))]
    return rest, removed


def shown(words: Sequence[str]) -> str:
    """Flags in words, for a table."""
    return " ".join(words) or "(not given)"


def _trials(rest: list[str], knob: Knob, judge: Judge) -> Iterator[Trial]:
    for choice in knob.choices:
        argv = (*rest, *choice.split())
        if (plan := judge(argv)) is not None:
            yield Trial(argv, plan)


def _is_better(new: Trial, old: Trial) -> bool:
    """Whether a change is worth its flags."""
    if new.lacks or old.lacks:
        return new.lacks < old.lacks
    before, after = old.plan.rollout_seconds, new.plan.rollout_seconds
    if math.isclose(before, after, rel_tol=LEAST_GAIN):
        return new.rank[2] < old.rank[2] and after <= before
    return after < before
