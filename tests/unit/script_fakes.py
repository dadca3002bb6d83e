"""The shell scripts as a user runs them, with a stand-in for python, and the public config values of their models."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "hf_configs"
# The first layers of a larger model.
SHORTENED = {"deepseek-v3-5layer": ("deepseek-v3", 5), "deepseek-v3-20layer": ("deepseek-v3", 20)}

# Stands for python: says what it was told to do, and plays Ray's part, down to running a submitted job.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$FAKE_LOG"
case "$*" in
    train.py* | train_async.py*) printf '%s\\0' "$@" ;;
    *is_free*) echo 1001 1002 1003 ;;
    *env_vars*) echo '{}' ;;
    *"job submit"*) bash "${@: -1}" ;;
esac
"""


# A model of the same sizes -> (that one, what differs of what flags say).
SIZED_AS = {
    "glm5.2-744B-A40B": (
        "glm5-744B-A40B",
        {"rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}},
    )
}


def hf_config(name: str) -> dict[str, Any]:
    """The config of the model of a model script."""
    name, changes = SIZED_AS.get(name, (name, {}))
    whole, num_layers = SHORTENED.get(name, (name, None))
    config = json.loads((FIXTURES / f"{whole}.json").read_text())
    return config | changes | ({} if num_layers is None else {"num_hidden_layers": num_layers})


def script_flags(name: str) -> list[str]:
    """MODEL_ARGS of a model script, as bash expands it."""
    command = f'set -eu; . scripts/models/{name}.sh; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def start_script(
    tmp_path: Path, name: str, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], str]:
    """(what a run script said, everything that python was told to do)."""
    fake, log = tmp_path / "python", tmp_path / "log"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    log.touch()
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLIME_", "WANDB_", "RAY_", "MASTER_"))
    }
    done = subprocess.run(
        ["bash", f"scripts/{name}.sh", *arguments],
        cwd=ROOT,
        env=kept | {"SLIME_PYTHON": str(fake), "FAKE_LOG": str(log), "TMPDIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done, log.read_text()


def run_script(
    tmp_path: Path, name: str, *arguments: str, driver: str = "train.py", **environment: str
) -> tuple[list[str], str]:
    """(the flags with which a run script starts its driver, everything that python was told to do)."""
    done, log = start_script(tmp_path, name, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    program, *flags = done.stdout.split("\0")[:-1]
    assert program == driver
    return flags, log
