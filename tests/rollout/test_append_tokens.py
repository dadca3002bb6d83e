"""Sample.append_response_tokens: whatever is appended, the parallel lists stay in step and the sample round-trips."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
from argparse import Namespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.utils.types import Sample

LAYERS, TOPK = 3, 2
ARGS = Namespace(sglang_speculative_algorithm=None, num_layers=LAYERS, moe_router_topk=TOPK)

log_prob = st.floats(-50, 0, allow_nan=False)
model_tokens = st.lists(st.tuples(st.integers(0, 200_000), log_prob), max_size=6)
tool_tokens = st.lists(st.integers(0, 200_000), max_size=6)
segments = st.lists(
    st.one_of(model_tokens.map(lambda pairs: ("model", pairs)), tool_tokens.map(lambda ids: ("tool", ids))), max_size=8
)
PACKINGS = {
    "base64": lambda values: base64.b64encode(np.asarray(values, dtype=np.int32).tobytes()).decode(),
    "bytes": lambda values: np.asarray(values, dtype=np.int32).tobytes(),
    "array": lambda values: np.asarray(values, dtype=np.int32),
    "tensor": lambda values: torch.tensor(values, dtype=torch.int32),
    "list": list,
}


def append(sample: Sample, kind: str, content: list, **kwargs) -> None:
    if kind == "tool":
        sample.append_response_tokens(ARGS, tokens=content, trainable=False, text="t" * len(content), **kwargs)
    else:
        ids, log_probs = [pair[0] for pair in content], [pair[1] for pair in content]
        sample.append_response_tokens(ARGS, tokens=ids, log_probs=log_probs, text="m" * len(content), **kwargs)


@given(prompt=st.lists(st.integers(0, 99), max_size=4), parts=segments)
def test_after_any_turns_every_list_is_the_concatenation_of_what_was_appended(prompt, parts):
    sample = Sample(tokens=list(prompt))
    for kind, content in parts:
        append(sample, kind, content)
    flat = [(kind, entry) for kind, content in parts for entry in content]
    assert sample.tokens == [*prompt, *(entry if kind == "tool" else entry[0] for kind, entry in flat)]
    assert sample.response_length == len(flat)
    assert (sample.loss_mask or []) == [int(kind == "model") for kind, _ in flat]
    assert (sample.rollout_log_probs or []) == [0.0 if kind == "tool" else entry[1] for kind, entry in flat]
    assert sample.response == "".join(kind[0] for kind, _ in flat)
    assert sample.effective_response_length == sum(kind == "model" for kind, _ in flat)


def test_a_caller_that_holds_a_list_of_the_sample_sees_what_is_appended():
    sample = Sample(tokens=[1], response_length=0)
    tops = {"meta_info": {"top_p_token_ids": [9], "top_p_token_offsets": [0, 1]}}
    append(sample, "model", [(2, -1.0)], **tops)
    names = ("tokens", "loss_mask", "rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
    held = {name: getattr(sample, name) for name in names}
    append(sample, "tool", [3])
    append(sample, "model", [(4, -2.0)], **tops)
    assert all(getattr(sample, name) is values for name, values in held.items())
    assert held["loss_mask"] == [1, 0, 1]
    assert held["rollout_top_p_token_offsets"] == [0, 1, 1, 2]


def test_samples_of_one_prompts_list_do_not_share_what_is_appended():
    prompt = [1, 2]
    first = Sample(tokens=prompt)
    second = dataclasses.replace(first)
    append(first, "model", [(3, -1.0)])
    append(second, "model", [(4, -2.0)])
    assert (first.tokens, second.tokens, prompt) == ([1, 2, 3], [1, 2, 4], [1, 2])


def test_a_snapshot_does_not_grow_with_its_sample():
    sample = Sample(tokens=[1])
    append(sample, "model", [(2, -1.0)])
    before = sample.snapshot()
    append(sample, "model", [(3, -1.0)])
    assert (before.tokens, before.loss_mask, before.rollout_log_probs) == ([1, 2], [1], [-1.0])


@given(parts=segments, cut=st.integers(0, 8))
def test_a_sample_that_was_stored_between_two_turns_goes_on_as_if_it_had_not_been(parts, cut):
    straight, stored = Sample(tokens=[1]), Sample(tokens=[1])
    for number, (kind, content) in enumerate(parts):
        append(straight, kind, content)
        if number == cut:
            stored = Sample.from_dict(json.loads(json.dumps(stored.to_dict())))
        append(stored, kind, content)
    assert stored == straight


@given(parts=segments, data=st.data(), packing=st.sampled_from(sorted(PACKINGS)), names=st.sampled_from(["", "kept_"]))
def test_top_p_spans_of_each_token_are_found_again_by_the_offsets(parts, data, packing, names):
    sample, expected = Sample(), []
    for kind, content in parts:
        if kind == "tool":
            append(sample, kind, content)
            expected += [[] for _ in content]
            continue
        spans = [data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3)) for _ in content]
        offsets = np.cumsum([0, *map(len, spans)]).tolist()
        flat = [token for span in spans for token in span]
        pack = PACKINGS[packing]
        meta = {f"top_p_{names}token_ids": pack(flat), f"top_p_{names}token_offsets": pack(offsets)}
        append(sample, kind, content, meta_info=meta)
        expected += spans
    if sample.rollout_top_p_token_ids is None:
        assert not any(expected)
        return
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    assert [ids[a:b] for a, b in zip(offsets, offsets[1:], strict=False)] == expected
    assert len(offsets) == sample.response_length + 1


def test_spans_that_a_dump_holds_as_tensors_are_continued():
    sample = Sample(tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[0.0])
    sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets = torch.tensor([7, 8]), torch.tensor([0, 2])
    append(sample, "model", [(3, -1.0)], meta_info={"top_p_token_ids": [9], "top_p_token_offsets": [0, 1]})
    assert sample.rollout_top_p_token_ids == [7, 8, 9]
    assert sample.rollout_top_p_token_offsets == [0, 2, 3]


def experts(num_tokens: int, first: int = 0) -> np.ndarray:
    rows = np.arange(first, first + num_tokens, dtype=np.int32)
    return np.broadcast_to(rows[:, None, None], (num_tokens, LAYERS, TOPK)).copy()


@pytest.mark.parametrize("packing", ["base64", "bytes", "array", "list"])
def test_routed_experts_get_their_shape_and_are_joined_where_the_engine_began(packing):
    pack = PACKINGS[packing]
    sample = Sample(tokens=[1, 2, 3])
    meta = {"routed_experts": pack(experts(4).reshape(-1))}
    append(sample, "model", [(4, -1.0), (5, -1.0)], meta_info=meta)  # 5 tokens: the last was no input
    append(sample, "tool", [6, 7])
    assert sample.rollout_routed_experts.shape == (4, LAYERS, TOPK), "tools' tokens are routed by the next call"
    meta = {"routed_experts": pack(experts(4, first=3).reshape(-1)), "routed_experts_start_len": 3}
    append(sample, "model", [(8, -1.0)], meta_info=meta)
    np.testing.assert_array_equal(sample.rollout_routed_experts, experts(7))
    assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1


TWO = {"tokens": [5, 6], "log_probs": [-1.0, -2.0]}
BAD = {
    "fewer log_probs": ({"tokens": [5, 6], "log_probs": [-1.0]}, "2 tokens but 1 log_probs"),
    "more log_probs": ({"tokens": [5], "log_probs": [-1.0, -1.0]}, "1 tokens but 2 log_probs"),
    "no log_probs": ({"tokens": [5]}, "1 trainable tokens without log_probs"),
    "a tool's log_probs": ({"tokens": [5], "log_probs": [-1.0], "trainable": False}, "take no log_probs"),
    "ids without offsets": ({**TWO, "meta_info": {"top_p_token_ids": [1]}}, "has only one of"),
    "offsets without ids": ({**TWO, "meta_info": {"top_p_token_offsets": [0, 1, 1]}}, "has only one of"),
    "too few offsets": (
        {**TWO, "meta_info": {"top_p_token_ids": [1], "top_p_token_offsets": [0, 1]}},
        "must be 3 rising entries from 0 to 1",
    ),
    "offsets from 1": (
        {**TWO, "meta_info": {"top_p_token_ids": [1], "top_p_token_offsets": [1, 1, 1]}},
        "must be 3 rising entries",
    ),
    "falling offsets": (
        {**TWO, "meta_info": {"top_p_token_ids": [1], "top_p_token_offsets": [0, 2, 1]}},
        "must be 3 rising entries",
    ),
    "no base64": (
        {**TWO, "meta_info": {"top_p_token_ids": "?!", "top_p_token_offsets": [0, 1, 1]}},
        r"meta_info\['top_p_token_ids'\] is no int32 array",
    ),
    "half an int": (
        {**TWO, "meta_info": {"top_p_token_ids": b"\0\0\0", "top_p_token_offsets": [0, 1, 1]}},
        r"meta_info\['top_p_token_ids'\] is no int32 array",
    ),
    "experts of half a token": ({**TWO, "meta_info": {"routed_experts": [1] * 7}}, "7 routed_experts are no whole"),
    "experts of too many tokens": (
        {**TWO, "meta_info": {"routed_experts": [1] * LAYERS * TOPK * 4}},
        "of 4 tokens for 4: the last token was never an input",
    ),
    "a gap in the experts": (
        {**TWO, "meta_info": {"routed_experts": [1] * LAYERS * TOPK, "routed_experts_start_len": 2}},
        "begin at token 2, but the sample has those of 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_the_sample_stays_as_it_was(case):
    arguments, message = BAD[case]
    sample = Sample(tokens=[1, 2], response="r", response_length=1, loss_mask=[1], rollout_log_probs=[-1.0])
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(ARGS, text="x", **arguments)
    assert sample == before


def test_experts_without_args_and_tokens_after_a_response_without_log_probs_are_refused():
    with pytest.raises(ValueError, match="pass args"):
        Sample(tokens=[1]).append_response_tokens(**TWO, meta_info={"routed_experts": [1] * LAYERS * TOPK})
    sample = Sample(tokens=[1, 2], response_length=1)
    sample.append_response_tokens(tokens=[3], trainable=False)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0], None), "a tool's tokens need none"
    with pytest.raises(ValueError, match="already has 2 tokens without rollout_log_probs"):
        sample.append_response_tokens(**TWO)


def test_meta_info_counts_once_per_call_and_only_with_a_finish_reason():
    meta = {"finish_reason": {"type": "length"}, "weight_version": "3", "cached_tokens": 2, "prompt_tokens": 8}
    sample = Sample()
    sample.append_response_tokens(ARGS, meta_info=meta)
    sample.append_response_tokens(ARGS, meta_info={**meta, "finish_reason": None})
    sample.append_response_tokens(ARGS, meta_info=meta, update_terminal_info=False)
    assert sample.weight_versions == ["3"]
    assert sample.status is Sample.Status.TRUNCATED
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (2, 8)


def test_terminal_info_may_be_left_out_while_spans_and_experts_are_taken():
    meta = {"finish_reason": {"type": "stop"}, "routed_experts": [0] * LAYERS * TOPK}
    meta |= {"top_p_token_ids": [4], "top_p_token_offsets": [0, 1]}
    sample = Sample(tokens=[1])
    append(sample, "model", [(2, -1.0)], meta_info=meta, update_terminal_info=False)
    assert sample.status is Sample.Status.PENDING
    assert sample.rollout_top_p_token_ids == [4]
    assert sample.rollout_routed_experts.shape == (1, LAYERS, TOPK)


def test_a_tools_tokens_get_empty_spans_whatever_the_meta_info_says():
    sample = Sample()
    append(sample, "model", [(2, -1.0)], meta_info={"top_p_token_ids": [4], "top_p_token_offsets": [0, 1]})
    append(sample, "tool", [9], meta_info={"top_p_token_ids": [5], "top_p_token_offsets": [0, 1]})
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets) == ([4], [0, 1, 1])
