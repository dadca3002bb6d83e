"""The pins are exact and agree with each other, shellcheck finds nothing in the shell scripts, a wrong Python is
refused with the remedy.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    [
        *(path for folder in ("scripts", "examples", "benchmarks") for path in ROOT.glob(f"{folder}/**/*.sh")),
        ROOT / "build_conda.sh",
        ROOT / "docker/install_beside.sh",
        ROOT / ".ci/run",
    ]
)


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    assert all(re.fullmatch(r"==[\w.]+", str(requirement.specifier)) for requirement in requirements), name
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


def test_no_package_is_pinned_twice_with_different_versions():
    cpu = pins("requirements-cpu.txt")
    for name in ("requirements-dev.txt", "requirements-bench.txt"):
        assert not cpu.keys() & pins(name).keys()
    # What both stacks name must be the same thing, but for torch and numpy: the GPU kernels decide those.
    gpu = pins("requirements.txt")
    differing = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert differing == {"torch", "numpy"}


@pytest.mark.parametrize("name", ["requirements-cpu.txt", "requirements-dev.txt"])
def test_the_environment_has_what_the_pins_say(name: str):
    for package, version in pins(name).items():
        assert importlib.metadata.version(package).split("+")[0] == version, package


@pytest.mark.parametrize(
    "root",
    [
        "ray",
        "transformers",
        "megatron-core",
        "accelerate",
        "tensorboard",
        "wandb",
        "mlflow-skinny",
        "mcp",
        "pytest",
        "mypy",
    ],
)
def test_the_pins_are_complete_since_they_are_installed_without_dependencies(root: str):
    known = pins("requirements-cpu.txt") | pins("requirements-dev.txt")
    seen, waiting = set(), [(root, "default" if root == "ray" else "")]
    while waiting:
        package, extra = waiting.pop()
        seen.add(package)
        assert package in known, f"{package} is needed below {root} and not pinned"
        for line in importlib.metadata.requires(package) or []:
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            name = canonicalize_name(requirement.name)
            if wanted and name not in seen:
                waiting.append((name, ""))


@pytest.mark.processes
def test_shellcheck_finds_nothing_in_the_shell_scripts():
    # .shellcheckrc says what is left out, and why. The program comes with the package, beside the interpreter.
    command = [str(Path(sys.executable).parent / "shellcheck"), *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def run_setup(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup_env.sh", root / "scripts")
    command = ["bash", str(root / "scripts/setup_env.sh"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)


def test_an_old_python_is_refused_with_the_remedy_and_nothing_is_made(tmp_path: Path):
    # A stand-in for Python 3.9: it says its version, and the check that it is asked to run does not succeed.
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" || exit 1\n')
    old.chmod(0o755)
    done = run_setup(tmp_path, "--cpu", PYTHON=str(old))
    assert done.returncode == 2
    assert "Python 3.9.1" in done.stderr and "install Python 3.11 or newer" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_an_unknown_argument_of_setup_env_is_refused(tmp_path: Path):
    done = run_setup(tmp_path, "--gpu")
    assert done.returncode == 2
    assert "unknown argument --gpu: use --cpu, --cuda" in done.stderr


def test_submitting_without_a_ray_head_is_refused():
    script = '. scripts/common.sh; PYTHON=python3 slime_submit true; echo "status $?"; slime_ray_stop; echo "stop $?"'
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLIME_"))}
    done = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["status 1", "stop 0"]
    assert "call slime_ray_start first" in done.stderr
