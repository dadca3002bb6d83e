"""--partial-rollout: what was generated for a group that a rollout did not use is gone on with in the next."""

from __future__ import annotations

import copy
import json

import pytest

from slime.rollout.hooks.process_rewards import turn_spans
from slime.rollout.hooks.returns import check_trainable
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling.engine_request import end_ids, settled
from slime.rollout.sampling.generation import generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import response_loss_mask
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.rollout.chat_tokenizers import SPECIAL, family_tokenizer
from tests.unit.rollout_fakes import LetterTokenizer

Status = Sample.Status
PARTIAL = {"partial_rollout": True, "over_sampling_batch_size": 3, "n_samples_per_prompt": 2}


def by_prompt(groups):
    return {group[0].prompt: group for group in groups}


@pytest.fixture
def two_rollouts(make, engine):
    """Rollout 0 is aborted while "pz" has 3 of its 25 tokens, rollout 1 completes it; returns what each left."""

    def run(**changes):
        args, source = make("bcz", **{**PARTIAL, **changes})
        engine.held, engine.partial = {ord("z")}, 3
        generate_rollout(args, 0, source)
        kept = copy.deepcopy(source.buffer)
        engine.held, engine.requests, args.over_sampling_batch_size = set(), [], 2  # all of it is needed
        output = generate_rollout(args, 1, source)
        return args, kept, output

    return run


def test_an_aborted_group_goes_on_in_the_next_rollout_with_fewer_new_tokens(two_rollouts, engine):
    _, (kept,), output = two_rollouts(rollout_max_response_len=20)
    assert [(s.status, s.response_length, s.metadata) for s in kept] == [
        (Status.ABORTED, 3, {"start_rollout_id": 0})
    ] * 2
    sample = by_prompt(output.samples)["pz"][0]
    prompt = [ord("p"), ord("z")]
    assert sample.tokens == prompt + [100 + i for i in range(20)], "one answer, as if it had never been interrupted"
    assert sample.rollout_log_probs == [-0.5 - i for i in range(20)]
    assert (sample.status, sample.response_length) == (Status.TRUNCATED, 20)
    assert sample.weight_versions == ["7", "7"], "one entry per engine call"
    resumed = [r for r in engine.requests if r["input_ids"][:2] == prompt]
    assert [(len(r["input_ids"]), r["sampling_params"]["max_new_tokens"]) for r in resumed] == [(2 + 3, 20 - 3)] * 2
    assert sample.metadata["start_rollout_id"] == 0
    assert output.metrics["rollout/partial_rollout/resumed_samples"] == 2.0


@pytest.mark.parametrize(
    ("params", "ends"),
    [
        ({}, False),
        ({"stop_token_ids": [102]}, True),
        ({"stop_token_ids": [100]}, False),
        ({"stop_token_ids": [102], "ignore_eos": True}, False),
        ({"stop": "f"}, True),
        ({"stop": ["z", "ef"], "ignore_eos": True}, True),
        ({"stop": ["d", ""]}, False),
    ],
)
def test_an_abort_that_comes_with_the_end_of_a_response_is_that_end(params, ends):
    """As SGLang answers where the abort and the last token meet in one step: it looks for the abort first.

    The tokens are "def".
    """
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-1.0, i, None] for i in (100, 101, 102)]}
    output = {"text": "def", "meta_info": meta}
    ending = LetterTokenizer()
    ending.eos_token_id = 102
    for tokenizer, over in ((LetterTokenizer(), ends), (ending, "ignore_eos" not in params)):
        answer = settled(output, params, tokenizer)
        expected = {"type": "stop", "matched": 102} if over or ends else {"type": "abort"}
        assert answer["meta_info"] == meta | {"finish_reason": expected}
    empty = {"meta_info": meta | {"output_token_logprobs": []}, "text": ""}
    assert settled(empty, params | {"stop": ""}, LetterTokenizer()) is empty and settled("none", {}, None) == "none"


def test_a_stop_string_may_end_inside_the_last_token_of_a_response():
    """An engine looks for it in the text of the last tokens, and keeps the whole of the last one."""
    tokenizer = LetterTokenizer()
    tokenizer.decode = lambda ids, **_: "".join(map(chr, ids)).replace("f", "f).")  # the last token is "f)."
    meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-1.0, i, None] for i in (100, 101, 102)]}
    output = {"text": "def).", "meta_info": meta}
    assert settled(output, {"stop": ["ef)"]}, tokenizer)["meta_info"]["finish_reason"]["type"] == "stop"
    assert settled(output, {"stop": [")("]}, tokenizer) is output


def test_an_abort_is_the_end_where_the_files_of_the_checkpoint_name_its_token(tmp_path):
    """GLM-4.x ends a turn with the token of the next: its tokenizer names another end. Files of Qwen3-VL nest it."""
    tokenizer = family_tokenizer("glm4_5", (*SPECIAL["glm4_5"], "<|eom_id|>"))
    tokenizer.save_pretrained(tmp_path)
    user, observation, eom, sop, other = tokenizer.convert_tokens_to_ids(
        ["<|user|>", "<|observation|>", "<|eom_id|>", "<sop>", "<|assistant|>"]
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [user, observation]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": sop}}))
    loaded = load_tokenizer(str(tmp_path))
    assert not {user, observation, eom, sop} & {loaded.eos_token_id}

    def kind(token, **params):
        meta = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [[-1.0, token, None]]}
        return settled({"text": "", "meta_info": meta}, params, loaded)["meta_info"]["finish_reason"]["type"]

    assert [kind(token) for token in (user, observation, eom, sop, other)] == ["stop"] * 4 + ["abort"]
    assert kind(user, ignore_eos=True) == "abort"
    again = load_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert end_ids(again) == end_ids(loaded) - {sop}, "a file that cannot be read names none"


def test_an_abort_that_comes_with_the_last_token_leaves_nothing_to_go_on_with(make, engine):
    """Token 102 ends a response, and is the third of those that "pz" has when it is aborted."""
    args, source = make("bcz", **PARTIAL, rollout_stop_token_ids=[102])
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    [kept] = source.buffer
    assert [(s.status, s.response_length) for s in kept] == [(Status.COMPLETED, 3)] * 2
    engine.requests, args.over_sampling_batch_size = [], 1
    args.rollout_batch_size = 1
    generate_rollout(args, 1, source)
    assert engine.requests == [], "it is only scored"


def test_without_the_flag_nothing_of_the_answer_is_kept(two_rollouts):
    _, (kept,), output = two_rollouts(partial_rollout=False)
    assert [(s.status, s.response_length, s.tokens, s.metadata) for s in kept] == [(Status.PENDING, 0, [], {})] * 2
    assert "start_rollout_id" not in by_prompt(output.samples)["pz"][0].metadata


@pytest.mark.parametrize("mask", [False, True])
def test_tokens_from_before_the_resume_are_masked_where_asked(two_rollouts, mask):
    _, _, output = two_rollouts(mask_offpolicy_in_partial_rollout=mask)
    groups = by_prompt(output.samples)
    old = [0] * 3 if mask else [1] * 3
    assert [response_loss_mask(s) for s in groups["pz"]] == [old + [1] * 17] * 2
    fresh = next(group for prompt, group in groups.items() if prompt != "pz")
    assert all(set(response_loss_mask(s)) == {1} for s in fresh)


def test_a_finished_sample_of_an_unfinished_group_is_not_generated_or_hooked_again_and_keeps_its_reward(make, engine):
    args, source = make(
        "bcz",
        **PARTIAL,
        custom_generate_function_path=f"{__file__}:first_finishes",
        rollout_sample_hook_path=[f"{__file__}:count_hook"],
    )
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    ((finished, aborted),) = source.buffer
    assert (finished.status, finished.reward, finished.metadata) == (Status.COMPLETED, 0.0, {"hooks": 1})
    assert (aborted.status, aborted.reward) == (Status.ABORTED, None)
    assert "hooks" not in aborted.metadata, "hooks are for finished samples"
    engine.held, engine.requests, args.over_sampling_batch_size = set(), [], 2
    group = by_prompt(generate_rollout(args, 1, source).samples)["pz"]
    assert [s.metadata["hooks"] for s in group] == [1, 1]
    assert [s.reward for s in group] == [0.0, 20.0]
    assert len([r for r in engine.requests if r["input_ids"][1] == ord("z")]) == 1, "only the aborted one"


def rate_turns(args, sample):
    return [0.5 + start for start, _ in turn_spans(sample)]


def test_rewards_of_turns_that_are_masked_later_are_those_of_their_tokens(make, engine):
    """The first sample of "pz" is finished and rated in rollout 0, which aborts the second one."""
    masks = {"mask_offpolicy_in_partial_rollout": True, "advantage_estimator": "turn_grpo"}
    paths = {"custom_generate_function_path": "first_writes", "process_reward_path": "rate_turns"}
    args, source = make("bcz", **PARTIAL, **masks, **{name: f"{__file__}:{path}" for name, path in paths.items()})
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    ((finished, aborted),) = source.buffer
    assert (finished.turn_rewards, aborted.turn_rewards) == ([0.5, 2.5], None)
    engine.held, args.over_sampling_batch_size = set(), 2
    group = by_prompt(generate_rollout(args, 1, source).samples)["pz"]
    check_trainable(args, "the rollout", group)
    assert [s.loss_mask for s in group] == [[0] * 3, [0] * 3 + [1] * 17]
    assert [(s.turn_rewards, s.token_rewards) for s in group] == [(None, [0.5, None, 2.5]), ([0.5 + 3], None)]


async def first_writes(args, sample, sampling_params):
    if sample.prompt == "pz" and sample.index % 2 == 0:
        sample.status, sample.tokens, sample.response_length = Status.COMPLETED, [112, 122, 1, 2, 3], 3
        sample.loss_mask, sample.rollout_log_probs = [1, 0, 1], [-1.0, 0.0, -1.0]
        return sample
    return await generate(args, sample, sampling_params)


async def first_finishes(args, sample, sampling_params):
    if sample.prompt == "pz" and sample.index % 2 == 0:
        sample.status, sample.tokens = Status.COMPLETED, [ord("p"), ord("z")]
        return sample
    return await generate(args, sample, sampling_params)


def count_hook(args, sample):
    sample.metadata["hooks"] = sample.metadata.get("hooks", 0) + 1


def test_surplus_finished_groups_are_kept_whole_and_cost_no_request_later(make, engine):
    args, source = make(
        "ddddd", rollout_batch_size=2, over_sampling_batch_size=5, n_samples_per_prompt=1, partial_rollout=True
    )
    generate_rollout(args, 0, source)
    finished = [group for group in source.buffer if group[0].status is Status.COMPLETED]
    assert all(s.reward in (3.0, None) for (s,) in finished), "what ended with the rollout is scored in the next"
    assert all(s.metadata["start_rollout_id"] == 0 for (s,) in finished)
    assert len(source.buffer) == 3
    engine.requests.clear()
    args.over_sampling_batch_size = 2
    output = generate_rollout(args, 1, source)
    assert len(engine.requests) == 2 - min(2, len(finished)), "what is finished is only taken over"
    assert len(output.samples) == 2


def test_partial_samples_survive_a_checkpoint_with_versions_and_log_probs(make, engine):
    args, source = make("bcz", **PARTIAL)
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    source.save(0)
    resumed = type(source)(args)
    resumed.load(0)
    assert resumed.buffer == source.buffer
    (sample, _) = resumed.buffer[0]
    assert (sample.weight_versions, sample.rollout_log_probs) == (["7"], [-0.5, -1.5, -2.5])
    assert (sample.status, sample.session_id) == (Status.ABORTED, source.buffer[0][0].session_id)
    assert sample.session_id is not None
    engine.held, args.over_sampling_batch_size = set(), 2
    group = by_prompt(generate_rollout(args, 1, resumed).samples)["pz"]
    assert [s.response_length for s in group] == [20, 20]


async def begins_anew(args, sample, sampling_params):
    sample.tokens = [ord(letter) for letter in sample.prompt]
    return await generate(args, sample, sampling_params)


def test_a_generate_function_that_does_not_go_on_is_named_instead_of_training_nonsense(make, engine):
    args, source = make("bcz", **PARTIAL, custom_generate_function_path=f"{__file__}:begins_anew")
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    engine.held, engine.resumes, args.over_sampling_batch_size = set(), False, 2
    with pytest.raises(SampleError, match=r"begins_anew did not go on from the 3 response tokens .*'pz'.*--partial-r"):
        generate_rollout(args, 1, source)


def test_a_begun_sample_that_cannot_be_trained_on_names_the_data_source_that_gave_it(make, engine):
    args, source = make("bcz", **PARTIAL)
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    source.buffer[0][1].rollout_log_probs[2] = float("nan")
    engine.held, args.over_sampling_batch_size = set(), 2
    with pytest.raises(SampleError, match=r"--data-source-path .*WithBuffer returned sample 5 .*nan in .* token 2, "):
        generate_rollout(args, 1, source)


async def in_two(args, sample, sampling_params):
    first = await generate(args, sample, sampling_params)
    return [first, copy.deepcopy(first)]


def test_a_fan_out_begins_anew_because_its_siblings_are_no_group_of_prompts(make, engine):
    args, source = make("bcz", **PARTIAL, custom_generate_function_path=f"{__file__}:in_two")
    engine.held, engine.partial = {ord("z")}, 3
    generate_rollout(args, 0, source)
    (kept,) = source.buffer
    assert [(s.index, s.tokens) for s in kept] == [(4, []), (5, [])]


def test_a_group_reward_waits_until_the_group_is_finished(two_rollouts):
    _, (kept,), output = two_rollouts(group_rm=True)
    assert [s.reward for s in kept] == [None, None]
    assert [s.reward for s in by_prompt(output.samples)["pz"]] == [20.0, 20.0]
