"""The code on docs/customization.md works as it is written there: each block is run in the scripted world."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path

import pytest

from slime.observability.logging_utils import init_tracking
from slime.utils.types import Sample
from tests.contracts.rollout_world import World, rollout, train_data

PAGE = (Path(__file__).parents[2] / "docs" / "customization.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def page(tmp_path: Path, user_path: Path):
    """name of a function on the page -> its path."""
    file = tmp_path / "page.py"
    file.write_text("\n\n".join(block for block in BLOCKS))
    return lambda name: f"{file}:{name}"


def test_the_generate_function_and_the_reward_of_the_page_work(world: World, page):
    manager = world.manager(custom_generate_function_path=page("generate"), custom_rm_path=page("exact_match"))
    data = train_data(manager)
    assert data["tokens"] == [[ord("p"), ord("b"), 100]] * 2 + [[ord("p"), ord("c"), 100, 101]] * 2
    assert data["rollout_log_probs"] == [[-0.5]] * 2 + [[-0.5, -1.5]] * 2
    assert data["raw_reward"] == [0.0] * 4, "the engine says x, the label is a letter"


def test_the_filter_of_the_page_drops_what_is_solved(world: World, page):
    """Letter b is answered with one token, which the reward of the fakes scores 1; c and d with more."""
    manager = world.manager("bcd", dynamic_sampling_filter_path=page("not_too_easy"))
    _, [(metrics, _)] = rollout(manager, 0)
    assert metrics["rollout/dynamic_filter/drop_too_easy"] == 1


def test_the_data_source_of_the_page_hands_out_the_longest_prompts(world: World, page):
    source = world.manager("bcde", data_source_path=page("Hardest")).data_source
    for length, group in enumerate(groups := [source._next_group() for _ in range(4)]):
        group[0].prompt = "p" * length
    source.add_samples(groups)
    assert [group[0].prompt for group in source.get_samples(2)] == ["ppp", "pp"]
    assert [group[0].prompt for group in source.buffer] == ["p", ""]


def test_the_metrics_of_the_page_are_logged(world: World, page):
    path = page("log_labels")
    manager = world.manager(custom_rm_path=page("short"), custom_rollout_log_function_path=path, label_key="label")
    init_tracking(manager.args, primary=False)
    _, [(own, own_key), (metrics, key)] = rollout(manager, 3)
    assert own_key == key == "rollout/step" and own["rollout/step"] == metrics["rollout/step"] == 3
    assert own["mine/characters"] == (1 + 1 + 2 + 2) / 4, "letter b is answered with one character, c with two"
    assert own["mine/seconds_per_sample"] > 0
    assert metrics["mine/labels"] == 2 and "rollout/response_len/mean" in metrics


def test_a_grader_of_the_page_that_is_down_leaves_an_untrusted_reward(page):
    file, _, _ = page("reward").rpartition(":")

    class MyGraderIsDown(Exception):
        pass

    async def my_grader(response):
        if not response:
            raise MyGraderIsDown
        return 0.5

    code = runpy.run_path(file, {"my_grader": my_grader, "MyGraderIsDown": MyGraderIsDown})
    graded, lost = Sample(response="x"), Sample(response="")
    assert [asyncio.run(code["reward"](None, sample)) for sample in (graded, lost)] == [0.5, None]
    assert graded.reward_is_trusted and (lost.end_reason, lost.reward_is_trusted) == ("grader_error", False)


def test_every_block_of_the_page_is_run_here():
    names = re.findall(r"^(?:async def|def|class) (\w+)", "\n".join(BLOCKS), flags=re.MULTILINE)
    assert names == ["generate", "exact_match", "reward", "not_too_easy", "Hardest", "short", "log_labels"]
