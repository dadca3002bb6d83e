"""Checkpoints whose files are not what was written are never loaded: the one before is, or an error names the file."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.checkpoints.paths import (
    MANIFEST_FILE,
    MODEL_SHAPE_FILE,
    STATE_MANIFEST,
    TRACKER_FILE,
    entries_of,
    manifest_of_state,
    state_path,
    write_manifest,
)
from slime.config.args import Args
from slime.ray.checkpoints import settle_checkpoint
from slime.training.resume import (
    REFERENCE_PART,
    STATE_FILE,
    note_state_of_data_source,
)
from slime.utils.errors import UsageError, is_of_full_disk
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tests.unit.test_checkpoint import FLAGS, RUN

NUM_FAULTS = 1000


def flags_for(root: Path | None, **given: object) -> Args:
    args = Args()
    vars(args).update(
        {
            "load": root and str(root),
            "ckpt_step": None,
            "ref_load": None,
            "ref_ckpt_step": None,
            "opd_teacher_load": None,
        }
        | {"opd_teacher_ckpt_step": None, "use_critic": False, "debug_rollout_only": False}
        | {"verify_checkpoint": "full", "save": None, "resume": None, "finetune": False, "start_rollout_id": None}
        | {"eval_only": False, "load_debug_rollout_data": None}
        | given
    )
    return args.freeze()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two trainer ranks wrote as iteration 1, with the state of a data source."""
    work = tmp_path_factory.mktemp("saved")
    make_hf_model(work / "hf")
    root = work / "root"
    write_state(root, 1)
    run_world(2, save_with_state, make_args(work / "hf", FLAGS, **RUN, actor_num_gpus_per_node=2), root)
    return root


def write_state(root: Path, step: int) -> None:
    """What a data source writes after a rollout."""
    state = state_path(root, step)
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_bytes(os.urandom(300))
    write_manifest(manifest_of_state(state), entries_of(state.parent, [state]))


def save_with_state(args: Any, root: Path) -> None:
    from slime.backends.megatron_utils.checkpoint.iterations import begin_checkpoint
    from tests.unit.test_checkpoint import build

    def write_more(directory: Path) -> None:
        if torch.distributed.get_rank() == 0:
            note_state_of_data_source(directory, str(root), 1)

    state = build(args)
    begin_checkpoint(
        root,
        1,
        model=state.model,
        optimizer=state.optimizer,
        scheduler=state.scheduler,
        write_more=write_more,
    ).finish()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A root with the whole iterations 3 and 7 and their states; they hold nothing that could be loaded."""
    for step in (3, 7):
        directory = tmp_path / f"iter_{step:07d}"
        directory.mkdir()
        (directory / MODEL_SHAPE_FILE).write_text("{}")
        (directory / "__0_0.distcp").write_bytes(os.urandom(1000))
        write_state(tmp_path, step)
        note_state_of_data_source(directory, str(tmp_path), step)
        write_manifest(directory / MANIFEST_FILE, entries_of(directory, sorted(directory.iterdir())))
    (tmp_path / TRACKER_FILE).write_text("7")
    return tmp_path


def damage(path: Path, fault: str, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if fault == "delete":
        path.unlink()
    elif fault == "truncate":
        os.truncate(path, chance.randrange(len(content)))
    else:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)


def files_of(root: Path) -> Iterator[Path]:
    yield from (path for path in sorted((root / "iter_0000001").rglob("*")) if path.is_file())
    yield state_path(root, 1)
    yield manifest_of_state(state_path(root, 1))


@pytest.mark.processes
def test_a_manifest_names_every_file_that_both_ranks_wrote(saved: Path) -> None:
    args = flags_for(saved)
    assert settle_checkpoint(args) is args
    named = {path.name for path in files_of(saved)}
    assert {"common.pt", ".metadata", MODEL_SHAPE_FILE, MANIFEST_FILE} <= named
    assert any(name.startswith("__1_") for name in named), "a file of rank 1"
    entries = entries_of(saved, list(files_of(saved)))
    assert all(entry["bytes"] for entry in entries.values())


@pytest.mark.processes
def test_each_of_a_thousand_random_faults_is_found(saved: Path) -> None:
    chance, files = random.Random(0), list(files_of(saved))
    for number in range(NUM_FAULTS):
        path, fault = chance.choice(files), chance.choice(["delete", "truncate", "flip"])
        before = path.read_bytes()
        damage(path, fault, chance)
        with pytest.raises(UsageError) as error:
            settle_checkpoint(flags_for(saved))
        where = str(path) if path.name != MANIFEST_FILE else MANIFEST_FILE
        assert where in str(error.value), (number, fault, path, str(error.value))
        path.write_bytes(before)
    assert settle_checkpoint(flags_for(saved)).ckpt_step is None


def test_the_iteration_before_a_damaged_one_is_taken_and_said(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(two / "iter_0000007/__0_0.distcp", "flip", random.Random(1))
    assert settle_checkpoint(flags_for(two)).ckpt_step == 3
    assert "iteration 7 cannot be loaded" in caplog.text and "__0_0.distcp is not what was written" in caplog.text
    assert "goes on from iteration 3" in caplog.text


@pytest.mark.parametrize("fault", ["flip", "delete"])
@pytest.mark.parametrize("name_of", [lambda path: path, manifest_of_state], ids=["state", "its manifest"])
def test_an_iteration_whose_data_source_has_lost_its_place_is_not_taken(two, caplog, fault, name_of) -> None:
    path = name_of(state_path(two, 7))
    damage(path, fault, random.Random(1))
    assert settle_checkpoint(flags_for(two)).ckpt_step == 3
    assert f"iteration 7 cannot be loaded: {path} is" in caplog.text and "the data source's state" in caplog.text
    damage(name_of(state_path(two, 3)), fault, random.Random(1))
    with pytest.raises(UsageError, match=r"state_dict_7.*--verify-checkpoint none.*no other iteration that is whole"):
        settle_checkpoint(flags_for(two))
    assert settle_checkpoint(flags_for(two, verify_checkpoint="none")).ckpt_step is None
    assert settle_checkpoint(flags_for(None, ref_load=str(two))).ckpt_step is None, "a reference draws no prompts"
    for given in (
        {"finetune": True},
        {"eval_only": True},
        {"load_debug_rollout_data": "dump.pt"},
        {"start_rollout_id": 0},
    ):
        assert settle_checkpoint(flags_for(two, **given)).ckpt_step is None, f"with {given} none is needed"


def test_an_iteration_without_a_state_of_slimes_is_taken(two: Path) -> None:
    """A data source of the user's own writes what it likes, and a replay nothing."""
    shutil.rmtree(two / "rollout")
    directory = two / "iter_0000007"
    (directory / STATE_MANIFEST).unlink()
    write_manifest(directory / MANIFEST_FILE, entries_of(directory, [directory / "__0_0.distcp"]))
    note_state_of_data_source(directory, str(two), 7)
    assert not (directory / STATE_MANIFEST).exists()
    assert settle_checkpoint(flags_for(two)).ckpt_step is None


def test_an_iteration_behind_a_link_has_its_state(two: Path) -> None:
    elsewhere = two / "far" / "away"
    elsewhere.mkdir(parents=True)
    (two / "iter_0000007").rename(elsewhere / "iter_0000007")
    (two / "iter_0000007").symlink_to(elsewhere / "iter_0000007")
    assert settle_checkpoint(flags_for(two)).ckpt_step is None


def test_an_iteration_that_is_asked_for_is_not_exchanged(two: Path) -> None:
    damage(two / "iter_0000007/__0_0.distcp", "truncate", random.Random(1))
    with pytest.raises(UsageError, match=r"--ckpt-step 7: .* bytes, but 1000 were written; .* is --ckpt-step 3"):
        settle_checkpoint(flags_for(two, ckpt_step=7))
    assert settle_checkpoint(flags_for(two, ckpt_step=3)).ckpt_step == 3


def test_a_damaged_release_is_an_error_for_nothing_came_before_it(two: Path) -> None:
    (two / "iter_0000007").rename(two / "release")
    (two / TRACKER_FILE).write_text("release")
    assert settle_checkpoint(flags_for(two)).ckpt_step is None
    (two / "release/__0_0.distcp").unlink()
    with pytest.raises(
        UsageError, match=r"release/__0_0.distcp is missing; it holds no other iteration that is whole"
    ):
        settle_checkpoint(flags_for(two))


def test_a_run_that_has_lost_its_tracker_does_not_begin_anew_over_its_checkpoints(two: Path) -> None:
    (two / TRACKER_FILE).unlink()
    begins = flags_for(two, load=None, save=str(two))
    with pytest.raises(UsageError, match=r"holds iter_0000007, but no latest_checkpointed_iteration.txt"):
        settle_checkpoint(begins)
    never = begins.replace(resume="never")
    assert settle_checkpoint(never) is never


@pytest.mark.processes
def test_a_damaged_reference_is_an_error(two: Path, saved: Path) -> None:
    damage(two / "iter_0000007/__0_0.distcp", "flip", random.Random(1))
    with pytest.raises(UsageError, match=r"--ref-load .*__0_0.distcp is not what was written"):
        settle_checkpoint(flags_for(saved, ref_load=str(two)))
    assert settle_checkpoint(flags_for(saved, ref_load=str(two), ref_ckpt_step=3)).ckpt_step is None


def test_checksums_are_compared_as_the_flag_says(two: Path) -> None:
    damage(two / "iter_0000007/__0_0.distcp", "flip", random.Random(1))
    assert settle_checkpoint(flags_for(two, verify_checkpoint="sizes")).ckpt_step is None, "its size is right"
    (two / "iter_0000007/__0_0.distcp").unlink()
    assert settle_checkpoint(flags_for(two, verify_checkpoint="sizes")).ckpt_step == 3
    assert settle_checkpoint(flags_for(two, verify_checkpoint="none")).ckpt_step is None


def test_a_checkpoint_of_megatrons_own_is_taken_as_it_is(two: Path) -> None:
    for name in (MODEL_SHAPE_FILE, MANIFEST_FILE, "__0_0.distcp"):
        (two / "iter_0000007" / name).unlink()
    assert settle_checkpoint(flags_for(two)).ckpt_step is None


# ---- a full disk


def save_where_nothing_fits(args, root):
    from slime.backends.megatron_utils.checkpoint.iterations import begin_checkpoint
    from slime.training import resume as writing
    from tests.unit.test_checkpoint import build

    state = build(args)
    for margin in (writing.MARGIN, -(2**40)):  # seen before anything is written, and while it is
        writing.MARGIN = margin
        with pytest.raises(writing.DiskFull, match="GB free, and it takes" if margin > 0 else "became full"):
            begin_checkpoint(root, 0, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler).finish()
        assert not list(root.iterdir()), "what was written is gone again"
        torch.distributed.barrier()  # before another save begins


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_checkpoint_that_finds_its_disk_full_is_given_up_by_all_ranks(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        make_hf_model(tmp_path / "hf")
        args = make_args(tmp_path / "hf", FLAGS, **RUN, actor_num_gpus_per_node=2)
        run_world(2, save_where_nothing_fits, args, small)
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


FAILS_ON_ONE_RANK = (
    (0, ".iter_0000000.partial/common.pt"),
    (0, ".iter_0000000.partial/metadata.json"),
    (0, ".iter_0000000.partial/.metadata.tmp"),
    (0, ".iter_0000000.partial/__0_0.distcp"),
    (1, ".iter_0000000.partial/__1_0.distcp"),
    (0, f".iter_0000000.partial/{STATE_FILE}"),
    (0, f".iter_0000000.partial/{REFERENCE_PART}/common.pt"),
    (0, f".iter_0000000.partial/{REFERENCE_PART}/__0_0.distcp"),
    (0, f".iter_0000000.partial/{MODEL_SHAPE_FILE}"),
    (0, f".iter_0000000.partial/.{MANIFEST_FILE}."),
    (0, f".{TRACKER_FILE}.partial"),
)


def save_where_one_file_finds_no_room(args: Any, root: Path) -> None:
    """Of two ranks one opens a device that is always full in place of a file; then fsync fails, then all is well."""
    from slime.backends.megatron_utils.checkpoint.iterations import begin_checkpoint, save_weights
    from slime.training.resume import DiskFull, write_resumed_state
    from tests.unit.test_checkpoint import build

    state, rank, opens, syncs = build(args), torch.distributed.get_rank(), io.open, os.fsync

    def write_more(directory: Path) -> None:
        backend = SimpleNamespace(save_weights=lambda part: save_weights(part, state.model))
        parts = {"backend": backend, "weights": AsTheyAre(), "controller": SimpleNamespace(coef=1)}
        write_resumed_state(args, directory, **parts)

    def save(in_background: bool) -> None:
        parts = {"model": state.model, "optimizer": state.optimizer, "scheduler": state.scheduler}
        begin_checkpoint(root, 0, **parts, write_more=write_more, in_background=in_background).finish()

    def expect_disk_full(what: object) -> None:
        begin = time.monotonic()
        with pytest.raises(DiskFull, match="became full: .*No space left on device"):
            save(in_background)
        assert time.monotonic() - begin < 20, f"{what}: a rank waited for another"
        assert not list(root.iterdir()), f"{what}: what was written is gone again"
        torch.distributed.barrier()  # before another save begins

    for in_background in (False, True):
        for which, name in FAILS_ON_ONE_RANK:

            def open_full(path: Any, *more: Any, full: str = str(root / name), **named: Any) -> Any:
                return opens("/dev/full" if str(path).startswith(full) else path, *more, **named)

            if rank == which:
                builtins.open = io.open = open_full
            expect_disk_full((in_background, which, name))
            builtins.open = io.open = opens
        if rank == 1:
            os.fsync = lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        expect_disk_full((in_background, "fsync"))
        os.fsync = syncs
    save(in_background=True)
    assert {path.name for path in root.iterdir()} == {"iter_0000000", TRACKER_FILE}


class AsTheyAre:
    """In place of the copies of weights: the reference's are the model's."""

    def swapped(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_file_of_one_rank_that_finds_no_room_ends_the_checkpoint_on_all_ranks_at_once(tmp_path: Path) -> None:
    make_hf_model(tmp_path / "hf")
    args = make_args(tmp_path / "hf", FLAGS, **RUN, actor_num_gpus_per_node=2, distributed_timeout_minutes=0.4)
    vars(args).update(kl_ctrl="adaptive", ref_update_interval=1)
    (tmp_path / "root").mkdir()
    run_world(2, save_where_one_file_finds_no_room, args, tmp_path / "root")


def test_a_full_disk_is_recognised_behind_other_errors() -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("Worker failure") from error
    except RuntimeError as error:
        assert is_of_full_disk(error)
    assert not is_of_full_disk(OSError(5, "Input/output error"))
