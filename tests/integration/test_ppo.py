"""train.py with PPO from start to end: values go to the actor, returns to the critic, and both write checkpoints.

The umask forbids nothing, and while the run goes on, another user of the machine looks at its files: what of them can
that user read or change?
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.checkpoints.paths import latest_iteration
from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(600)
KEYS = ("key-of-engines-4711", "key-of-routers-4712")
NUM_ROLLOUT = 3
IS_ROOT = os.getuid() == 0

ROLES = """\
megatron:
  - {name: value, role: critic, overrides: {lr: 5e-3}}
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A directory that everybody may use: others cannot enter pytest's own. Ray needs a short path."""
    before, made = os.umask(0), Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    os.umask(before)
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    (folder / "roles.yaml").write_text(ROLES)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    model, prompts, out = make_model(folder / "model"), write_prompts(folder / "prompts.jsonl"), folder / "out"
    reward = "show_to_a_stranger" if IS_ROOT else "share_of_digits"
    return train(
        out, *grpo_flags(model, prompts), "--colocate", "--num-rollout", NUM_ROLLOUT,
        "--advantage-estimator", "ppo", "--gamma", 0.99, "--lambd", 0.95, "--kl-coef", 0.1, "--ref-load", model,
        "--normalize-advantages", "--num-critic-only-steps", 1, "--megatron-config-path", folder / "roles.yaml",
        "--save", out / "saved", "--save-interval", 1, "--keep-checkpoints", 2, "--async-save",
        "--custom-rm-path", f"{ROOT}/tests/integration/user_code.py:{reward}",
        "--save-debug-rollout-data", out / "samples_{rollout_id}.pt",
        "--sglang-api-key", KEYS[0], "--router-api-key", KEYS[1],
        "--use-tensorboard", "--tb-project-name", out / "board", TMPDIR=str(folder / "tmp"),
    )  # fmt: skip


def test_the_first_rollout_trains_only_the_critic(run: Run):
    steps = run.records("train/step")
    assert [step["train/step"] for step in steps] == [0, 1, 2]
    assert ["train/pg_loss" in step for step in steps] == [False, True, True]
    for name in ("value_loss", "value_clipfrac", "grad_norm", "lr-pg_0"):
        assert all(f"train/critic-{name}" in step for step in steps), name
    assert run.column("train/critic-lr-pg_0") == [5e-3] * 3 and run.column("train/lr-pg_0") == [1e-3] * 2
    # the weights of the second rollout are those of the first: nothing was updated between the two
    assert abs(steps[1]["train/ppo_kl"]) < 1e-6
    assert run.column("rollout/kl", "rollout/step")[:2] == [0.0, 0.0]


def test_values_reach_the_actor_and_its_returns_the_critic(run: Run):
    values = run.column("rollout/values", "rollout/step")
    assert values[0] == 0.0, "a fresh critic"
    assert values[1] != 0.0 and len(set(values)) == 3, "it learns"
    assert all("rollout/returns" in record for record in run.records("rollout/step"))
    # the first step's values are those before it, so nothing is clipped
    assert run.column("train/critic-value_clipfrac") == [0.0] * 3
    assert all(
        time > 0 for name in ("values", "train") for time in run.column(f"perf/critic_{name}_time", "rollout/step")
    )


def test_both_roles_have_the_same_iterations_and_logs_of_their_own(run: Run):
    out = run.output_dir
    for root in (out / "saved", out / "saved" / "critic"):
        assert latest_iteration(root) == 2
        assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert (out / "logs" / "critic_0.log").exists() and (out / "logs" / "trainer_0.log").exists()


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_another_user_reads_no_secret_of_a_run_and_changes_nothing_that_it_loads(folder: Path, run: Run):
    out = run.output_dir
    seen = json.loads((out / "stranger.json").read_text())
    assert any("/sglang_loads_" in path for path in seen["memory"]), "the engine ran while the stranger looked"
    outside = [path for path in seen["read"] + seen["write"] if not path.startswith((f"{out}/", f"{folder}/model"))]
    allowed = (out, folder / "tmp", folder / "prompts.jsonl", folder / "roles.yaml")
    assert sorted(set(outside)) == sorted(map(str, allowed))
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    unread = {str(path.relative_to(out)) for path in out.rglob("*") if path.stat().st_mode & 0o777 == 0o600}
    dumps = {f"samples_{rollout_id}.pt" for rollout_id in range(NUM_ROLLOUT)}
    records = {name for name in files if name.startswith("rollouts/")}
    assert {f"rollouts/{rollout_id:05}.parquet" for rollout_id in range(NUM_ROLLOUT)} <= records
    flags = {"run_events.jsonl", "trackers/run.json", "trackers/tensorboard.json"}
    assert unread == {"logs/engine_0.json", "logs/router.json", *flags, *dumps, *records}
    assert "logs/engine_0.log" in files - unread, "the rest is as the umask says"
    states = list((out / "saved" / "rollout").glob("*.pt"))
    assert len(states) == 2 and all(path.stat().st_mode & 0o777 == 0o644 for path in states)
    for name in sorted(files - unread):
        content = (out / name).read_bytes()
        assert not any(key.encode() in content for key in KEYS), name
    assert not any(key in run.printed for key in KEYS)
