"""Evaluation against a scripted engine: own sampling, own grader, the same seeds at every evaluation."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace

import pytest

from slime.rollout.eval import EvalDatasets
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling import generation
from slime.rollout.sglang_rollout import GenerateState, generate_rollout
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs
from slime.utils.types import Sample
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Evaluate data sets given as name -> letters; returns (output, engine, args)."""
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())

    def build(sets, *, times=1, settings=None, **changes):
        GenerateState.clear_instances()
        EvalDatasets.clear_instances()
        configs = []
        for name, letters in sets.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"input": f"p{letter}"}) + "\n" for letter in letters))
            own = {"max_response_len": 9, "temperature": 0.5, **(settings or {})}
            configs.append(EvalDatasetConfig(**{"name": name, "path": str(path), **own}))
        with FakeEngine().serve() as engine:
            args = rollout_args(sglang_router_port=engine.port, eval_datasets=configs, **changes)
            outputs = [generate_rollout(args, i, None, evaluation=True) for i in range(times)]
        return outputs, engine, args

    yield build
    GenerateState.clear_instances()
    EvalDatasets.clear_instances()


async def grade_d(args, sample, **kwargs):
    return float(sample.prompt == "pd")


def test_every_prompt_is_answered_n_times_in_file_order_and_graded(evaluate):
    (output,), engine, _ = evaluate({"a": "bd", "b": "z"}, settings={"n_samples_per_eval_prompt": 2})
    assert list(output.data) == ["a", "b"]
    assert output.data["a"]["rewards"] == [1.0, 1.0, 3.0, 3.0]
    assert output.data["b"]["rewards"] == [9.0, 9.0]
    assert output.data["b"]["truncated"] == [True, True]
    assert [s.group_index for s in output.data["a"]["samples"]] == [0, 0, 1, 1]
    (params,) = {json.dumps(r["sampling_params"], sort_keys=True) for r in engine.requests}
    assert json.loads(params) == {
        "temperature": 0.5,
        "max_new_tokens": 9,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def test_a_data_set_is_graded_by_its_own_grader_whatever_training_uses(evaluate):
    (output,), _, _ = evaluate(
        {"a": "bd"}, settings={"custom_rm_path": f"{__file__}:grade_d"}, custom_rm_path="none:none", group_rm=True
    )
    assert output.data["a"]["rewards"] == [0.0, 1.0]


def test_seeds_differ_between_samples_and_repeat_at_every_evaluation(evaluate):
    settings = {"n_samples_per_eval_prompt": 3}
    _, engine, _ = evaluate({"a": "bc"}, times=2, settings=settings, sglang_enable_deterministic_inference=True)
    seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    assert sorted(seeds[:6]) == sorted(seeds[6:])
    assert len(set(seeds[:6])) == 6, "2 prompts x 3 repetitions: prompts that drew the same noise would err together"


def test_the_file_is_read_once(evaluate, monkeypatch):
    from slime.rollout import eval as eval_module

    reads = []
    real = eval_module.Dataset
    monkeypatch.setattr(eval_module, "Dataset", lambda *a, **k: reads.append(a) or real(*a, **k))
    evaluate({"a": "bc"}, times=2)
    assert len(reads) == 1


def test_a_directory_or_url_is_read_as_a_stream_in_its_order(evaluate, tmp_path, monkeypatch):
    """The fake tokenizer has one token a letter: a prompt that is too long is left out, and no sample has failed."""
    for name, rows in {"b.jsonl": ["cc", "dddddddd"], "a.jsonl": ["a", "", "bb"]}.items():
        text = "\n".join(json.dumps({"input": row, "label": row}) if row else "" for row in rows)
        (tmp_path / "sets").mkdir(exist_ok=True)
        (tmp_path / "sets" / name).write_text(text + "\n")
    settings = {"path": f"file://{tmp_path}/sets", "label_key": "label", "n_samples_per_eval_prompt": 2}
    (result,), *_ = evaluate({"s": ""}, settings=settings, eval_max_prompt_len=4, custom_rm_path=f"{__name__}:grade_d")
    assert [sample.label for sample in result.data["s"]["samples"]] == ["a", "a", "bb", "bb", "cc", "cc"]
    assert not result.metrics
    with pytest.raises(UsageError, match="evaluation data set s: no row of file:.* has a prompt that is short enough"):
        evaluate({"s": ""}, settings=settings, eval_max_prompt_len=0)


def test_group_rewards_cannot_grade_an_evaluation(evaluate):
    with pytest.raises(UsageError, match="--group-rm .* give a a custom_rm_path"):
        evaluate({"a": "b"}, group_rm=True)


async def dict_reward(args, sample, **kwargs):
    return {"score": 2, "acc": 1}


def test_a_dict_reward_needs_a_key(evaluate):
    settings = {"custom_rm_path": f"{__file__}:dict_reward"}
    with pytest.raises(SampleError, match=r"dict_reward returned a dict for sample 0 .*--eval-reward-key must name"):
        evaluate({"a": "b"}, settings=settings)
    (output,), _, _ = evaluate({"a": "b"}, settings=settings, eval_reward_key="acc", reward_key="score")
    assert output.data["a"]["rewards"] == [1.0]


async def label_reward(args, sample, **kwargs):
    return len(sample.label)


def test_a_reward_that_reads_labels_says_which_flag_names_them(evaluate):
    with pytest.raises(SampleError, match=r"TypeError: .*no label, whose field --eval-label-key or label_key of the"):
        evaluate({"a": "b"}, settings={"custom_rm_path": f"{__file__}:label_reward"})


async def fan_out(args, sample, sampling_params, evaluation):
    assert evaluation is True
    done = [dataclasses.replace(sample, status=Sample.Status.COMPLETED, response_length=n) for n in (1, 2)]
    return done


def test_the_last_sibling_stands_for_a_fan_out_execution(evaluate):
    settings = {"custom_generate_function_path": f"{__file__}:fan_out"}
    (output,), _, _ = evaluate({"a": "bc"}, settings=settings)
    assert output.data["a"]["rewards"] == [2.0, 2.0]


FLAGS = {
    "eval_input_key": None,
    "eval_label_key": None,
    "eval_tool_key": None,
    "n_samples_per_eval_prompt": 1,
    "eval_temperature": None,
    "eval_top_p": None,
    "eval_top_k": None,
    "eval_max_response_len": None,
    "eval_min_new_tokens": None,
}


@pytest.fixture
def evaluate_by_flags(monkeypatch, tmp_path):
    """Evaluate one row as the flags of a command line say; returns (samples, requests)."""
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps({"input": "pd", "question": "qd", "answer": "yes", "functions": [{"f": 1}]}) + "\n")

    def build(**changes):
        GenerateState.clear_instances()
        EvalDatasets.clear_instances()
        with FakeEngine().serve() as engine:
            values = {**vars(rollout_args(sglang_router_port=engine.port)), **FLAGS, **changes}
            args = Namespace(**values)
            args.eval_datasets = build_eval_dataset_configs(args, [{"name": "e", "path": str(path)}])
            output = generate_rollout(args, 0, None, evaluation=True)
        return output.data["e"]["samples"], engine.requests

    yield build
    GenerateState.clear_instances()
    EvalDatasets.clear_instances()


@pytest.mark.parametrize(
    ("flag", "value", "parameter"),
    [
        ("eval_temperature", 0.25, "temperature"),
        ("eval_top_p", 0.5, "top_p"),
        ("eval_top_k", 3, "top_k"),
        ("eval_max_response_len", 7, "max_new_tokens"),
        ("eval_min_new_tokens", 2, "min_new_tokens"),
    ],
)
def test_an_evaluation_flag_is_a_parameter_of_its_requests(evaluate_by_flags, flag, value, parameter):
    (_, (default,)), (_, (request,)) = evaluate_by_flags(), evaluate_by_flags(**{flag: value})
    assert default["sampling_params"].get(parameter) != value
    assert request["sampling_params"] == {**default["sampling_params"], parameter: value}


def test_evaluation_flags_say_what_of_a_row_is_read_and_how_often(evaluate_by_flags):
    keys = {"eval_input_key": "question", "eval_label_key": "answer", "eval_tool_key": "functions"}
    (plain,), _ = evaluate_by_flags()
    samples, requests = evaluate_by_flags(**keys, n_samples_per_eval_prompt=3)
    assert (plain.prompt, plain.label, plain.metadata) == ("pd", None, {})
    seen = [(sample.prompt, sample.label, sample.metadata) for sample in samples]
    assert seen == [("qd", "yes", {"tools": [{"f": 1}]})] * 3
    assert len(requests) == 3


def test_an_evaluation_has_a_context_limit_of_its_own(evaluate_by_flags):
    _, (request,) = evaluate_by_flags(rollout_max_context_len=4, eval_max_context_len=9)
    assert request["sampling_params"]["max_new_tokens"] == 9 - len("pd")
    _, (request,) = evaluate_by_flags(rollout_max_context_len=4)
    assert request["sampling_params"]["max_new_tokens"] == 20, "parsing makes the rollout's limit the default"
