"""Engine and trainer hold the same weights and compute the same log-probs, before and after training.

One run, with a trainer of two pipeline stages next to the engine, serves all these tests (a colocated run is in
test_resume): the first rollout is clean, the second has a trainer weight changed between the sync and the old-log-prob
pass, the third between that pass and the train step. Evaluation then dumps what the engine answers. The run would go
on for days: SIGTERM ends it, and nothing of it may be left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.launch import (
    ROOT,
    Run,
    command_of,
    environment,
    grpo_flags,
    log_tails,
    make_model,
    write_prompts,
)
from tests.integration.leftovers import MARK, Holdings

pytestmark = pytest.mark.timeout(1200)
HOOKS = f"{ROOT}/tests/integration/user_code.py"
ENDLESS, EVALUATED_AFTER = 100_000, 3


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[str]]:
    """The run that SIGTERM ended in its fourth rollout or a later one, and what was left of it."""
    work: Path = tmp_path_factory.mktemp("separate")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    out, mark = work / "out", f"{os.getpid()}-{time.time_ns()}"
    command = command_of(
        out, *grpo_flags(model, prompts), "--num-rollout", ENDLESS,
        "--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 1,
        "--custom-megatron-before-log-prob-hook-path", f"{HOOKS}:perturb_before_log_probs",
        "--custom-megatron-before-train-step-hook-path", f"{HOOKS}:perturb_before_train_step",
        "--eval-prompt-data", "digits", prompts, "--eval-interval", EVALUATED_AFTER, "--n-samples-per-eval-prompt", 2,
        "--save", out, "--save-interval", EVALUATED_AFTER, "--save-hf", out / "hf-{rollout_id}",
        "--update-weight-buffer-size", 100_000,
        "--save-debug-rollout-data", out / "dump" / "{rollout_id}.pt",
    )  # fmt: skip
    with (work / "printed").open("w") as printed:
        process = subprocess.Popen(command, cwd=ROOT, env=environment() | {MARK: mark}, stdout=printed, stderr=printed)
    try:
        # the fourth rollout is dumped after the evaluation that follows the third
        wait_until(lambda: (out / "dump" / "3.pt").exists() or process.poll() is not None, 600)
        assert process.poll() is None, (work / "printed").read_text()[-4000:] + log_tails(out)
        holdings = Holdings(mark)
        holdings.look()
        assert len(holdings.processes) > 5, "Ray, the trainers, the manager, the engine and the router carry the mark"
        assert len(holdings.ports) > 5 and len(holdings.sessions) == 1 and holdings.memory
        process.send_signal(signal.SIGTERM)
        status = process.wait(90)
    finally:
        process.kill()
    return Run(out, status, (work / "printed").read_text()), holdings.wait_until_gone()


@pytest.fixture
def run(ended: tuple[Run, list[str]]) -> Run:
    return ended[0]


def wait_until(condition: Callable[[], object], deadline_s: float) -> None:
    """Poll; the assertion that follows says what did not happen."""
    end = time.monotonic() + deadline_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.2)


def test_nothing_is_left_running_after_sigterm(ended: tuple[Run, list[str]]):
    run, left = ended
    assert run.status == 143, run.printed[-3000:]
    assert left == []


def test_the_first_step_is_on_policy_and_the_engine_agrees_with_the_trainer(run: Run):
    first = run.records("train/step")[0]
    assert abs(first["train/ppo_kl"]) < 1e-6
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4


def test_a_weight_changed_after_the_sync_shows_as_a_gap_to_the_engine(run: Run):
    second = run.records("train/step")[1]
    assert second["train/train_rollout_logprob_abs_diff"] > 1e-2
    assert abs(second["train/ppo_kl"]) < 1e-6, "old and new log-probs come from the same changed weights"


def test_a_weight_changed_after_the_old_log_probs_shows_as_ppo_kl(run: Run):
    third = run.records("train/step")[2]
    assert third["train/train_rollout_logprob_abs_diff"] < 1e-4, "the third rollout began with a fresh sync"
    assert abs(third["train/ppo_kl"]) > 1e-3


def test_after_three_steps_the_engine_answers_with_the_exported_weights(run: Run):
    evaluated = run.output_dir / "dump" / f"eval_{EVALUATED_AFTER}.pt"
    assert_answers_are_of(evaluated, run.output_dir / "hf-2", instead_of=run.output_dir.parent / "model")


def assert_answers_are_of(evaluated: Path, exported: Path, *, instead_of: Path) -> None:
    """The engine's log-probs in the dump of an evaluation are those of an HF model, and not of another one."""
    samples = torch.load(evaluated, weights_only=False)["samples"]
    assert samples
    engine = torch.cat([torch.tensor(sample["rollout_log_probs"]) for sample in samples])
    assert (engine - hf_log_probs(exported, samples)).abs().max() < 1e-4
    before = hf_log_probs(instead_of, samples)
    assert (engine - before).abs().max() > 1e-2, "three steps at lr 1e-3 must have moved the engine"


def hf_log_probs(path: Path, samples: list[dict]) -> torch.Tensor:
    """What the HF model in `path` gives the response tokens, one sample at a time."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for sample in samples:
            tokens, response = torch.tensor(sample["tokens"]), sample["response_length"]
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            found.append(log_probs.gather(1, tokens[1:, None])[-response:, 0])
    return torch.cat(found)
