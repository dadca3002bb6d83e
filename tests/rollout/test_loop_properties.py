"""Properties over random inputs: samples survive dumps, splits of a response do not show, no prompt is lost."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.rollout import data_source, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import response_loss_mask, samples_to_train_data
from slime.utils import async_utils
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

HERE = __file__
Status = Sample.Status
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ---- samples

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
metadata = st.dictionaries(st.text(max_size=5), scalars | st.lists(scalars, max_size=3), max_size=3)


@st.composite
def samples(draw):
    sample = Sample(
        group_index=draw(st.none() | st.integers(0, 99)),
        index=draw(st.none() | st.integers(0, 99)),
        prompt=draw(st.text(max_size=9) | st.just([{"role": "user", "content": "hi"}])),
        tokens=draw(tokens),
        label=draw(scalars),
        reward=draw(st.none() | st.floats(allow_nan=False) | st.just({"score": 1.0})),
        weight_versions=draw(st.lists(st.text(max_size=3), max_size=3)),
        status=draw(st.sampled_from(Status)),
        metadata=draw(metadata),
        session_id=draw(st.none() | st.text(max_size=4)),
        remove_sample=draw(st.booleans()),
    )
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-0.5, -1.0])
    sample.append_response_tokens(tokens=draw(tokens), trainable=False)
    if draw(st.booleans()):
        sample.trace = {"events": draw(st.lists(st.text(max_size=3), max_size=2))}
    return sample


@given(samples())
@FEW
def test_a_sample_survives_a_dump_with_the_attributes_that_a_user_added(sample):
    back = Sample.from_dict(copy.deepcopy(sample.to_dict()))
    assert back == sample and vars(back) == vars(sample)
    assert Sample.from_dict(back.to_dict()) == sample


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=6), st.booleans())
@FEW
def test_masks_log_probs_and_lengths_stay_in_step_over_any_turns(turns, removed):
    sample = Sample(tokens=[1, 2], remove_sample=removed)
    expected: list[int] = []
    for trainable, count in turns:
        sample.append_response_tokens(
            tokens=[5] * count, log_probs=[-1.0] * count if trainable else None, trainable=trainable
        )
        expected += [int(trainable)] * count
    assert sample.response_length == len(expected) == len(sample.tokens) - 2
    assert (sample.loss_mask or []) == expected
    assert sample.effective_response_length == sum(expected)
    assert response_loss_mask(sample) == ([0] * len(expected) if removed else expected)
    data = samples_to_train_data([sample], [0.0], [0.0])
    assert data["rollout_mask_sums"] == [0 if removed else sum(expected)]
    if expected:
        assert [p != 0.0 for p in sample.rollout_log_probs] == [bool(m) for m in expected]


# ---- a fake engine in process: the answer to a prompt is a function of the prompt


class Engine:
    """Answers prompt n with n % 7 + 1 tokens; the plan says how many it gives before it is aborted (None: all)."""

    def __init__(self, plan):
        self.plan, self.calls, self.release = plan, 0, asyncio.Event()

    async def post(self, url, payload, headers=None):
        ids, params = payload["input_ids"], payload["sampling_params"]
        prompt = ids[: ids.index(ord("!")) + 1]
        done = len(ids) - len(prompt)
        left = script_of(prompt)[done : done + params["max_new_tokens"]]
        cut = self.plan(self.calls)
        self.calls += 1
        reason = "length" if done + len(left) < len(script_of(prompt)) else "stop"
        if cut is not None:
            await asyncio.wait_for(self.release.wait(), 20)
            left, reason = left[: min(cut, len(left) - 1)], "abort"
        else:
            await asyncio.sleep(0)
        pairs = [[-token / 1000, token, None] for token in left]
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs, "weight_version": str(self.calls)}
        return {"text": "".join(map(chr, left)), "meta_info": meta}

    async def abort(self, args):
        self.release.set()
        await asyncio.sleep(0)


def script_of(prompt):
    number = int("".join(map(chr, prompt[:-1])))
    return [200 + number + i for i in range(number % 7 + 1)]


@pytest.fixture
def world(monkeypatch):
    for module in (generation, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda name, **kw: LetterTokenizer())

    def install(plan):
        GenerateState.clear_instances()
        engine = Engine(plan)
        monkeypatch.setattr(generation, "post", engine.post)
        monkeypatch.setattr(sglang_rollout, "_abort_engines", engine.abort)
        return engine

    yield install
    GenerateState.clear_instances()


async def resumed(args, prompt, cuts):
    """The sample after calls that are each aborted after so many tokens, and a last one that is not."""
    sample = Sample(prompt=prompt, index=0)
    for _ in range(len(cuts) + 1):
        sample = await generation.generate_and_rm(args, sample, {"max_new_tokens": 99})
    return sample


@given(number=st.integers(0, 60), cuts=st.lists(st.integers(0, 3), max_size=4), mask=st.booleans())
@FEW
def test_any_split_of_a_response_resumes_to_the_same_tokens_and_log_probs(world, number, cuts, mask):
    args = rollout_args(partial_rollout=True, mask_offpolicy_in_partial_rollout=mask)
    whole = script_of([ord(c) for c in f"{number}!"])
    engine = world(lambda call: cuts[call] if call < len(cuts) else None)
    engine.release.set()
    sample = async_utils.run(resumed(args, f"{number}!", cuts))
    assert sample.tokens[-sample.response_length :] == whole
    assert sample.rollout_log_probs == [-token / 1000 for token in whole]
    assert (sample.response, sample.status) == ("".join(map(chr, whole)), Status.COMPLETED)
    before = 0
    for cut in cuts:
        before += min(cut, len(whole) - before - 1)
    assert sample.loss_mask == [int(not mask)] * before + [1] * (len(whole) - before)
    assert sample.weight_versions == [str(i + 1) for i in range(len(cuts) + 1)]
    assert sample.reward == len(whole)


def some_pass(args, group):
    return DynamicFilterOutput(keep=group[0].group_index % 3 != args.rollout_seed % 3, reason="third")


def remember(args, all_samples, data_source):
    data_source.metadata["finished"] = [group[0].group_index for group in all_samples]


@given(
    seed=st.integers(0, 999),
    partial=st.booleans(),
    filtered=st.booleans(),
    batch=st.integers(1, 3),
    extra=st.integers(0, 3),
    n=st.integers(1, 2),
)
@FEW
def test_no_prompt_is_lost_or_used_twice_over_random_aborts_and_drops(
    world, tmp_path, seed, partial, filtered, batch, extra, n
):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"input": "{i}!"}}\n' for i in range(5)))
    args = rollout_args(
        prompt_data=str(path),
        rollout_batch_size=batch,
        over_sampling_batch_size=batch + extra,
        n_samples_per_prompt=n,
        partial_rollout=partial,
        rollout_seed=seed,
        dynamic_sampling_filter_path=f"{HERE}:some_pass" if filtered else None,
        rollout_all_samples_process_path=f"{HERE}:remember",
        buffer_filter_path=None,
    )
    source = RolloutDataSourceWithBuffer(args)
    chance = random.Random(seed)
    used: list[int] = []
    for rollout_id in range(3):
        # Of the calls beyond a batch, some are held until the rollout ends; the first ones always come through.
        held = {call: chance.choice([None, 0, 1, 2]) for call in range(batch * n * 4, 400)}
        held |= (
            {call: chance.choice([None, 1]) for call in range(n * batch, n * (batch + extra))} if not filtered else {}
        )
        world(held.get)
        output = generate_rollout(args, rollout_id, source)
        assert len(output.samples) == batch and all(len(group) == n for group in output.samples)
        used += source.metadata["finished"]
        for group in output.samples:
            for sample in group:
                ids = sample.tokens
                assert ids[ids.index(ord("!")) + 1 :] == script_of(ids[: ids.index(ord("!")) + 1])
                assert sample.reward == sample.response_length == len(sample.rollout_log_probs)
        for group in source.buffer:
            kept = [sample.response_length for sample in group]
            assert partial or not any(kept)
            marked = ["start_rollout_id" in sample.metadata for sample in group]
            assert marked == [bool(length) for length in kept] or not any(kept)
    waiting = [group[0].group_index for group in source.buffer]
    assert sorted(used + waiting) == list(range(source.sample_group_index)), (
        "every group once: used, dropped or waiting"
    )
    indices = list(itertools.chain.from_iterable([s.index for s in g] for g in source.buffer))
    assert len(set(indices)) == len(indices)


def test_a_snapshot_does_not_change_with_its_sample():
    sample = Sample(prompt="p", tokens=[1], metadata={"a": 1}, weight_versions=["1"])
    sample.extra = [1]
    before = dataclasses.replace(sample)
    taken = sample.snapshot()
    for name in ("tokens", "weight_versions", "extra"):
        vars(sample)[name].append(9)
    sample.metadata["b"] = 2
    sample.spec_info.completion_token_num = 5
    assert taken == dataclasses.replace(
        before, tokens=[1], metadata={"a": 1}, weight_versions=["1"], spec_info=Sample.SpecInfo()
    )
    assert taken.extra == [1]
