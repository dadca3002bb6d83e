"""The images: hadolint finds nothing, what they copy is there, and their own steps run, with stand-ins for what
installs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile*"))
# Stands for python, pip among it: notes what it was told, and makes an environment with itself in it.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "$3" >"$3/bin/activate" ;;
    "-m pip list"*) printf '%s\\n' torch==2.9.0+rocm7.0 sglang==0.5.17 numpy==2.2.6 requests==2.0 ;;
    "-m pip install"*)
        echo "$@" >>"$FAKE_LOG"
        for flag in "$@"; do
            case "$before" in -c | -r) cp "$flag" "$FAKE_FILES/${before#-}.txt" 2>/dev/null ;; esac
            before="$flag"
        done ;;
    "-m pip"*) ;;
    *"import sys, venv"*) echo True ;;
    *sysconfig*) echo "$FAKE_FILES" ;;
    -V | --version) echo "Python 3.11.13" ;;
    "-c import ${FAKE_LACKS:-nothing}") exit 1 ;;
    -c*) ;;
    *) echo "$@" >>"$FAKE_LOG"; [ -f "$1" ] ;;
esac
"""


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def context() -> list[Path]:
    """The top of what .dockerignore leaves of a clone."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    found = [path for pattern in allowed for path in ROOT.glob(pattern)]
    assert len(found) >= len(allowed), "a name of .dockerignore is not in the repository"
    return found


def copy(sources: list[str], target: Path) -> None:
    """A COPY of names and patterns out of the context."""
    for source in sources:
        paths = context() if source == "." else list(ROOT.glob(source))
        assert paths, f"{source} is not there to be copied"
        for path in paths:
            assert any(path == one or one in path.parents for one in context()), f"{path} is kept out by .dockerignore"
            # "COPY file there" names the file; ". there/" and several files name a folder.
            place = target / path.name if len(sources) > 1 or "*" in source or target.is_dir() else target
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "models")
                shutil.copytree(path, target / path.name, dirs_exist_ok=True, ignore=ignored)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)


def build(path: Path, tmp_path: Path) -> tuple[Path, str]:
    """Go through a Dockerfile with stand-ins; (the folder that it makes, what python was told)."""
    work, tools, files = tmp_path / "opt", tmp_path / "bin", tmp_path / "files"
    for folder in (work, tools, files):
        folder.mkdir()
    for name, text in (("apt-get", "#!/bin/sh\n"), *((name, FAKE_PYTHON) for name in ("python3.11", "python3"))):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLIME_", "PYTHON"))}
    environment |= {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "FAKE_LOG": str(tmp_path / "log"),
        "FAKE_FILES": str(files),
    }
    (tmp_path / "log").touch()
    for instruction, rest in instructions(path):
        if instruction == "ENV":
            for pair in shlex.split(rest):
                key, value = pair.replace("/opt/slime", str(work)).split("=", 1)
                environment[key] = value.replace("$PATH", environment["PATH"])
        elif instruction == "COPY":
            *sources, target = shlex.split(rest)
            copy(sources, work / target)
        elif instruction == "RUN":
            command = rest.replace("/var/lib/apt", str(tmp_path / "apt"))
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=work,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return work, (tmp_path / "log").read_text()


def test_there_is_an_image_for_each_kind_of_machine():
    assert [path.name for path in IMAGES] == ["Dockerfile", "Dockerfile.cpu", "Dockerfile.rocm"]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    command = [str(Path(sys.executable).parent / "hadolint"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_patches_nothing_that_it_installs(path):
    text = path.read_text()
    assert not re.search(r"git apply|patch -p|sed -i|site-packages", text)
    (line,) = [line for line in text.splitlines() if line.startswith("FROM ")]
    base = re.search(r"^ARG SGLANG_IMAGE=(\S+)", text, re.MULTILINE)[1] if "${SGLANG_IMAGE}" in line else line[5:]
    assert re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*", base), "a base without a version is another one tomorrow"


def test_the_steps_of_the_cpu_image_make_an_environment_and_start_the_driver(tmp_path):
    work, log = build(ROOT / "docker/Dockerfile.cpu", tmp_path)
    installed = [line for line in log.splitlines() if " install " in line]
    assert any("torch==" in line for line in installed)
    assert any(line.endswith(f"--no-deps -r {work}/requirements-cpu.txt") for line in installed)
    assert any(line.endswith(f"-e {work}") for line in installed)
    assert "requirements-dev" not in log and (work / ".venv/.stamp-slime").is_file()
    assert log.splitlines()[-1] == "train.py --help"
    assert (work / "scripts/run-tiny-cpu.sh").is_file() and not (work / "tests").exists()


def test_the_steps_of_the_cuda_image_take_the_pins_of_the_gpu_stack(tmp_path):
    work, log = build(ROOT / "docker/Dockerfile", tmp_path)
    assert f"-r {work}/requirements.txt" in log and "requirements-cpu" not in log
    assert log.splitlines()[-1] == "train.py --help"


def test_on_rocm_torch_and_sglang_stay_and_everything_else_is_pinned(tmp_path):
    _, log = build(ROOT / "docker/Dockerfile.rocm", tmp_path)
    kept = (tmp_path / "files/c.txt").read_text().split()
    assert kept == ["torch==2.9.0+rocm7.0", "sglang==0.5.17", "numpy==2.2.6"]
    wanted = {line.split("==")[0] for line in (tmp_path / "files/r.txt").read_text().split()}
    pinned = {line.split("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    pinned = {name for name in pinned if not name.startswith("#")}
    assert pinned - wanted == {"sglang", "torch", "torch_memory_saver", "numpy"} and wanted <= pinned
    assert "install --no-deps --no-build-isolation -e ." in log


def test_without_sglang_nothing_is_installed_beside_it(tmp_path):
    fake = tmp_path / "python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    environment = os.environ | {"PYTHON": str(fake), "FAKE_LACKS": "sglang", "FAKE_LOG": str(tmp_path / "log")}
    command = ["bash", str(ROOT / "docker/install_beside.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "has no sglang; use SGLang's image for ROCm" in done.stderr
    assert not (tmp_path / "log").exists()


# Stands for conda: notes what it was told, and has an environment once it has made one.
FAKE_CONDA = """#!/bin/sh
echo "$@" >>"$FAKE_LOG"
case "$*" in
    create*) touch "$FAKE_LOG.made" ;;
    *"python --version") [ -e "$FAKE_LOG.made" ] ;;
esac
"""


def test_a_conda_environment_is_made_once_and_takes_the_pins_of_the_gpu_stack(tmp_path):
    (tmp_path / "conda").write_text(FAKE_CONDA)
    (tmp_path / "conda").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FAKE_LOG": str(tmp_path / "log")}

    def build(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(ROOT / "build_conda.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert "environment with the GPU stack of requirements.txt" in build("--help").stdout
    assert build("--dev").returncode == 2 and not (tmp_path / "log").exists()
    for _ in range(2):
        done = build("mine")
        assert done.returncode == 0 and done.stdout.endswith("ready: conda activate mine\n"), done.stderr
    told = (tmp_path / "log").read_text().splitlines()
    assert [line for line in told if line.startswith("create")] == ["create -y -n mine python=3.12 pip"]
    assert told.count(f"run -n mine python -m pip install -r {ROOT}/requirements.txt") == 2
    assert told.count(f"run -n mine python -m pip install --no-deps -e {ROOT}") == 2
