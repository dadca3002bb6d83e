"""--ci-test: what a correct run keeps, and the sentence that each wrong number ends a run with."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.training import ci_checks
from slime.training.ci_checks import (
    CheckFailed,
    above_zero,
    differs_from_reference,
    entropy_out_of_range,
    not_finite,
    other_grad_norm,
)
from tests.integration.trainer_world import train, trainer_args

HOOKS = str(Path(__file__).resolve().parents[1] / "integration" / "trainer_hooks.py")
ENGINE_GAP = {"ci_train_rollout_logprob_abs_diff_threshold": 9.0}  # the engine's log-probs of these tests are made up
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}


def passes(actor: Any, records: list[Any]) -> None:
    assert actor._checks._starts_as_reference is actor.args.use_kl_loss


def run(hf_path: Path, *, num_rollouts: int = 1, flags: str = "", dp_size: int = 1, **changes: Any) -> None:
    args = trainer_args(hf_path, flags, dp_size=dp_size, **({"ci_test": True, "lr": 1e-3} | ENGINE_GAP | changes))
    train(args, passes, num_rollouts=num_rollouts, dp_size=dp_size)


@pytest.mark.parametrize(
    "changes",
    [
        {"ref_load": "hf", **KL},
        {"ref_load": "hf", **KL, "dp_size": 2},
        {"global_batch_size": 6},
        {"ppo_epochs": 2},
        {"log_probs_max_tokens_per_gpu": 40, "max_tokens_per_gpu": 90},
        {"recompute_loss_function": True},
        {"advantage_estimator": "gspo"},
        {"use_rollout_logprobs": True},
        {"loss_type": "sft_loss"},
    ],
    ids=lambda changes: " ".join(f"{name}={value}" for name, value in changes.items() if name not in KL),
)
def test_a_correct_run_passes(hf_path: Path, changes: dict[str, Any]):
    if "ref_load" in changes:
        changes = changes | {"ref_load": str(hf_path)}
    run(hf_path, num_rollouts=2, **changes)


def test_weights_that_change_after_the_old_log_probs_end_the_run(hf_path: Path):
    hook = {"custom_megatron_before_train_step_hook_path": f"{HOOKS}:perturb_before_train_step"}
    with pytest.raises(AssertionError, match=r"--ci-test, rollout 0, train step 0: ppo_kl is .* must be 0"):
        run(hf_path, **hook)
    run(hf_path, **hook, ci_disable_kl_checker=True)


def test_a_reference_that_is_not_the_actor_it_was_loaded_as_ends_the_run(hf_path: Path):
    hook = {"custom_megatron_before_log_prob_hook_path": f"{HOOKS}:perturb_reference"}
    with pytest.raises(AssertionError, match="the weights are still the reference's"):
        run(hf_path, **hook, ref_load=str(hf_path), **KL, lr=0.0)


def test_the_engine_must_be_as_close_as_the_flag_says(hf_path: Path):
    with pytest.raises(AssertionError, match="--ci-train-rollout-logprob-abs-diff-threshold 0.1"):
        run(hf_path, ci_train_rollout_logprob_abs_diff_threshold=0.1)


def test_nothing_is_checked_without_the_flag(hf_path: Path):
    hook = f"{HOOKS}:perturb_before_train_step"
    args = trainer_args(hf_path, custom_megatron_before_train_step_hook_path=hook, lr=0.0)
    train(args, nothing)


def nothing(actor: Any, records: list[Any]) -> None:
    pass


def test_gradient_norms_are_compared_with_those_of_another_run(hf_path: Path, tmp_path: Path):
    template = str(tmp_path / "norms" / "{role}-{rollout_id}-{step_id}.txt")
    run(hf_path, num_rollouts=2, global_batch_size=6, ci_save_grad_norm=template)
    names = [f"actor-{rollout}-{step}.txt" for rollout in (0, 1) for step in (0, 1)]
    assert sorted(path.name for path in (tmp_path / "norms").iterdir()) == names
    assert float((tmp_path / "norms" / names[0]).read_text()) > 0
    run(hf_path, num_rollouts=2, global_batch_size=6, ci_load_grad_norm=template)
    with pytest.raises(AssertionError, match=r"grad_norm is .* in .*actor-0-0\.txt \(--ci-load-grad-norm"):
        run(hf_path, global_batch_size=6, ci_load_grad_norm=template, entropy_coef=1.0)
    with pytest.raises(AssertionError, match=r"actor-2-0\.txt holds no gradient norm"):
        run(hf_path, num_rollouts=3, global_batch_size=6, ci_load_grad_norm=template)


def test_each_sentence_names_the_number_and_its_bound(tmp_path: Path):
    assert list(not_finite({"loss": math.nan, "kl": 1.0})) == ["loss is nan, which is no finite number"]
    assert list(above_zero({"rollout/log_probs": 0.5, "rollout/ref_log_probs": -1.0})) == [
        "rollout/log_probs is 0.5, above 0: it holds no log-probabilities"
    ]
    (entropy,) = entropy_out_of_range({"entropy_loss": 5.0}, 100)
    assert entropy == f"entropy_loss is 5, outside 0 to ln(100) = {math.log(100):.6g}"
    assert not [*entropy_out_of_range({"entropy_loss": math.log(100)}, 100), *entropy_out_of_range({}, 100)]
    equal = {"rollout/log_probs": -1.0, "rollout/ref_log_probs": -1.0, "rollout/kl": 0.0}
    assert not list(differs_from_reference(equal, bound=0.0))
    other = equal | {"rollout/ref_log_probs": -1.1, "rollout/kl": 0.1}
    assert len(list(differs_from_reference(other, bound=0.0))) == 2
    file = tmp_path / "norm.txt"
    file.write_text("2.0\n")
    assert not [*other_grad_norm(2.019, file), *other_grad_norm(1.981, file)], "1% of 2"
    assert list(other_grad_norm(2.03, file)) == [
        f"grad_norm is 2.03 and 2 in {file} (--ci-load-grad-norm, tolerance 1%)"
    ]


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, 0.0),
        ({"multi_latent_attention": True}, 1e-8),
        ({"recompute_loss_function": True}, 1e-5),
        ({"log_probs_max_tokens_per_gpu": 9}, 1e-5),
        ({"log_probs_max_tokens_per_gpu": 9, "use_dynamic_batch_size": False}, 0.0),
        ({"shuffle_mini_batches": True, "bf16": True}, 1e-2),
    ],
)
def test_a_kl_is_exactly_0_unless_the_two_passes_round_otherwise(changes: dict[str, Any], bound: float, monkeypatch):
    monkeypatch.setattr(ci_checks.dist, "get_rank", lambda: 1)  # of whom only rank 0 has files
    args = Namespace(
        **{
            "ci_test": True, "ci_disable_kl_checker": False, "ci_train_rollout_logprob_abs_diff_threshold": 0.1,
            "use_rollout_logprobs": False, "keep_old_actor": False, "vocab_size": 100, "bf16": False, "fp16": False,
            "use_dynamic_batch_size": True, "log_probs_max_tokens_per_gpu": 64, "max_tokens_per_gpu": 64,
            "multi_latent_attention": False, "recompute_loss_function": False, "shuffle_mini_batches": False,
        }
        | changes
    )  # fmt: skip
    checks = ci_checks.CiChecks(args, Namespace(equals=lambda tag: True))
    checks.step(0, 0, {"ppo_kl": bound, "kl_loss": -bound})
    checks.step(0, 1, {"ppo_kl": 1.0, "kl_loss": 1.0})
    with pytest.raises(CheckFailed, match=r"rollout 1, train step 0: ppo_kl is .* must be 0 \(bound"):
        checks.step(1, 0, {"ppo_kl": 2 * bound + 1e-12, "kl_loss": 1.0})
