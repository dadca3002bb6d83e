"""The default rollout loop against a scripted engine over real HTTP (see rollout_fakes)."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from slime.rollout import data_source, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling import generation
from slime.rollout.sglang_rollout import GenerateState, generate_rollout, get_model_url
from slime.utils import async_utils
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args

Status = Sample.Status


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    GenerateState.clear_instances()
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    yield
    GenerateState.clear_instances()


@pytest.fixture
def engine():
    with FakeEngine().serve() as fake:
        yield fake


@pytest.fixture
def make(engine, tmp_path):
    """(args, data source) over prompts given as letters; letter n of the alphabet is answered with n tokens."""

    def build(letters: str, **changes):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"input": f"p{letter}"}) + "\n" for letter in letters))
        args = rollout_args(prompt_data=str(path), sglang_router_port=engine.port, **changes)
        return args, RolloutDataSourceWithBuffer(args)

    return build


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_a_rollout_returns_completed_and_scored_groups_in_the_order_of_their_index(make, engine):
    args, source = make("jcbd", rollout_batch_size=4, over_sampling_batch_size=4)
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pj", "pc", "pb", "pd"]
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    sample = output.samples[1][0]
    assert sample.tokens == [ord("p"), ord("c"), 100, 101]
    assert sample.rollout_log_probs == [-0.5, -1.5]
    assert (sample.response, sample.response_length, sample.status) == ("xx", 2, Status.COMPLETED)
    assert sample.reward == 2.0
    assert sample.weight_versions == ["7"]
    assert sample.loss_mask == [1, 1]
    assert engine.aborts == 0, "nothing was in flight: no engine needs to hear an abort"


def test_a_response_that_reaches_the_limit_is_truncated(make):
    args, source = make("jj", rollout_max_response_len=3)
    assert {s.status for group in generate_rollout(args, 0, source).samples for s in group} == {Status.TRUNCATED}


def test_the_engine_is_told_to_ignore_the_end_token_and_of_the_fewest_tokens_only_in_training(make, engine):
    args, source = make("bc")
    generate_rollout(args, 0, source)
    assert {(r["sampling_params"]["ignore_eos"], r["sampling_params"]["min_new_tokens"]) for r in engine.requests} == {
        (False, 0)
    }
    engine.requests.clear()
    GenerateState.clear_instances()
    path = source.args.prompt_data
    config = EvalDatasetConfig("e", path, input_key="input", max_response_len=9)
    args, source = make("bc", rollout_ignore_eos=True, rollout_min_new_tokens=5, eval_datasets=[config])
    generate_rollout(args, 0, source)
    assert {(r["sampling_params"]["ignore_eos"], r["sampling_params"]["min_new_tokens"]) for r in engine.requests} == {
        (True, 5)
    }
    engine.requests.clear()
    generate_rollout(args, 0, None, evaluation=True)
    assert engine.requests and not {"ignore_eos", "min_new_tokens"} & engine.requests[0]["sampling_params"].keys()


@pytest.mark.parametrize(
    ("flags", "parameter", "expected"),
    [
        ({"rollout_temperature": 0.3}, "temperature", 0.3),
        ({"rollout_top_p": 0.8}, "top_p", 0.8),
        ({"rollout_top_k": 7}, "top_k", 7),
        ({"rollout_max_response_len": 11}, "max_new_tokens", 11),
        ({"rollout_stop": ["END"]}, "stop", ["END"]),
        ({"rollout_stop_token_ids": [3, 4]}, "stop_token_ids", [3, 4]),
        ({"rollout_skip_special_tokens": True}, "skip_special_tokens", True),
    ],
)
def test_sampling_flags_are_the_parameters_of_every_request(make, engine, flags, parameter, expected):
    args, source = make("bc", **flags)
    generate_rollout(args, 0, source)
    assert [request["sampling_params"][parameter] for request in engine.requests] == [expected] * 4
    assert GenerateState(rollout_args()).sampling_params[parameter] == expected, "one state a process"
    GenerateState.clear_instances()
    assert GenerateState(rollout_args()).sampling_params[parameter] != expected, "the default is another"


def test_the_fewest_tokens_never_exceed_the_room_that_is_left(make, engine):
    args, source = make("jj", rollout_max_context_len=5, rollout_min_new_tokens=9)
    generate_rollout(args, 0, source)
    assert {r["sampling_params"]["min_new_tokens"] for r in engine.requests} == {5 - len("pj")}
    engine.requests.clear()
    sample = Sample(prompt="pj", tokens=[1, 2, ord("j")], response_length=2, rollout_log_probs=[-1.0] * 2)
    params = {"max_new_tokens": 20, "min_new_tokens": 7}
    GenerateState.clear_instances()
    args, _ = make("jj", rollout_min_new_tokens=7)
    async_utils.run(generation.generate(args, sample, params))
    sent = engine.requests[0]["sampling_params"]
    assert (sent["max_new_tokens"], sent["min_new_tokens"]) == (20 - 2, 7 - 2), "two tokens are there already"


def test_the_context_limit_caps_the_response_and_a_full_context_generates_nothing(make, engine):
    args, source = make("jj", rollout_max_context_len=5)
    generate_rollout(args, 0, source)
    assert {r["sampling_params"]["max_new_tokens"] for r in engine.requests} == {5 - len("pj")}
    engine.requests.clear()
    GenerateState.clear_instances()
    args, source = make("jj", rollout_max_context_len=2)
    sample = generate_rollout(args, 0, source).samples[0][0]
    assert (sample.status, sample.response_length, engine.requests) == (Status.TRUNCATED, 0, [])


def test_the_next_epoch_follows_when_the_file_ends(make):
    args, source = make("bcd", rollout_batch_size=2)
    generate_rollout(args, 0, source)
    assert prompts(generate_rollout(args, 1, source).samples) == ["pd", "pb"]
    assert source.epoch_id == 1


def test_the_semaphore_bounds_the_requests_in_flight(make, engine):
    args, source = make("bcde", rollout_batch_size=4, over_sampling_batch_size=4, sglang_server_concurrency=3)
    generate_rollout(args, 0, source)
    assert engine.most_running <= 3
    assert len(engine.requests) == 8


def test_aborted_prompts_return_to_the_data_source_untouched_and_are_served_first(make, engine):
    args, source = make("bczdef", rollout_batch_size=2, over_sampling_batch_size=3, n_samples_per_prompt=2)
    engine.held = {ord("z")}
    first = generate_rollout(args, 0, source)
    assert prompts(first.samples) == ["pb", "pc"]
    assert engine.aborts >= 1
    assert engine.running == 0, "no request may outlive the rollout: weights are synced next"
    (returned,) = source.buffer
    pristine = Sample(prompt="pz", group_index=2, index=4)
    assert returned[0] == pristine
    assert [s.index for s in returned] == [4, 5]
    engine.held = set()
    second = generate_rollout(args, 1, source)
    assert sorted(prompts(second.samples) + prompts(source.buffer)) == ["pd", "pe", "pz"], "no prompt was lost"


def test_an_engine_that_died_does_not_keep_the_others_from_being_told_to_abort(make, engine, monkeypatch, caplog):
    async def workers(router_url):
        return ["http://127.0.0.1:9", engine.url]  # nothing listens at the first

    monkeypatch.setattr(sglang_rollout.server_control, "list_workers", workers)
    args, source = make("bz", rollout_batch_size=1)
    engine.held = {ord("z")}
    assert prompts(generate_rollout(args, 0, source).samples) == ["pb"]
    assert prompts(source.buffer) == ["pz"]
    assert "an engine could not be told to abort: POST http://127.0.0.1:9/abort_request failed 1 times" in caplog.text


def test_finished_surplus_groups_return_to_the_data_source_too(make):
    args, source = make("bbbbb", rollout_batch_size=2, over_sampling_batch_size=5, n_samples_per_prompt=1)
    output = generate_rollout(args, 0, source)
    assert len(output.samples) == 2
    used = {s.index for group in output.samples for s in group}
    back = {s.index for group in source.buffer for s in group}
    assert used | back == set(range(5)) and not used & back
    assert all(s == Sample(prompt="pb", group_index=s.index, index=s.index) for (s,) in source.buffer)


def keep_long_responses(args, group):
    return DynamicFilterOutput(keep=group[0].response_length >= 3, reason="short")


def test_dropped_groups_are_replaced_counted_and_shown_to_the_all_samples_hook(make):
    args, source = make(
        "bdce",
        dynamic_sampling_filter_path=f"{__file__}:keep_long_responses",
        rollout_all_samples_process_path=f"{__file__}:remember_all",
        rollout_sample_filter_path=f"{__file__}:remove_first",
    )
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pd", "pe"]
    assert output.metrics == {"rollout/dynamic_filter/drop_short": 2, "rollout/dropped_ratio": 2 / (2 + 2)}
    assert [s.remove_sample for group in output.samples for s in group] == [True, False, False, False]
    assert source.metadata["seen"] == ["pb", "pd", "pc", "pe"]
    assert source.metadata["callable"] == 1


def remember_all(args, all_samples, data_source):
    data_source.update_metadata({"seen": prompts(all_samples), "callable": len(data_source(1))})


def remove_first(args, data):
    data[0][0].remove_sample = True


def drop_everything(args, group):
    return False


def test_a_filter_that_drops_everything_is_an_error_that_names_it(make):
    args, source = make("b", rollout_batch_size=1, dynamic_sampling_filter_path=f"{__file__}:drop_everything")
    with pytest.raises(RuntimeError, match=r"drop_everything dropped 100 groups in rollout 0, 0 of 1 were accepted"):
        generate_rollout(args, 0, source)


def test_an_error_of_the_engine_ends_the_rollout_with_its_text_and_leaves_no_task(make, engine):
    args, source = make("bc")
    engine.fail_with = (400, "input is longer than the context")
    with pytest.raises(SampleError, match="HTTP 400: input is longer than the context"):
        generate_rollout(args, 0, source)
    assert len(engine.requests) <= 4, "a 4xx answer is not asked again"
    assert not GenerateState(args).pendings


def test_an_engine_that_keeps_aborting_is_an_error(make, engine):
    args, source = make("b", rollout_batch_size=1, n_samples_per_prompt=1)
    args.custom_generate_function_path = f"{__file__}:abort_by_itself"
    with pytest.raises(RuntimeError, match="engines aborted 11 groups"):
        generate_rollout(args, 0, source)


def test_groups_that_engines_abort_are_counted(make, engine):
    args, source = make("bc", rollout_batch_size=1, n_samples_per_prompt=1)
    args.custom_generate_function_path = f"{__file__}:abort_once"
    FIRST_CALLS.clear()
    assert generate_rollout(args, 0, source).metrics["rollout/aborted_ratio"] == 1 / 2
    assert "rollout/aborted_ratio" not in generate_rollout(args, 1, source).metrics


FIRST_CALLS: list[str] = []


async def abort_once(args, sample, sampling_params):
    sample.status = Status.COMPLETED if FIRST_CALLS else Status.ABORTED
    FIRST_CALLS.append(sample.prompt)
    sample.tokens, sample.response, sample.response_length = [1, 2], "x", 1
    sample.rollout_log_probs = [0.0]
    return sample


async def abort_by_itself(args, sample, sampling_params):
    sample.status = Status.ABORTED
    return sample


def test_each_sample_has_its_own_seed_which_is_the_same_in_every_run(make, engine):
    args, source = make("bc", sglang_enable_deterministic_inference=True)
    generate_rollout(args, 0, source)
    seeds = {r["sampling_params"]["sampling_seed"] for r in engine.requests}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds == {generation.sampling_seed(42, str(index)) for index in range(4)}
    other = {generation.sampling_seed(43, str(index)) for index in range(4)}
    assert not seeds & other


def test_without_deterministic_inference_no_seed_is_sent(make, engine):
    args, source = make("bc")
    generate_rollout(args, 0, source)
    assert not any("sampling_seed" in r["sampling_params"] for r in engine.requests)


async def two_siblings(args, sample, sampling_params, evaluation):
    assert evaluation is False, "functions that have this parameter are told"
    first = await generation.generate(args, sample, sampling_params)
    second = dataclasses.replace(first, tokens=[*first.tokens, 9], response_length=first.response_length + 1)
    second.loss_mask, second.rollout_log_probs = None, None
    return [first, second]


@pytest.mark.parametrize("group_rm", [False, True])
def test_fan_out_siblings_share_a_rollout_id_and_are_scored_together(make, group_rm):
    args, source = make("bc", custom_generate_function_path=f"{__file__}:two_siblings", group_rm=group_rm)
    args.custom_rm_path = f"{__file__}:" + ("group_reward" if group_rm else "siblings_reward")
    output = generate_rollout(args, 0, source)
    assert [[s.rollout_id for s in group] for group in output.samples] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert [s.reward for s in output.samples[1]] == [2.0, 3.0, 2.0, 3.0]


async def siblings_reward(args, samples, **kwargs):
    assert len(samples) == 2 and all(isinstance(s, Sample) for s in samples)
    return [float(s.response_length) for s in samples]


async def group_reward(args, samples, **kwargs):
    assert len(samples) == 4 and all(isinstance(s, Sample) for s in samples)
    return [float(s.response_length) for s in samples]


async def disagreeing_siblings(args, sample, sampling_params):
    sample.tokens = [1]
    return [dataclasses.replace(sample, rollout_id=1), dataclasses.replace(sample, rollout_id=2)]


def test_siblings_with_different_rollout_ids_are_refused(make):
    args, source = make("bc", custom_generate_function_path=f"{__file__}:disagreeing_siblings")
    with pytest.raises(SampleError, match=r"different rollout_ids: \[1, 2\]"):
        generate_rollout(args, 0, source)


async def rewarded(args, sample, sampling_params):
    sample.reward, sample.status, sample.tokens = 5.0, Status.COMPLETED, [1]
    return sample


def test_a_reward_that_the_generate_function_gave_is_kept(make):
    args, source = make("bc", custom_generate_function_path=f"{__file__}:rewarded")
    args.custom_rm_path = "nowhere:nothing"
    assert generate_rollout(args, 0, source).samples[0][0].reward == 5.0


def mark(args, sample, rollout_id):
    sample.metadata["rollout_id"] = rollout_id


async def shout(args, sample, evaluation):
    sample.response = sample.response.upper()
    return sample


def test_sample_hooks_run_in_order_before_the_reward_and_get_what_they_ask_for(make):
    args, source = make("cc", rollout_sample_hook_path=[f"{__file__}:mark", f"{__file__}:shout"])
    sample = generate_rollout(args, 3, source).samples[0][0]
    assert (sample.metadata, sample.response) == ({"rollout_id": 3}, "XX")


def test_the_state_is_one_per_process_and_knows_the_sampling_parameters():
    args = rollout_args(rollout_stop=["."], rollout_num_engines=2)
    state = GenerateState(args)
    assert GenerateState(args) is state
    assert state.sampling_params["max_new_tokens"] == 20
    assert (state.sampling_params["stop"], state.sampling_params["no_stop_trim"]) == (["."], True)
    assert state.semaphore._value == 64 * (4 // 2)


def test_a_message_list_without_a_chat_template_is_refused_with_the_flag():
    args = rollout_args()
    sample = Sample(prompt=[{"role": "user", "content": "hi"}])
    with pytest.raises(ValueError, match="--apply-chat-template"):
        asyncio.run(generation.generate(args, sample, {"max_new_tokens": 3}))


def test_get_model_url_prefers_the_named_router():
    args = rollout_args(sglang_router_port=5, sglang_model_routers={"judge": ("10.0.0.1", 9)})
    assert get_model_url(args, "judge", "/classify") == "http://10.0.0.1:9/classify"
    assert get_model_url(args, "actor") == "http://127.0.0.1:5/generate"


def test_one_failing_call_cancels_its_siblings():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(30)
        finally:
            ended.append("slow")

    async def failing():
        await asyncio.sleep(0)
        raise KeyError("broken reward")

    with pytest.raises(KeyError, match="broken reward"):
        async_utils.run(generation.gather_or_cancel([slow(), failing()]))
    assert ended == ["slow"]


def test_a_group_that_ignores_the_abort_is_cancelled(make, monkeypatch):
    monkeypatch.setattr(sglang_rollout, "ABORT_DEADLINE_S", 0.1)
    monkeypatch.setattr(sglang_rollout, "_ABORT_EVERY_S", 0.05)
    args, source = make("bcz", rollout_batch_size=2, over_sampling_batch_size=3, n_samples_per_prompt=1)
    args.custom_generate_function_path = f"{__file__}:stubborn"
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pb", "pc"]
    assert prompts(source.buffer) == ["pz"]


async def stubborn(args, sample, sampling_params):
    if sample.prompt == "pz":
        await asyncio.sleep(60)
    return await generation.generate(args, sample, sampling_params)
