"""train.py with PPO from start to end: values go to the actor, returns to the critic, and both write checkpoints."""

from __future__ import annotations

import pytest

from slime.checkpoints.paths import latest_iteration
from tests.integration.launch import Run, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(600)

ROLES = """\
megatron:
  - {name: value, role: critic, overrides: {lr: 5e-3}}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    work = tmp_path_factory.mktemp("ppo")
    (work / "roles.yaml").write_text(ROLES)
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    return train(
        work / "out", *grpo_flags(model, prompts), "--colocate", "--num-rollout", 3,
        "--advantage-estimator", "ppo", "--gamma", 0.99, "--lambd", 0.95, "--kl-coef", 0.1, "--ref-load", model,
        "--normalize-advantages", "--num-critic-only-steps", 1, "--megatron-config-path", work / "roles.yaml",
        "--save", work / "out", "--save-interval", 1, "--keep-checkpoints", 2, "--async-save",
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
    for root in (out, out / "critic"):
        assert latest_iteration(root) == 2
        assert sorted(path.name for path in root.glob("iter_*")) == ["iter_0000001", "iter_0000002"]
    assert (out / "logs" / "critic_0.log").exists() and (out / "logs" / "trainer_0.log").exists()
