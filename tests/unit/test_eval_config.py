"""Evaluation data sets: data set > defaults > flags, and unknown keys are errors."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.utils.errors import UsageError
from slime.utils.eval_config import build_eval_dataset_configs, ensure_dataset_list, load_eval_config

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
    keys = [build_eval_dataset_configs(ARGS, [raw])[0].cache_key for raw in changed]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    ("raw", "defaults", "message"),
    [
        ([{"name": "a", "path": "p", "temprature": 1}], {}, "data set a: unknown key 'temprature'; did you mean temp"),
        ([{"name": "a", "path": "p"}], {"path": "x"}, "defaults: unknown key 'path'"),
        ([{"name": "a"}], {}, "needs both 'name' and 'path'"),
        ([{"name": "a", "path": "p"}] * 2, {}, "different names"),
        ([{"name": "a", "path": "p", "n_samples_per_eval_prompt": 0}], {}, "must be at least 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(raw, defaults, message):
    with pytest.raises(UsageError, match=message):
        build_eval_dataset_configs(ARGS, raw, defaults)


@pytest.mark.parametrize("root", ["", "eval:\n"])
def test_a_file_may_have_its_settings_at_the_root_or_under_eval(tmp_path, root):
    indent = "  " if root else ""
    lines = ["defaults: {temperature: 0}", "datasets:", "  add: {path: a.jsonl}"]
    path = tmp_path / "eval.yaml"
    path.write_text(root + "".join(f"{indent}{line}\n" for line in lines))
    assert load_eval_config(str(path)) == ([{"name": "add", "path": "a.jsonl"}], {"temperature": 0})


def test_a_file_that_is_no_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_eval_config("nowhere.yaml")
    path = tmp_path / "eval.yaml"
    for text, message in [
        ("a: [", "not valid YAML"),
        ("a: 1", "needs a 'datasets'"),
        ("datasets: 3", "must be a list"),
    ]:
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_eval_config(str(path))
    assert ensure_dataset_list([{"name": "a"}]) == [{"name": "a"}]
