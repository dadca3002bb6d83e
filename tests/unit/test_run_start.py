"""What is decided before the first rollout: whether to run at all, where to begin and where to end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.ray import driver, lifetime
from slime.ray.lifetime import RunPlan
from slime.ray.run import TrainingRun
from slime.utils.errors import UsageError
from tests.unit.argument_mutations import base_lines, write_files


class Manager:
    """In the place of the rollout manager's actor: answers at once, and notes which state of the data is loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        answers = {"get_num_rollout_per_epoch": lambda: 4, "load": self.loaded.append}
        return SimpleNamespace(remote=answers.get(name, lambda *values: None))


def plan_of(monkeypatch: pytest.MonkeyPatch, **flags: object) -> tuple[RunPlan, list[int]]:
    """The plan of a run whose checkpoint says that rollout 3 is next, and the loaded states of its data."""
    monkeypatch.setattr(lifetime, "get", lambda value, *what: value)
    values = {
        "start_rollout_id": None,
        "num_rollout": 9,
        "num_epoch": None,
        "use_critic": False,
        "use_fault_tolerance": False,
        "elastic_rollout": False,
        "num_critic_only_steps": 0,
        "eval_only": False,
        "debug_train_only": True,
        "debug_rollout_only": False,
        "use_pytorch_profiler": False,
        "profile_step_start": 0,
        "profile_step_end": 1,
        "exit_signal_handler": False,
        "save": None,
        "save_hf": None,
        "async_save": False,
        "release_train": False,
        "deterministic": False,
        "peer_checkpoint_interval": None,
        "exit_duration_in_mins": None,
    }
    run = TrainingRun(SimpleNamespace(**(values | flags)))
    run.parts.manager = manager = Manager()
    run._connect({"start_rollout_id": 3, "parallel_config": {}, "warnings": []})
    return run.plan, manager.loaded


def test_a_run_begins_where_its_checkpoint_ends_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, loaded = plan_of(monkeypatch)
    assert (plan.start_rollout_id, loaded) == (3, [2])
    plan, loaded = plan_of(monkeypatch, start_rollout_id=6)
    assert (plan.start_rollout_id, loaded) == (6, [5])
    plan, loaded = plan_of(monkeypatch, start_rollout_id=0)
    assert (plan.start_rollout_id, loaded) == (0, [])


def test_a_resumed_run_says_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plan_of(monkeypatch)
    assert "resumed from rollout 2; going on at 3" in caplog.text
    caplog.clear()
    plan_of(monkeypatch, num_rollout=3)
    assert "resumed from rollout 2; it was the last: no rollout is left" in caplog.text
    caplog.clear()
    plan_of(monkeypatch, eval_only=True)
    assert "resumed" not in caplog.text


def test_a_run_ends_after_its_rollouts_or_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of(monkeypatch)[0].num_rollout == 9
    assert plan_of(monkeypatch, num_rollout=None, num_epoch=5)[0].num_rollout == 5 * 4


def test_epochs_that_leave_the_actor_no_rollout_are_refused_once_they_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs = {"num_rollout": None, "num_epoch": 5, "use_critic": True}
    assert plan_of(monkeypatch, num_critic_only_steps=19, **epochs)[0].num_rollout == 20
    with pytest.raises(UsageError, match="--num-critic-only-steps 20 leaves none of the 20 rollouts"):
        plan_of(monkeypatch, num_critic_only_steps=20, **epochs)


def test_a_dry_run_plans_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver.signal, "signal", lambda *_: None)
    write_files(tmp_path)
    trained: list[object] = []
    line = ["train.py", *base_lines()[0]]
    monkeypatch.setattr(sys, "argv", line)
    assert driver.drive(trained.append) == 0
    assert len(trained) == 1 and capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", [*line, "--dry-run"])
    driver.drive(trained.append)
    assert len(trained) == 1 and "4 prompts" in capsys.readouterr().out
