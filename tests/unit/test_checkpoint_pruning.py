"""--keep-checkpoints: what is deleted, and all that is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slime.checkpoints.paths import MODEL_SHAPE_FILE
from slime.training.resume import prune_checkpoints, prune_exports


def make_iteration(root: Path, iteration: int, *, ours: bool = True) -> Path:
    directory = root / f"iter_{iteration:07d}"
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(b"weights")
    if ours:
        (directory / MODEL_SHAPE_FILE).write_text("{}")
    states = root / "rollout"
    states.mkdir(exist_ok=True)
    (states / f"global_dataset_state_dict_{iteration}.pt").write_bytes(b"state")
    return directory


def make_export(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def states(root: Path) -> list[str]:
    return sorted(path.stem.rpartition("_")[2] for path in (root / "rollout").iterdir())


def test_every_so_many_rollouts_stay_and_of_the_others_the_newest(tmp_path: Path):
    """--save-retain-interval 4: what was saved after 4 and 8 rollouts, which are those numbered 3 and 7."""
    for iteration in (1, 3, 5, 7, 9):
        make_iteration(tmp_path / "ckpt", iteration)
        make_export(tmp_path / "hf" / str(iteration))
    assert prune_checkpoints(tmp_path / "ckpt", 9, keep=1, retain=4) == [1, 5]
    assert states(tmp_path / "ckpt") == ["3", "7", "9"]
    assert prune_exports(str(tmp_path / "hf" / "{rollout_id}"), 9, keep=1, retain=4) == [1, 5]
    assert names(tmp_path / "hf") == ["3", "7", "9"]


def test_the_newest_iterations_stay_with_their_data_states(tmp_path: Path):
    for iteration in (1, 3, 5, 9):
        make_iteration(tmp_path, iteration)
    assert prune_checkpoints(tmp_path, 9, keep=2) == [1, 3]
    assert names(tmp_path) == ["iter_0000005", "iter_0000009", "rollout"]
    assert states(tmp_path) == ["5", "9"]
    assert prune_checkpoints(tmp_path, 9, keep=2) == []
    assert prune_checkpoints(tmp_path, 9, keep=1) == [5]
    assert names(tmp_path) == ["iter_0000009", "rollout"]


def test_iterations_after_the_one_just_written_count_for_nothing_and_stay(tmp_path: Path):
    """A run that went back to iteration 2 writes 3: what the abandoned branch left is neither newest nor old."""
    for iteration in (1, 2, 3, 7, 8):
        make_iteration(tmp_path, iteration)
    assert prune_checkpoints(tmp_path, 3, keep=1) == [1, 2]
    assert names(tmp_path) == ["iter_0000003", "iter_0000007", "iter_0000008", "rollout"]
    assert states(tmp_path) == ["3", "7", "8"]


def test_a_rollout_begun_ahead_keeps_its_data_state(tmp_path: Path):
    make_iteration(tmp_path, 4)
    (tmp_path / "rollout" / "global_dataset_state_dict_5.pt").write_bytes(b"ahead")
    (tmp_path / "rollout" / "global_dataset_state_dict_2.pt").write_bytes(b"of an iteration that is gone")
    prune_checkpoints(tmp_path, 4, keep=1)
    assert states(tmp_path) == ["4", "5"]


def test_what_slime_did_not_write_is_not_touched(tmp_path: Path):
    make_iteration(tmp_path, 1, ours=False)  # no model_shape.json: another program's
    for name in ("release", "iter_0000001_backup", "iter_one", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MODEL_SHAPE_FILE).write_text("{}")
    make_iteration(tmp_path, 2)
    make_iteration(tmp_path, 3)
    (tmp_path / "rollout" / "mine_1.pt").write_bytes(b"")
    before = names(tmp_path)
    assert prune_checkpoints(tmp_path, 3, keep=1) == [2]
    assert names(tmp_path) == [name for name in before if name != "iter_0000002"]
    assert {path.name for path in (tmp_path / "rollout").iterdir()} >= {
        "mine_1.pt",
        "global_dataset_state_dict_1.pt",
    }


def test_what_the_run_loads_is_not_touched(tmp_path: Path):
    hf = make_export(make_iteration(tmp_path, 1) / "hf")
    for iteration in (2, 3, 4):
        make_iteration(tmp_path, iteration)
    assert prune_checkpoints(tmp_path, 4, keep=1, protected=[hf], protected_ids=[2]) == [3]
    assert names(tmp_path) == ["iter_0000001", "iter_0000002", "iter_0000004", "rollout"]


def test_a_deletion_that_was_cut_off_is_ended_by_the_next(tmp_path: Path):
    make_iteration(tmp_path, 1).rename(tmp_path / ".iter_0000001.deleted")
    make_iteration(tmp_path, 2)
    prune_checkpoints(tmp_path, 2, keep=3)
    assert names(tmp_path) == ["iter_0000002", "rollout"]


def test_what_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    make_iteration(tmp_path, 1)
    make_iteration(tmp_path, 2)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with caplog.at_level(logging.WARNING):
        assert prune_checkpoints(tmp_path, 2, keep=1) == []
    assert "iter_0000001 cannot be deleted" in caplog.text


@pytest.mark.parametrize(
    "template", ["out/hf_{rollout_id}", "out/{rollout_id}/hf", "out/{rollout_id:05d}", "{rollout_id}/"]
)
def test_exports_are_found_where_the_template_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
):
    monkeypatch.chdir(tmp_path)
    places = {i: Path(template.format(rollout_id=i)) for i in (0, 2, 10, 11)}
    for place in places.values():
        make_export(place)
    absolute = str(tmp_path / template)
    assert prune_exports(absolute, 10, keep=2, protected=[places[0]]) == []
    assert prune_exports(absolute, 10, keep=1, protected=[places[0]]) == [2]
    assert prune_exports(template, 10, keep=1) == [0]
    assert [i for i, place in places.items() if place.exists()] == [10, 11]


def test_only_exports_of_the_template_are_deleted(tmp_path: Path):
    template = str(tmp_path / "hf_{rollout_id}")
    for name in ("hf_1", "hf_3", "hf_x", "hf_02", "other_1"):
        make_export(tmp_path / name)
    (tmp_path / "hf_2").mkdir()  # no export
    assert prune_exports(template, 3, keep=1) == [1]
    assert names(tmp_path) == ["hf_02", "hf_2", "hf_3", "hf_x", "other_1"]
    assert prune_exports(str(tmp_path / "hf_3"), 9, keep=1) == [], "one place is one export"
