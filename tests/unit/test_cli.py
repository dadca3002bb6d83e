"""The command `slime`: a task is written, drivers and tools become the process, a machine is examined."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slime import cli

ROOT = Path(__file__).resolve().parents[2]


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(words))
    return result.exit_code, result.output


def test_init_writes_the_example_with_this_checkout_and_interpreter(tmp_path: Path) -> None:
    status, said = invoke("init", str(tmp_path / "mine"))
    assert status == 0, said
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        "make_data.py",
        "task.py",
        "settings.yaml",
        "run.sh",
    }
    assert (tmp_path / "mine/task.py").read_text() == (ROOT / "examples/bring_your_own_task/task.py").read_text()
    script = (tmp_path / "mine/run.sh").read_text()
    assert f"SLIME_REPO:-{ROOT}" in script and f"SLIME_PYTHON:-{sys.executable}" in script


def test_init_writes_into_no_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    status, said = invoke("init", str(tmp_path))
    assert status == 2 and "not empty" in said
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_written_is_an_error_of_one_line() -> None:
    status, said = invoke("init", "/proc/mine")
    assert status == 2 and "cannot be written" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "script", "passed"),
    [
        (["train", "--lr", "1e-6", "--help"], "train.py", ["--lr", "1e-6", "--help"]),
        (["train-async", "--lr", "1e-6"], "train_async.py", ["--lr", "1e-6"]),
        (["plan", "--lr", "1e-6"], "train.py", ["--lr", "1e-6", "--dry-run"]),
        (["convert", "gguf-to-hf", "--help"], "tools/convert_gguf_to_hf.py", ["--help"]),
    ],
)
def test_a_command_becomes_its_script_with_the_flags_as_they_are(monkeypatch, words, script, passed) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, line: seen.append([program, *line]))
    invoke(*words)
    assert seen == [[sys.executable, sys.executable, str(ROOT / script), *passed]]


def test_every_way_to_convert_has_its_tool() -> None:
    assert [name for name in cli.WAYS.values() if not (ROOT / "tools" / name).is_file()] == []
    status, said = invoke("convert", "hf-to-nothing")
    assert status == 2 and "hf-to-nothing" in said and "gguf-to-hf" in said
    status, said = invoke("convert", "--help")
    assert status == 0 and all(way in said for way in cli.WAYS)


def test_runs_of_a_directory_without_one_is_one_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    status, said = invoke("runs", str(tmp_path))
    assert status == 2 and "holds no run" in " ".join(said.split()) and "--output-dir" in said
    assert "0/?" not in said and "Traceback" not in said


def test_a_wheel_has_no_package_but_slimes_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, list[str]] = {}
    monkeypatch.setattr("setuptools.setup", lambda **words: given.update(words))
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    runpy.run_path(str(ROOT / "setup.py"))
    assert {name.partition(".")[0] for name in given["packages"]} == {"slime", "slime_plugins"}
    assert "py_modules" not in given and {"slime.programs", "slime.programs.tools.parts"} <= set(given["packages"])


def test_a_tool_takes_its_parts_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()  # a package of this name that somebody has installed
    (tmp_path / "tools" / "__init__.py").write_text("")
    line = [sys.executable, str(ROOT / "tools" / "analyze_profile.py"), "--help"]  # it imports tools.parts at its top
    done = subprocess.run(
        line, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_doctor_names_a_ray_that_does_not_answer_and_the_remedy(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not cli._ray(f"127.0.0.1:{port}").remedy
    assert not cli._ray("auto").remedy  # Ray looks it up, as it does for a run
    assert "HOST:PORT" in cli._ray("http://127.0.0.1:8265").text
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")  # closed now
    status, said = invoke("doctor")
    (line,) = [line for line in said.splitlines() if "Ray" in line]
    assert status == 1 and line.startswith("wrong") and "unset RAY_ADDRESS" in line
    assert {"python", "torch", "sglang", "disk", "clock"} <= {line.split()[1] for line in said.splitlines()}


def test_the_memory_is_that_which_the_container_may_take(monkeypatch) -> None:
    monkeypatch.setattr(cli, "host_memory", lambda: 2 * 10**9)
    (found,) = [finding for finding in cli.examine() if finding.name == "memory"]
    assert found.text == "2 GB" and "more memory" in found.remedy


def test_too_little_room_and_a_clock_of_the_past_are_wrong(monkeypatch) -> None:
    assert cli._room("disk", 9 * 10**9, 10, "free some").remedy == "free some (10 GB)"
    assert cli._room("disk", 10 * 10**9, 10, "free some").remedy == ""
    monkeypatch.setattr(cli.shutil, "which", lambda name: None)
    assert "NTP" in cli._clock(0.0).remedy and not cli._clock(Path(cli.__file__).stat().st_mtime + 1).remedy


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_and_sdist_build_and_an_installed_slime_writes_a_task(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert list((tmp_path / "dist").glob("*.tar.gz"))
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"slime", "slime_plugins", "slime-0.1.0.dist-info"}
    venv.create(tmp_path / "env", system_site_packages=False, with_pip=False)
    python = tmp_path / "env/bin/python"
    target = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=200)
    # The packages that slime needs are those of this environment.
    (target / "parent.pth").write_text(str(Path(cli.typer.__file__).parents[1]))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for words in (["init", str(tmp_path / "mine")], ["convert", "gguf-to-hf", "--help"], ["train", "--help"]):
        ran = subprocess.run(
            [str(python), "-m", "slime.cli", *words], cwd=tmp_path, env=environment, capture_output=True, timeout=100
        )
        assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    assert str(target) in (tmp_path / "mine/run.sh").read_text()
