"""Versions of weights as deltas: what engines load of them, and what their hosts refuse.

The files are those of the real updater, the host's copy that of a real engine; `test_disk_sync` has the world.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.update_weight.base import WeightSyncError
from slime.backends.megatron_utils.update_weight.from_disk import DeltaWeightUpdater
from slime.backends.sglang_utils import disk_weights
from slime.backends.sglang_utils.disk_weights import LocalCheckpoint
from slime.checkpoints.paths import MANIFEST_FILE, entries_of, write_manifest
from slime.weights.delta import CHECKSUMS, ENCODINGS, bytes_of, checksum
from slime.weights.names import INDEX_FILE, files_of
from tests.unit.test_disk_sync import NAMES, ROOT, FileEngine, World, world

__all__ = ["world"]  # a fixture

INSTALLED = [kind for kind in CHECKSUMS if kind != "blake3" or importlib.util.find_spec("blake3")]


# ---- versions


class LocalEngine(FileEngine):
    """With a copy of the weights of its own, like an engine on another host."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[set[str]] = []

    def load_weights(self, tensors: Any) -> None:
        found = {name: tensor.clone() for name, tensor in tensors}
        self.weights |= found
        self.loaded.append(set(found))


class CopyingEngine(LocalEngine):
    """Which brings its host's copy to a version when it is asked to, as those that a run has started."""

    is_ours = True

    def bring_copy(self, path: str, *, local_dir: str, timeout_s: float) -> None:
        self.calls.append(f"copy {Path(path).name}")
        if self.spoil:
            self.spoil.pop(0)(Path(path))
        if problem := disk_weights.bring_copy(Path(path), Path(local_dir)):
            raise RuntimeError(problem)


class ModelEngine(CopyingEngine):
    """With parameters, which it fuses and cuts as one of two tensor-parallel ranks does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.ParameterDict({"fused": torch.zeros(4), "whole": torch.zeros(4)}).requires_grad_(False)
        self.known = disk_weights.ElementCopies(self.model)

    def load_weights(self, tensors: Any) -> None:
        given = dict(tensors)
        self.loaded.append(set(given))
        places = [self.model["fused"][:2], self.model["fused"][2:], self.model["whole"]]
        parts = {NAMES[0]: slice(0, 2), NAMES[1]: slice(2, 4), NAMES[2]: slice(0, 4)}
        for (name, part), place in zip(parts.items(), places, strict=True):
            if name in given:
                place.data.copy_(given[name][part])

    def update_weights_from_disk(self, path: str, *, weight_version: str, local_dir: Any, timeout_s: float) -> str:
        problem = disk_weights.load(Path(path), self.load_weights, Path(local_dir), self.known)
        assert problem is None, problem
        self.version = weight_version
        return weight_version

    def sample_weights(self, names: list[str]) -> list[dict[str, str]]:
        return [{}]  # these ranks hold no tensor under its own name

    def holds(self, world: World) -> bool:
        first, second, third = (world.weights[name] for name in NAMES)
        fused = torch.cat([first[:2], second[2:]])
        return torch.equal(self.model["fused"], fused) and torch.equal(self.model["whole"], third)


def delta_updater(world: World, *engines: FileEngine, **values: Any) -> DeltaWeightUpdater:
    values = {
        "update_weight_mode": "delta",
        "update_weight_delta_encoding": "xor",
        "update_weight_delta_checksum": "xxh3-128",
        "update_weight_local_checkpoint_dir": str(world.shared.parent / "local"),
        "update_weight_disk_keep_files": True,
    } | values
    made = world.updater(*engines, **values)
    assert isinstance(made, DeltaWeightUpdater)
    return made


def holds(engine: FileEngine, world: World) -> bool:
    local = {
        name: t for file in files_of(world.shared.parent / "local/checkpoint") for name, t in load_file(file).items()
    }
    return all(
        torch.equal(engine.weights[name], t) and torch.equal(local[name], t) for name, t in world.weights.items()
    )


@pytest.mark.parametrize("kind", INSTALLED)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_delta_holds_the_tensors_that_changed_and_the_engine_loads_those(
    world: World, encoding: str, kind: str
) -> None:
    engine = LocalEngine()
    updater = delta_updater(world, engine, update_weight_delta_encoding=encoding, update_weight_delta_checksum=kind)
    first = updater.update()
    assert holds(engine, world) and first["perf/update_weights_density"] == 1.0
    assert first["perf/update_weights_wire_bytes"] == 3 * 4 * 4
    world.weights["layer.1.weight"][2] = 7.0
    second = updater.update()
    assert holds(engine, world) and engine.loaded == [set(NAMES), {"layer.1.weight"}]
    assert second["perf/update_weights_density"] == 1 / 12, "one element of twelve"
    index = json.loads((world.shared / "weight_v000002" / INDEX_FILE).read_text())
    assert list(index["weight_map"]) == ["layer.1.weight"]
    metadata = index["metadata"]
    assert (metadata["version"], metadata["base_version"]) == (2, 1)
    assert (metadata["delta_encoding"], metadata["compression_format"]) == (encoding, "zstd")
    assert metadata["checksum_format"] == kind
    with safe_open(world.shared / "weight_v000002/model.safetensors", framework="np") as file:
        assert file.metadata()["layer.1.weight"] == checksum(bytes_of(world.weights["layer.1.weight"]), kind)
        assert second["perf/update_weights_wire_bytes"] == file.get_tensor("layer.1.weight").size


def test_what_engines_load_in_pairs_is_loaded_whole_where_one_of_two_has_changed(world: World) -> None:
    pair = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    world.weights |= {name: torch.ones(4) for name in pair}
    engine = LocalEngine()
    updater = delta_updater(world, engine)
    updater.update()
    world.weights[pair[1]][0] = 3.0
    metrics = updater.update()
    assert metrics["perf/update_weights_density"] == 1 / 20, "what has not changed is not sent"
    assert engine.loaded[1] == set(pair), "SGLang would forget the one without the other"
    assert holds(engine, world)


def test_many_versions_follow_each_other_exactly_and_nothing_is_kept(world: World) -> None:
    engine, other = LocalEngine(), LocalEngine()  # two engines of one host share its copy
    updater = delta_updater(world, engine, other, update_weight_disk_keep_files=False)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        updater.update()
        assert holds(engine, world) and holds(other, world)
        for tensor in world.weights.values():
            tensor += torch.randn(4, generator=generator) * (torch.rand(4, generator=generator) < 0.4)
    assert not list(world.shared.glob("weight_*"))
    assert engine.version == other.version == "6"


def test_a_sync_of_nothing_new_sends_nothing(world: World) -> None:
    engine = LocalEngine()
    updater = delta_updater(world, engine)
    updater.update()
    metrics = updater.update()
    assert metrics["perf/update_weights_density"] == metrics["perf/update_weights_wire_bytes"] == 0
    assert engine.version == "2" and engine.loaded[1:] == [set()]


def test_trained_weights_that_change_in_place_are_compared_with_what_was_sent(world: World) -> None:
    engine = LocalEngine()
    updater = delta_updater(world, engine)
    updater.update()
    kept = world.weights["layer.0.weight"]
    kept.add_(1)
    updater.update()
    assert engine.loaded[1] == {"layer.0.weight"} and holds(engine, world)


# ---- the elements alone


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_an_engine_that_holds_the_base_gets_only_the_elements_that_changed(world: World, encoding: str) -> None:
    engine, late = ModelEngine(), ModelEngine()
    updater = delta_updater(world, engine, late, update_weight_delta_encoding=encoding)
    updater.update()
    late.known = disk_weights.ElementCopies(late.model)  # as if it were a new process, which knows nothing
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        for tensor in world.weights.values():
            tensor += torch.randn(4, generator=generator) * (torch.rand(4, generator=generator) < 0.5)
        updater.update()
        assert engine.holds(world) and late.holds(world)
    assert engine.loaded == [set(NAMES)], "the first version alone is loaded whole"
    assert late.loaded[0] == set(NAMES) and len(late.loaded) == 2, "and for who begins anew the next one, too"


def test_where_too_many_elements_changed_whole_tensors_are_loaded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.weights.delta.MAX_LISTED", (2, 1))
    engine = ModelEngine()
    updater = delta_updater(world, engine)
    updater.update()
    for num_changed, loads in ((2, 1), (3, 2)):  # two of four may be listed
        world.weights[NAMES[2]][:num_changed] += 1
        updater.update()
        assert engine.holds(world) and len(engine.loaded) == loads


# ---- what a host refuses


def sign(version: Path) -> None:
    """As if the trainer had written the files as they are now."""
    files = [path for path in version.iterdir() if path.name != MANIFEST_FILE]
    write_manifest(version / MANIFEST_FILE, entries_of(version, files))


def flip_a_bit_and_sign(version: Path, world: World) -> None:
    flip_a_bit(version, world)
    sign(version)


def flip_a_bit(version: Path, world: World) -> None:
    (file,) = version.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def lose_the_file(version: Path, world: World) -> None:
    (file,) = version.glob("*.safetensors")
    file.unlink()


def cut(version: Path, world: World) -> None:
    (file,) = version.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 2)


def change_the_checksum(version: Path, world: World) -> None:
    (file,) = version.glob("*.safetensors")
    save_file(load_file(file), file, metadata={"layer.1.weight": "0" * 32})
    sign(version)


def lose_the_copy(version: Path, world: World) -> None:
    (world.shared.parent / "local/state.json").unlink()


def miss_a_version(version: Path, world: World) -> None:
    file = version / INDEX_FILE
    index = json.loads(file.read_text())
    index["metadata"] |= {"version": 5, "base_version": 4}
    file.write_text(json.dumps(index))
    sign(version)


def follow_another(version: Path, world: World) -> None:
    """The version of that number that trainers before these have written."""
    file = version / INDEX_FILE
    index = json.loads(file.read_text())
    index["metadata"]["base_id"] = "theirs"
    file.write_text(json.dumps(index))
    sign(version)


def damage_the_copy(version: Path, world: World) -> None:
    (file,) = [one for one in files_of(world.shared.parent / "local/checkpoint") if "layer.1.weight" in load_file(one)]
    save_file({"layer.1.weight": torch.full((4,), 9.0)}, file)


REFUSED = {
    flip_a_bit: "model.safetensors is not what was written",
    flip_a_bit_and_sign: "the delta of layer.1.weight in .* is damaged|layer.1.weight has xxh3-128",
    lose_the_file: "safetensors is missing",
    cut: "bytes, but",
    change_the_checksum: "layer.1.weight has xxh3-128 [0-9a-f]{32} after the delta of .*, and had 0{32} at the t",
    lose_the_copy: "is a delta from version 1, but .* holds no whole version: a version is missing there",
    miss_a_version: "is a delta from version 4, but .* holds 1: a version is missing there",
    follow_another: "is a delta from version 1, but .* holds another version 1: a version is missing there",
    damage_the_copy: "layer.1.weight has xxh3-128 .* and had",
}


@pytest.mark.parametrize("kind", [LocalEngine, CopyingEngine])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("spoil", REFUSED)
def test_a_delta_that_is_refused_is_followed_by_a_whole_version(
    world: World, spoil: Any, encoding: str, kind: type[LocalEngine], caplog: pytest.LogCaptureFixture
) -> None:
    if spoil is damage_the_copy and encoding == "overwrite":
        pytest.skip("values that are all overwritten do not depend on what was there")
    engine = kind()
    updater = delta_updater(world, engine, update_weight_delta_encoding=encoding)
    updater.update()
    world.weights["layer.1.weight"] += 1
    engine.calls.clear()
    engine.spoil = [lambda version: spoil(version, world)]
    held = engine.weights["layer.1.weight"].clone()
    before: list[bool] = []
    with caplog.at_level(logging.WARNING):
        engine.spoil.append(lambda version: before.append(torch.equal(engine.weights["layer.1.weight"], held)))
        metrics = updater.update()
    assert before == [True], "the refused delta changed no weight of the engine"
    assert holds(engine, world) and engine.version == "2" and metrics["perf/update_weights_density"] == 1.0
    assert "version 2 was refused as a delta; a whole one follows" in caplog.text
    load, copies = "load weight_v000002", ["copy weight_v000002"] * 2
    expected = ["pause", "flush", load, load] if kind is LocalEngine else [*copies, "pause", "flush", load]
    assert engine.calls == [*expected, "continue"], "what is known before the pause is written anew before it"
    assert [record for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(REFUSED[spoil], caplog.text)
    world.weights["layer.2.weight"] += 1
    assert updater.update()["perf/update_weights_density"] == 4 / 12, "and deltas go on from there"
    assert holds(engine, world)


def test_the_hosts_copy_is_brought_to_a_version_before_the_pause(world: World) -> None:
    engine = CopyingEngine()
    updater = delta_updater(world, engine, LocalEngine())  # the other one is somebody else's
    metrics = updater.update()
    assert engine.calls == ["copy weight_v000001", "pause", "flush", "load weight_v000001", "continue"]
    assert metrics["perf/update_weights_copy_time"] > 0
    world.weights["layer.0.weight"] += 1
    states: list[Any] = []
    engine.pause = lambda mode: states.append(json.loads((world.shared.parent / "local/state.json").read_text()))  # type: ignore[method-assign]
    updater.update()
    assert [state["version"] for state in states] == [2]
    assert engine.loaded[1] == {"layer.0.weight"} and holds(engine, world)


def test_new_engines_get_a_whole_version(world: World, tmp_path: Path) -> None:
    updater = delta_updater(world, LocalEngine())
    updater.update()
    late = LocalEngine()
    updater.connect([late], engine_sizes=[1])
    assert updater.update()["perf/update_weights_density"] == 1.0
    assert holds(late, world)


def test_a_full_sync_may_load_from_the_hosts_own_copy_too(world: World) -> None:
    engine = LocalEngine()
    updater = world.updater(engine, update_weight_local_checkpoint_dir=str(world.shared.parent / "local"))
    for _ in range(2):
        updater.update()
        assert holds(engine, world)
        world.weights["layer.0.weight"] += 1


OTHER_HOST_RUN = """
import pathlib, sys, time
from slime.backends.sglang_utils.disk_weights import LocalCheckpoint
LocalCheckpoint(pathlib.Path(sys.argv[1])).bring_to(pathlib.Path(sys.argv[2]))
print("there", flush=True)
time.sleep(60)
"""


def test_a_copy_belongs_to_the_engines_of_one_run_as_long_as_they_live(world: World, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    save_file({"w": torch.zeros(1)}, theirs / "model.safetensors")
    metadata = {"run": "other", "version": 3, "id": "theirs"}
    (theirs / INDEX_FILE).write_text(json.dumps({"metadata": metadata, "weight_map": {"w": "model.safetensors"}}))
    sign(theirs)
    command = [sys.executable, "-c", OTHER_HOST_RUN, str(tmp_path / "local"), str(theirs)]
    other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"there\n"
    engine = LocalEngine()
    updater = delta_updater(world, engine)
    with pytest.raises(
        WeightSyncError, match="failed 2 times.* is in use by the engines of another run; give each run"
    ):
        updater.update()
    assert (tmp_path / "local/checkpoint/model.safetensors").is_file() and not engine.weights
    other.kill()
    other.wait()
    updater.update()
    assert holds(engine, world)


SECOND_ENGINE = """
import pathlib, sys
from slime.backends.sglang_utils import disk_weights
from slime.backends.sglang_utils.disk_weights import LocalCheckpoint
for line in sys.stdin:
    LocalCheckpoint(pathlib.Path(sys.argv[1])).bring_to(pathlib.Path(line.strip()))
    print("there", flush=True)
"""


def test_trainers_that_begin_again_are_of_the_same_run_and_their_versions_are_others(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with --release-train and --max-restarts, while engines stay. A second one of the host holds the copy, too."""
    engine = LocalEngine()
    first = delta_updater(world, engine)
    first.update()
    world.weights["layer.1.weight"] += 1
    first.update()
    command = [sys.executable, "-c", SECOND_ENGINE, str(tmp_path / "local")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdin is not None and second.stdout is not None
        second.stdin.write(f"{world.shared}/weight_v000002\n")
        second.stdin.flush()
        assert second.stdout.readline() == "there\n"
        assert first._dir.file is not None
        first._dir.file.close()  # the trainers are lost in the sync after the first
        world.weights["layer.1.weight"] += 5
        again = delta_updater(world, engine, connect=False)
        again.weight_version = 1
        again.connect([engine], engine_sizes=[1])
        with caplog.at_level(logging.WARNING):
            again.update()
        assert not caplog.records, "nothing is refused, and nothing is sent twice"
        assert holds(engine, world), "another version 2 than the one before"


def test_a_folder_that_no_run_has_made_is_not_removed(world: World, tmp_path: Path) -> None:
    theirs = tmp_path / "local/checkpoint/precious.pt"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    with pytest.raises(WeightSyncError, match="local/checkpoint would be overwritten, and no run of slime has made"):
        delta_updater(world, LocalEngine()).update()
    assert theirs.read_text() == "mine"


def test_what_else_is_in_the_local_directory_stays(world: World, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local/notes.txt").write_text("mine")
    delta_updater(world, LocalEngine()).update()
    assert (tmp_path / "local/notes.txt").read_text() == "mine"
    assert LocalCheckpoint(tmp_path / "local").directory.is_dir()
