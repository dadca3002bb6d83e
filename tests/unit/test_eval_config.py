"""Evaluation data sets: data set > defaults > flags, and unknown keys are errors."""

from __future__ import annotations

import contextlib
from argparse import Namespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.errors import UsageError
from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list, load_eval_config
from tests.unit.yaml_mutations import edited

ARGS = Namespace(
    eval_input_key=None,
    input_key="question",
    eval_label_key="gold",
    label_key="label",
    eval_tool_key=None,
    tool_key=None,
    metadata_key="metadata",
    apply_chat_template=True,
    apply_chat_template_kwargs={"enable_thinking": False},
    n_samples_per_eval_prompt=4,
    eval_temperature=None,
    rollout_temperature=0.7,
    eval_top_p=None,
    rollout_top_p=1.0,
    eval_top_k=None,
    rollout_top_k=-1,
    eval_max_response_len=8,
    rollout_max_response_len=16,
    eval_min_new_tokens=None,
    rollout_stop=None,
    rollout_stop_token_ids=None,
    rollout_skip_special_tokens=False,
    multimodal_keys=None,
)


def test_a_field_comes_from_the_data_set_then_the_defaults_then_the_flags():
    raw = [{"name": "a", "path": "a.jsonl", "temperature": 0.1}, {"name": "b", "path": "b.jsonl"}]
    a, b = build_eval_dataset_configs(ARGS, raw, {"temperature": 0.5, "rm_type": "math"})
    assert (a.temperature, b.temperature) == (0.1, 0.5)
    assert (b.input_key, b.label_key, b.max_response_len, b.n_samples_per_eval_prompt) == ("question", "gold", 8, 4)
    assert (b.rm_type, b.min_new_tokens, b.apply_chat_template) == ("math", None, True)


def test_metadata_carries_the_grader_and_the_overrides():
    (config,) = build_eval_dataset_configs(
        ARGS, [{"name": "a", "path": "p", "rm_type": "math", "metadata_overrides": {"level": 2}}]
    )
    assert config.inject_metadata({"level": 1, "id": 3}) == {"level": 2, "id": 3, "rm_type": "math"}


def test_the_cache_key_tells_prompts_apart_but_not_sampling():
    base = {"name": "a", "path": "p"}
    changed = [base, {**base, "temperature": 0.2}, {**base, "input_key": "other"}]
    changed.append({**base, "multimodal_keys": {"image": "pictures"}})
    keys = [build_eval_dataset_configs(ARGS, [raw])[0].cache_key for raw in changed]
    assert keys[0] == keys[1] and len(set(keys)) == 3


@pytest.mark.parametrize(
    ("raw", "defaults", "message"),
    [
        (
            [{"name": "a", "path": "p", "temprature": 1}],
            {},
            r"datasets\[0\].temprature: unknown key; did you mean temperature",
        ),
        ([{"name": "a", "path": "p"}], {"path": "x"}, "defaults.path: unknown key"),
        ([{"name": "a"}], {}, r"datasets\[0\].path: is missing"),
        ([{"name": "a", "path": ""}], {}, r"datasets\[0\].path: "),
        ([{"name": "a", "path": "p"}] * 2, {}, r"datasets\[1\]: the name 'a' is there twice"),
        (
            [{"name": "a", "path": "p", "n_samples_per_eval_prompt": 0}],
            {},
            "n_samples_per_eval_prompt: 0 must be >= 1",
        ),
        ([{"name": "a", "path": "p", "min_new_tokens": 9}], {}, "min_new_tokens 9 is more than max_response_len 8"),
        ([{"name": "a", "path": "p", "min_eval_samples": 0}], {}, r"min_eval_samples: 0 must be >= 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(raw, defaults, message):
    with pytest.raises(UsageError, match=message):
        build_eval_dataset_configs(ARGS, raw, defaults)


def test_a_null_leaves_the_field_to_the_next_source():
    raw = [{"name": "a", "path": "p", "temperature": None, "stop": "END", "apply_chat_template_kwargs": None}]
    (config,) = build_eval_dataset_configs(ARGS, raw, {"temperature": 0.5, "max_response_len": None})
    assert (config.temperature, config.max_response_len) == (0.5, 8)
    assert (config.stop, config.apply_chat_template_kwargs) == (["END"], {"enable_thinking": False})


@pytest.mark.parametrize("root", ["", "eval:\n"])
def test_a_file_may_have_its_settings_at_the_root_or_under_eval(tmp_path, root):
    indent = "  " if root else ""
    lines = ["defaults: {temperature: 0}", "datasets:", "  add: {path: a.jsonl}"]
    path = tmp_path / "eval.yaml"
    path.write_text(root + "".join(f"{indent}{line}\n" for line in lines))
    assert load_eval_config(str(path)) == ([{"name": "add", "path": "a.jsonl"}], {"temperature": 0}, [])


def test_a_file_names_data_sets_by_list_or_by_mapping(tmp_path):
    path = tmp_path / "eval.yaml"
    texts = [
        "datasets:\n  - {name: add, path: p}\n",
        "datasets: {add: {path: p}}",
        "datasets: {x: {name: add, path: p}}",
    ]
    for text in texts:
        path.write_text(text)
        assert load_eval_config(str(path)).datasets == [{"name": "add", "path": "p"}]


def test_every_problem_of_a_file_is_reported_with_its_line(tmp_path):
    path = tmp_path / "eval.yaml"
    path.write_text(
        "eval:\n"
        "  defaults:\n"
        "    top_p: 1.5\n"
        "  datasets:\n"
        "    - name: a\n"
        "      path: a.jsonl\n"
        "      n_samples_per_eval_promt: 4\n"
        "    - path: b.jsonl\n"
        "      temperature: hot\n"
    )
    with pytest.raises(UsageError) as raised:
        load_eval_config(str(path))
    assert raised.value.messages == [
        f"--eval-config {path}:3: eval.defaults.top_p: 1.5 must be <= 1.",
        f"--eval-config {path}:7: eval.datasets[0].n_samples_per_eval_promt: unknown key; did you mean "
        "n_samples_per_eval_prompt?",
        f"--eval-config {path}:8: eval.datasets[1].name: is missing.",
        f"--eval-config {path}:9: eval.datasets[1].temperature: 'hot' is not a number.",
    ]


def test_settings_that_only_hooks_read_are_told_apart_and_kept_for_them(tmp_path):
    path = tmp_path / "eval.yaml"
    path.write_text("defaults: {message_processor: x}\ndatasets:\n  a: {path: p, min_eval_samples: 3}\n")
    datasets, defaults, ignored = load_eval_config(str(path))
    assert (datasets, defaults) == ([{"name": "a", "path": "p", "min_eval_samples": 3}], {"message_processor": "x"})
    assert ignored == [f"--eval-config {path}:1: message_processor", f"--eval-config {path}:3: min_eval_samples"]


def test_a_file_may_take_values_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DATA", "/data")
    path = tmp_path / "eval.yaml"
    path.write_text("datasets:\n  a: {path: '${oc.env:DATA}/a.jsonl', top_p: '${oc.env:P}'}\n")
    with pytest.raises(UsageError, match=r"eval.yaml:2: datasets.a.top_p: .*variable P is not set"):
        load_eval_config(str(path))
    path.write_text("datasets:\n  a: {path: '${oc.env:DATA}/a.jsonl'}\n")
    assert load_eval_config(str(path)).datasets == [{"name": "a", "path": "/data/a.jsonl"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is no valid YAML"),
        ("a: 1", "eval.yaml:1: datasets: is missing"),
        ("datasets: 3", "eval.yaml:1: datasets: 3 is not a list"),
        ("datasets: []", "datasets: is empty"),
        ("eval: 3", "eval.yaml:1: eval: 3 is no mapping"),
        ("eval: {datasets: {a: {path: p}}}\ndatasets: {}", "eval.yaml:2: datasets: stands beside 'eval'"),
        ("datasets:\n- {name: a, path: p}\n- {name: a, path: q}", r"eval.yaml:3: datasets\[1\]: the name 'a' is"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, message):
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_eval_config(str(path))


def test_the_datasets_entry_is_a_list_or_a_mapping():
    assert ensure_dataset_list([{"name": "a"}]) == ensure_dataset_list({"a": {}}) == [{"name": "a"}]
    for wrong in (3, [], [1], {"a": 1}):
        with pytest.raises(UsageError, match="must be a list of mappings"):
            ensure_dataset_list(wrong)


VALID = "eval:\n  defaults: {top_p: 0.9}\n  datasets:\n    - name: a\n      path: a.jsonl\n      stop: [x]\n"
PIECES = st.sampled_from([*"{}[]:,-&*!|'\"#\n 0", "null", "eval", "datasets: {a: {path: b}}", "1e999", "- name: a"])


@settings(max_examples=100, deadline=None)
@given(text=edited(VALID, PIECES))
def test_a_mutated_file_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "mutated_eval.yaml"
    path.write_text(text)
    with contextlib.suppress(UsageError):
        datasets, defaults, _ = load_eval_config(str(path))
        build_eval_dataset_configs(ARGS, datasets, defaults)
