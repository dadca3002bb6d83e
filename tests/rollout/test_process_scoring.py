"""--process-reward-path: when the hook is asked, what it may return, and which ways to a batch keep its answer."""

from __future__ import annotations

import copy
import json

import pytest

from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.rm_hub import service
from slime.rollout.rm_hub.service import RewardError, score_turns
from slime.rollout.sampling.curriculum import CurriculumDataSource
from slime.rollout.sampling.generation import generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample
from tests.rollout.reward_fakes import run
from tests.rollout.test_evaluation import evaluate  # noqa: F401 - a fixture
from tests.unit.rollout_fakes import rollout_args

HERE = __file__
TURNS = {"advantage_estimator": "turn_grpo"}


async def by_place(args, sample):
    """Token t earns t tenths, once the response is whole."""
    return [place / 10 for place in range(sample.response_length)]


def of_turn(args, sample):
    return [float(sample.response_length)]


def too_many(args, sample):
    return [1.0] * (sample.response_length + 1)


def service_is_down(args, sample):
    raise RewardError("the judge", "does not answer", sample_index=sample.index, answer="busy", status=503)


async def earns_as_it_writes(args, sample, sampling_params):
    """A generate function whose environment says itself what each turn earned."""
    await generate(args, sample, sampling_params)
    sample.turn_rewards = [9.0]
    return sample


async def as_two(args, sample, sampling_params):
    await generate(args, sample, sampling_params)
    return [sample, copy.deepcopy(sample)]


def samples_of(output):
    return [sample for group in output.samples for sample in group]


@pytest.mark.parametrize("changes", [{}, {"group_rm": True}, {"custom_generate_function_path": f"{HERE}:as_two"}])
def test_each_finished_sample_is_asked_for_once_it_is_scored(make, changes):
    args, source = make("bc", process_reward_path=f"{HERE}:by_place", **TURNS, **changes)
    samples = samples_of(generate_rollout(args, 0, source))
    assert all(sample.reward == sample.response_length for sample in samples)
    expected = {"pb": [0.0], "pc": [0.0, 0.1]}
    # one token is one turn, so that a reward of the one is of the other
    assert all((sample.turn_rewards or sample.token_rewards) == expected[sample.prompt] for sample in samples)


def test_a_resumed_response_is_rewarded_as_a_whole(make, engine):
    partial = {"partial_rollout": True, "over_sampling_batch_size": 3}
    args, source = make("bcz", process_reward_path=f"{HERE}:by_place", **TURNS, **partial)
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    engine.held, args.over_sampling_batch_size = set(), 2
    long = [s for s in samples_of(generate_rollout(args, 1, source)) if s.prompt == "pz"]
    assert [s.token_rewards for s in long] == [[place / 10 for place in range(20)]] * 2


def test_what_a_generate_function_gave_is_kept(make):
    changes = {"custom_generate_function_path": f"{HERE}:earns_as_it_writes"}
    args, source = make("bc", process_reward_path=f"{HERE}:by_place", **TURNS, **changes)
    assert [s.turn_rewards for s in samples_of(generate_rollout(args, 0, source))] == [[9.0]] * 4
    args, source = make("bc", **changes)
    with pytest.raises(SampleError, match=r"sample 0 .* turn_rewards, which --advantage-estimator grpo does not use"):
        generate_rollout(args, 0, source)


def test_a_hook_that_returns_another_number_of_rewards_is_named_with_the_sample(make):
    args, source = make("c", process_reward_path=f"{HERE}:too_many", rollout_batch_size=1, **TURNS)
    with pytest.raises(SampleError, match=r"--process-reward-path .*too_many.* sample \d.*3 rewards for 2 response"):
        generate_rollout(args, 0, source)


def test_a_service_that_is_down_makes_the_reward_untrusted(make):
    args, source = make("bc", process_reward_path=f"{HERE}:service_is_down", **TURNS)
    samples = samples_of(generate_rollout(args, 0, source))
    assert [(s.end_reason, s.reward_is_trusted, s.turn_rewards) for s in samples] == [
        ("grader_error", False, None)
    ] * 4


def test_an_evaluation_asks_for_no_rewards_of_turns(evaluate):  # noqa: F811
    _, output = evaluate({"a": ("b", {})}, process_reward_path=f"{HERE}:too_many", **TURNS)
    assert [sample.turn_rewards for sample in output.data["a"]["samples"]] == [None]


def test_the_served_reward_model_scores_each_turn_up_to_its_end(letters, start_service, monkeypatch):
    class Letters:
        def decode(self, tokens):
            return "".join(map(chr, tokens))

    asked = []

    async def scores(args, response, sample):
        asked.append(response)
        return float(len(response))

    monkeypatch.setattr(service, "load_tokenizer", lambda *given, **kw: Letters())
    monkeypatch.setattr(service, "classify_reward", scores)
    service._policy_tokenizer.cache_clear()
    sample = Sample(tokens=list(map(ord, "pabTcd")), response_length=5, loss_mask=[1, 1, 0, 1, 1])
    assert run(score_turns(rollout_args(), sample)) == [2.0, 5.0]
    assert asked == ["ab", "abTcd"]
    service._policy_tokenizer.cache_clear()


def test_a_curriculum_over_a_stream_goes_on_with_the_same_groups_and_rewards(make, tmp_path):
    """Every part together, through the loop and a checkpoint: --prompt-data is a directory."""
    (tmp_path / "many").mkdir()
    for name, letters in (("a", "bcde"), ("b", "fghij")):
        rows = [json.dumps({"input": f"p{letter}"}) for letter in letters]
        (tmp_path / "many" / f"{name}.jsonl").write_text("\n".join(rows))
    flags = {"prompt_data": str(tmp_path / "many"), "process_reward_path": f"{HERE}:by_place", **TURNS}
    flags |= {"rollout_shuffle": True, "stream_shuffle_rows": 4, "curriculum_pass_reward": 4.0}

    def rollouts(source, numbers):
        drawn = [samples_of(generate_rollout(source.args, number, source)) for number in numbers]
        return [[(s.prompt, s.index, s.token_rewards, s.turn_rewards) for s in samples] for samples in drawn]

    args, _ = make("b", **flags)
    whole = CurriculumDataSource(args)
    rollouts(whole, range(3))
    whole.save(2)
    expected = rollouts(whole, range(3, 9))
    resumed = CurriculumDataSource(args)
    resumed.load(2)
    assert rollouts(resumed, range(3, 9)) == expected
    drawn = {prompt for rollout in expected for prompt, *_ in rollout}
    assert len(drawn) > 2 and drawn <= {f"p{letter}" for letter in "bcdefghij"}
