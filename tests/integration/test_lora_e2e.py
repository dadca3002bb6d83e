"""train.py with --lora-rank: engines generate with what the trainer trained; a second run goes on from adapters.

Engines serve adapters (--lora-serve adapter, the default); the second run gives them merged weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.checkpoints.paths import iteration_dir
from tests.integration.launch import ROOT, grpo_flags, make_model, tensors_in, train, write_prompts
from tools import convert_hf_to_fp8

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_engines_follow_the_adapters_and_a_run_resumes_from_them(tmp_path: Path, backend: str) -> None:
    model = make_model(tmp_path / "model")
    flags = [
        *grpo_flags(model, write_prompts(tmp_path / "prompts.jsonl")),
        *(
            "--train-backend",
            backend,
            "--colocate",
            "--lora-rank",
            8,
            "--lora-target-modules",
            "all-linear",
            "--lr",
            2e-2,
        ),
        *("--use-kl-loss", "--kl-loss-coef", 0.01, "--kl-loss-type", "k3", "--ref-load", model),
        *("--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", 3),
        *("--save-hf", tmp_path / "hf_{rollout_id}"),
    ]
    first = train(tmp_path / "first", *flags, "--num-rollout", 3)
    assert max(first.column("train/train_rollout_logprob_abs_diff")) < 1e-4, "engines have the adapters of each sync"
    kl = first.column("train/kl_loss")
    assert kl[0] == 0 and kl[-1] > 1e-4, "the reference is the base"
    base, merged = (tensors_in(path) for path in (model, tmp_path / "hf_2"))
    changed = {name.split(".")[-2] for name in base if not base[name].equal(merged[name])}
    assert changed == {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert (iteration_dir(tmp_path / "ckpt", 2) / "adapter" / "adapter_config.json").is_file()

    second = train(tmp_path / "second", *flags, "--num-rollout", 4, "--lora-serve", "merged")
    assert [record["train/step"] for record in second.records("train/step")] == [3]
    assert max(second.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert second.column("train/kl_loss")[0] > 1e-4, "it goes on from the adapters, against the same reference"


def test_over_an_fp8_base_engines_and_trainer_multiply_by_the_same_weights(tmp_path: Path) -> None:
    """The trainer's base is what the fp8 checkpoint stands for."""
    model = make_model(tmp_path / "model")
    made = ["--model-dir", str(model), "--save-dir", str(tmp_path / "fp8"), "--block-size", "16"]
    assert convert_hf_to_fp8.main(made) == 0
    run = train(
        tmp_path / "out",
        *grpo_flags(tmp_path / "fp8", write_prompts(tmp_path / "prompts.jsonl")),
        *("--colocate", "--lora-rank", 8, "--lr", 2e-2, "--num-rollout", 3, "--ref-load", tmp_path / "fp8"),
        *("--use-kl-loss", "--kl-loss-coef", 0.01, "--kl-loss-type", "k3"),
    )
    assert max(run.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert run.column("train/kl_loss")[-1] > 1e-4, "it trains"


def test_an_engine_that_takes_a_lost_ones_place_serves_the_newest_adapter(tmp_path: Path) -> None:
    run = train(
        tmp_path / "out",
        *grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")),
        *("--rollout-num-gpus", 2, "--num-rollout", 4, "--lora-rank", 8, "--lr", 2e-2),
        *("--use-fault-tolerance", "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 20),
        *("--rollout-health-check-first-wait", 1, "--custom-rollout-log-function-path"),
        f"{ROOT}/tests/integration/user_code.py:kill_router_and_engine",
    )
    assert run.status == 0
    assert "takes the place of a lost one" in run.printed
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 4 and max(gaps) < 1e-4, gaps
    answers = list(json.loads((run.output_dir / "answers.json").read_text()).values())
    assert [answer["weight_version"] for answer in answers] == ["4", "4"], (
        "one sync at the start, three after rollouts"
    )


def test_policies_are_generated_together_trained_in_turns_and_go_on(tmp_path: Path) -> None:
    model, prompts = make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    policies = [{"name": "one", "rank": 4}, {"name": "two", "lr": 1e-2, "data": str(prompts)}, {"name": "three"}]
    (tmp_path / "policies.yaml").write_text(json.dumps({"policies": policies}))
    evals = {"datasets": [{"name": "held", "path": str(prompts), "metadata_overrides": {"lora_policy": "two"}}]}
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": evals}))
    flags = [
        *grpo_flags(model, prompts),
        *("--colocate", "--lora-rank", 8, "--lr", 2e-2, "--lora-policies", tmp_path / "policies.yaml"),
        *("--use-kl-loss", "--kl-loss-coef", 0.01, "--kl-loss-type", "k3", "--ref-load", model),
        *("--eval-config", tmp_path / "eval.yaml", "--eval-interval", 2, "--eval-max-response-len", 4),
        *("--save", tmp_path / "ckpt", "--load", tmp_path / "ckpt", "--save-interval", 2),
    ]
    first = train(tmp_path / "first", *flags, "--num-rollout", 2)
    for name in ("one", "two", "three"):
        gaps = first.column(f"policy/{name}/train/train_rollout_logprob_abs_diff")
        assert len(gaps) == 2 and max(gaps) < 1e-4, "engines answer with the adapter of the sample's policy"
        assert first.column(f"policy/{name}/train/kl_loss")[-1] > 1e-6, "each moves away from the base"
        own = iteration_dir(tmp_path / "ckpt", 1) / "policies" / name
        assert json.loads((iteration_dir(own, 1) / "adapter" / "adapter_config.json").read_text())["r"] in (4, 8)
    rates = [first.column(f"policy/{name}/train/lr-pg_0")[-1] for name in ("one", "two")]
    assert rates[0] == 2 * rates[1] > 0
    second = train(tmp_path / "second", *flags, "--num-rollout", 3)
    assert max(second.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    assert second.column("policy/two/train/kl_loss")[0] > 1e-6, "it goes on from its adapters"
