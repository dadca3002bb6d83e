"""Several policies over one base (--lora-policies): eight in one trainer, and each as in a run of its own.

A policy's own run starts from the PEFT directory that the common trainer wrote before its first step, so both have the
same A. Every policy has other rewards, so that a state that is mixed up shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.paths import iteration_dir
from slime.config.args import Args
from slime.config.lora_policies import LoraPolicy
from tests.integration.test_lora import LORA, WITH_HEAD, hf_path, lora_args
from tests.integration.trainer_world import make_train_data, resumed_from, train

__all__ = ["hf_path"]

RANKS, RATES = (4, 2, 3, 1, 4, 4, 2, 1), (1e-2, 3e-2, 1e-3, 2e-2, 5e-3, 1e-2, 1e-2, 4e-2)
POLICIES = tuple(
    LoraPolicy(name=f"policy_{n}", rank=rank, lr=rate) for n, (rank, rate) in enumerate(zip(RANKS, RATES, strict=True))
)
LOOKED_AT = (0, 1, 3)


def flags_of(hf_path: Path, flags: str = "", **changes: Any) -> Args:
    """Without --lora-alpha, so that every rank has a scale of 2."""
    return Args.of(vars(lora_args(hf_path, flags, lora_alpha=None, **WITH_HEAD, **changes)))


def data_of(number: int) -> dict[str, Any]:
    data = make_train_data()
    return data | {"rewards": [reward * (-1) ** number + number * 0.1 for reward in data["rewards"]]}


def share_of(actor: Any, number: int) -> dict[str, Any]:
    from slime.ray.rollout.shares import split_train_data

    layout = actor.parallel_config()
    return split_train_data(actor.args, data_of(number), layout)[layout["dp_rank"]]


def write_all(actor: Any, out: Path) -> None:
    """Each policy's PEFT directory."""
    from slime.backends.megatron_utils.layers.lora import save_adapter

    for policy in actor._policies.adapters():
        save_adapter(policy.of(actor.args), actor.state.model, out / policy.name)
        torch.distributed.barrier()


def train_all(actor: Any, rollout_id: int) -> list[Any]:
    shares = {policy.name: share_of(actor, number) for number, policy in enumerate(actor.args.policies)}
    with mock.patch.object(actor, "_fetch", side_effect=dict):
        return actor.train(rollout_id, shares)


def train_in_turns(actor: Any, records: list[Any], out: Path) -> None:
    rank = torch.distributed.get_rank()
    if rank == 0:
        (out / "start").mkdir(parents=True)
        (out / "end").mkdir()
    torch.distributed.barrier()
    write_all(actor, out / "start")
    found = [train_all(actor, 0)]
    if actor.args.save:
        actor.save_model(0)
    found += [train_all(actor, 1), train_all(actor, 2)]
    write_all(actor, out / "end")
    if rank == 0:
        torch.save(found, out / "records.pt")


def go_on(actor: Any, records: list[Any], out: Path) -> None:
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    torch.distributed.barrier()
    train_all(actor, 1)
    train_all(actor, 2)
    write_all(actor, out)


def train_alone(actor: Any, records: list[Any], number: int, out: Path) -> None:
    from slime.backends.megatron_utils.layers.lora import save_adapter

    found = [actor.train_on(rollout_id, share_of(actor, number)) for rollout_id in range(3)]
    save_adapter(actor.args, actor.state.model, out / "end")
    torch.save(found, out / "records.pt")


def adapter_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_each_policy_is_trained_as_in_a_run_of_its_own(hf_path: Path, tmp_path: Path, flags: str) -> None:
    policies = POLICIES if not flags else POLICIES[:2]
    common = flags_of(hf_path, flags, policies=policies)
    train(common, train_in_turns, tmp_path / "all", num_rollouts=0)
    together = torch.load(tmp_path / "all" / "records.pt")
    for number in [n for n in LOOKED_AT if n < len(policies)]:
        policy = policies[number]
        (tmp_path / policy.name).mkdir()
        start, out = tmp_path / "all" / "start" / policy.name, tmp_path / policy.name
        own = flags_of(hf_path, lora_adapter_path=str(start))
        train(policy.of(own), train_alone, number, out, num_rollouts=0)
        before, ours, theirs = (
            adapter_of(path) for path in (start, tmp_path / "all" / "end" / policy.name, out / "end")
        )
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].shape == tensor.shape, "without the room of other policies"
            moved = (tensor - before[name]).norm()
            assert moved > 0 and (ours[name] - tensor).norm() <= 1e-3 * moved, name
        for in_turns, alone in zip(together, torch.load(out / "records.pt"), strict=True):
            loss = next(metrics["train/loss"] for metrics, key in alone if key == "train/step")
            named = [metrics for metrics, _ in in_turns if f"policy/{policy.name}/train/loss" in metrics]
            assert [m[f"policy/{policy.name}/train/loss"] for m in named] == [pytest.approx(loss, rel=1e-5, abs=1e-7)]
    losses = [
        m[f"policy/{p.name}/train/loss"]
        for p in policies
        for m, _ in together[0]
        if f"policy/{p.name}/train/loss" in m
    ]
    (mean,) = [metrics["train/loss"] for metrics, _ in together[0] if "train/loss" in metrics]
    assert mean == pytest.approx(sum(losses) / len(policies))


def test_all_policies_go_on_from_one_checkpoint(hf_path: Path, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    common = flags_of(hf_path, policies=POLICIES, save=str(root))
    train(common, train_in_turns, tmp_path / "all", num_rollouts=0)
    for policy in POLICIES:
        own = iteration_dir(iteration_dir(root, 0) / "policies" / policy.name, 0)
        assert (own / "adapter" / "adapter_config.json").is_file(), "a PEFT directory of each"
    more = (*POLICIES, LoraPolicy(name="new_one", rank=LORA["lora_rank"]))
    resumed = flags_of(hf_path, policies=more, **resumed_from(str(root)))
    train(resumed, go_on, tmp_path / "again", num_rollouts=0)
    for policy in POLICIES:
        ours, theirs = (adapter_of(tmp_path / part / policy.name) for part in ("again", "all/end"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), policy.name
    assert (tmp_path / "again" / "new_one").is_dir(), "one that the checkpoint lacks begins anew"
