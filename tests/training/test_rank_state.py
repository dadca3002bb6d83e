"""A rank that takes over a copy of another process's state trains on as that one would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime.ray.peer_copies import pieces_of
from tests.integration.trainer_world import make_train_data, parameters, train, trainer_args

REINFORCE = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_loss_type": "k2"}
KL = REINFORCE | {"kl_ctrl": "adaptive", "kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 60, "ref_update_interval": 1}
SCHEDULE = "--lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1"
SMALL = 4096
"""Bytes of a piece: some hold several tensors, and some tensors are larger."""


def next_step(actor: Any, out: Path) -> None:
    """Train on rollout 1 and write (its records, the weights then) beside `out`."""
    from slime.ray.rollout.shares import split_train_data

    layout = actor.parallel_config()
    shares = split_train_data(actor.args, make_train_data(), {"dp_size": layout["dp_size"], "cp_size": 1})
    torch.save((actor.train_on(1, shares[layout["dp_rank"]]), parameters(actor)), f"{out}.{dist.get_rank()}")


def copy_then_go_on(actor: Any, records: list[Any], copies: Path, out: Path) -> None:
    copy = (list(pieces_of(actor.state_tensors(), SMALL)), actor.state_values())
    torch.save(copy, f"{copies}.{dist.get_rank()}")
    next_step(actor, out)


def go_on_from_copy(actor: Any, records: list[Any], copies: Path, out: Path) -> None:
    pieces, values = torch.load(f"{copies}.{dist.get_rank()}", weights_only=False)
    assert len(pieces) > 2
    with pytest.raises(RuntimeError, match="lacks .* of this rank's tensors"):
        actor.restore_state(pieces[:-1], values)
    actor.restore_state(iter(pieces), values)
    next_step(actor, out)


@pytest.mark.parametrize(
    ("flags", "dp_size", "changes"),
    [
        (SCHEDULE, 1, KL),
        (f"{SCHEDULE} --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 2, {}),
        (f"{SCHEDULE} --bf16", 1, {}),
        (f"{SCHEDULE} --use-distributed-optimizer --optimizer-cpu-offload", 1, {}),
    ],
    ids=["kl", "distributed", "bf16", "on-host"],
)
def test_a_rank_that_takes_over_a_copy_does_the_next_step_bit_for_bit(
    hf_path: Path, tmp_path: Path, flags: str, dp_size: int, changes: dict[str, Any]
):
    args = trainer_args(hf_path, flags, dp_size=dp_size, lr=1e-2, ref_load=str(hf_path), **changes)
    copies, straight, again = (tmp_path / name for name in ("copies", "straight", "again"))
    train(args, copy_then_go_on, copies, straight, dp_size=dp_size)
    train(args, go_on_from_copy, copies, again, num_rollouts=0, dp_size=dp_size)
    for rank in range(dp_size):
        (records, weights), (same, equal) = (torch.load(f"{path}.{rank}") for path in (straight, again))
        assert records == same
        assert all(torch.equal(weights[name], equal[name]) for name in weights)
    lr = [metrics["train/lr-pg_0"] for metrics, key in records if key == "train/step"]
    assert lr == [pytest.approx(1e-2 / 2)], "after one of two steps to warm up; a fresh schedule begins with 0"


def test_a_piece_has_as_many_tensors_as_fit_and_at_least_one():
    tensors = [(str(i), torch.full((size,), i, dtype=torch.bfloat16)) for i, size in enumerate([2, 2, 9, 1, 0, 3])]
    pieces = [{name: array.nbytes for name, array in piece.items()} for piece in pieces_of(iter(tensors), 8)]
    assert pieces == [{"0": 4, "1": 4}, {"2": 18}, {"3": 2, "4": 0, "5": 6}]
