"""FIRE's hot first token, the greedy baseline of remax, the affinity header, and rollouts that generate nothing."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from slime.checkpoints.rollout_files import subsample
from slime.rollout import sleep_rollout
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.forge_load import generate_rollout as replay
from slime.rollout.sampling.generation import GenerateState, generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import samples_to_train_data
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args

HERE = __file__
ONE = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 1}


def test_the_first_token_is_sampled_hot_and_not_trained_on_the_rest_as_ever(make, engine):
    args, source = make("e", **ONE, rollout_fire_temperature=3.0, rollout_temperature=0.7, rollout_max_response_len=9)
    ((sample,),) = generate_rollout(args, 0, source).samples
    hot, rest = [r["sampling_params"] for r in engine.requests]
    assert (hot["temperature"], hot["max_new_tokens"]) == (3.0, 1)
    assert (rest["temperature"], rest["max_new_tokens"]) == (0.7, 9 - 1)
    assert engine.requests[1]["input_ids"] == [ord("p"), ord("e"), 100]
    assert sample.tokens[2:] == [100, 101, 102, 103]
    assert sample.loss_mask == [0, 1, 1, 1], "the policy did not choose the first token"
    assert sample.rollout_log_probs == [0.0, -1.5, -2.5, -3.5]
    assert (sample.status, sample.response) == (Sample.Status.COMPLETED, "defg")
    data = samples_to_train_data([sample], [1.0], [1.0])
    assert data["loss_masks"] == [[0, 1, 1, 1]] and data["rollout_mask_sums"] == [3]


def test_a_response_that_ends_with_its_hot_token_or_its_limit_is_left_at_that(make, engine):
    args, source = make("b", **ONE, rollout_fire_temperature=3.0)  # "b": one token
    engine_answers = generate_rollout(args, 0, source).samples[0][0]
    assert engine_answers.response_length == 1
    engine.requests.clear()
    args, source = make("e", **ONE, rollout_fire_temperature=3.0, rollout_max_response_len=1)
    sample = generate_rollout(args, 1, source).samples[0][0]
    assert (sample.status, sample.response_length, len(engine.requests)) == (Sample.Status.TRUNCATED, 1, 1)


def test_evaluations_and_resumed_responses_have_no_hot_token(make, engine):
    args, source = make("e", **ONE, rollout_fire_temperature=3.0)
    args.eval_datasets = [EvalDatasetConfig("e", args.prompt_data, input_key="input", max_response_len=9)]
    generate_rollout(args, 0, None, evaluation=True)
    assert len(engine.requests) == 1
    engine.requests.clear()
    sample = Sample(prompt="pe", tokens=[ord("p"), ord("e"), 100], response_length=1, rollout_log_probs=[-0.5])
    from slime.utils import async_utils

    async_utils.run(generate(args, sample, {"max_new_tokens": 9, "temperature": 1.0}))
    assert [r["sampling_params"]["temperature"] for r in engine.requests] == [1.0]


async def reward_by_temperature(args, sample, **kwargs):
    if isinstance(sample, list):
        return [sum(s.rollout_log_probs) for s in sample]
    return sum(sample.rollout_log_probs)


@pytest.mark.parametrize("group_rm", [False, True])
def test_remax_has_the_reward_of_one_greedy_response_a_prompt_as_baseline(make, engine, group_rm):
    args, source = make(
        "bd", advantage_estimator="remax", group_rm=group_rm, custom_rm_path=f"{HERE}:reward_by_temperature"
    )
    output = generate_rollout(args, 0, source)
    temperatures = [r["sampling_params"]["temperature"] for r in engine.requests]
    assert sorted(temperatures) == [0.0] * 2 + [1.0] * 4, "one greedy response a prompt"
    expected = {"pb": -0.5, "pd": -0.5 - 1.5 - 2.5}
    for group in output.samples:
        assert len(group) == 2, "the greedy response is not trained on"
        assert [s.metadata["greedy_reward"] for s in group] == [expected[group[0].prompt]] * 2
    assert output.metrics["rollout/greedy_reward"] == sum(expected.values()) / 2


def test_other_estimators_have_no_greedy_response(make, engine):
    args, source = make("bd")
    output = generate_rollout(args, 0, source)
    assert len(engine.requests) == 4 and "rollout/greedy_reward" not in output.metrics


def test_a_greedy_response_is_never_hot(make, engine):
    args, source = make("e", **ONE, advantage_estimator="remax", rollout_fire_temperature=3.0)
    generate_rollout(args, 0, source)
    assert sorted(r["sampling_params"]["temperature"] for r in engine.requests) == [0.0, 1.0, 3.0]


@pytest.mark.parametrize(("policy", "is_sent"), [("consistent_hashing", True), ("cache_aware", False)])
def test_the_calls_of_a_session_carry_its_id_where_the_router_keeps_sessions_together(make, engine, policy, is_sent):
    args, source = make("bc", router_policy=policy)
    output = generate_rollout(args, 0, source)
    sessions = {s.session_id for group in output.samples for s in group}
    sent = {headers.get("X-SMG-Routing-Key") for headers in engine.headers}
    assert len(sessions) == 4
    assert sent == (sessions if is_sent else {None})


def test_the_least_loaded_data_parallel_rank_is_given_out(letters):
    state = GenerateState(rollout_args(sglang_dp_size=3))
    with state.dp_rank_context() as first, state.dp_rank_context() as second:
        assert (first, second) == (0, 1)
    with state.dp_rank_context() as again:
        assert again == 0


def test_group_seeds_are_the_rollout_seed_and_the_following_ones(letters):
    args = rollout_args(sglang_enable_deterministic_inference=True, n_samples_per_prompt=3)
    assert GenerateState(args).group_sampling_seeds == [42, 43, 44]


@pytest.fixture
def dump(tmp_path):
    samples = [
        Sample(group_index=i // 2, index=i, tokens=[1, i], response_length=1, reward=float(i)) for i in range(6)
    ]
    torch.save({"rollout_id": "5", "samples": [s.to_dict() for s in samples]}, tmp_path / "5.pt")
    return str(tmp_path / "{rollout_id}.pt"), samples


def test_a_dump_is_replayed_in_its_groups_without_drawing_a_prompt(dump):
    template, samples = dump
    output = replay(rollout_args(load_forge_rollout_data=template), 5, None)
    assert output.samples == [samples[0:2], samples[2:4], samples[4:6]]
    with pytest.raises(UsageError, match=r"there is no file .*6\.pt; dump it with --save-debug-rollout-data"):
        replay(rollout_args(load_forge_rollout_data=template), 6, None)


def test_a_share_of_a_dump_is_half_from_each_end(dump):
    template, samples = dump
    args = rollout_args(load_forge_rollout_data=template, load_debug_rollout_data_subsample=0.7)
    indices = [s.index for group in replay(args, 5, None).samples for s in group]
    assert indices == [0, 1, 4, 5], "int(6 * 0.7) = 4"
    assert subsample(samples, 1.0) == samples and len(subsample(samples, 0.01)) == 1


def test_an_evaluation_beside_a_replay_generates(make, engine):
    args, source = make("b")
    args.eval_datasets = [EvalDatasetConfig("e", args.prompt_data, input_key="input", max_response_len=9)]
    output = replay(args, 0, source, evaluation=True)
    assert isinstance(output, RolloutFnEvalOutput) and len(engine.requests) == 1


def test_sleep_keeps_saying_where_the_engines_are_and_does_not_return(monkeypatch, caplog):
    naps = itertools.count()

    def nap(seconds):
        if next(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sleep_rollout, "time", SimpleNamespace(sleep=nap, monotonic=time.monotonic))
    with pytest.raises(KeyboardInterrupt):
        sleep_rollout.sleep(rollout_args(sglang_router_port=77), 0, None)
    assert [r.getMessage().split("; ")[1] for r in caplog.records] == [
        f"asleep for {hours} h, end with Ctrl-C" for hours in range(3)
    ]
    assert "http://127.0.0.1:77" in caplog.text
