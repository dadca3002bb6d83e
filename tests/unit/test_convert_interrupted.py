"""A converter that meets a full disk, or is killed: nothing under the final name, and the next run makes all of it."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.checkpoint import torch_dist_writer
from tests.unit.converter_ways import WAYS, EndOfWriting, contents, killed, make_inputs, no_room, run_apart

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_inputs(root)
    return root


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory) -> dict[str, Path]:
    """What each way makes where nothing happens."""
    root = tmp_path_factory.mktemp("whole")
    outputs = {}
    for way, one in WAYS.items():
        outputs[way] = root / way.replace(" ", "-") / "out"
        outputs[way].parent.mkdir()
        assert run_apart(one, one.command(inputs, outputs[way])) == 0
    return outputs


def partial_in(root: Path, way: str) -> Path:
    """Where the output of a way grows."""
    return root / "out" / ".release.partial" if WAYS[way].inside else root / "out.partial"


ENDS = [pytest.param(no_room, id="full"), pytest.param(killed, id="killed")]
MOMENTS = ("the weights", "the rest", "the name")
IN_EVERY_MOMENT = ("hf to torch_dist", "int4")
"""A writer of checkpoints, and one of HF files, through which all other ways write."""


def each_end() -> list[Any]:
    """(way, end, moment): two ways end in every moment, each other one is killed and meets a full disk once."""
    cases = [(way, ends, when) for way in WAYS for ends in ENDS for when in MOMENTS]
    once = [(0, "the weights"), (1, "the name")]
    return [
        pytest.param(way, *ends.values, when, id=f"{way}-{ends.id}-{when}")
        for way, ends, when in cases
        if way in IN_EVERY_MOMENT or (ENDS.index(ends), when) in once
    ]


@pytest.mark.parametrize(("way", "ends", "when"), each_end())
def test_nothing_half_written_has_the_final_name(tmp_path, capfd, inputs, whole, way, ends, when):
    one, final = WAYS[way], tmp_path / "out" / WAYS[way].inside
    before, partial = contents(inputs), partial_in(tmp_path, way)
    num_bytes = sum(len(data) for data in contents(whole[way]).values())
    command = one.command(inputs, tmp_path / "out")
    capfd.readouterr()
    status = run_apart(one, command, EndOfWriting(ends, when, after=num_bytes // 2 if when == "the weights" else 0))
    said = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert contents(inputs) == before and not final.exists()
    if ends is killed:
        assert status == -9 and not said
        assert run_apart(one, command) == 2
        assert f"{partial}, where the result grows, exists" in capfd.readouterr().err
        shutil.rmtree(partial)
    else:
        assert status == 2 and len(said) == 1 and said[0].startswith("error: ")
        assert "is full; make room and run the same command again" in said[0]
        assert not partial.exists()
    assert run_apart(one, command) == 0
    assert contents(tmp_path / "out") == contents(whole[way])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("renamed", [0, 1], ids=["before", "between"])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("way", [way for way, one in WAYS.items() if one.replaces])
def test_what_is_replaced_is_kept_until_the_new_one_is_complete(tmp_path, inputs, whole, way, ends, renamed):
    one = WAYS[way]
    command = one.command(inputs, tmp_path / "out", one.replaces or "")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "before").write_text("x")
    assert run_apart(one, command, EndOfWriting(ends, "the name", after=renamed)) == (2 if ends is no_room else -9)
    if ends is killed and renamed:
        assert not (tmp_path / "out").exists()
        assert contents(tmp_path / ".out.old") == {"before": b"x"}
    else:
        assert contents(tmp_path / "out") == {"before": b"x"}
    shutil.rmtree(partial_in(tmp_path, way), ignore_errors=True)
    assert run_apart(one, command) == 0
    assert contents(tmp_path / "out") == contents(whole[way])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("way", WAYS)
def test_what_comes_into_being_meanwhile_is_kept(tmp_path, capfd, inputs, whole, way):
    one, final = WAYS[way], tmp_path / "out" / WAYS[way].inside
    command = one.command(inputs, tmp_path / "out")

    def made_meanwhile() -> None:
        final.mkdir(exist_ok=True)
        (final / "mine").touch()

    assert run_apart(one, command, EndOfWriting(made_meanwhile, "the rest")) == 2
    assert f"{final} came into being meanwhile" in capfd.readouterr().err
    assert contents(final) == {"mine": b""}
    shutil.rmtree(final)
    assert run_apart(one, command) == 0
    assert contents(tmp_path / "out") == contents(whole[way])


def no_room_for_values() -> None:
    """As of a disk that fills while torch.save hands over the values of a tensor."""
    real = torch_dist_writer.HashedStream.write

    def write(stream: Any, data: Any) -> int:
        if memoryview(data).nbytes > 1000:
            no_room()
        return real(stream, data)

    torch_dist_writer.HashedStream.write = write


def no_room_for_the_common_state() -> None:
    real = Path.open

    def open_file(path: Path, *how: Any, **more: Any) -> Any:
        if path.name == "common.pt" and "wb" in how:
            no_room()
        return real(path, *how, **more)

    Path.open = open_file


@pytest.mark.parametrize("full", [no_room_for_values, no_room_for_the_common_state])
def test_a_disk_that_is_full_while_torch_writes_is_named(tmp_path, capfd, inputs, full):
    one = WAYS["hf to torch_dist"]
    assert run_apart(one, one.command(inputs, tmp_path / "out"), full) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "rror" in line]
    assert len(said) == 1 and "is full; make room and run the same command again" in said[0], said


def test_weights_of_fsdp_have_no_config_that_says_how_they_are_quantised(tmp_path, inputs):
    root, one = shutil.copytree(inputs, tmp_path / "inputs"), WAYS["fsdp to hf"]
    config = json.loads((root / "origin" / "config.json").read_text())
    fp8 = json.loads((root / "fp8" / "config.json").read_text())["quantization_config"]
    (root / "origin" / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    assert run_apart(one, one.command(root, tmp_path / "out")) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


@pytest.mark.parametrize("way", [way for way, one in WAYS.items() if not one.inside and way != "gguf to hf"])
def test_files_of_a_read_only_input_can_be_written_again(tmp_path, inputs, way):
    root, one = shutil.copytree(inputs, tmp_path / "inputs"), WAYS[way]
    for file in root.rglob("*.json"):
        file.chmod(0o444)
    assert run_apart(one, one.command(root, tmp_path / "out")) == 0
    assert all(file.stat().st_mode & stat.S_IWUSR for file in (tmp_path / "out").iterdir())


def test_what_needs_no_megatron_does_not_import_it(tmp_path, inputs):
    """Its libraries would take two seconds and 150 MB, and are not there where only files are converted."""
    tools = {way: one for way, one in WAYS.items() if way not in ("hf to torch_dist", "int4 by GPTQ")}
    lines = [(one.tool.__name__, one.command(inputs, tmp_path / way)) for way, one in tools.items()]
    code = (
        "import importlib, json, sys\n"
        "for name, line in json.loads(sys.argv[1]):\n"
        "    assert importlib.import_module(name).main(line) == 0\n"
        "    assert 'megatron' not in sys.modules, name\n"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(lines)], check=True, cwd=ROOT, timeout=120)
