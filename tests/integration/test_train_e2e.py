"""train_async.py from start to end, without --colocate, scraped as Prometheus would."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.integration.launch import Run, grpo_flags, make_model, train, write_prompts
from tests.unit.test_prometheus import names_on_the_board

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    work = tmp_path_factory.mktemp("e2e")
    return grpo_flags(make_model(work / "model"), write_prompts(work / "prompts.jsonl"))


@pytest.fixture(scope="module")
def scraped() -> Iterator[tuple[int, set[str]]]:
    """A free port, and the names of all metrics that are shown there, with "up engine" where an engine answered.

    Prometheus asks every few seconds; a run as short as this one is asked more often.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    names: set[str] = set()
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.wait(0.5):
            with contextlib.suppress(requests.RequestException):
                text = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
                samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
                names.update(sample.name for sample in samples)
                names.update(f"up {sample.labels['kind']}" for sample in samples if is_target_up(sample))

    thread = threading.Thread(target=scrape)
    thread.start()
    yield port, names
    is_over.set()
    thread.join(30)


def is_target_up(sample: Sample) -> bool:
    return sample.name == "slime_target_up" and sample.value == 1


@pytest.fixture(scope="module")
def run(inputs: list[object], scraped: tuple[int, set[str]], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The fully async rollout: few and long responses, which take far longer than to train on them and to sync."""
    out = tmp_path_factory.mktemp("async") / "out"
    prompts = inputs[inputs.index("--prompt-data") + 1]
    return train(
        out, *inputs, "--rollout-num-gpus", 1, "--num-rollout", 3,
        "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "--max-weight-staleness", 1, "--rollout-max-response-len", 400, "--rollout-ignore-eos",
        "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--global-batch-size", 4,
        "--eval-interval", 1, "--eval-prompt-data", "digits", prompts, "--eval-max-response-len", 4,
        "--rollout-sample-hook-path", "tests.integration.user_code:log_length",
        "--custom-rollout-log-function-path", "tests.integration.user_code:log_own",
        "--save-debug-rollout-data", out / "dump" / "{rollout_id}.pt", "--prometheus-port", scraped[0],
        script="train_async.py",
    )  # fmt: skip


def test_the_first_step_is_on_policy_with_weights_that_came_over_gloo(run: Run):
    first = run.records("train/step")[0]
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert abs(first["train/ppo_kl"]) < 1e-6


def test_no_trained_token_is_older_than_the_bound_although_requests_are_in_flight_during_syncs(run: Run):
    import torch

    rollouts = [torch.load(run.output_dir / "dump" / f"{i}.pt", weights_only=False)["samples"] for i in range(3)]
    versions = [[[int(version) for version in sample["weight_versions"]] for sample in group] for group in rollouts]
    # Weights are synced before the first rollout and after each one, so rollout i is trained at version 1 + i.
    ages = [[1 + i - min(seen) for seen in group] for i, group in enumerate(versions)]
    assert all(0 <= age <= 1 for group in ages for age in group)
    assert ages[1] == [1] * 4, "rollout 1 is begun while rollout 0 is trained"
    found = run.column("rollout/weight_staleness/max", "rollout/step")
    assert found == [max(group) for group in ages]
    assert any(len(set(seen)) > 1 for group in versions for seen in group), "a request went on over a sync"
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert gaps[1] > gaps[0] and gaps[2] > gaps[0], "rollouts that were generated ahead are one update old"


def test_engines_that_keep_requests_in_flight_run_without_a_prefix_cache_and_the_user_is_told(run: Run):
    assert "--sglang-disable-radix-cache" in run.printed
    launched = json.loads((run.output_dir / "logs" / "engine_0.json").read_text())
    assert launched["server_args"]["disable_radix_cache"] is True


def test_a_run_without_a_correction_for_old_weights_is_warned_once(run: Run):
    assert run.printed.count("train_async.py trains on responses of older weights") == 1


def test_metrics_of_hooks_and_of_a_log_function_are_beside_those_of_the_run(run: Run):
    assert run.column("mine/logged", "rollout/step") == [0, 10, 20]
    assert run.column("mine/put", "rollout/step") == [1.0] * 3
    assert run.column("mine/returned", "rollout/step") == [2 * 2] * 3
    assert all(0 < length <= 400 for length in run.column("mine/length", "rollout/step"))
    assert len(run.column("mine/length", "rollout/step")) == 3


def test_evaluations_in_the_background_are_logged_at_their_own_steps(run: Run):
    assert run.column("eval/step", "eval/step") == [0, 1, 2, 3]
    assert all(0 <= score <= 1 for score in run.column("eval/digits", "eval/step"))


def test_each_query_of_the_grafana_board_finds_its_metric_at_the_runs_one_target(
    run: Run, scraped: tuple[int, set[str]]
):
    names = scraped[1]
    assert names_on_the_board() - names == set()
    assert {"up router", "up engine"} <= names
    assert any(name.startswith("slime_eval_") for name in names), "what the board finds by a pattern"


def test_every_rollout_leaves_one_line_of_each_family(run: Run):
    assert run.column("train/step") == [0, 1, 2]
    rollouts = run.records("rollout/step")
    assert [record["rollout/step"] for record in rollouts] == [0, 1, 2]
    for record in rollouts:
        assert record["rollout/raw_reward"] >= 0 and record["perf/rollout_time"] > 0
    assert rollouts[1]["perf/update_weights_time"] > 0


def test_colocated_engines_are_refused_before_anything_starts(inputs: list[object], tmp_path: Path):
    run = train(tmp_path, *inputs, "--num-rollout", 1, "--colocate", script="train_async.py", check=False)
    assert run.status == 2
    assert "error: --colocate" in run.printed
    assert not (tmp_path / "metrics.jsonl").exists()
