"""--train-backend fsdp with a critic: five steps of PPO equal those of Megatron, on one, two and four processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from slime.observability.timer import Timer
from tests.integration.trainer_world import NUM_SAMPLES, make_train_data, trainer_args
from tests.unit.megatron_fakes import make_hf_model, run_world
from tests.unit.test_fsdp import MEGATRON, NUM_STEPS, assert_equal_runs

pytestmark = pytest.mark.processes

PPO: dict[str, Any] = {
    **{"advantage_estimator": "ppo", "gamma": 0.99, "lambd": 0.95, "normalize_advantages": True},
    **{"kl_coef": 0.05, "recompute_old_log_probs": True, "entropy_coef": 0.01},
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF directory, beside it what PPO with Megatron makes of it on one process."""
    import slime.backends.fsdp_utils.actor  # noqa: F401  (once, before worlds fork)

    path = tmp_path_factory.mktemp("ppo") / "hf"
    make_hf_model(path)
    ppo_of(path, "megatron", path.with_suffix(".pt"))
    return path


@pytest.mark.parametrize(
    ("world", "flags", "megatron"),
    [
        (1, {"recompute_loss_function": True}, "--recompute-granularity full"),
        (2, {"fsdp_cpu_offload": True, "fsdp_reshard_after_forward": False}, ""),
        (4, {"fsdp_replicate_size": 2, "max_tokens_per_gpu": 24}, ""),
        (4, {"max_tokens_per_gpu": 24, "log_probs_max_tokens_per_gpu": 48}, "--context-parallel-size 2"),
    ],
    ids=str,
)
def test_five_steps_of_ppo_equal_those_of_megatron(
    hf: Path, tmp_path: Path, world: int, flags: dict[str, Any], megatron: str
) -> None:
    ppo_of(hf, "fsdp", tmp_path / "ppo.pt", world=world, megatron=megatron, **flags)
    assert_equal_runs(hf.with_suffix(".pt"), tmp_path / "ppo.pt")
    (theirs, their_values), (ours, values) = (
        torch.load(path.with_suffix(".critic")) for path in (hf, tmp_path / "ppo")
    )
    assert len(ours) == NUM_STEPS and max(map(abs, values)) > 0.05, "values start at 0"
    for expected, found in zip(theirs, ours, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert values == pytest.approx(their_values, rel=1e-3, abs=1e-5)


def ppo_of(hf: Path, backend: str, out: Path, *, world: int = 1, megatron: str = "", **flags: Any) -> None:
    """Train actor and critic in turn; what `assert_equal_runs` reads goes to `out`, the critic's part beside it."""
    size = 2 if "context" in megatron else 1
    args, critic = (
        trainer_args(
            hf, f"{MEGATRON} {megatron}", dp_size=world // size, train_backend=backend, lr=lr, ref_load=str(hf),
            fsdp_min_group_params=1, **PPO, **flags,
        )
        for lr in (1e-3, 1e-2)
    )  # fmt: skip
    vars(critic).update(loss_type="value_loss", untie_embeddings_and_output_weights=True, kl_coef=0.0)
    run_world(world, _ppo, args, critic, out)


def _ppo(args: Any, critic_args: Any, out: Path) -> None:
    from slime.backends.fsdp_utils.actor import FsdpCriticActor, FsdpTrainActor
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronCriticActor, MegatronTrainActor
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
    from slime.ray.rollout.shares import split_train_data

    is_fsdp = args.train_backend == "fsdp"
    where = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "master_addr": "", "master_port": 0}
    actor = (FsdpTrainActor if is_fsdp else MegatronTrainActor)(args, **where)
    critic = (FsdpCriticActor if is_fsdp else MegatronCriticActor)(critic_args, **where)
    with mock.patch.object(initialize, "init"):  # run_world has done it
        actor.init()
        Timer().end("train_wait")  # in a run each has a process of its own
        critic.init()

    def whole() -> dict[str, torch.Tensor]:
        source = actor.backend._source if is_fsdp else actor.state.model
        return {
            name: tensor.clone()
            for bucket in iter_hf_buckets(args, source, buffer_size=20_000)
            for name, tensor in bucket
        }

    layout, before = actor.parallel_config(), whole()
    share = split_train_data(args, make_train_data(), layout)[layout["dp_rank"]]
    records, of_critic = [], []
    for step in range(NUM_STEPS):
        values = critic.values_of(dict(share))
        records += actor.train_on(step, dict(share) | values)
        of_critic += [metrics for metrics, _ in critic.train_on(step, dict(share) | actor.columns_for_critic)]
    mine = dict(zip(share["sample_indices"], critic.values_of(dict(share))["values"], strict=True))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    of_all = {number: values.tolist() for of_one in of_ranks for number, values in of_one.items()}
    after = whole()
    if dist.get_rank() == 0:
        assert len(of_all) == NUM_SAMPLES
        torch.save((records, before, after), out)
        torch.save((of_critic, [x for number in sorted(of_all) for x in of_all[number]]), out.with_suffix(".critic"))
