"""The curriculum: which prompts it draws and retires, that a run goes on with the same; the gate on advantages."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from slime.rollout import data_source
from slime.rollout.filter_hub.dynamic_sampling_filters import check_advantage_range
from slime.rollout.sampling.curriculum import KEY, CurriculumDataSource
from slime.rollout.sglang_rollout import finish_rollout
from slime.utils.types import Sample
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

__all__ = ["check", "command_line"]  # fixtures
CURRICULUM = "slime.rollout.sampling.curriculum:CurriculumDataSource"


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())

    def build(count: int = 200, **changes: Any) -> CurriculumDataSource:
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"input": f"p{i}", "label": str(i)}) + "\n" for i in range(count)))
        flags = {"prompt_data": str(path), "label_key": "label", "rollout_shuffle": True, "n_samples_per_prompt": 8}
        flags |= {"save": str(tmp_path), "load": str(tmp_path), "data_source_path": CURRICULUM}
        return CurriculumDataSource(rollout_args(**{**flags, **changes}))

    return build


def scored(groups: list[list[Sample]], rates: dict[str, float], draws: random.Random) -> list[float]:
    """Rewards of 1 and 0 by the pass rate of each prompt; returns these rates."""
    for group in groups:
        for sample in group:
            sample.reward = float(draws.random() < rates[str(sample.label)])
    return [rates[str(group[0].label)] for group in groups]


def used(source: CurriculumDataSource, rates: dict[str, float], num_rollouts: int, seed: int = 0) -> list[list[float]]:
    draws, found = random.Random(seed), []
    for _ in range(num_rollouts):
        groups = source.get_samples(10)
        found.append(scored(groups, rates, draws))
        source.observe(groups)
    return found


@pytest.mark.parametrize("target", [0.5, 0.8])
def test_prompts_are_drawn_near_the_target(make: Any, target: float) -> None:
    rates = {str(i): i / 199 for i in range(200)}  # uniform: on average 0.25 and 0.34 from the targets
    found = used(make(curriculum_target=target), rates, 60)
    late = [rate for rollout in found[30:] for rate in rollout]
    assert mean(abs(rate - target) for rate in late) < 0.18
    plain = used(make(curriculum_target=target, curriculum_lookahead=1), rates, 60)
    early = [rate for rollout in plain[:20] for rate in rollout]
    assert mean(abs(rate - target) for rate in early) > 0.22


def test_solved_prompts_are_retired_and_come_back_where_all_are(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = make(count=6, curriculum_lookahead=1, curriculum_retire_after=2)
    rates = {str(i): float(i < 4) for i in range(6)}
    used(source, rates, 2)  # 20 draws: every prompt was visited three times
    later = [str(group[0].label) for group in source.get_samples(20)]
    assert set(later) == {"4", "5"}
    metrics = source.observe([])
    assert metrics["rollout/curriculum/retired"] == 4.0 and metrics["rollout/curriculum/seen"] == 6.0
    used(source, dict.fromkeys(rates, 1.0), 3)
    assert "has retired all of the 6 prompts" in caplog.text
    assert len(source.get_samples(10)) == 10


def test_a_prompt_that_is_forgotten_again_is_not_retired(make: Any) -> None:
    source = make(count=1, curriculum_lookahead=1)
    for rate in (1.0, 0.0, 1.0):
        (group,) = source.get_samples(1)
        scored([group], {"0": rate}, random.Random(0))
        source.observe([group])
    assert source.observe([])["rollout/curriculum/retired"] == 0.0


def test_what_is_known_is_in_the_checkpoint(make: Any) -> None:
    rates = {str(i): (i % 10) / 9 for i in range(50)}
    whole = make(count=50)
    used(whole, rates, 20, seed=1)
    whole.save(7)
    expected = used(whole, rates, 20, seed=2)
    resumed = make(count=50)
    resumed.load(7)
    assert used(resumed, rates, 20, seed=2) == expected
    fresh = make(count=50)
    assert used(fresh, rates, 20, seed=2) != expected, "it is what was known that decides"


def test_only_trusted_rewards_count_and_those_of_dropped_groups_do(make: Any) -> None:
    source = make(count=2, curriculum_lookahead=1, n_samples_per_prompt=2)
    first, second = source.get_samples(2)
    for sample in first + second:
        sample.reward = 1.0
    first[1].reward_is_trusted = False
    second[0].reward = 0.0

    class Collected:
        accepted, dropped = [first], [second]

        def metrics(self) -> dict[str, float]:
            return {"rollout/dropped_ratio": 0.5}

    output = finish_rollout(source.args, Collected(), source)  # type: ignore[arg-type]
    assert output.metrics is not None and output.metrics["rollout/curriculum/pass_rate"] == pytest.approx(2 / 3)
    assert source._seen[first[0].metadata[KEY]] == [1.0, 1.0, 1.0]
    assert source._seen[second[0].metadata[KEY]] == [2.0, 1.0, 0.0]


def test_groups_whose_advantages_are_out_of_the_range_are_dropped() -> None:
    def verdict(rewards: list[float], **flags: Any) -> tuple[bool, str | None]:
        samples = [Sample(index=i, group_index=0, reward=r, response_length=1) for i, r in enumerate(rewards)]
        output = check_advantage_range(rollout_args(**flags), samples)
        return output.keep, output.reason

    lucky = [1.0] + [0.0] * 7  # mean 1/8, std sqrt(1/8): its advantage is (7/8) / sqrt(1/8) = 2.47
    assert verdict([1.0, 1.0]) == (False, "advantage_below_range")
    assert verdict(lucky) == (True, None)
    assert verdict(lucky, advantage_range_max=2.4) == (False, "advantage_above_range")
    assert verdict(lucky, advantage_range_max=2.5) == (True, None)
    assert verdict(lucky, advantage_range_min=2.5) == (False, "advantage_below_range")
    raw = {"grpo_std_normalization": False}
    assert verdict(lucky, advantage_range_min=0.9, **raw) == (False, "advantage_below_range"), "7/8 without the std"


def test_a_response_passes_from_the_reward_that_is_asked_for(make: Any) -> None:
    source = make(count=1, curriculum_pass_reward=0.5, n_samples_per_prompt=2)
    (group,) = source.get_samples(1)
    group[0].reward, group[1].reward = 0.5, 0.4
    assert source.observe([group])["rollout/curriculum/pass_rate"] == 0.5


def test_flags_of_the_curriculum(check: Check) -> None:
    source = f"--data-source-path {CURRICULUM}"
    assert not check(f"{source} --curriculum-target 0.6 --curriculum-lookahead 2").problems.all()
    wrong = "--curriculum-target has no effect with a --data-source-path that is no curriculum"
    has(check("--curriculum-target 0.6").problems.all(), wrong)
    has(check(f"{source} --curriculum-target 2").problems.all(), "--curriculum-target 2.0 must be at most 1")
    gate = "--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_advantage_range"
    found = check(f"{gate} --advantage-range-min 2 --advantage-range-max 1").problems.all()
    has(found, "--advantage-range-max 1.0 is below --advantage-range-min 2.0")
