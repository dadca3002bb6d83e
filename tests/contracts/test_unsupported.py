"""What is declared but not built, pinned: building something takes its line out of unsupported.txt.

The topics are the work that is still to come; nothing may be put off without one.
"""

from __future__ import annotations

from pathlib import Path

from slime.config.parse import CommandLine

LISTED = Path(__file__).parent / "unsupported.txt"
TOPICS = {
    "rollout",
    "algorithms",
    "parallelism",
    "one GPU",
    "several GPUs",
    "model families",
    "fault tolerance",
    "dashboard",
}


def test_what_is_not_built_yet_is_exactly_what_is_listed() -> None:
    now = {f"{topic}: {flag}" for flag, topic in CommandLine().unsupported()}
    listed = set(LISTED.read_text().splitlines())
    assert not now - listed, "newly unsupported: build it, or add it to unsupported.txt"
    assert not listed - now, "built (or gone): take it out of unsupported.txt"
    assert {line.split(":")[0] for line in listed} <= TOPICS
