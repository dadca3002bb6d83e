"""Sample keeps its parallel lists in step, and says so when it cannot."""

from __future__ import annotations

import base64
import copy
import json
import pickle
from argparse import Namespace

import numpy as np
import pytest

from slime.utils.types import MultimodalTypes, Sample

ARGS = Namespace(sglang_speculative_algorithm=None, num_layers=2, moe_router_topk=1)


def test_a_two_turn_conversation_builds_the_lists_of_the_docstring():
    sample = Sample(tokens=[11, 12, 13])
    sample.append_response_tokens(tokens=[21, 22], log_probs=[-0.3, -0.1], text="go")
    sample.append_response_tokens(tokens=[31], trainable=False, text="[tool]")
    sample.append_response_tokens(tokens=[23], log_probs=[-0.7], text="!")
    assert sample.tokens == [11, 12, 13, 21, 22, 31, 23]
    assert (sample.response_length, sample.effective_response_length) == (4, 3)
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.3, -0.1, 0.0, -0.7]
    assert sample.response == "go[tool]!"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 tokens but 1 log_probs"),
        ({"tokens": [1]}, "without log_probs"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "take no log_probs"),
    ],
)
def test_appending_inconsistent_lists_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sample().append_response_tokens(**arguments)


def test_trainable_tokens_after_a_response_without_log_probs_are_refused():
    sample = Sample(tokens=[1, 2], response_length=1)
    with pytest.raises(ValueError, match="1 tokens without rollout_log_probs"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1.0])


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        ("length", Sample.Status.TRUNCATED),
        ("abort", Sample.Status.ABORTED),
        ("stop", Sample.Status.COMPLETED),
        ("other", Sample.Status.PENDING),
    ],
)
def test_the_finish_reason_sets_the_status(reason, status):
    sample = Sample()
    meta = {"finish_reason": {"type": reason}, "weight_version": 3, "cached_tokens": 1, "prompt_tokens": 4}
    sample.append_response_tokens(ARGS, meta_info=meta)
    assert (sample.status, sample.weight_versions) == (status, ["3"])
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 1 / 4
    again = Sample()
    again.append_response_tokens(ARGS, meta_info=meta, update_terminal_info=False)
    assert again == Sample(loss_mask=[])


def test_speculative_counters_add_up_where_an_engine_returns_them_whatever_told_it_to_draft():
    # As SGLang 0.5.17 counts: of 4 verifications, each of 3 drafted tokens, one accepted none, two 1, one 3.
    meta = {"finish_reason": {"type": "stop"}, "spec_num_correct_drafts": 0 + 2 * 1 + 3, "spec_verify_ct": 4}
    meta |= {"spec_num_proposed_drafts": 4 * 3, "spec_correct_drafts_histogram": [1, 2, 0, 1], "completion_tokens": 10}
    on, off = Sample(), Sample()
    for _ in range(2):
        before = on.spec_info.copy()
        on.append_response_tokens(ARGS, meta_info=meta)  # as of a group of --sglang-config, with no flag
    off.append_response_tokens(ARGS, meta_info={name: meta[name] for name in ("finish_reason", "completion_tokens")})
    assert (on.spec_info.spec_accept_rate, on.spec_info.spec_accept_length) == (5 / 12, 10 / 4)
    assert (before.spec_accept_counts, on.spec_info.spec_accept_counts) == ([1, 2, 0, 1], [2, 4, 0, 2])
    assert Sample.SpecInfo.from_dict(json.loads(json.dumps(on.spec_info.to_dict()))) == on.spec_info
    assert off.spec_info == Sample.SpecInfo()


def test_speculative_counters_of_older_engines_count_too():
    info = Sample.SpecInfo()
    info.add({"spec_accept_token_num": 3, "spec_draft_token_num": 6, "spec_verify_ct": 2, "completion_tokens": 5})
    assert (info.spec_accept_rate, info.spec_accept_length, info.spec_accept_counts) == (3 / 6, 5 / 2, [])


def test_top_p_spans_accumulate_and_tool_tokens_get_empty_ones():
    def meta(ids, offsets):
        text = base64.b64encode(np.asarray(ids, dtype=np.int32).tobytes()).decode()
        return {"top_p_token_ids": text, "top_p_token_offsets": offsets}

    sample = Sample()
    sample.append_response_tokens(tokens=[9], trainable=False)
    sample.append_response_tokens(tokens=[1, 2], log_probs=[0.0, 0.0], meta_info=meta([1, 5, 2], [0, 2, 3]))
    sample.append_response_tokens(tokens=[9], trainable=False)
    sample.append_response_tokens(tokens=[3], log_probs=[0.0], meta_info=meta([3, 4], [0, 2]))
    assert sample.rollout_top_p_token_ids == [1, 5, 2, 3, 4]
    assert sample.rollout_top_p_token_offsets == [0, 0, 2, 3, 3, 5]
    with pytest.raises(ValueError, match="top-p offsets"):
        sample.append_response_tokens(tokens=[3], log_probs=[0.0], meta_info=meta([3], [0, 2]))


def test_routed_experts_take_their_shape_from_the_model():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(ARGS, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": [1, 2, 3, 4]})
    assert np.asarray(sample.rollout_routed_experts).shape == (len(sample.tokens) - 1, 2, 1)


def test_to_dict_and_from_dict_keep_extra_attributes():
    sample = Sample(prompt="p", status=Sample.Status.TRUNCATED, metadata={"a": 1})
    sample.trace = {"version": 1}
    sample.end_reason, sample.reward_is_trusted = "max_turns", False
    data = sample.to_dict()
    assert data["status"] == "truncated" and data["end_reason"] == "max_turns" and not data["reward_is_trusted"]
    copy = Sample.from_dict(data)
    assert copy == sample
    assert copy.trace == {"version": 1}
    assert pickle.loads(pickle.dumps(copy)) == sample


def test_the_dead_attribute_loss_masks_names_the_real_one():
    with pytest.raises(AttributeError, match="assign loss_mask"):
        Sample().loss_masks = [1]
    assert not hasattr(Sample(), "loss_masks")


def test_the_reward_value_is_the_number_that_reward_key_names():
    assert Sample(reward=2.0).get_reward_value(Namespace(reward_key=None)) == 2.0
    assert Sample(reward={"score": 3}).get_reward_value(Namespace(reward_key="score")) == 3
    with pytest.raises(ValueError, match="--reward-key acc"):
        Sample(reward={"score": 3}).get_reward_value(Namespace(reward_key="acc"))


def test_multimodal_types_are_found_by_name():
    assert [kind.placeholder for kind in MultimodalTypes.all()] == ["<image>", "<video>", "<audio>"]
    assert MultimodalTypes.get("video") is MultimodalTypes.VIDEO
    assert MultimodalTypes.get("smell") is None


def nested_sample() -> Sample:
    sample = Sample(index=3, prompt=[{"role": "user", "content": "p"}], tokens=[1, 2], metadata={"a": {"b": [1]}})
    sample.spec_info.spec_verify_ct = 5
    sample.prefix_cache_info.cached_tokens = 7
    sample.note = {"extra": [1]}  # attributes of user code are copied too
    return sample


def test_a_deep_copy_is_equal_and_shares_nothing_that_can_change():
    sample = nested_sample()
    sample.itself = sample
    twin = copy.deepcopy(sample)
    assert twin.itself is twin
    del sample.itself, twin.itself
    assert twin.to_dict() == sample.to_dict() and type(twin) is Sample
    twin.prompt[0]["content"] = "q"
    twin.metadata["a"]["b"].append(2)
    twin.tokens.append(3)
    twin.note["extra"].append(2)
    twin.spec_info.spec_verify_ct = twin.prefix_cache_info.cached_tokens = 0
    assert sample.to_dict() == nested_sample().to_dict()


def test_a_deep_copy_shares_what_the_memo_says():
    sample = Sample(multimodal_inputs={"images": [object()]})
    twin = copy.deepcopy(sample, {id(sample.multimodal_inputs): sample.multimodal_inputs})
    assert twin.multimodal_inputs is sample.multimodal_inputs


def test_a_snapshot_does_not_see_what_is_generated_later():
    sample = nested_sample()
    before = sample.snapshot()
    meta = {"finish_reason": {"type": "stop"}, "weight_version": 3, "cached_tokens": 1, "prompt_tokens": 4}
    sample.append_response_tokens(ARGS, tokens=[9], log_probs=[-1.0], text="x", meta_info=meta)
    sample.metadata["b"] = sample.note["more"] = 1
    sample.spec_info.spec_verify_ct += 1
    assert before.to_dict() == nested_sample().to_dict()


def test_a_deep_copy_takes_token_lists_whole_and_keeps_what_was_one_object_one(monkeypatch):
    masks = [1, 1]
    sample = Sample(tokens=[1, 2, 3], loss_mask=masks, metadata={"steps": [[1]]})
    sample.twin_mask = masks
    copied = []
    real = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda value, memo: copied.append(value) or real(value, memo))
    twin = sample.__deepcopy__({})
    assert twin == sample and [1, 2, 3] not in copied and masks not in copied[:-1]
    assert twin.tokens is not sample.tokens and twin.loss_mask is twin.twin_mask is not masks
    twin.metadata["steps"][0].append(2)
    assert sample.metadata == {"steps": [[1]]}
