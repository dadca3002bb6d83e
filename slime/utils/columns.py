"""Columns of a rollout that have one value per token, on their way from one process to another.

As lists of Python numbers they cost more to pickle and unpickle than everything else of a rollout together; as one
array a column they are read where they lie in shared memory. Measured for 512 samples of 576 tokens on one core of a
CPU: 11 ms to pickle and 21 ms to unpickle lists; 12 ms to make arrays of them, 1 ms for the rest. It knows nothing
about who sends or who reads.

Example:
    >>> sent = flatten_columns({"tokens": [[5, 6, 21], [5, 6]], "rewards": [1.0, 0.0]})
    >>> sent["tokens"].values
    array([ 5,  6, 21,  5,  6])
    >>> restore_columns(sent)
    {'tokens': [array([ 5,  6, 21]), array([5, 6])], 'rewards': [1.0, 0.0]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PER_TOKEN: dict[str, type[np.generic]] = {
    "tokens": np.int64,
    "loss_masks": np.int32,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
}
"""Name and type of the columns, as the trainer takes them."""


@dataclass(frozen=True)
class FlatColumn:
    """The values of all samples, one after the other.

    Attributes:
        values: [sum of lengths]; a tensor where NIXL carries it.
        lengths: [S] of each sample.
    """

    values: np.ndarray
    lengths: list[int]


def flatten_columns(share: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's share of a rollout with each column of `PER_TOKEN` as a `FlatColumn`; the others as they are.

    A column that is no list of samples stays as it is, too: whoever reads it says what is wrong with it.
    """
    return {
        name: _flat(values, PER_TOKEN[name]) if name in PER_TOKEN and isinstance(values, list) and values else values
        for name, values in share.items()
    }


def restore_columns(share: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `flatten_columns`: a list of an array per sample, which is a read-only view where it came out of the object
    store."""
    return {
        name: np.split(np.asarray(column.values), np.cumsum(column.lengths)[:-1])
        if isinstance(column, FlatColumn)
        else column
        for name, column in share.items()
    }


def _flat(samples: list[Any], dtype: type[np.generic]) -> FlatColumn:
    arrays = [np.asarray(sample, dtype=dtype) for sample in samples]
    return FlatColumn(np.concatenate(arrays), [len(array) for array in arrays])
