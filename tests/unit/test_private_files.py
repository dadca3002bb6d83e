"""What is written where others could read secrets or replace code, under the most open umask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.checkpoint.hf_export import HfWriter
from slime.backends.sglang_utils import engine_patches
from slime.backends.sglang_utils.disk_weights import LocalCheckpoint
from slime.backends.sglang_utils.launch_server import hidden, write_launch_file
from slime.checkpoints.rollout_files import samples_path, save_dump
from slime.observability.logging_utils import RunEvents
from slime.observability.rollout_records.recorder import write_samples
from slime.observability.trackers import FOLDER, RUN_FILE, write_json
from slime.processes.directories import READABLE, make_own_directory, open_new, use_private_temp_dir
from slime.utils.errors import UsageError
from slime.utils.types import Sample


def mode_of(path: str | Path) -> int:
    return os.lstat(path).st_mode & 0o777


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def shared_temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory like /tmp, in which everybody may make files."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return shared


def test_temporary_files_go_where_nobody_else_gets_to_them(shared_temp_dir: Path) -> None:
    use_private_temp_dir()
    assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(shared_temp_dir / f"slime-tmp-{os.getuid()}")
    assert mode_of(tempfile.gettempdir()) == 0o700
    (compiled := Path(tempfile.gettempdir(), "kernel.so")).touch()
    use_private_temp_dir()  # of a process that inherits it
    assert compiled.parent == Path(tempfile.gettempdir())


def test_what_others_have_put_there_under_its_name_is_not_used(shared_temp_dir: Path) -> None:
    (trap := shared_temp_dir / f"slime-tmp-{os.getuid()}").mkdir()
    trap.chmod(0o777)
    use_private_temp_dir()
    assert tempfile.gettempdir() != str(trap) and mode_of(tempfile.gettempdir()) == 0o700


def test_a_directory_is_only_taken_from_its_own_user(tmp_path: Path) -> None:
    make_own_directory(tmp_path / "new")
    make_own_directory(tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(PermissionError, match="link is not a directory"):
        make_own_directory(tmp_path / "link")
    (tmp_path / "new").chmod(0o755)
    make_own_directory(tmp_path / "new", forbidden=0o022)
    with pytest.raises(PermissionError, match=r"other users have access to .*new \(mode 0755\)"):
        make_own_directory(tmp_path / "new")
    if os.getuid() == 0:
        os.chown(tmp_path / "new", 65534, 65534)
        with pytest.raises(PermissionError, match="belongs to another user .uid 65534"):
            make_own_directory(tmp_path / "new")


def test_a_file_is_private_from_its_first_moment_also_in_the_place_of_an_open_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert mode_of(path) == 0o666
    with open_new(path):
        assert mode_of(path) == 0o600
    with open_new(path, mode=READABLE):
        assert mode_of(path) == 0o644


def test_what_starts_an_engine_and_what_is_loaded_with_trust_is_its_users_own(tmp_path: Path) -> None:
    launch_file = tmp_path / "logs" / "engine_0.json"
    write_launch_file(launch_file, accelerator="cpu", server_args={"ssl_keyfile_password": "x"})
    assert json.loads(launch_file.read_text())["server_args"] == {"ssl_keyfile_password": "x"}
    save_dump(tmp_path / "0.pt", {"rollout_id": 0})
    assert mode_of(launch_file) == mode_of(tmp_path / "0.pt") == 0o600
    assert mode_of(launch_file.parent) == 0o777, "directories of outputs are as the umask says"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_exported_weights_are_shared_as_the_umask_says(tmp_path: Path, umask: int, mode: int) -> None:
    """A group that shares checkpoints shares exports; safetensors alone would let nobody else read them."""
    os.umask(umask)
    writer = HfWriter(tmp_path / "hf", None)
    writer.add([("w", torch.ones(2))])
    writer.finish()
    assert mode_of(tmp_path / "hf" / "model.safetensors") == mode


def test_a_secret_argument_of_an_engine_is_not_in_its_log() -> None:
    assert hidden("ssl_keyfile_password", "x") == "x" and repr(hidden("ssl_keyfile_password", "x")) == "'***'"
    assert repr(hidden("model_path", "m")) == "'m'" and hidden("api_key", None) is None


def test_the_script_that_starts_a_scheduler_on_its_numa_node_can_only_be_written_by_its_user(
    shared_temp_dir: Path,
) -> None:
    path, shown = engine_patches.write_numa_script("--cpunodebind=0")
    assert mode_of(path) == 0o700 and Path(path).parent == shared_temp_dir
    line = f'exec numactl --cpunodebind=0 {sys.executable} "$@"'
    assert Path(path).read_text().splitlines() == ["#!/bin/sh", line] and "cpunodebind" in shown


def test_weights_are_not_kept_where_others_can_replace_them(tmp_path: Path) -> None:
    version = tmp_path / "weight_v000001"
    version.mkdir()
    index = {"metadata": {"run": "a", "id": "b"}, "weight_map": {}}
    (version / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "local").mkdir()  # by anybody, under this umask
    with pytest.raises(UsageError, match=r"dir .*/local: other users have access .*0777.*replace the weights"):
        LocalCheckpoint(tmp_path / "local").bring_to(version)


def test_an_engine_leaves_no_mode_to_the_umask_of_its_starter(shared_temp_dir: Path, tmp_path: Path) -> None:
    """The server itself is not needed: what comes before its first import decides."""
    script = (
        "import os, pathlib, sys, tempfile\n"
        "from slime.backends.sglang_utils import launch_server\n"
        "def prepare(launch):\n"
        "    print(oct(os.umask(0)), tempfile.gettempdir())\n"
        "    sys.exit()\n"
        "launch_server.prepare = prepare\n"
        "launch_server.main(pathlib.Path(sys.argv[1]))\n"
    )
    write_launch_file(tmp_path / "engine.json", accelerator="cpu", server_args={})
    command = [sys.executable, "-c", script, str(tmp_path / "engine.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0o77", str(shared_temp_dir / f"slime-tmp-{os.getuid()}")], done.stderr


def test_what_a_run_records_of_itself_is_its_users_own(tmp_path: Path) -> None:
    RunEvents(tmp_path).start("python train.py", None, {})
    write_json(tmp_path / FOLDER / RUN_FILE, {})
    write_samples(samples_path(tmp_path / "rollouts", 0), [(0, Sample(index=0), None)], reward_key=None)
    for path in (tmp_path / "run_events.jsonl", tmp_path / FOLDER / RUN_FILE, samples_path(tmp_path / "rollouts", 0)):
        assert mode_of(path) == 0o600
