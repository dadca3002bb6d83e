"""Trees of messages and the samples they become: which tokens are trained, and that a lost one is counted."""

from __future__ import annotations

import dataclasses
import gc
import logging
import random
import weakref

import pytest

from slime.agent.trajectory import DriftKind, MessageNode, TrajectoryManager, TurnRecord, _common_prefix_len
from slime.utils.types import Sample

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "1+1?"}
AGAIN = {"role": "user", "content": "2+2?"}
TOOL = {"role": "tool", "content": "2"}
BASE = Sample(index=7, group_index=3, prompt="p", label="l", metadata={"not": "taken over"})


def said(text):
    return {"role": "assistant", "content": text}


def turn(prompt, output, finish="stop", **kwargs):
    log_probs = kwargs.pop("output_log_probs", [-0.5] * len(output))
    return TurnRecord(list(prompt), list(output), finish, log_probs, **kwargs)


def record(manager, prompt, output, messages, answer, sid="s", **kwargs):
    manager.record_turn(sid, turn=turn(prompt, output, **kwargs), prompt_messages=messages, response_message=answer)


def samples_of(manager, sid="s", **kwargs):
    return manager.get_trajectory(sid, base_sample=BASE, **kwargs)


def shape(root):
    """The tree as nested (role, generated, children)."""
    return [(c.role, c.turn is not None, shape(c)) for c in root.children]


def masks(samples):
    return [(s.tokens, s.loss_mask) for s in samples]


@pytest.mark.parametrize("threshold", [None, 0])
def test_the_tree_is_the_same_when_the_prompt_before_is_walked_anew(threshold):
    rng, quick, slow = random.Random(5), *(TrajectoryManager(fork_threshold_tokens=threshold) for _ in range(2))
    parts = [USER, AGAIN, TOOL, said("a"), said("b")]
    messages = [USER]  # changed in place, as an agent may
    for number in range(300):
        if rng.random() < 0.3:
            messages = messages[: rng.randint(1, len(messages))]
        messages += rng.choices(parts, k=rng.randint(0, 2))
        slow._latest.clear()
        for manager in (quick, slow):
            record(manager, [1], [2] * rng.choice([1, 3]), messages[:] if number % 2 else messages, said("a"))
        assert shape(quick.trees["s"]) == shape(slow.trees["s"])
        if len(messages) > 8:
            messages = [rng.choice(parts)]


def test_two_turns_of_a_tool_conversation_are_one_chain_and_one_sample():
    manager = TrajectoryManager()
    record(manager, [1, 2], [10, 11], [SYSTEM, USER], said("call"), output_log_probs=[-0.1, -0.2])
    record(manager, [1, 2, 10, 11, 3, 4], [12], [SYSTEM, USER, said("call"), TOOL], said("2"), output_log_probs=[-0.3])
    chain = [("system", False, [("user", False, [("assistant", True, [("tool", False, [("assistant", True, [])])])])])]
    assert shape(manager.trees["s"]) == chain
    assert [leaf.turn_index for leaf in manager.trees["s"].leaves()] == [2]
    assert manager.turn_count("s") == 2
    [sample] = samples_of(manager, reward=0.5, extra_metadata={"exit": 0})
    assert sample.tokens == [1, 2, 10, 11, 3, 4, 12]
    assert (sample.response_length, sample.loss_mask) == (5, [1, 1, 0, 0, 1])
    assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, 0.0, -0.3], "own log-probs, 0.0 on what the tool says"
    assert (sample.index, sample.group_index, sample.prompt, sample.label, sample.rollout_id) == (7, 3, "p", "l", 7)
    assert (sample.reward, sample.status, sample.response) == (0.5, Sample.Status.COMPLETED, "")
    agent = {"turns": 2, "breaks": 0, "forks": 0, "masked_tokens": 0, "template_drift": 0}
    expected = {"exit": 0, "truncated": False, "use_tool": False, "ill_formed": False, "agent": agent}
    assert sample.metadata == expected
    assert not manager.has_session("s") and samples_of(manager) == []


@pytest.mark.parametrize(
    ("other", "num_shared"),
    [
        ([{"role": "system", "content": "other"}, USER, said("a"), AGAIN], 0),
        ([SYSTEM, AGAIN, said("a"), AGAIN], 1),
        ([SYSTEM, USER, said("a"), TOOL], 3),
    ],
    ids=["system", "user", "tool"],
)
def test_another_message_is_a_branch_from_there_on(other, num_shared):
    manager = TrajectoryManager(fork_threshold_tokens=0)
    record(manager, [1], [10], [SYSTEM, USER], said("a"))
    record(manager, [1, 10, 2], [11], [SYSTEM, USER, said("a"), AGAIN], said("b"))
    record(manager, [1, 10, 3], [12], other, said("c"))
    first, second = (leaf.path_from_root() for leaf in manager.trees["s"].leaves())
    shared = [a for a, b in zip(first, second, strict=True) if a is b]
    assert len(shared) == num_shared


def test_two_answers_to_one_prompt_and_two_tool_messages_are_nodes_of_their_own():
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [1], [11], [USER], said("a"))
    record(manager, [1, 11, 2], [12], [USER, said("b"), TOOL, TOOL], said("c"))
    answers = manager.trees["s"].children[0].children
    assert [child.turn_index for child in answers] == [1, 2, None], "an unknown answer is context only"
    assert [n.role for n in answers[2].children[0].path_from_root()] == ["user", "assistant", "tool"]
    assert [n.role for n in answers[2].children[0].children] == ["tool"]


def test_sessions_do_not_see_each_other_and_messages_match_whatever_their_tokens():
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"), sid="one")
    record(manager, [1], [10], [USER], said("a"), sid="two")
    record(manager, [9, 9, 9], [11], [USER, said("a"), AGAIN], said("b"), sid="one")
    assert shape(manager.trees["one"]) == [
        ("user", False, [("assistant", True, [("user", False, [("assistant", True, [])])])])
    ]
    manager.drop_session("one")
    assert not manager.has_session("one") and manager.turn_count("one") == 0
    assert len(samples_of(manager, "two")) == 1


@pytest.mark.parametrize("end", [samples_of, TrajectoryManager.drop_session])
def test_a_session_that_has_ended_is_freed_without_the_collector(end):
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"), sid="s")
    record(manager, [1, 10, 2], [11], [USER, said("a"), AGAIN], said("b"), sid="s")
    nodes = [weakref.ref(node) for leaf in manager.trees["s"].leaves() for node in leaf.path_from_root()]
    gc.disable()
    try:
        end(manager, "s")
        assert len(nodes) == 4 and not any(node() for node in nodes)
    finally:
        gc.enable()


def test_an_empty_response_is_a_leaf_without_a_message_and_no_sample():
    manager = TrajectoryManager()
    record(manager, [1], [], [USER], None)
    [leaf] = manager.trees["s"].leaves()
    assert leaf.message is None and leaf.turn is not None
    assert samples_of(manager) == []


def test_what_differs_in_the_prompt_begins_a_sample_of_its_own():
    manager = TrajectoryManager()
    record(manager, [1, 2], [10], [USER], said("a"))
    record(manager, [1, 9, 10, 3], [11], [USER, said("a"), AGAIN], said("b"))
    samples = samples_of(manager, reward=1.0)
    assert masks(samples) == [([1, 2, 10], [1]), ([1, 9, 10, 3, 11], [1])]
    assert [s.reward for s in samples] == [1.0, 1.0], "each has the whole reward"
    assert [s.metadata["agent"]["breaks"] for s in samples] == [0, 1]


def test_what_differs_in_the_last_response_masks_it_and_counts_the_tokens():
    manager = TrajectoryManager()
    record(manager, [1, 2], [10, 11], [USER], said("a"))
    record(manager, [1, 2, 10, 99, 3], [12], [USER, said("a"), AGAIN], said("b"))
    [sample] = samples_of(manager)
    assert sample.tokens == [1, 2, 10, 99, 3, 12]
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0, 0, 0, 1], [0.0, 0.0, 0.0, -0.5])
    assert sample.metadata["agent"]["masked_tokens"] == 2


@pytest.mark.parametrize(("threshold", "expected"), [(0, 2), (1, 2), (2, 2), (3, 1)])
def test_a_given_threshold_is_exclusive_and_measures_the_incoming_answer(threshold, expected):
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(manager, [1, 2], [10, 11], [USER], said("a"))
    record(manager, [1, 2, 10, 99, 3], [12, 13], [USER, said("a"), AGAIN], said("b"))
    assert len(samples_of(manager)) == expected


def test_a_short_turn_never_wipes_out_a_long_one():
    # THUDM/slime #2338: a turn of 61 tokens cost 28,404 trained ones
    long = list(range(1000, 1000 + 28_404))
    manager = TrajectoryManager()
    record(manager, [1], long, [USER], said("a"))
    record(manager, [1, *long[:-1], 5, 6], [7] * 61, [USER, said("a"), AGAIN], said("b"))
    samples = samples_of(manager)
    assert [sum(s.loss_mask) for s in samples] == [28_404, 61]
    assert [s.metadata["agent"]["masked_tokens"] for s in samples] == [0, 0]


def test_what_differs_in_an_earlier_response_begins_a_sample_and_keeps_the_turns_before():
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [1, 10, 2], [11], [USER, said("a"), AGAIN], said("b"))
    record(manager, [1, 99, 2, 11, 3], [12], [USER, said("a"), AGAIN, said("b"), USER], said("c"))
    assert masks(samples_of(manager)) == [([1, 10, 2, 11], [1, 0, 1]), ([1, 99, 2, 11, 3, 12], [1])]


def test_a_turn_on_several_paths_is_trained_once():
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [1, 10, 2], [11], [USER, said("a"), AGAIN], said("b"))
    record(manager, [1, 10, 3], [12], [USER, said("a"), TOOL], said("c"))
    record(manager, [1, 10, 4], [13], [USER, said("a"), SYSTEM], said("d"))
    samples = samples_of(manager)
    assert [(s.tokens, s.loss_mask) for s in samples] == [
        ([1, 10, 2, 11], [1, 0, 1]),
        ([1, 10, 3, 12], [0, 0, 1]),
        ([1, 10, 4, 13], [0, 0, 1]),
    ]
    assert [s.metadata["agent"]["forks"] for s in samples] == [0, 1, 1]


def test_a_short_answer_that_the_client_rewrote_is_merged_and_counted():
    manager = TrajectoryManager()
    record(manager, [1], [10, 11], [USER], said("a "))
    [answer] = manager.trees["s"].leaves()
    record(manager, [1, 20, 2], [12], [USER, said("a"), AGAIN], said("b"))
    assert answer.metadata["merged_rewrite"] == {"abandoned_turn_index": 1, "abandoned_response_tokens": 2}
    assert (answer.turn, answer.turn_index, answer.message) == (None, None, said("a"))
    record(manager, [1, 20, 2, 12, 3], [13], [USER, said("a"), AGAIN, said("b"), USER], said("c"))
    [sample] = samples_of(manager)
    assert (sample.tokens, sample.loss_mask) == ([1, 20, 2, 12, 3, 13], [1, 0, 1])
    assert sample.metadata["agent"]["masked_tokens"] == 2


@pytest.mark.parametrize("threshold", [0, 2])
def test_a_long_rewritten_answer_stays_a_leaf(threshold):
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(manager, [1], [10, 11], [USER], said("a "))
    record(manager, [1, 20, 2], [12], [USER, said("a"), AGAIN], said("b"))
    assert len(list(manager.trees["s"].leaves())) == len(samples_of(manager)) == 2


def test_a_rewrite_of_one_of_two_answers_is_a_third_branch(caplog):
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [1], [11], [USER], said("b"))
    with caplog.at_level(logging.WARNING):
        record(manager, [1, 12, 2], [13], [USER, said("c"), AGAIN], said("d"))
    assert len(list(manager.trees["s"].leaves())) == 3
    assert "any of 2 answers" in caplog.text


def test_a_drifted_tool_token_makes_the_next_honest_prompt_a_sample_of_its_own():
    manager = TrajectoryManager(fork_threshold_tokens=100)
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [1, 99, 2], [11], [USER, said("a"), TOOL], said("b"))
    record(manager, [1, 10, 2, 11, 3], [12], [USER, said("a"), TOOL, said("b"), AGAIN], said("c"))
    assert masks(samples_of(manager)) == [([1, 99, 2, 11], [0, 0, 1]), ([1, 10, 2, 11, 3, 12], [1])]


def test_branches_and_breaks_come_in_the_order_of_the_leaves():
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [5, 10, 2], [11], [USER, said("a"), AGAIN], said("b"))
    record(manager, [1, 10, 3], [12], [USER, said("a"), TOOL], said("c"))
    samples = samples_of(manager)
    assert [s.tokens for s in samples] == [[1, 10], [5, 10, 2, 11], [1, 10, 3, 12]]
    assert [(s.metadata["agent"]["breaks"], s.metadata["agent"]["forks"]) for s in samples] == [(0, 0), (1, 0), (0, 1)]


def test_log_probs_of_another_length_are_refused_and_missing_ones_are_zero():
    manager = TrajectoryManager()
    with pytest.raises(AssertionError, match="output_log_probs has 1 entries for 2"):
        record(manager, [1], [10, 11], [USER], said("a"), output_log_probs=[-0.1])
    record(manager, [1], [10, 11], [USER], said("a"), output_log_probs=[])
    [sample] = samples_of(manager)
    assert sample.rollout_log_probs == [0.0, 0.0]


def test_a_turn_without_messages_is_not_recorded(caplog):
    manager = TrajectoryManager()
    record(manager, [1], [10], [], said("a"))
    assert not manager.has_session("s") and "was not recorded" in caplog.text


def test_a_base_sample_is_needed():
    with pytest.raises(TypeError):
        TrajectoryManager().get_trajectory("s")


@pytest.mark.parametrize(("finish", "status"), [("length", "truncated"), ("abort", "aborted"), ("stop", "completed")])
def test_how_the_last_turn_ended_is_the_status(finish, status):
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"), finish=finish)
    [sample] = samples_of(manager)
    assert (sample.status.value, sample.metadata["truncated"]) == (status, finish == "length")


def test_a_sample_is_cut_to_the_context_and_the_trained_tokens_behind_it_are_counted():
    manager = TrajectoryManager()
    offsets = {"top_p_token_ids": [4, 5, 6], "top_p_token_offsets": [0, 1, 3]}
    record(manager, [1, 2], [10, 11], [USER], said("a"), meta_info=offsets)
    [sample] = samples_of(manager, max_sample_tokens=3)
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 10], [1], [-0.5])
    assert (sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets) == ([4], [0, 1])
    assert (sample.metadata["agent"]["masked_tokens"], sample.status) == (1, Sample.Status.TRUNCATED)


def test_a_prompt_that_is_longer_than_a_sample_may_be_gives_none_and_a_warning(caplog):
    manager = TrajectoryManager()
    record(manager, [1, 2, 3], [10, 11], [USER], said("a"))
    assert samples_of(manager, max_sample_tokens=2) == []
    assert "the engine wrote 2 tokens" in caplog.text


def test_lost_tokens_of_a_dropped_part_are_counted_in_the_sample_before():
    manager = TrajectoryManager()
    record(manager, [1], [10], [USER], said("a"))
    record(manager, [5, 5, 5, 5], [11, 12], [USER, said("a"), AGAIN], said("b"))
    [sample] = samples_of(manager, max_sample_tokens=3)
    assert sample.metadata["agent"]["masked_tokens"] == 2


def test_what_the_engine_says_of_each_turn_reaches_the_sample():
    manager = TrajectoryManager()
    infos = [
        {"weight_version": v, "cached_tokens": 2, "prompt_tokens": 4, "finish_reason": {"type": "stop"}} for v in "12"
    ]
    record(manager, [1], [10], [USER], said("a"), meta_info=infos[0])
    record(manager, [1, 10, 2], [11], [USER, said("a"), AGAIN], said("b"), meta_info=infos[1])
    [sample] = samples_of(manager)
    assert sample.weight_versions == ["1", "2"]
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (4, 8)


def test_small_parts_are_what_the_contract_says():
    root = MessageNode()
    assert root.is_root and list(root.leaves()) == [root] and root.path_from_root() == []
    assert [_common_prefix_len(*ids) for ids in (([1, 2], [1, 2, 3]), ([1, 2], [1]), ([1], [2]), ([], [1]))] == [
        2,
        1,
        0,
        0,
    ]
    assert [kind.value for kind in DriftKind] == ["clean", "realign", "fork"]
    first = TurnRecord([1], [2], "stop")
    assert dataclasses.replace(first, ill_formed=True).ill_formed and first.output_log_probs == []
