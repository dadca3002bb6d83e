"""Evaluation: every data set keeps its own settings, and errors and aborts of training do not spoil a result."""

from __future__ import annotations

import json

import pytest

from slime.observability.rollout_metrics import compute_eval_metrics
from slime.rollout.eval import EvalDatasets
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling.generation import GenerateState, generate
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args

HERE = __file__


@pytest.fixture
def evaluate(engine, tmp_path):
    """Evaluate data sets given as name -> (letters, settings)."""

    def run(sets, **changes):
        GenerateState.clear_instances()
        EvalDatasets.clear_instances()
        configs = []
        for name, (letters, settings) in sets.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"input": f"p{x}", "metadata": {"row": x}}) + "\n" for x in letters))
            configs.append(EvalDatasetConfig(name, str(path), **{"max_response_len": 9, **settings}))
        args = rollout_args(sglang_router_port=engine.port, eval_datasets=configs, **changes)
        return args, generate_rollout(args, 0, None, evaluation=True)

    return run


async def grade_row(args, sample, **kwargs):
    return float(sample.metadata["row"] == "d") + sample.metadata.get("bonus", 0)


async def two_answers(args, sample, sampling_params, evaluation):
    assert evaluation
    sample.response, sample.status, sample.reward = "own", Sample.Status.COMPLETED, 7.0
    return sample


FIELDS = {
    "temperature": 0.3,
    "top_p": 0.9,
    "top_k": 5,
    "min_new_tokens": 2,
    "repetition_penalty": 1.1,
    "stop": ["END"],
    "stop_token_ids": [3],
    "skip_special_tokens": True,
    "no_stop_trim": False,
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_sampling_field_of_a_data_set_is_a_parameter_of_its_own_requests_only(evaluate, engine, field):
    evaluate({"own": ("b", {field: FIELDS[field]}), "other": ("c", {})})
    own, other = sorted((r for r in engine.requests), key=lambda r: r["input_ids"])
    assert own["sampling_params"][field] == FIELDS[field] != other["sampling_params"].get(field)


def test_data_sets_have_their_own_limits_repetitions_graders_and_generate_functions(evaluate, engine):
    _, output = evaluate(
        {
            "long": ("z", {"max_response_len": 4, "n_samples_per_eval_prompt": 3}),
            "graded": ("cd", {"custom_rm_path": f"{HERE}:grade_row", "metadata_overrides": {"bonus": 2}}),
            "custom": ("b", {"custom_generate_function_path": f"{HERE}:two_answers"}),
        }
    )
    assert output.data["long"]["rewards"] == [4.0] * 3 and output.data["long"]["truncated"] == [True] * 3
    assert output.data["graded"]["rewards"] == [2.0, 3.0]
    assert (output.data["custom"]["rewards"], output.data["custom"]["samples"][0].response) == ([7.0], "own")
    assert len(engine.requests) == 3 + 2, "the custom function asked no engine"
    assert set(output.data["long"]) == {"rewards", "truncated", "samples"}


async def reward_d(args, sample, **kwargs):
    return float(sample.prompt == "pd")


def test_pass_at_k_counts_the_repetitions_of_each_data_set(evaluate):
    two, four = {"n_samples_per_eval_prompt": 2}, {"n_samples_per_eval_prompt": 4}
    args, output = evaluate({"two": ("bd", two), "four": ("d", four)}, custom_rm_path=f"{HERE}:reward_d")
    vars(args).update(log_passrate=True, log_multi_turn=False, n_samples_per_eval_prompt=1)
    metrics = compute_eval_metrics(args, output.data)
    assert (metrics["eval/two-pass@1"], metrics["eval/two-pass@2"]) == (0.5, 0.5)
    assert metrics["eval/four-pass@4"] == 1.0 and "eval/two-pass@4" not in metrics


async def fails_on_d(args, sample, **kwargs):
    if sample.prompt == "pd":
        raise ValueError("cannot be graded")
    return 1.0


@pytest.mark.parametrize(("policy", "retries"), [("drop", 3), ("retry", 2)])
def test_a_sample_that_fails_is_left_out_and_counted(evaluate, engine, policy, retries):
    _, output = evaluate(
        {"e": ("bdc", {})},
        custom_rm_path=f"{HERE}:fails_on_d",
        on_sample_error=policy,
        max_group_retries=retries,
    )
    assert [s.prompt for s in output.data["e"]["samples"]] == ["pb", "pc"]
    assert output.data["e"]["rewards"] == [1.0, 1.0]
    assert output.metrics == {"eval/e-failed_samples": 1.0}
    tries = sum(r["input_ids"][-1] == ord("d") for r in engine.requests)
    assert tries == (1 if policy == "drop" else 1 + retries)


def test_by_default_a_sample_that_fails_ends_the_evaluation_by_name(evaluate):
    with pytest.raises(SampleError, match=r"fails_on_d failed on sample 1 \(prompt 1: 'pd'\): ValueError"):
        evaluate({"e": ("bdc", {})}, custom_rm_path=f"{HERE}:fails_on_d")


ABORTS: list[int] = []


async def aborted_twice(args, sample, sampling_params):
    if sample.prompt == "pd" and len(ABORTS) < 2:
        ABORTS.append(1)
        sample.status = Sample.Status.ABORTED
        return sample
    return await generate(args, sample, sampling_params)


def test_a_sample_that_a_rollouts_end_aborts_is_generated_again(evaluate, engine):
    settings = {"custom_generate_function_path": f"{HERE}:aborted_twice"}
    _, output = evaluate({"e": ("bd", settings)})
    assert output.data["e"]["rewards"] == [1.0, 3.0] and output.metrics == {}
