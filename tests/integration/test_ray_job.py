"""`ray job submit` on a Ray that was started before, through the functions that the run scripts use."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, Run, grpo_flags, log_tails, make_model, write_prompts

SCRIPT = """
set -u
. scripts/common.sh
slime_env && slime_ray_start 1 || exit 9
if [ "$(id -u)" -eq 0 ]; then
    env -u RAY_AUTH_MODE -u RAY_AUTH_TOKEN_PATH "$PYTHON" -m tests.integration.stranger "$SLIME_RAY_PID" \\
        "$SLIME_RAY_DIR" >{stranger}
fi
slime_submit "$PYTHON" train.py {too_many}
echo "first job: status $?"
slime_submit "$PYTHON" train.py {fitting}
"""


@pytest.mark.timeout(600)
def test_a_submitted_job_trains_and_one_that_asks_for_too_many_slots_is_refused(tmp_path: Path):
    flags = grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    flags += ["--num-rollout", 1, "--output-dir", tmp_path / "out"]
    commands = {"too_many": [*flags, "--rollout-num-gpus", 1], "fitting": [*flags, "--colocate"]}
    script = SCRIPT.format(
        stranger=tmp_path / "stranger.json",
        **{name: shlex.join(map(str, command)) for name, command in commands.items()},
    )
    environment = {**os.environ, "SLIME_PYTHON": sys.executable}
    environment.pop("RAY_ADDRESS", None)
    # Ray puts sockets below TMPDIR, and their paths must be shorter than pytest's directories are.
    environment["TMPDIR"] = "/tmp"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment,
        timeout=550,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert "error: 2 slime_slot units asked / 1 available on the running Ray" in done.stdout, done.stdout[-4000:]
    assert "first job: status 0" not in done.stdout
    assert done.returncode == 0, done.stdout[-4000:] + log_tails(tmp_path / "out")
    run = Run(tmp_path / "out", done.returncode, done.stdout)
    assert run.column("train/train_rollout_logprob_abs_diff")[0] < 1e-4
    if os.getuid() == 0:  # only root can become another user
        seen = json.loads((tmp_path / "stranger.json").read_text())
        refused = {"folder": "refused", "job": 401, "dashboard": 401, "gcs": "refused", "client": "refused"}
        assert seen["answers"] == refused | {"environment agents": [401]}
        assert {ip.removeprefix("::ffff:") for _, ip, _ in seen["bound"]} == {"127.0.0.1"}
