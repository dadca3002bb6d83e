"""execute_train on a real Ray, with a script of a few lines in place of train.py."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from slime.processes.registry import registry
from slime.utils.external_utils import command_utils as U

DRIVER = """
import json, os, pathlib, ray, sys
ray.init()
env = {name: os.environ.get(name) for name in ("RAY_ADDRESS", "COLOR", "SHAPE")}
said = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": env, "slots": ray.cluster_resources().get("slime_slot")}
pathlib.Path(sys.argv[-1]).write_text(json.dumps(said))
"""


@pytest.mark.timeout(300)
def test_a_run_has_a_ray_of_its_own_that_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", "/tmp")  # Ray's sockets need a short path
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    out, order = tmp_path / "out.json", []
    before = {process.pid for process in psutil.process_iter()}

    def hook() -> None:
        order.append(out.exists())
        names = {p.info["name"] for p in psutil.process_iter(["name"]) if p.pid not in before}
        order.append("raylet" in names)

    U.execute_train(
        f"--accelerator cpu --text 'two words' --dollar '$HOME' {out}",
        num_gpus_per_node=3,
        megatron_model_type="qwen3-0.6B",
        train_script=str(driver),
        before_ray_job_submit=hook,
        extra_env_vars={"COLOR": "red", "SHAPE": "round"},
        config=U.ExecuteTrainConfig(extra_env_vars="SHAPE='a square'"),
    )
    assert order == [False, True], "the hook runs when Ray is up and the run has not begun"
    said = json.loads(out.read_text())
    assert said["argv"][:2] == ["--num-layers", "28"], "scripts/models/qwen3-0.6B.sh comes first"
    assert said["argv"][-5:-1] == ["--text", "two words", "--dollar", "$HOME"]
    assert said["slots"] == 3 and said["cwd"] == str(U.repo_base_dir)
    assert (said["env"]["COLOR"], said["env"]["SHAPE"]) == ("red", "a square")
    left = [p for p in psutil.process_iter(["environ"]) if said["env"]["RAY_ADDRESS"] in str(p.info["environ"])]
    assert not left, "its Ray is gone"
    assert "execute_train" not in registry().running()
