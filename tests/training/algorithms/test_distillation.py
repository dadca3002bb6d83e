"""On-policy distillation: its formula against plain float64 Python, and a student that comes to its teacher."""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.loss import apply_opd_kl_to_advantages
from tests.integration.trainer_world import VOCAB, train, trainer_args
from tests.training.algorithms.loss_world import MASKS, advantages_of, aggregate, make_args, make_world, rows, run
from tests.unit.megatron_fakes import make_hf_model

HOOKS = str(Path(__file__).parents[2] / "integration" / "trainer_hooks.py")


def distilled(**changes: Any) -> tuple[dict[str, list], dict[str, float], dict[str, Any]]:
    """(columns, metrics, data) of a micro-batch with a teacher; masked tokens' log-probs are far off."""
    logits, columns, tokens = make_world()
    columns["teacher"] = rows(
        lambda x, m: x if m else 1e6, rows(lambda old, x: 2 * x - old, columns["old"], columns["ref"]), MASKS
    )
    _, metrics, data = run(make_args(use_opd=True, **changes), logits, columns, tokens)
    return columns, metrics, data


def reverse_kl(columns: dict[str, list]) -> list[list[float]]:
    return rows(lambda s, t, m: (s - t) * m, columns["old"], columns["teacher"], MASKS)


def plain_advantages() -> list[list[float]]:
    logits, columns, tokens = make_world()
    return advantages_of(run(make_args(), logits, columns, tokens)[2])


@pytest.mark.parametrize("coef", [0.0, 1.0, 0.3])
def test_the_log_ratio_of_student_to_teacher_is_taken_from_every_trained_token(coef: float):
    columns, metrics, data = distilled(opd_kl_coef=coef)
    expected = rows(lambda a, kl: a - coef * kl, plain_advantages(), reverse_kl(columns))
    for found, wanted in zip(advantages_of(data), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    for found, wanted in zip(data["opd_reverse_kl"], reverse_kl(columns), strict=True):
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    assert metrics["opd_reverse_kl"] == pytest.approx(aggregate("seq-mean-token-mean", reverse_kl(columns)), abs=1e-5)
    assert [r.tolist() for r in data["returns"]] == plain_advantages(), "what a critic learns is not touched"


def test_the_teacher_comes_before_whitening():
    columns, _, data = distilled(normalize_advantages=True)
    values = rows(lambda a, kl: a - kl, plain_advantages(), reverse_kl(columns))
    kept = [x for row, mask in zip(values, MASKS, strict=True) for x, m in zip(row, mask, strict=True) if m]
    mean, spread = statistics.fmean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    expected = rows(lambda x, m: m * (x - mean) / spread, values, MASKS)
    for found, wanted in zip(advantages_of(data), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


def double_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """A --custom-advantage-function-path."""
    rollout_data["advantages"] = [torch.full_like(mask, 7, dtype=torch.float32) for mask in rollout_data["loss_masks"]]
    rollout_data["returns"] = rollout_data["advantages"]


def test_the_teacher_comes_after_advantages_of_the_users_own():
    columns, _, data = distilled(custom_advantage_function_path=f"{__file__}:double_advantages")
    expected = rows(lambda kl: 7 - kl, reverse_kl(columns))
    for found, wanted in zip(advantages_of(data), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


def test_without_log_probs_of_the_teacher_the_error_says_where_they_come_from():
    data = {"loss_masks": [torch.ones(2)]}
    with pytest.raises(
        ValueError, match="no log-probs of the teacher .* give --custom-rm-path slime.rollout.on_policy"
    ):
        apply_opd_kl_to_advantages(make_args(), data, [torch.zeros(2)], [torch.zeros(2)])


# ---- a trainer that holds the teacher's weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A student and a teacher: two random models of one shape."""
    student, teacher = (tmp_path_factory.mktemp(name) for name in ("student", "teacher"))
    make_hf_model(student)
    model = make_hf_model(teacher)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(teacher)
    return student, teacher


PROMPTS = [[11 * i % VOCAB, 7 * i + 1, 3 * i + 2] for i in range(12)]
SAMPLES = 32


@torch.no_grad()
def next_token_log_probs(actor: Any) -> torch.Tensor:
    """[prompts, vocabulary] of the weights that the model holds now."""
    from slime.backends.megatron_utils.data import pack
    from slime.backends.megatron_utils.passes.forward import run_model

    batch = pack([torch.tensor(prompt) for prompt in PROMPTS])
    logits = run_model(actor.state.model[0], batch)[0, len(PROMPTS[0]) - 1 :: len(PROMPTS[0]), :VOCAB]
    return logits.double().log_softmax(-1)


def sampled_rollout(actor: Any, seed: int) -> dict[str, Any]:
    """A share whose responses are one token that the policy samples, all rewards 0."""
    from slime.ray.rollout.shares import split_train_data

    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(next_token_log_probs(actor).exp(), SAMPLES, replacement=True, generator=generator)
    tokens = [[*prompt, token] for prompt, row in zip(PROMPTS, drawn.tolist(), strict=True) for token in row]
    count = len(tokens)
    data = {
        "tokens": tokens,
        "response_lengths": [1] * count,
        "loss_masks": [[1]] * count,
        "rewards": [0.0] * count,
        "raw_reward": [0.0] * count,
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "rollout_mask_sums": [1] * count,
    }
    one_step = argparse.Namespace(**(vars(actor.args) | {"global_batch_size": count}))
    return split_train_data(one_step, data, {"dp_size": 1, "cp_size": 1})[0]


def check_comes_nearer(actor: Any, records: list[Any], num_rollouts: int) -> None:
    with actor._weights.swapped("teacher"):
        teacher = next_token_log_probs(actor)

    def exact_kl() -> float:
        student = next_token_log_probs(actor)
        return (student.exp() * (student - teacher)).sum(-1).mean().item()

    before = exact_kl()
    for rollout_id in range(num_rollouts):
        at_rollout = exact_kl()
        (rollout, _), (step, _) = actor.train_on(rollout_id, sampled_rollout(actor, rollout_id))
        # what is logged estimates the divergence of the policy that sampled
        assert rollout["rollout/opd_reverse_kl"] == pytest.approx(at_rollout, abs=0.25 * before)
        assert step["train/opd_reverse_kl"] == pytest.approx(rollout["rollout/opd_reverse_kl"], abs=1e-5)
    assert before > 0.3 and exact_kl() < 0.35 * before, (before, exact_kl())
    from slime.utils.misc import load_function

    assert load_function(f"{HOOKS}:CALLS") == ["teacher_", ""] * num_rollouts


def test_without_rewards_a_student_comes_to_the_teacher(models: tuple[Path, Path]):
    student, teacher = models
    flags = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(teacher), "lr": 1e-2}
    hook = {"custom_megatron_before_log_prob_hook_path": f"{HOOKS}:record_log_prob_pass"}
    args = trainer_args(student, **flags, **hook)
    train(args, check_comes_nearer, 12, num_rollouts=0)


def check_nothing_to_learn(actor: Any, records: list[Any]) -> None:
    for metrics in (metrics for metrics, _ in records):
        names = [name for name in metrics if name.endswith(("opd_reverse_kl", "/advantages", "grad_norm"))]
        assert names and all(metrics[name] == 0.0 for name in names)


def test_a_student_that_is_its_teacher_has_no_advantages(models: tuple[Path, Path]):
    student, _ = models
    flags = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": str(student), "lr": 1e-2}
    args = trainer_args(student, "--weight-decay 0", **flags, custom_advantage_function_path=f"{__file__}:no_rewards")
    train(args, check_nothing_to_learn, num_rollouts=2)


def no_rewards(args: Any, rollout_data: dict[str, Any]) -> None:
    """A --custom-advantage-function-path."""
    rollout_data["advantages"] = [torch.zeros(len(mask)) for mask in rollout_data["loss_masks"]]
    rollout_data["returns"] = rollout_data["advantages"]
