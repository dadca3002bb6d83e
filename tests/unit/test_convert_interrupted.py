"""A converter that meets a full disk, or is killed: nothing under the final name, and the same command goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.converter_ways import WAYS, EndOfWriting, contents, killed, make_inputs, no_room, run_apart

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


def complete_files(root: Path) -> dict[str, tuple[int, int]]:
    """The files of weights that a second run keeps, and which they are."""
    parts = [file.with_name(f"__0_{file.stem.removeprefix('part-')}.distcp") for file in root.rglob("part-*.pickle")]
    shards = [file for file in root.rglob("*.safetensors") if file.parent.name == "out.partial"]
    return {file.name: made_at(file) for file in (*parts, *shards)}


def made_at(file: Path) -> tuple[int, int]:
    return file.stat().st_ino, file.stat().st_mtime_ns


@pytest.mark.parametrize("when", ["the plan", "the weights", "the rest", "the name"])
@pytest.mark.parametrize("ends", [no_room, killed], ids=["full", "killed"])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_half_written_has_the_final_name_and_the_same_command_goes_on(
    tmp_path, capfd, inputs, whole, way, ends, when
):
    one, final = WAYS[way], tmp_path / "out" / WAYS[way].inside
    before = contents(inputs)
    num_bytes = sum(len(data) for data in contents(whole[way]).values())
    command = one.command(inputs, tmp_path / "out")
    capfd.readouterr()
    status = run_apart(one, command, EndOfWriting(ends, when, after=num_bytes // 2 if when == "the weights" else 0))
    said = [line for line in capfd.readouterr().err.splitlines() if "error" in line.lower() or "Traceback" in line]
    if ends is killed:
        assert status == -9 and not said
    else:
        assert status == 2 and len(said) == 1 and said[0].startswith("error: ")
        assert "is full; make room and run the same command again" in said[0]
    assert not final.exists() and contents(inputs) == before
    complete = complete_files(tmp_path)
    assert bool(complete) == (when != "the plan" and (way, when) != ("hf to torch_dist", "the name"))
    assert run_apart(one, command) == 0
    assert contents(tmp_path / "out") == contents(whole[way])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    assert complete == {name: made_at(final / name) for name in complete}


@pytest.mark.parametrize("renamed", [0, 1], ids=["before", "between"])
@pytest.mark.parametrize("ends", [no_room, killed], ids=["full", "killed"])
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
    complete = complete_files(tmp_path)
    assert run_apart(one, command) == 0
    assert contents(tmp_path / "out") == contents(whole[way])
    assert complete == {name: made_at(final / name) for name in complete}


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
