"""Which checkpoint a directory holds, from names alone."""

from __future__ import annotations

import pytest

from slime.checkpoints.paths import (
    TRACKER_FILE,
    classify_checkpoint,
    iteration_dir,
    latest_iteration,
    resolve_checkpoint_dir,
)
from slime.utils.errors import UsageError


def test_a_tracker_file_makes_a_megatron_checkpoint_and_a_config_an_hf_one(tmp_path):
    assert classify_checkpoint(None) is None
    assert classify_checkpoint(tmp_path / "absent") is None
    assert classify_checkpoint(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert classify_checkpoint(tmp_path) == "hf"
    (tmp_path / TRACKER_FILE).write_text("7")
    assert classify_checkpoint(tmp_path) == "megatron"


def test_the_newest_iteration_is_what_the_tracker_says(tmp_path):
    assert latest_iteration(tmp_path) is None
    (tmp_path / TRACKER_FILE).write_text("12\n")
    assert latest_iteration(tmp_path) == 12
    assert iteration_dir(tmp_path, 12).name == "iter_0000012"
    (tmp_path / TRACKER_FILE).write_text("release")
    assert latest_iteration(tmp_path) is None


def test_a_garbled_tracker_is_named(tmp_path):
    (tmp_path / TRACKER_FILE).write_text("twelve")
    with pytest.raises(UsageError, match="twelve"):
        latest_iteration(tmp_path)


def test_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(UsageError, match="no Megatron checkpoint"):
        resolve_checkpoint_dir(tmp_path)
    (tmp_path / TRACKER_FILE).write_text("3")
    (tmp_path / "iter_0000002").mkdir()
    with pytest.raises(UsageError, match="iter_0000002"):
        resolve_checkpoint_dir(tmp_path)
    assert resolve_checkpoint_dir(tmp_path, step=2) == (tmp_path / "iter_0000002", 2)
    (tmp_path / TRACKER_FILE).write_text("release")
    (tmp_path / "release").mkdir()
    assert resolve_checkpoint_dir(tmp_path) == (tmp_path / "release", None)
