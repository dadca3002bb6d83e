"""A resumed run goes on with the KL controller's weight and with the reference that was moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_world import resumed_from, train, train_and_save, train_once_more, trainer_args

REINFORCE = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_loss_type": "k2"}
ADAPTIVE = {"kl_ctrl": "adaptive", "kl_coef": 0.1, "kl_target": 1e-3, "kl_horizon": 60}


@pytest.mark.parametrize(
    "changes", [REINFORCE | ADAPTIVE, REINFORCE | {"kl_coef": 0.1, "ref_update_interval": 1}], ids=["weight", "copy"]
)
def test_a_resumed_run_goes_on_with_the_same_kl(hf_path: Path, tmp_path: Path, changes: dict[str, Any]):
    changes = changes | {"lr": 1e-2, "ref_load": str(hf_path)}
    root = str(tmp_path / "ckpt")
    train(trainer_args(hf_path, **changes, save=root), train_and_save, tmp_path / "straight")
    train(
        trainer_args(hf_path, **changes, **resumed_from(root)), train_once_more, tmp_path / "resumed", num_rollouts=0
    )
    (records, weights), (again, same) = (torch.load(tmp_path / name) for name in ("straight", "resumed"))
    assert records == again
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    rollout = next(metrics for metrics, key in again if key == "rollout/step")
    if "kl_ctrl" in changes:
        # the KL of the first rollout was 0, far below its target: clipped at -0.2, 12 samples of 60
        assert rollout["rollout/kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 12 / 60))
    else:
        assert rollout["rollout/kl"] == 0.0, "the reference is the actor that was saved"
