"""Checkpoints of a run as the driver asks for them: a full disk, a lost writer, copies in memory."""

from __future__ import annotations

from types import SimpleNamespace

import fsspec
import pytest

from slime.checkpoints import remote
from slime.checkpoints.paths import TRACKER_FILE, iteration_dir, state_path
from slime.checkpoints.remote import Uploads
from slime.config.args import Args
from slime.ray import checkpoints
from slime.ray.checkpoints import Checkpoints
from slime.ray.utils import ActorFailure

NOTHING = Uploads(Args(save=None, save_hf=None, push_to_hub=None, remote_urls={}))


class FakeTrainers:
    """Trainers whose disk has room; they write down what they are asked for."""

    def __init__(self):
        self.saved = []

    def save_model(self, rollout_id):
        self.saved.append(rollout_id)

    def export_problem(self):
        return None


def checkpoints_of_full_disk(monkeypatch, tmp_path, *, needs_each=False):
    """Checkpoints whose data source finds no room at rollout 1, their trainers and the records."""
    monkeypatch.setattr(checkpoints, "get", lambda ref, *_: ref)
    records = []
    made = checkpoints.Checkpoints(
        str(tmp_path), is_async=False, exports=True, uploads=NOTHING, needs_each=needs_each, log=records.append
    )
    made.keep_state(0, None)
    made.keep_state(1, "the data source's state found no room")
    return made, FakeTrainers(), records


def test_a_data_source_that_finds_no_room_costs_a_checkpoint_and_not_the_run(monkeypatch, tmp_path, caplog):
    made, trainers, records = checkpoints_of_full_disk(monkeypatch, tmp_path)
    turns = SimpleNamespace(to_trainer=lambda group: None)
    for rollout_id in (0, 1, 2):
        made.save(rollout_id, [trainers], turns, is_last=False)
    assert trainers.saved == [0, 2], "nothing is written of the checkpoint that would have no state"
    assert [r["perf/checkpoint_not_written"] for r in records if "perf/checkpoint_not_written" in r] == [0, 1, 0]
    assert [r["perf/hf_export_not_written"] for r in records if "perf/hf_export_not_written" in r] == [0, 1, 0]
    assert "rollout 1 was not written: the data source's state found no room; the one before is kept" in caplog.text


@pytest.mark.parametrize("which", [{"is_last": True}, {"needs_each": True}])
def test_the_last_checkpoint_and_one_that_the_next_trainers_begin_from_cannot_be_missing(monkeypatch, tmp_path, which):
    made, trainers, _ = checkpoints_of_full_disk(monkeypatch, tmp_path, needs_each=which.get("needs_each", False))
    with pytest.raises(ActorFailure, match="the data source's state found no room; free some room"):
        turns = SimpleNamespace(to_trainer=lambda group: None)
        made.save(1, [trainers], turns, is_last=which.get("is_last", False))


def test_a_checkpoint_whose_writer_was_lost_behind_it_is_one_of_this_run(tmp_path):
    """The tracker is written last but for an export, in which a rank may be lost."""
    (tmp_path / TRACKER_FILE).write_text("3")  # of a run before
    settings = {"is_async": False, "exports": True, "uploads": NOTHING, "needs_each": False, "log": None}
    made = checkpoints.Checkpoints(str(tmp_path), **settings)
    assert not made.has_saved and not checkpoints.Checkpoints(None, **settings).has_saved
    (tmp_path / TRACKER_FILE).write_text("5")
    assert made.has_saved


def test_the_state_of_a_copy_that_is_a_checkpoints_now_stays_with_it(monkeypatch, tmp_path):
    made, trainers, _ = checkpoints_of_full_disk(monkeypatch, tmp_path)
    made.keep_state_of_copy(0)
    state = state_path(str(tmp_path), 0)
    state.parent.mkdir(parents=True)
    state.touch()
    made.save(0, [trainers], SimpleNamespace(to_trainer=lambda group: None), is_last=False)
    made.forget_state_of_copy()
    assert state.exists()


def test_trainers_are_not_copied_behind_a_rollout_whose_data_source_found_no_room(monkeypatch, tmp_path, caplog):
    made, *_ = checkpoints_of_full_disk(monkeypatch, tmp_path)
    assert made.has_state_for_copy(0) and not made.has_state_for_copy(1)
    assert "the states of rollout 1 are not copied: the data source's state found no room" in caplog.text


class Writers(FakeTrainers):
    """Trainers that write the files of a checkpoint, at once or when they are to finish one."""

    def __init__(self, root, *, is_async):
        super().__init__()
        self.root, self.is_async = root, is_async

    def save_model(self, rollout_id):
        super().save_model(rollout_id)
        if not self.is_async:
            self.finish_save()

    def save_is_written(self):
        return True

    def finish_save(self):
        directory = iteration_dir(self.root, self.saved[-1])
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(str(self.saved[-1]))
        (self.root / TRACKER_FILE).write_text(str(self.saved[-1]))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_checkpoint_is_sent_once_it_is_complete(monkeypatch, tmp_path, is_async):
    monkeypatch.setattr(checkpoints, "get", lambda ref, *_: ref)
    turns = SimpleNamespace(to_trainer=lambda group: None)
    there, url = fsspec.filesystem("memory"), f"memory://{tmp_path.name}/run"
    uploads = Uploads(Args(save=str(tmp_path), save_hf=None, load=None, remote_urls={"save": url}))
    settings = {"exports": False, "uploads": uploads, "needs_each": False, "log": [].append}
    made, writers = Checkpoints(str(tmp_path), is_async=is_async, **settings), Writers(tmp_path, is_async=is_async)

    def newest():
        uploads.wait()
        path = f"{url}/{TRACKER_FILE}"
        return there.cat_file(path).decode() if there.exists(path) else None

    made.save(0, [writers], turns, is_last=False)
    assert newest() == (None if is_async else "0"), "one that is only begun is not sent"
    made.finish([writers], turns, if_written=True)
    assert newest() == "0"
    made.save(1, [writers], turns, is_last=True)
    assert newest() == "1"
    monkeypatch.setattr(remote, "_place_of", lambda _: 1 / 0)
    with pytest.raises(ActorFailure, match="the last checkpoint or export was not sent .ZeroDivisionError"):
        made.save(2, [writers], turns, is_last=True)
