"""The one check of token ids, masks and log-probs, and the errors of the sources that it runs for."""

from __future__ import annotations

import dataclasses
import math
import time
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.rollout.hooks.returns import HookReturnError, check_train_data, check_trainable, draw_groups
from slime.rollout.hooks.sample_errors import SampleError, check_completed, sample_problem, to_lists, train_problem
from slime.rollout.train_data import samples_to_train_data
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args

NAN, INF = math.nan, math.inf
ARGS = rollout_args(vocab_size=100)


def sample(**changes: Any) -> Sample:
    """Prompt [11, 12] and three response tokens, the second of which a tool wrote."""
    fields: dict[str, Any] = {"index": 7, "group_index": 3, "prompt": "p", "tokens": [11, 12, 21, 31, 22]}
    fields |= {"response_length": 3, "loss_mask": [1, 0, 1], "rollout_log_probs": [-0.5, 0.0, -1.5], "reward": 1.0}
    return Sample(**{**fields, "status": Sample.Status.COMPLETED, **changes})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [11, 12, 21, 31, 100]}, "100 as token 4 of 5; token ids are whole numbers from 0 to 99"),
    ({"tokens": [11, 12, 21, -1, 22]}, "-1 as token 3 of 5"),
    ({"tokens": [11, 12, 21, None, 22]}, "None as token 3 of 5"),
    ({"tokens": [11, 12.5, 21, 31, 22]}, "12.5 as token 1 of 5"),
    ({"tokens": ["11", 12, 21, 31, 22]}, "'11' as token 0 of 5"),
    ({"tokens": [11, 12, 10**30, 31, 22]}, "1000000000000000000000000000000 as token 2"),
    (
        {"tokens": [[11, 12, 21, 31, 22]], "response_length": 1, "loss_mask": [1], "rollout_log_probs": None},
        "as token",
    ),
    ({"tokens": "11 12"}, "tokens of the type str; it must be a list"),
    ({"tokens": None}, "tokens of the type NoneType; it must be a list"),
    ({"loss_mask": [1, 2, 1]}, "2 in the loss_mask at response token 1; a mask has only zeros and ones"),
    ({"loss_mask": [1, 0, 0.5]}, "0.5 in the loss_mask at response token 2"),
    ({"loss_mask": [1, None, 1]}, "None in the loss_mask at response token 1"),
    ({"loss_mask": [NAN, 0, 1]}, "nan in the loss_mask at response token 0"),
    ({"loss_mask": [1, -1, 1]}, "-1 in the loss_mask at response token 1"),
    ({"loss_mask": [1, 1]}, "a loss_mask of 2 entries for response_length 3; they must be equal"),
    ({"rollout_log_probs": [-0.5, 0.0, NAN]}, "nan in rollout_log_probs at response token 2, which is trained"),
    ({"rollout_log_probs": [-INF, 0.0, -1.5]}, "-inf in rollout_log_probs at response token 0, which is trained"),
    ({"rollout_log_probs": [None, 0.0, -1.5]}, "None in rollout_log_probs at response token 0, which is trained"),
    ({"rollout_log_probs": [-1e300, 0.0, -1.5]}, "-1e+300 in rollout_log_probs at response token 0"),
    ({"rollout_log_probs": [-0.5, "x", -1.5]}, "'x' in rollout_log_probs at response token 1; a log-prob is a finite"),
    ({"rollout_log_probs": [-0.5, 10**400, -1.5]}, "in rollout_log_probs at response token 1"),
    ({"rollout_log_probs": [-0.5, [0.0], -1.5]}, "[0.0] in rollout_log_probs at response token 1"),
    ({"rollout_log_probs": [-0.5]}, "a rollout_log_probs of 1 entries for response_length 3"),
    ({"teacher_log_probs": [NAN, 0.0, -1.0]}, "nan in teacher_log_probs at response token 0, which is trained"),
    ({"teacher_log_probs": [-1.0, 0.0]}, "a teacher_log_probs of 2 entries for response_length 3"),
    ({"response_length": 9}, "response_length 9 but only 5 tokens"),
    ({"response_length": -1}, "response_length -1; it must be a whole number from 0"),
    ({"response_length": 3.0}, "response_length 3.0; it must be a whole number"),
    ({"status": "completed"}, "the status 'completed'; it must be one of Sample.Status"),
    ({"metadata": None}, "metadata of the type NoneType; it must be a dict"),
    ({"weight_versions": [3]}, "weight_versions [3]; it must be a list of strings"),
    ({"end_reason": "tired"}, "the end_reason 'tired'; it must be None or one of done, max_turns, length, budget"),
    ({"reward_is_trusted": None}, "reward_is_trusted 'None'; it must be True or False"),
    ({"multimodal_train_inputs": {"pixel_values": [1]}}, "0 images (multimodal_inputs), 0 image_spans and multimodal"),
    ({"multimodal_inputs": {"images": ["x"], "videos": None}}, "1 images (multimodal_inputs), 0 image_spans and no "),
]


@pytest.mark.parametrize(("changes", "problem"), WRONG)
def test_a_sample_that_cannot_be_trained_on_is_told_with_place_and_value(changes: dict[str, Any], problem: str):
    found = sample_problem(ARGS, sample(**changes))
    assert found is not None and problem in found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": [0, 99, 21, 31, 22]},
        {"loss_mask": [True, False, True]},
        {"loss_mask": [1.0, 0.0, 1.0]},
        {"loss_mask": None, "rollout_log_probs": None},
        {"rollout_log_probs": [-0.5, -INF, -1.5]},
        {"rollout_log_probs": [-0.5, NAN, -1.5]},
        {"rollout_log_probs": [-0.5, None, -1]},
        {"rollout_log_probs": [NAN, NAN, NAN], "remove_sample": True},
        {"tokens": [], "response_length": 0, "loss_mask": [], "rollout_log_probs": []},
        {"multimodal_inputs": {"images": None, "videos": None}},
        {"response_length": np.int64(3)},
    ],
)
def test_what_no_loss_reads_may_be_anything(changes: dict[str, Any]):
    assert sample_problem(ARGS, sample(**changes)) is None


def test_a_log_prob_that_is_no_number_becomes_zero_where_it_is_masked():
    samples = [sample(rollout_log_probs=[-0.5, bad, -1.5]) for bad in (None, NAN, -INF)]
    data = samples_to_train_data(samples, [0.0] * 3, [0.0] * 3)
    assert data["rollout_log_probs"] == [[-0.5, 0.0, -1.5]] * 3


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple])
def test_arrays_tensors_and_tuples_become_lists(kind: Any):
    plain = sample()
    other = sample(**{name: kind(vars(plain)[name]) for name in ("tokens", "loss_mask", "rollout_log_probs")})
    to_lists(other)
    assert other.tokens == plain.tokens and other.loss_mask == plain.loss_mask
    assert other.rollout_log_probs == pytest.approx(plain.rollout_log_probs)
    assert sample_problem(ARGS, other) is None


def test_without_a_known_vocabulary_only_negative_ids_are_refused():
    args = rollout_args(vocab_size=None)
    assert sample_problem(args, sample(tokens=[11, 12, 21, 31, 10**9])) is None
    assert "whole numbers from 0" in (sample_problem(args, sample(tokens=[11, 12, 21, 31, -5])) or "")


def test_an_evaluation_trains_on_nothing_so_only_lengths_matter():
    assert sample_problem(ARGS, sample(tokens=[11, 12, 21, 31, 500]), evaluation=True) is None
    assert sample_problem(ARGS, sample(loss_mask=[1]), evaluation=True) is not None


def test_images_may_be_generated_for_where_nothing_is_trained():
    args = rollout_args(vocab_size=100, debug_rollout_only=True)
    assert sample_problem(args, sample(multimodal_train_inputs={"pixel_values": [1]})) is None


def test_a_trained_sample_has_a_prompt():
    assert "a prompt of at least one token" in (train_problem(ARGS, sample(tokens=[21, 31, 22])) or "")
    empty = sample(tokens=[], response_length=0, loss_mask=None, rollout_log_probs=None)
    assert "0 tokens and response_length 0" in (train_problem(ARGS, empty) or "")


def test_experts_that_are_replayed_have_a_row_for_each_input_token():
    args = rollout_args(vocab_size=100, use_rollout_routing_replay=True)
    args.num_layers, args.moe_router_topk = 2, 1
    assert train_problem(args, sample(rollout_routed_experts=np.zeros((4, 2, 1)))) is None
    found = train_problem(args, sample(rollout_routed_experts=np.zeros((5, 2, 1))))
    assert found == "rollout_routed_experts of the shape (5, 2, 1) for 5 tokens; it must be (4, 2, 1)"


def test_the_check_of_a_long_sample_takes_less_than_a_microsecond_a_token():
    size = 100_000
    long = sample(
        tokens=list(range(size + 1)),
        response_length=size,
        loss_mask=[1] * size,
        rollout_log_probs=[-0.5] * size,
    )
    args = rollout_args(vocab_size=size + 1)
    begun = time.process_time()
    assert train_problem(args, long) is None
    assert time.process_time() - begun < size * 1e-6


# ---- what the sources say


def test_one_object_in_two_places_is_named():
    twice = sample()
    for check in (
        lambda: check_completed(ARGS, "--custom-generate-function-path my:fn", sample(), [twice, twice]),
        lambda: check_trainable(ARGS, "--rollout-function-path my:fn", [twice, sample(), twice]),
    ):
        with pytest.raises(
            SampleError, match=r"path my:fn returned one Sample object twice: sample 7 \(prompt 3: 'p'"
        ):
            check()
    with pytest.raises(HookReturnError, match="get_samples returned one Sample object twice"):
        draw_groups(rollout_args(), Namespace(get_samples=lambda num_groups: [[twice, twice]]), 1)


def test_the_last_check_names_the_source_the_sample_and_its_place_in_the_rollout():
    samples = [sample(), sample(index=8, loss_mask=[1, 5, 1])]
    with pytest.raises(
        SampleError,
        match=r"--load-debug-rollout-data d/3\.pt returned sample 8 \(prompt 3: 'p'\), number 1 of the rollout, with "
        r"5 in the loss_mask at response token 1",
    ):
        check_trainable(ARGS, "--load-debug-rollout-data d/3.pt", samples)
    with pytest.raises(SampleError, match=r"a:b returned 'nan' for sample 7"):
        check_trainable(ARGS, "--rollout-function-path a:b", [sample(reward=NAN)])


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("tokens", [[11, 12, 100]], "100 as token 2 of 3"),
        ("tokens", [[100]], "1 tokens and response_length 1; it must be from 0 to 0"),
        ("loss_masks", [[3]], "3 in the loss_mask at response token 0"),
        ("loss_masks", [None], "None in loss_masks; it must be a list"),
        ("rollout_log_probs", [[NAN]], "nan in rollout_log_probs at response token 0, which is trained"),
        ("rewards", [INF], "inf in rewards; it must be a finite number"),
        ("raw_reward", [None], "None in raw_reward; it must be a finite number"),
    ],
)
def test_the_columns_of_a_converter_are_checked_alike(column: str, value: Any, problem: str):
    args = rollout_args(vocab_size=100)
    args.custom_convert_samples_to_train_data_path = "my.mod.convert"
    columns = {"tokens": [[11, 12, 21]], "response_lengths": [1], "rewards": [0.0], "raw_reward": [0.0]}
    columns |= {"truncated": [0], "sample_indices": [0], "rollout_ids": [0], "loss_masks": [[1]]}
    columns |= {"rollout_log_probs": [np.array([-0.5])]}
    assert check_train_data(args, columns)["rollout_mask_sums"] == [1]
    with pytest.raises(HookReturnError) as error:
        check_train_data(args, {**columns, column: value})
    assert f"my.mod:convert returned sample 0 with {problem}" in str(error.value)


def test_a_changed_sample_is_a_new_object():
    changed = dataclasses.replace(sample(), reward=0.0)
    check_trainable(ARGS, "a", [sample(), changed])


@pytest.mark.parametrize(
    "values",
    [
        {"loss_mask": torch.tensor([1, 0, 1])},
        {"loss_mask": [torch.tensor(1), torch.tensor(0), torch.tensor(1)]},
        {"response_length": torch.tensor(3)},
        {"tokens": range(5)},
        {"multimodal_inputs": {"images": [], "videos": None}},
        {"rollout_log_probs": np.array([-1, -2, -3], np.float16)},
    ],
)
def test_tensors_and_what_is_empty_are_taken(values):
    given = sample(**values)
    to_lists(given)
    assert train_problem(ARGS, given) is None


@pytest.mark.parametrize("column", ["loss_masks", "rollout_log_probs", "teacher_log_probs"])
def test_a_converters_tensors_are_taken_and_a_column_of_none_is_none(column):
    columns = samples_to_train_data([sample()], [1.0], [1.0])
    columns[column] = None if column == "teacher_log_probs" else [torch.tensor([1.0, 0.0, 1.0])]
    args = rollout_args(vocab_size=100)
    args.custom_convert_samples_to_train_data_path = "a:b"
    assert "tokens" in check_train_data(args, dict(columns))


def test_a_half_precision_infinity_is_no_log_prob():
    given = sample(rollout_log_probs=np.array([-INF, -1, -1], np.float16))
    to_lists(given)
    assert "a log-prob is a finite number" in train_problem(ARGS, given)
