"""What a trainer does about algorithms around its steps: controller of the KL, reference, moments, entropy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.observability.timer import Timer
from tests.integration.trainer_world import NUM_ROLLOUTS, train, trainer_args


def of(records: list[Any], key: str) -> list[dict[str, float]]:
    return [metrics for metrics, step_key in records if step_key == key]


def save_timed_records(actor: Any, records: list[Any], out: Path) -> None:
    """Records, and the names of the timers."""
    torch.save((records, sorted(Timer().log_dict())), out)


def save_records(actor: Any, records: list[Any], out: Path) -> None:
    moments = [state for state in _states(actor) for state in (state["exp_avg"].abs().sum().item(),)]
    torch.save((records, sum(moments)), out)


def _states(actor: Any) -> list[dict[str, Any]]:
    optimizer = actor.state.optimizer
    parts = vars(optimizer).get("chained_optimizers", [optimizer])
    return [state for part in parts for state in part.optimizer.state.values()]


def run(hf_path: Path, out: Path, *, num_rollouts: int, **changes: Any) -> tuple[list[Any], float]:
    args = trainer_args(hf_path, **({"lr": 1e-2} | changes))
    train(args, save_records, out, num_rollouts=num_rollouts)
    return torch.load(out)


REINFORCE = {
    "advantage_estimator": "reinforce_plus_plus",
    "normalize_advantages": True,
    "kl_coef": 0.1,
    "kl_loss_type": "k2",
}


def test_an_adaptive_controller_steers_the_weight_of_the_kl(hf_path: Path, tmp_path: Path):
    adaptive = {"kl_ctrl": "adaptive", "kl_target": 1e-3, "kl_horizon": 60, "ref_load": str(hf_path)}
    records, _ = run(hf_path, tmp_path / "a", num_rollouts=3, **REINFORCE, **adaptive)
    measured = of(records, "rollout/step")
    # the first rollout is on the reference: its KL of 0 is far below the target; the next is far above it
    assert measured[0]["rollout/kl"] == 0.0 and measured[1]["rollout/kl"] > 2e-3
    down, up = 1 - 0.2 * NUM_ROLLOUTS / 60, 1 + 0.2 * NUM_ROLLOUTS / 60
    expected = [0.1, 0.1 * down, 0.1 * down * up]
    assert [metrics["rollout/kl_coef"] for metrics in measured] == pytest.approx(expected)
    fixed, _ = run(hf_path, tmp_path / "b", num_rollouts=2, **REINFORCE, ref_load=str(hf_path))
    assert [metrics["rollout/kl_coef"] for metrics in of(fixed, "rollout/step")] == [0.1, 0.1]
    # the smaller weight was used: nothing else differs in the second rollout
    steered, plain = (of(r, "rollout/step")[1]["rollout/returns"] for r in (records, fixed))
    assert steered != plain


def test_the_reference_follows_the_actor_every_so_many_rollouts(hf_path: Path, tmp_path: Path):
    changes = {"use_kl_loss": True, "kl_loss_type": "k3", "ref_load": str(hf_path), "ref_update_interval": 2}
    train(trainer_args(hf_path, lr=1e-2, **changes), save_timed_records, tmp_path / "a", num_rollouts=4)
    records, timers = torch.load(tmp_path / "a")
    assert {"ref_log_probs", "ref_model_update", "actor_train"} <= set(timers)
    kl = [metrics["train/kl_loss"] for metrics in of(records, "train/step")]
    assert kl[0] == 0.0 and kl[1] > 1e-4, "the reference is that of the start"
    assert kl[2] == 0.0 and kl[3] > 1e-6, "after two rollouts it is the actor"


def test_moments_are_forgotten_before_each_rollout(hf_path: Path, tmp_path: Path):
    changes = {"num_rollouts": 2, "global_batch_size": NUM_ROLLOUTS}
    _, kept = run(hf_path, tmp_path / "a", **changes)
    _, forgotten = run(hf_path, tmp_path / "b", **changes, reset_optimizer_states=True)
    _, one_step = run(hf_path, tmp_path / "c", num_rollouts=1, reset_optimizer_states=True)
    # exp_avg = 0.1 g of one step, 0.09 g1 + 0.1 g2 of two
    assert forgotten != kept and 0.3 * one_step < forgotten < 3 * one_step


def check_reset(actor: Any, records: list[Any], out: Path) -> None:
    from slime.backends.megatron_utils.optimizer import reset_optimizer_states

    before = [parameter.detach().clone() for parameter in actor.state.model[0].parameters()]
    assert all(state["exp_avg_sq"].any() for state in _states(actor)[:1])
    reset_optimizer_states(actor.state.optimizer)
    assert not any(value.any() for state in _states(actor) for value in state.values() if torch.is_tensor(value))
    assert all(torch.equal(a, b) for a, b in zip(before, actor.state.model[0].parameters(), strict=True))


def test_forgetting_moments_changes_no_weight(hf_path: Path, tmp_path: Path):
    train(trainer_args(hf_path, lr=1e-2), check_reset, tmp_path)


def test_further_passes_over_a_rollout_train_on_it_again(hf_path: Path, tmp_path: Path):
    records, _ = run(hf_path, tmp_path / "a", num_rollouts=2, ppo_epochs=3, global_batch_size=NUM_ROLLOUTS // 2)
    steps = of(records, "train/step")
    assert [metrics["train/step"] for metrics in steps] == list(range(2 * 3 * 2)), "2 steps a pass, 3 passes a rollout"
    # the ratio is to the policy before the rollout's first step: 1 there, and no more in later passes
    assert steps[0]["train/ppo_kl"] == 0.0 and steps[6]["train/ppo_kl"] == 0.0
    assert all(abs(metrics["train/ppo_kl"]) > 1e-4 for metrics in steps[2:6])
    assert len(of(records, "rollout/step")) == 2
    single, _ = run(hf_path, tmp_path / "b", num_rollouts=1, ppo_epochs=2)
    assert abs(of(single, "train/step")[1]["train/ppo_kl"]) > 1e-4, "also where a pass is a single step"


def test_the_schedule_is_as_long_as_all_passes(hf_path: Path):
    from slime.utils.dp_schedule import total_train_steps

    args = trainer_args(hf_path, ppo_epochs=3, num_rollout=5, rollout_batch_size=4, n_samples_per_prompt=2)
    args.global_batch_size = 4
    assert total_train_steps(args) == 5 * 2 * 3


def test_the_entropy_before_training_is_logged(hf_path: Path, tmp_path: Path):
    records, _ = run(hf_path, tmp_path / "a", num_rollouts=1, use_rollout_entropy=True)
    (rollout,), (step,) = of(records, "rollout/step"), of(records, "train/step")
    # one step: the entropy before it is also that which the loss reports. Fan-out samples count apart, so roughly
    assert rollout["rollout/entropy"] == pytest.approx(step["train/entropy_loss"], rel=0.15)
    without, _ = run(hf_path, tmp_path / "b", num_rollouts=1)
    assert "rollout/entropy" not in of(without, "rollout/step")[0]
