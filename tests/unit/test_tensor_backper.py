"""Weights by tag: swapped in place and put back, whatever happens in between."""

from __future__ import annotations

import pytest
import torch

from slime.utils.tensor_backper import TensorBackuper


def test_a_swap_is_undone_bit_for_bit_even_when_the_block_raises():
    weight = torch.randn(4)
    view = weight[:2]  # as an optimizer's shard is
    backuper = TensorBackuper(lambda: [("w", weight)])
    reference = weight.clone()
    backuper.backup("ref")
    weight += torch.randn(4)
    trained = weight.clone()
    with pytest.raises(RuntimeError, match="inside"), backuper.swapped("ref"):
        assert torch.equal(weight, reference)
        raise RuntimeError("inside")
    assert torch.equal(weight, trained)
    assert torch.equal(view, trained[:2])
    assert backuper.tags == ["ref"]


def test_a_backup_is_a_copy_and_can_be_renewed():
    weight = torch.ones(2)
    backuper = TensorBackuper(lambda: [("w", weight)])
    backuper.backup("ref")
    weight.fill_(2)
    backuper.restore("ref")
    assert weight.tolist() == [1.0, 1.0]
    weight.fill_(3)
    backuper.backup("ref")
    weight.zero_()
    backuper.restore("ref")
    assert weight.tolist() == [3.0, 3.0]


def test_a_dropped_tag_is_gone_and_may_be_dropped_again():
    backuper = TensorBackuper(lambda: [("w", torch.ones(1))])
    backuper.backup("old")
    backuper.backup("ref")
    backuper.drop("old")
    backuper.drop("old")
    assert backuper.tags == ["ref"]


def test_an_unknown_tag_names_the_known_ones():
    backuper = TensorBackuper(lambda: [("w", torch.ones(1))])
    backuper.backup("actor")
    with pytest.raises(KeyError, match=r"'ref'.*actor"):
        backuper.restore("ref")
