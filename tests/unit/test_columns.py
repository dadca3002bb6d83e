"""Columns of a share on their way between processes: what comes out is what went in."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from slime.training.micro_batches import to_tensors
from slime.utils.train_data import PER_TOKEN, FlatColumn, flatten_columns, restore_columns

SHARE = {
    "tokens": [[5, 6, 21, 22, 2], [5, 6], [7, 8, 2]],
    "response_lengths": [3, 0, 1],
    "loss_masks": [[1, 0, 1], [], [1]],
    "rollout_log_probs": [[-0.1, -0.2, 0.0], [], [-2.3]],
    "rewards": [1.0, 0.0, 0.5],
    "metadata": [{"a": 1}, None, {}],
}


def test_a_share_that_went_to_another_process_gives_the_same_tensors_as_its_lists():
    sent = pickle.loads(pickle.dumps(flatten_columns(SHARE)))
    assert {name for name, column in sent.items() if isinstance(column, FlatColumn)} == PER_TOKEN.keys() & SHARE.keys()
    device = torch.device("cpu")
    found, wanted = to_tensors(restore_columns(sent), device), to_tensors(dict(SHARE), device)
    assert found.keys() == wanted.keys()
    for name in ("tokens", "loss_masks", "rollout_log_probs"):
        for one, other in zip(found[name], wanted[name], strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
    assert found["rewards"] == SHARE["rewards"] and found["metadata"] == SHARE["metadata"]


def test_tensors_made_of_read_only_memory_may_be_written_to():
    sent = flatten_columns(SHARE)
    sent["tokens"].values.flags.writeable = False  # as the object store hands arrays out
    tokens = to_tensors(restore_columns(sent), torch.device("cpu"))["tokens"]
    tokens[0][0] = 9
    assert tokens[0][0] == 9 and sent["tokens"].values[0] == 5


def test_columns_of_a_custom_converter_may_hold_arrays_and_empty_shares_stay_empty():
    given = {"tokens": [np.array([1, 2]), np.array([3])], "loss_masks": []}
    found = restore_columns(flatten_columns(given))
    assert [value.tolist() for value in found["tokens"]] == [[1, 2], [3]] and found["loss_masks"] == []


def test_what_is_no_column_of_samples_is_left_to_its_reader():
    assert flatten_columns({"tokens": None, "loss_masks": "x"}) == {"tokens": None, "loss_masks": "x"}
    with pytest.raises(TypeError):
        flatten_columns({"tokens": [[1, None]]})
