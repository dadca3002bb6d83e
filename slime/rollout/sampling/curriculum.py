"""A data source that steers prompts to a target pass rate, and retires those that are solved.

    --data-source-path slime.rollout.sampling.curriculum:CurriculumDataSource

A group teaches most where about half of its responses pass: the gradient of a reward of 0 or 1 grows with its standard
deviation, sqrt(p (1 - p)). So each prompt is the best of the next --curriculum-lookahead prompts of the epoch, by

    |p - target| - sqrt(p (1 - p) / (n + 1)),       p = (s + m) / (n + 1)

where s of the n latest responses to a prompt passed, and m is the pass rate of all prompts lately: a prompt that was
not seen is worth a try, and one of which much is known has to be near the target. Each visit halves what earlier ones
count, because the policy has learnt since. The other prompts come again in the next epoch.

A prompt whose groups passed as a whole at --curriculum-retire-after visits in a row is retired: the epoch goes on with
the prompts behind it. Where all are, they all come back, with a warning that asks for others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from typing import Any

from slime.config.args import Args
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
KEY = "curriculum_key"
"""Key of Sample.metadata: which prompt it is, in every epoch."""
_EARLIER = 0.5  # what the visits before count of a prompt, at each visit
_EARLIER_OF_ALL = 0.98  # of all prompts, at each group


class CurriculumDataSource(RolloutDataSourceWithBuffer):
    """The prompts as of the default data source, chosen by what groups of them have scored.

    Args:
        args: reads `curriculum_target`, `curriculum_lookahead`, `curriculum_retire_after`, `curriculum_pass_reward`,
            and what the default reads.
    """

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self._seen: dict[str, list[float]] = {}  # prompt -> responses, those that passed, whole visits in a row
        self._all = [0.0, 0.0]
        self._num_passed_by = 0

    def _next_prompt(self) -> Sample:
        candidates = [self._next_active() for _ in range(self.args.curriculum_lookahead)]
        self._num_passed_by += len(candidates) - 1
        return min(candidates, key=lambda sample: self._distance(sample.metadata[KEY]))

    def _next_active(self) -> Sample:
        for _ in range(len(self)):
            sample = self._named()
            if not self._is_retired(sample.metadata[KEY]):
                return sample
        logger.warning(
            "the curriculum has retired all of the %d prompts: they are drawn again; give harder --prompt-data",
            len(self),
        )
        for known in self._seen.values():
            known[2] = 0.0
        return self._named()

    def _named(self) -> Sample:
        sample = super()._next_prompt()
        text = sample.prompt if isinstance(sample.prompt, str) else json.dumps(sample.prompt, default=str)
        named = hashlib.blake2b(f"{text}/{sample.label}".encode(), digest_size=8).hexdigest()
        sample.metadata = {**sample.metadata, KEY: named}
        return sample

    def _is_retired(self, key: str) -> bool:
        return key in self._seen and self._seen[key][2] >= self.args.curriculum_retire_after

    def _distance(self, key: str) -> float:
        """How far a prompt's pass rate is from the target, less what is not known of it."""
        target = self.args.curriculum_target
        of_all = self._all[1] / self._all[0] if self._all[0] else target
        count, passed, _ = self._seen.get(key, (0.0, 0.0, 0.0))
        rate = (passed + of_all) / (count + 1)
        return abs(rate - target) - math.sqrt(rate * (1 - rate) / (count + 1))

    def observe(self, groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
        """Learn from the scored groups of a rollout, those that a filter dropped included; returns metrics."""
        num_known, num_passed = 0, 0
        for group in groups:
            known = [sample for sample in group if sample.counts(self.args) and sample.reward is not None]
            if not known or KEY not in known[0].metadata:
                continue
            bar = self.args.curriculum_pass_reward
            passed = sum(float(sample.get_reward_value(self.args)) >= bar for sample in known)
            self._note(known[0].metadata[KEY], len(known), passed)
            num_known, num_passed = num_known + len(known), num_passed + passed
        passed_by, self._num_passed_by = self._num_passed_by, 0
        return {
            "rollout/curriculum/pass_rate": num_passed / max(num_known, 1),
            "rollout/curriculum/retired": float(sum(map(self._is_retired, list(self._seen)))),
            "rollout/curriculum/seen": float(len(self._seen)),
            "rollout/curriculum/passed_by": float(passed_by),
        }

    def _note(self, key: str, count: int, passed: int) -> None:
        before = self._seen.get(key, [0.0, 0.0, 0.0])
        streak = before[2] + 1 if passed == count else 0.0
        self._seen[key] = [_EARLIER * before[0] + count, _EARLIER * before[1] + passed, streak]
        self._all = [_EARLIER_OF_ALL * old + new for old, new in zip(self._all, (count, passed), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The default's, and what is known of the prompts."""
        known = {key: list(values) for key, values in self._seen.items()}
        return {**super().state_dict(), "curriculum": {"seen": known, "all": list(self._all)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place that `state_dict` described; of a run without a curriculum nothing is known of the prompts."""
        super().load_state_dict(state)
        saved = state.get("curriculum", {"seen": {}, "all": [0.0, 0.0]})
        self._seen = {key: list(values) for key, values in saved["seen"].items()}
        self._all = list(saved["all"])
