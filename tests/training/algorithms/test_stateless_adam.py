"""--use-stateless-adam: each update is Adam's first, and nothing is remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.integration.trainer_world import (
    parameters,
    resumed_from,
    train,
    train_and_save,
    train_once_more,
    trainer_args,
)
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures


def save(actor: Any, records: list[Any], out: Path) -> None:
    optimizer = actor.state.optimizer
    parts = vars(optimizer).get("chained_optimizers", [optimizer])
    kept = sum(value.numel() for p in parts for s in p.optimizer.state.values() for value in s.values())
    torch.save((parameters(actor), kept), out)


def run(hf_path: Path, out: Path, num_rollouts: int, **changes: Any) -> tuple[dict[str, torch.Tensor], int]:
    train(trainer_args(hf_path, lr=1e-3, **changes), save, out, num_rollouts=num_rollouts)
    return torch.load(out)


def test_every_update_is_adams_first_and_nothing_is_kept(hf_path: Path, tmp_path: Path) -> None:
    first, kept = run(hf_path, tmp_path / "a", 1)
    assert kept == 2 * sum(weight.numel() for weight in first.values())
    alone, kept = run(hf_path, tmp_path / "b", 1, use_stateless_adam=True)
    assert kept == 0
    for name, weight in first.items():
        torch.testing.assert_close(alone[name], weight, rtol=0, atol=1e-6)
    # Adam that forgets before each of two rollouts of one step makes two first updates; one that remembers does not
    two, _ = run(hf_path, tmp_path / "c", 2, use_stateless_adam=True)
    forgetful, _ = run(hf_path, tmp_path / "d", 2, reset_optimizer_states=True)
    remembering, _ = run(hf_path, tmp_path / "e", 2)
    assert max(float((two[name] - forgetful[name]).abs().max()) for name in two) < 1e-5
    assert max(float((two[name] - remembering[name]).abs().max()) for name in two) > 1e-4


def test_a_resumed_run_goes_on_with_the_schedule(hf_path: Path, tmp_path: Path) -> None:
    flags, stateless = "--lr-warmup-iters 4", {"use_stateless_adam": True, "checkpoint_contents": ["model", "rng"]}
    root = str(tmp_path / "ckpt")
    train(trainer_args(hf_path, flags, lr=1e-3, **stateless, save=root), train_and_save, tmp_path / "straight")
    resumed = trainer_args(hf_path, flags, lr=1e-3, **stateless, **resumed_from(root))
    train(resumed, train_once_more, tmp_path / "resumed", num_rollouts=0)
    (records, weights), (again, same) = (torch.load(tmp_path / name) for name in ("straight", "resumed"))
    assert records == again and records[-1][0]["train/lr-pg_0"] == 1e-3 / 4, "one of four steps of the warm-up is done"
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_stateless_adam_saves_no_optimizer_state(check: Check) -> None:
    has(check("--use-stateless-adam").problems.wrong, "it needs --optimizer adam and --no-save-optim")
    assert check("--use-stateless-adam --save ckpt --no-save-optim").problems.all() == []
