"""examples/geo3k_vlm and its multi-turn sibling: the environment, the conversation, the data, the scripts."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from examples.geo3k_vlm.make_data import CELL, problems, with_messages
from slime.config.parse import CommandLine
from slime.rollout.tool_calls import EnvError
from slime.utils.processing_utils import open_image
from slime.utils.types import Sample
from tests.rollout.chat_tokenizers import family_tokenizer
from tests.rollout.example_fakes import load_example, play, trained_text
from tests.unit.script_fakes import run_script

FOLDER = "geo3k_vlm_multi_turn"
base = load_example(FOLDER, "base_env")
env = load_example(FOLDER, "env_geo3k")
rollout = load_example(FOLDER, "rollout", own_name="geo3k_rollout")


def call(answer: Any, name: str = "calc_score") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'answer': answer}})}</tool_call>"


def a_sample() -> Sample:
    return Sample(index=7, prompt=[{"role": "user", "content": "area?"}], label="6")


@pytest.mark.parametrize(
    ("turn", "said", "score"),
    [
        (call("6"), "Your answer 6 is right.", 1.0),
        (call("5") + call("6", "calc_geo3k_reward"), "Your answer 6 is right.", 1.0),
        (call("5"), "Your answer 5 is wrong; look at the drawing again.", 0.0),
        ('<tool_call>{"name"</tool_call>', "The call cannot be made: the call is no JSON", 0.0),
        (call("6", "guess"), 'The call cannot be made: call calc_score with {"answer": "..."}.', 0.0),
        (call(""), 'The call cannot be made: call calc_score with {"answer": "..."}.', 0.0),
    ],
)
def test_an_answer_is_scored_and_another_turn_follows(turn: str, said: str, score: float) -> None:
    world = env.build_env(a_sample(), SimpleNamespace(max_turns=4))
    observation, is_done, _ = world.step(turn)
    assert observation["obs_str"].startswith(said) and observation["tool_score"] == score and not is_done


def test_an_episode_ends_without_a_call_and_its_last_turn_is_announced() -> None:
    world = env.build_env(a_sample(), SimpleNamespace(max_turns=3))
    assert "last turn" not in world.step(call("5"))[0]["obs_str"]
    assert "last turn" in world.step(call("5"))[0]["obs_str"]
    assert world.step("\\boxed{6}")[1]
    world.reset(1)  # a sample that goes on after an abort
    assert "last turn" in world.step(call("5"))[0]["obs_str"]
    with pytest.raises(ValueError, match="sample 3 has no label"):
        env.build_env(Sample(index=3), SimpleNamespace(max_turns=3))


def test_observations_are_messages_of_the_user_and_may_have_images() -> None:
    world = base.BaseInteractionEnv()
    assert world.format_observation({"obs_str": "a"}) == {"role": "user", "content": "a"}
    picture = Image.new("RGB", (2, 2))
    message = world.format_observation({"obs_str": "see", "multi_modal_data": {"image": [picture]}, "role": "tool"})
    assert message["role"] == "tool" and message["content"][1] == {"type": "image", "image": picture}


def test_what_the_environment_says_is_masked_and_the_model_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [call("5"), "so \\boxed{6}"]
    sample, model = play(monkeypatch, rollout.generate, a_sample(), replies, custom={"max_turns": 3})
    assert trained_text(family_tokenizer("qwen2_5"), sample) == "".join(reply + "<|im_end|>" for reply in replies)
    assert "<|im_start|>user\nYour answer 5 is wrong; look at the drawing again." in sample.response
    assert (sample.status, sample.metadata["tool_score"]) == (Sample.Status.COMPLETED, 0.0)
    assert [message["role"] for message in sample.metadata["messages"]] == ["assistant", "user", "assistant"]


class Broken(env.Geo3kEnv):  # type: ignore[name-defined,misc]
    def step(self, response_text: str) -> Any:
        raise EnvError("the grader is gone")


def build_env(sample: Sample, args: Any) -> Broken:
    return Broken("6", args.max_turns)


def test_a_failed_environment_ends_its_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    custom = {"max_turns": 3, "rollout_interaction_env_path": __file__}
    sample, _ = play(monkeypatch, rollout.generate, a_sample(), [call("6")], custom=custom)
    assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)
    assert sample.metadata["env_error"] == "the grader is gone"


def test_drawn_problems_have_the_columns_of_the_data_set_and_the_right_answer() -> None:
    for row in map(with_messages, problems(random.Random(0), 5)):
        assert row["messages"][1]["content"] == f"Answer: \\boxed{{{row['answer']}}}"
        picture = open_image(row["images"][0])
        dark = [(x, y) for x in range(128) for y in range(128) if picture.getpixel((x, y)) == (0, 0, 0)]
        base_, height = (max(point[axis] for point in dark) // CELL for axis in (0, 1))
        assert float(row["answer"]) == base_ * height / 2


@pytest.mark.parametrize(
    ("script", "rm_type", "temperature", "template"),
    [("geo3k_vlm/run_geo3k_qwen35", "deepscaler", 0.8, True),
     (f"{FOLDER}/run_geo3k_vlm_multi_turn", "math", 1.0, False)],
)  # fmt: skip
def test_the_scripts_are_those_of_the_contract(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, script: str, rm_type: str, temperature: float, template: bool
) -> None:
    flags, _ = run_script(tmp_path, f"../examples/{script}", "--dry-run", SLIME_HOME=str(tmp_path))
    monkeypatch.syspath_prepend(f"examples/{FOLDER}")
    args = CommandLine().check(flags).args
    assert (args.rm_type, args.rollout_temperature, args.apply_chat_template) == (rm_type, temperature, template)
    assert (args.input_key, args.label_key, args.multimodal_keys) == ("problem", "answer", {"image": "images"})
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size) == (64, 8, 512)
    assert (args.tensor_model_parallel_size, args.expert_model_parallel_size, args.colocate) == (2, 8, True)
    if not template:
        assert args.custom_generate_function_path == "rollout.generate" and args.max_turns == 3
        assert args.rollout_interaction_env_path == "env_geo3k"
