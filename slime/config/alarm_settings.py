"""Thresholds of alarms, and the YAML file that changes them (--alarms-config).

A file names the alarms that differ, and of each the values that differ::

    truncated: {share: 0.5, rollouts: 10}
    entropy_collapse: {enabled: false}
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from slime.utils.files.yaml_config import load_yaml, validate

FLAG = "--alarms-config"
OFF = "off"
Positive = Annotated[float, Field(gt=0)]
KEPT = 400
"""Points of a metric that are remembered."""
Count = Annotated[int, Field(ge=1, le=KEPT)]
HalfCount = Annotated[int, Field(ge=1, le=KEPT // 2)]
"""Where as many points before the last ones are looked at, too."""


class _Thresholds(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True


class Share(_Thresholds):
    """At least this share in each of the last rollouts."""

    share: Positive
    rollouts: Count = 5


class Level(_Thresholds):
    """At least this in each of the last rollouts."""

    at_least: Positive
    rollouts: Count = 3


class Jump(_Thresholds):
    """At least `factor` times the median of the steps before, and at least so much; in each of the last `steps`."""

    factor: Positive
    at_least: Positive
    steps: HalfCount = 1


class Collapse(_Thresholds):
    """Below this share of the first steps' median, and below so much; in each of the last `steps`."""

    share: Positive = 0.05
    below: Positive = 0.02
    steps: Count = 10


class Falling(_Thresholds):
    """The last `rollouts` are lower than the best as many before them: by this share of it, and by twice the noise."""

    share: Positive = 0.25
    rollouts: HalfCount = 10


class Flat(_Thresholds):
    """The last `rollouts` are within the noise of as many before them."""

    rollouts: HalfCount = 100


class Growth(_Thresholds):
    """At least `factor` times the median of the first rollouts, and at least so many tokens; for 3 rollouts."""

    factor: Positive = 3.0
    at_least: Positive = 256.0


class Below(_Thresholds):
    """Below this in each of the last rollouts."""

    share: Positive = 0.1
    rollouts: Count = 5


class AlarmSettings(BaseModel):
    """Thresholds of every alarm, by its name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    no_gradient: Share = Share(share=0.5)
    truncated: Share = Share(share=0.25)
    entropy_collapse: Collapse = Collapse()
    engine_gap: Jump = Jump(factor=3, at_least=0.05, steps=2)
    kl_spike: Jump = Jump(factor=10, at_least=0.1)
    grad_spike: Jump = Jump(factor=10, at_least=1.0)
    reward_falling: Falling = Falling()
    reward_flat: Flat = Flat()
    length_explosion: Growth = Growth()
    staleness: Level = Level(at_least=4)
    failures: Level = Level(at_least=1, rollouts=5)
    untrusted_rewards: Share = Share(share=0.1, rollouts=2)
    engines_lost: Level = Level(at_least=1, rollouts=1)
    aborts: Level = Level(at_least=0.25)
    slow_engine: Level = Level(at_least=2)
    slow_rank: Level = Level(at_least=1.5)
    kv_full: Level = Level(at_least=0.5)
    drafts_lose: Level = Level(at_least=1)
    slow_phase: Jump = Jump(factor=6, at_least=60)
    low_mfu: Below = Below()


def alarm_settings(path: str | None) -> AlarmSettings | None:
    """Return the thresholds of a run; None where no alarm is wanted.

    Args:
        path: a YAML file, "off", or None for the thresholds above.

    Raises:
        UsageError: the file cannot be read, or names what there is not.
    """
    if path == OFF:
        return None
    if path is None:
        return AlarmSettings()
    located, usual = load_yaml(path, FLAG), AlarmSettings().model_dump()
    if isinstance(located.value, dict):
        located.value = {
            name: usual.get(name, {}) | given if isinstance(given, dict) else given
            for name, given in located.value.items()
        }
    return validate(AlarmSettings, located)
