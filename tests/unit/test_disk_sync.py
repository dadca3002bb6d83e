"""Weight sync over files: what is written, when it has its name, what engines refuse, and whose directory it is.

The engine is a dictionary of weights that loads files with the code of the real one.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from slime.backends.megatron_utils.checkpoint import hf_export
from slime.backends.megatron_utils.update_weight import build_weight_updater, over_files_instead
from slime.backends.megatron_utils.update_weight.base import WeightSyncError
from slime.backends.megatron_utils.update_weight.bucket_updater import BucketUpdater
from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
from slime.backends.sglang_utils import disk_weights
from slime.backends.sglang_utils.engine_client import DirectEngine, EngineContact
from slime.checkpoints import paths
from slime.checkpoints.paths import MANIFEST_FILE
from slime.config.rules.files import check_weight_dir
from slime.conversion import writer
from slime.utils import http_utils
from slime.weights.names import INDEX_FILE
from slime.weights.transports import WeightDir, why_not_ours
from tests.unit.disk_sync_world import NAMES, FileEngine, World
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.mark.parametrize(("transport", "colocated"), [("disk", False), ("disk", True), ("nccl", False)])
def test_the_transport_says_who_carries_the_weights(world: World, transport: str, colocated: bool) -> None:
    args = world.updater(FileEngine(), connect=False).args
    args.update_weight_transport = transport
    made = build_weight_updater(args, [], colocated=colocated)
    assert type(made).__name__ == {"disk": "DiskWeightUpdater", "nccl": "DistributedWeightUpdater"}[transport]


# ---- what is written, and when


def test_a_version_is_a_whole_hf_directory_with_the_weights_as_they_are(world: World, tmp_path: Path) -> None:
    shared = tmp_path / "versions"
    world.updater(FileEngine(), update_weight_disk_dir=str(shared), update_weight_disk_keep_files=True).update()
    version = shared / "weight_v000001"
    assert (version / "config.json").is_file() and (version / "tokenizer.json").is_file()
    index = json.loads((version / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == world.weights.keys()
    assert (index["metadata"]["total_size"], index["metadata"]["version"]) == (3 * 4 * 4, 1)
    assert len(set(index["weight_map"].values())) == 3, "a shard is a bucket of 16 bytes"
    stored = {name: load_file(version / file)[name] for name, file in index["weight_map"].items()}
    for name, tensor in world.weights.items():
        assert stored[name].dtype == torch.float32, "the trainer's precision, though the config says bfloat16"
        assert torch.equal(stored[name], tensor)
    assert paths.what_is_wrong(version / MANIFEST_FILE) is None


def test_files_are_written_before_the_pause_and_gone_after_the_engines_have_them(world: World) -> None:
    engine, other = FileEngine(), FileEngine()
    seen: list[bool] = []
    engine.pause = lambda mode: seen.append((world.shared / "weight_v000001").is_dir())  # type: ignore[method-assign]
    metrics = world.updater(engine, other).update()
    assert seen == [True]
    assert other.calls == ["pause", "flush", "load weight_v000001", "continue"]
    assert all(torch.equal(one.weights[name], world.weights[name]) for one in (engine, other) for name in NAMES)
    assert not list(world.shared.glob("weight_*"))
    assert metrics["perf/update_weights_wire_bytes"] == 3 * 4 * 4
    parts = [metrics[f"perf/update_weights_{part}_time"] for part in ("write", "pause", "send")]
    assert all(part > 0 for part in parts) and sum(parts) <= metrics["perf/update_weights_time"]


def test_a_load_may_take_as_long_as_the_flag_says(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model from a shared disk takes longer than the ten minutes of the client's other requests."""
    engine, asked = FileEngine(), []
    world.updater(engine, distributed_timeout_minutes=45).update()
    assert engine.timeout_s == 45 * 60

    def post(url: str, payload: Any, *, timeout_s: float) -> dict[str, Any]:
        asked.append((payload["weight_version"], timeout_s))
        return {"success": True, "message": "Weight version updated to 1.0."}

    monkeypatch.setattr(http_utils, "post_sync", post)
    direct = DirectEngine(EngineContact(0, "http://127.0.0.1:1"))
    direct.update_weights_from_disk("/shared/weight_v000001", weight_version="1.0", timeout_s=2700.0)
    assert asked == [("1.0", 2700.0)]


def test_versions_count_up_and_stay_where_they_are_kept(world: World) -> None:
    engine = FileEngine()
    updater = world.updater(engine, update_weight_disk_keep_files=True)
    updater.update()
    world.weights["layer.1.weight"] += 1
    updater.update()
    assert sorted(path.name for path in world.shared.glob("weight_*")) == ["weight_v000001", "weight_v000002"]
    assert engine.version == "2" and engine.weights["layer.1.weight"].tolist() == [2.0] * 4


def test_the_name_appears_when_every_file_is_on_the_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    to_disk = hf_export.to_disk

    def watch(path: Path) -> None:
        synced.append(MANIFEST_FILE if path.name.startswith(f".{MANIFEST_FILE}.") else path.name)
        assert (world.shared / "weight_v000001").exists() == (path == world.shared)
        to_disk(path)

    for module in (hf_export, paths, writer):
        monkeypatch.setattr(module, "to_disk", watch)
    world.updater(FileEngine()).update()
    assert synced[-2:] == ["weight_v000001.partial", "shared"], "its entries, then the entry of its name"
    shards = {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    assert set(synced[:-2]) == shards | {INDEX_FILE, "config.json", "tokenizer.json", MANIFEST_FILE}


@pytest.mark.parametrize("moment", ["first shard", "last shard", "fsync"])
def test_a_full_disk_ends_the_sync_before_any_engine_is_paused(
    world: World, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine, save, saved = FileEngine(), hf_export.save_file, []

    def save_until_full(shard: dict[str, torch.Tensor], path: Path, **keywords: Any) -> None:
        saved.append(path)
        if len(saved) == {"first shard": 1, "last shard": 3, "fsync": 0}[moment]:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(shard, path, **keywords)

    def no_room(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export, "save_file", save_until_full)
    if moment == "fsync":
        monkeypatch.setattr(paths, "to_disk", no_room)
    updater = world.updater(engine)
    with pytest.raises(
        WeightSyncError, match="weight sync 1 could not be written to --update-weight-disk-dir .*space"
    ):
        updater.update()
    assert not engine.calls
    assert not list(world.shared.glob("weight_*")), "neither under its name nor under the other one"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of one megabyte")
def test_a_disk_that_is_really_full_is_named(world: World) -> None:
    world.shared.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(world.shared)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount")
    try:
        world.weights["layer.2.weight"] = torch.zeros(500_000)
        with pytest.raises(WeightSyncError, match="No space left on device"):
            world.updater(FileEngine()).update()
        assert not list(world.shared.glob("weight_*"))
    finally:
        subprocess.run(["umount", "--lazy", world.shared], check=True)


# ---- what engines refuse


def cut_short(version: Path) -> None:
    file = max(version.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def lose_a_file(version: Path) -> None:
    max(version.glob("*.safetensors")).unlink()


def lose_everything(version: Path) -> None:
    version.rename(version.with_name("elsewhere"))


def garble(version: Path) -> None:
    max(version.glob("*.safetensors")).write_bytes(b"\x10\0\0\0\0\0\0\0no header at all")


def flip_a_bit(version: Path) -> None:
    file = max(version.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose_the_manifest(version: Path) -> None:
    (version / MANIFEST_FILE).unlink()


SPOILT = {
    flip_a_bit: "model-00003-of-00003.safetensors is not what was written",
    lose_the_manifest: "manifest.json cannot be read",
    cut_short: "has 127 bytes, but 128 were written",
    lose_a_file: "safetensors is missing",
    lose_everything: "there is no .*weight_v000001 on this host; is its parent the same directory",
    garble: "bytes, but 128 were written",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_version_that_is_not_whole_is_refused_and_written_anew(
    world: World, spoil: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FileEngine()
    engine.spoil = [spoil]
    world.updater(engine).update()
    assert engine.calls == ["pause", "flush", "load weight_v000001", "load weight_v000001", "continue"]
    assert engine.version == "1" and engine.weights.keys() == set(NAMES)
    assert "weight sync 1 failed, it is sent whole once more" in caplog.text


@pytest.mark.parametrize("has_copy", [False, True])
def test_none_of_a_thousand_random_faults_is_loaded(world: World, tmp_path: Path, has_copy: bool) -> None:
    world.updater(FileEngine(), update_weight_disk_keep_files=True).update()
    version, chance = world.shared / "weight_v000001", random.Random(0)
    whole = {path: path.read_bytes() for path in sorted(version.iterdir())}
    assert {path.suffix for path in whole} == {".json", ".safetensors"}
    loaded: list[Any] = []
    copy = tmp_path / "local" if has_copy else None
    for number in range(500):
        path, fault = chance.choice(list(whole)), chance.choice(["lose", "cut", "flip"])
        data = bytearray(whole[path])
        if fault == "flip":
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data[: chance.randrange(len(data))] if fault == "cut" else data)
        if fault == "lose":
            path.unlink()
        assert disk_weights.load(version, loaded.extend, copy), (number, path, fault)
        path.write_bytes(whole[path])
    assert not loaded
    assert disk_weights.load(version, loaded.extend, copy) is None and len(loaded) == len(NAMES)


@pytest.mark.parametrize("spoil", SPOILT)
def test_a_version_that_is_refused_twice_ends_the_run_with_the_reason(world: World, spoil: Any) -> None:
    engine = FileEngine()
    engine.spoil = [lose_a_file, spoil]
    with pytest.raises(WeightSyncError, match=f"failed 2 times.*engines stay paused.*{SPOILT[spoil]}"):
        world.updater(engine).update()
    assert "continue" not in engine.calls and not engine.weights


def test_an_error_of_the_model_is_an_answer(tmp_path: Path, world: World) -> None:
    world.updater(FileEngine(), update_weight_disk_keep_files=True).update()

    def no_such_parameter(tensors: Any) -> None:
        raise KeyError("layer.0.weight")

    problem = disk_weights.load(world.shared / "weight_v000001", no_such_parameter)
    assert problem is not None and problem.endswith("weight_v000001 failed: KeyError: 'layer.0.weight'")


# ---- the hook


CALLED: list[tuple[Any, str, list[Any]]] = []


def remember(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    CALLED.append((args, version_dir, rollout_engines))
    assert paths.what_is_wrong(Path(version_dir, MANIFEST_FILE)) is None, "it is complete"
    assert not rollout_engines[0].calls, "no engine has been paused for it"


def fail(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    raise ValueError("the mirror is gone")


def test_the_hook_gets_the_directory_once_it_is_complete_and_before_engines_read_it(world: World) -> None:
    CALLED.clear()
    engine = FileEngine()
    updater = world.updater(engine, custom_update_weight_post_write_path=f"{__name__}.remember")
    updater.update()
    (call,) = CALLED
    assert call == (updater.args, str(world.shared / "weight_v000001"), [engine])


def test_a_hook_that_fails_ends_the_run_and_is_named(world: World) -> None:
    engine = FileEngine()
    updater = world.updater(engine, custom_update_weight_post_write_path=f"{__name__}.fail")
    sentence = "--custom-update-weight-post-write-path failed .*rank 0: ValueError: the mirror is gone"
    with pytest.raises(WeightSyncError, match=sentence):
        updater.update()
    assert not engine.calls


# ---- whose directory it is


OTHER_RUN = """
import pathlib, sys, time
from slime.weights.transports import WeightDir
held = WeightDir(pathlib.Path(sys.argv[1]), keeps_files=False, run="runs/other")
held.claim()
print("claimed", flush=True)
time.sleep(60)
"""


def test_two_runs_cannot_have_one_directory_and_a_dead_one_gives_it_up(world: World) -> None:
    command = [sys.executable, "-c", OTHER_RUN, str(world.shared)]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
    sentence = rf"{world.shared} is in use by runs/other \(process {other.pid} on .*\); give each run a directory"
    with pytest.raises(WeightSyncError, match=sentence):
        world.updater(FileEngine())
    (at_parse_time,) = check_weight_dir(str(world.shared))
    assert at_parse_time.startswith(f"--update-weight-disk-dir {world.shared} is in use by runs/other")
    other.kill()
    other.wait()
    assert not [*check_weight_dir(str(world.shared))]
    world.updater(FileEngine()).update()


def test_what_a_run_left_behind_is_removed_and_what_it_kept_is_not(world: World) -> None:
    left = WeightDir(world.shared, keeps_files=False, run="first")
    left.claim()
    left.path(7).mkdir()
    left.file.close()  # type: ignore[union-attr] - the process ends
    assert why_not_ours(world.shared) is None
    kept = WeightDir(world.shared, keeps_files=True, run="second")
    kept.claim()
    assert not left.path(7).exists()
    kept.path(8).mkdir()
    kept.file.close()  # type: ignore[union-attr]
    with pytest.raises(WeightSyncError, match="holds weight_v000008 of an earlier run; remove that run's versions"):
        world.updater(FileEngine())
    assert kept.path(8).exists()
    assert [*check_weight_dir(str(world.shared))][0].endswith("or give another directory.")


def test_another_process_of_the_same_run_goes_on_in_its_directory(world: World) -> None:
    first = WeightDir(world.shared, keeps_files=True, run="runs/mine")
    first.claim()
    first.path(1).mkdir()
    first.file.close()  # type: ignore[union-attr] - the process ends
    updater = world.updater(FileEngine(), connect=False, update_weight_disk_keep_files=True)
    updater.weight_version = 1
    engine = FileEngine()
    updater.connect([engine], engine_sizes=[1])
    updater.update()
    assert engine.version == "2"
    assert sorted(path.name for path in world.shared.glob("weight_*")) == ["weight_v000001", "weight_v000002"]


def test_a_directory_that_a_run_needs_for_the_first_time_in_its_middle_is_not_its_own(world: World) -> None:
    """It falls back to files at version 3; another run has been there."""
    other = WeightDir(world.shared, keeps_files=True, run="other")
    other.claim()
    other.path(3).mkdir()
    other.file.close()  # type: ignore[union-attr] - the process ends
    updater = world.updater(FileEngine(), connect=False)
    updater.weight_version = 2
    with pytest.raises(WeightSyncError, match="holds weight_v000003 of an earlier run"):
        updater.connect([FileEngine()], engine_sizes=[1])
    assert other.path(3).exists()


class Asked(FileEngine):
    """Answers, whatever the link does, or is gone."""

    def __init__(self, is_there: bool) -> None:
        super().__init__()
        self.is_there = is_there

    def check_scheduler(self) -> None:
        if not self.is_there:
            raise ConnectionError("refused")


class BrokenLink(BucketUpdater):
    """A link over which not even the pause comes through."""

    def open(self, engine_sizes: list[int]) -> list[Any]:
        return []

    def _pause(self) -> None:
        raise WeightSyncError("connection reset")


def go_over_files(args: Any, is_there: bool) -> None:
    updater = BrokenLink(args, model=[])
    updater.connect([Asked(is_there)], engine_sizes=[1])
    with pytest.raises(WeightSyncError, match="connection reset") as failed:
        updater.update()
    if is_there:
        assert isinstance(over_files_instead(updater, failed.value), DiskWeightUpdater)
        return
    with pytest.raises(WeightSyncError, match="connection reset"):
        over_files_instead(updater, failed.value)


@pytest.mark.processes
@pytest.mark.parametrize("is_there", [True, False])
def test_every_rank_of_a_trainer_goes_over_files_or_none_does(world: World, tmp_path: Path, is_there: bool) -> None:
    flags = vars(world.updater(connect=False).args)
    make_hf_model(tmp_path / "hf")
    args = make_args(tmp_path / "hf", actor_num_gpus_per_node=2)
    vars(args).update(flags)
    run_world(2, go_over_files, args, is_there)


def test_a_look_at_a_directory_leaves_nothing_there(tmp_path: Path) -> None:
    assert why_not_ours(tmp_path / "gone") is None and not [*check_weight_dir(str(tmp_path / "gone"))]
    assert not list(tmp_path.iterdir())


# ---- several tensor-parallel ranks of one engine

RANK = """
import pathlib, sys, types
import torch.distributed as dist
rank, root, shared = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{root}/meeting", rank=rank, world_size=2)
group = types.SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
sglang = types.ModuleType("sglang.srt.distributed")  # it takes long to import, and its group is a wrapper of this one
sglang.get_tp_group = lambda: group
for name in ("sglang", "sglang.srt"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["sglang.srt.distributed"] = sglang
from slime.backends.sglang_utils.disk_weights import load

def refuse(tensors):
    if rank == 1:
        raise MemoryError("no room on rank 1")
    list(tensors)

local = pathlib.Path(root) / "local"
print(load(shared / "weight_v000001", list, local))
print(load(shared / "weight_v000001", refuse, local))
print(load(shared / ("weight_v000001" if rank else "elsewhere"), list, local))
"""


@pytest.mark.processes
def test_every_rank_of_an_engine_gives_the_same_answer(world: World, tmp_path: Path) -> None:
    world.updater(FileEngine(), update_weight_disk_keep_files=True).update()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), str(world.shared)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=120)[0].splitlines() for rank in ranks]
    assert answers[0] == answers[1]
    good, failed, missing = answers[0]
    assert good == "None"
    assert failed.endswith("weight_v000001 failed: MemoryError: no room on rank 1")
    assert missing.startswith(f"there is no {world.shared}/elsewhere on this host")
