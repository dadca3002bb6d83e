"""Flags that record where the time of a run goes. Declarations only; the names of the first five are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag

PROFILE_TARGETS = ("train_overall", "train_actor", "train_log_probs")


@dataclass
class ProfileFlags:
    """Profile."""

    use_pytorch_profiler: bool = flag(
        False, "record the trainer with torch's profiler: <output-dir>/profile/*.json.gz, for chrome://tracing"
    )
    profile: bool = flag(False, "the same as --use-pytorch-profiler (nsys is not used)")
    profile_target: list[str] = flag(
        ["train_overall"],
        "what of a rollout's training to record: all of it, its train steps, its log-prob passes; turns profiling on",
        choices=PROFILE_TARGETS,
        nargs="+",
    )
    profile_ranks: list[int] = flag([0], "trainer ranks that record", nargs="+", needs="use_pytorch_profiler")
    profile_step_start: int = flag(
        10, "id of the first rollout that is recorded", needs="use_pytorch_profiler", at_least=0
    )
    profile_step_end: int = flag(
        12, "id of the first rollout that is no longer recorded", needs="use_pytorch_profiler", at_least=1
    )
    ray_timeline_path: str | None = flag(
        None, "JSON file that gets the timeline of all Ray actors' calls at the end, for chrome://tracing"
    )
