"""--sglang-config: models, groups and overrides are checked before any engine starts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.sglang.options import OWNED, table_of
from slime.config.sglang.sglang_config import (
    GROUP_OWNED,
    ModelConfig,
    ServerGroupConfig,
    SglangConfig,
    read_topology,
)
from slime.utils.errors import UsageError
from tests.unit.yaml_mutations import edited

VALID = """\
sglang:
  - name: policy
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 2, overrides: {chunked_prefill_size: 4096}}
      - worker_type: decode
        num_gpus: 4
        num_gpus_per_engine: 4
        overrides:
          mem_fraction_static: '0.8'
          disable-radix-cache: true
  - name: judge
    model_path: /models/judge
    engine_groups:
      - {worker_type: regular, num_gpus: 1}
      - {worker_type: placeholder, num_gpus: 1}
"""


def flags(**changes: Any) -> argparse.Namespace:
    base = {
        "sglang_config": None,
        "prefill_num_servers": None,
        "rollout_num_gpus": 8,
        "rollout_num_gpus_per_engine": 1,
        "hf_checkpoint": "/models/policy",
        "sglang_pp_size": 1,
    }
    return argparse.Namespace(**base | changes)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write_text(text: str) -> str:
        path = tmp_path / "engines.yaml"
        path.write_text(text)
        return str(path)

    return write_text


def test_a_file_becomes_models_with_groups_and_typed_overrides(write):
    policy, judge = SglangConfig.from_yaml(write(VALID)).models
    prefill, decode = policy.server_groups
    assert prefill == ServerGroupConfig(worker_type="prefill", num_gpus=2, overrides={"chunked_prefill_size": 4096})
    assert decode.overrides == {"mem_fraction_static": 0.8, "disable_radix_cache": True}
    assert (policy.total_num_gpus, judge.total_num_gpus) == (2 + 4, 1 + 1)
    assert policy.has_pd_disaggregation and not judge.has_pd_disaggregation
    assert not policy.has_encoder_disaggregation


def test_flags_fill_in_what_the_file_leaves_open(write):
    config, problems = read_topology(flags(sglang_config=write(VALID)))
    assert config is not None and config.total_num_gpus == 8
    policy, judge = config.models
    assert (policy.model_path, policy.update_weights) == ("/models/policy", True)
    assert (judge.model_path, judge.update_weights, judge.num_gpus_per_engine) == ("/models/judge", False, 1)
    assert [group.num_gpus_per_engine for group in policy.server_groups] == [2, 4]
    assert [[group.num_engines for group in model.server_groups] for model in config.models] == [[1, 1], [1, 0]]
    assert problems.wrong == [] and len(problems.environment) == 1
    assert "engines.yaml:13: sglang[1].model_path: /models/judge is no HF directory" in problems.environment[0]


def test_a_model_without_groups_is_left_out_with_a_warning(write):
    text = one("{worker_type: regular, num_gpus: 8}") + "- {name: judge, model_path: /nowhere, server_groups: []}\n"
    assert [model.total_num_gpus for model in SglangConfig.from_yaml(write(text)).models] == [8, 0]
    config, problems = read_topology(flags(sglang_config=write(text)))
    assert config is not None and [model.name for model in config.models] == ["a"]
    problems.settle()
    assert problems.all() == []
    assert problems.no_effect == ["--sglang-config: model judge has no effect without server_groups; leave it out."]


def test_the_first_model_has_engines(write):
    serving = "- {name: a, server_groups: [{worker_type: regular, num_gpus: 8}]}"
    text = f"sglang:\n- {{name: judge, server_groups: []}}\n{serving}"
    (problem,) = read_topology(flags(sglang_config=write(text)))[1].wrong
    assert ":2: sglang[0].server_groups: is empty, and the first model's engines generate the rollouts" in problem


def test_update_weights_can_be_said(write):
    text = "sglang: [{name: a, update_weights: false, server_groups: [{worker_type: regular, num_gpus: 8}]}]"
    config, _ = read_topology(flags(sglang_config=write(text)))
    assert config is not None and config.models[0].update_weights is False


def test_groups_share_one_model_path_wherever_it_is_said():
    def group(path: str) -> ServerGroupConfig:
        return ServerGroupConfig(worker_type="regular", num_gpus=1, overrides={"model_path": path})

    same = ModelConfig(name="a", server_groups=[group("/m"), group("/m")])
    same.resolve(flags())
    assert (same.model_path, same.update_weights) == ("/m", False)
    with pytest.raises(UsageError, match="the groups of model a must share one model_path, not /m, /n"):
        ModelConfig(name="a", server_groups=[group("/m"), group("/n")]).resolve(flags())


def test_prefill_servers_are_short_for_a_prefill_and_a_decode_group():
    config, problems = read_topology(flags(prefill_num_servers=2, rollout_num_gpus_per_engine=2))
    assert config is not None and not problems.all()
    (model,) = config.models
    assert model.has_pd_disaggregation
    assert [(g.worker_type, g.num_gpus, g.num_engines) for g in model.server_groups] == [
        ("prefill", 2 * 2, 2),
        ("decode", 8 - 2 * 2, 2),
    ]
    problems = read_topology(flags(prefill_num_servers=8))[1]
    assert problems.wrong == ["--prefill-num-servers 8 leaves none of --rollout-num-gpus 8 for decoding; lower it."]
    config, problems = read_topology(flags())
    assert config is None and not problems.all()


def one(group: str, **more: str) -> str:
    extra = "".join(f"  {key}: {value}\n" for key, value in more.items())
    return f"sglang:\n- name: a\n{extra}  server_groups:\n  - {group}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: []", "engines.yaml:1: models: unknown key"),
        ("sglang: []", "engines.yaml:1: sglang: is empty"),
        ("sglang:\n- name: a", r"engines.yaml:2: sglang\[0\].server_groups: is missing"),
        (
            "sglang:\n- name: a\n  engine_groups: &g [{worker_type: regular, num_gpus: 1}]\n  server_groups: *g",
            r":3: sglang\[0\].engine_groups: there is another name of the same key beside it; keep one",
        ),
        (one("{worker_type: big, num_gpus: 1}"), r":4: .*\[0\].worker_type: 'big' is none of 'regular', 'prefill'"),
        (one("{worker_type: regular, num_gpus: 0}"), r":4: sglang\[0\].server_groups\[0\].num_gpus: 0 must be > 0"),
        (one("{worker_type: regular, num_gpus: 1, overides: {}}"), "overides: unknown key; did you mean overrides"),
        (one("{worker_type: prefill, num_gpus: 1}"), r":2: sglang\[0\]: prefill groups need a decode group too"),
        (one("{worker_type: decode, num_gpus: 1}"), r":2: sglang\[0\]: decode groups need a prefill group too"),
        (one("{worker_type: encoder, num_gpus: 1}"), r":2: sglang\[0\]: encoder groups need a regular or prefill"),
        (one("{worker_type: placeholder, num_gpus: 1}"), r":2: sglang\[0\]: there are only placeholders"),
        (one("{worker_type: regular, num_gpus: 1}") * 2, "the key 'sglang' is there twice"),
        (
            one("{worker_type: regular, num_gpus: 1}")
            + "- {name: a, server_groups: [{worker_type: regular, num_gpus: 1}]}",
            r":5: sglang\[1\].name: the name 'a' is there twice",
        ),
    ],
)
def test_a_file_that_cannot_work_names_the_line(write, text, message):
    with pytest.raises(UsageError, match=message):
        SglangConfig.from_yaml(write(text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mem_fraction_statik: 0.5", "ServerArgs has no such field; did you mean mem_fraction_static"),
        ("mem_fraction_static: much", "invalid float value: 'much'"),
        ("disable_radix_cache: 1", "1 is not true or false"),
        ("tp_size: 2", "is set by slime: use num_gpus_per_engine"),
        ("tensor_parallel_size: 2", "is set by slime: use num_gpus_per_engine"),
        ("disaggregation_mode: prefill", "is set by slime: use worker_type"),
        ("model_path: 3", "3 is no path"),
    ],
)
def test_an_override_is_a_field_of_the_installed_server_args(write, override, message):
    text = one(f"worker_type: regular\n    num_gpus: 1\n    overrides:\n      {override}")
    with pytest.raises(UsageError, match=rf"engines.yaml:7: sglang\[0\].server_groups\[0\].overrides.*{message}"):
        SglangConfig.from_yaml(write(text))


def test_every_problem_of_the_overrides_is_reported(write):
    with pytest.raises(UsageError) as raised:
        SglangConfig.from_yaml(write(one("{worker_type: regular, num_gpus: 1, overrides: {a: 1, b: 2, port: 3}}")))
    assert len(raised.value.messages) == 3


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (
            one("{worker_type: regular, num_gpus: 3}"),
            {"rollout_num_gpus": 4},
            ":1: sglang: the groups have 3 (a) = 3 GPUs, but --rollout-num-gpus is 4; make them equal.",
        ),
        (
            one("{worker_type: regular, num_gpus: 3}"),
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            ":4: sglang[0].server_groups[0].num_gpus: 3 does not divide into engines of 2 GPUs",
        ),
        (
            one("{worker_type: regular, num_gpus: 4, overrides: {pp_size: 3}}", num_gpus_per_engine="4"),
            {"rollout_num_gpus": 4},
            ":5: sglang[0].server_groups[0]: pp_size 3 does not divide engines of 4 GPUs.",
        ),
    ],
)
def test_groups_have_to_fit_the_flags(write, text, changes, message):
    (sentence,) = read_topology(flags(sglang_config=write(text), **changes))[1].wrong
    assert message in sentence


def test_a_file_that_is_not_there_is_a_problem_of_the_environment():
    problems = read_topology(flags(sglang_config="none.yaml"))[1]
    assert problems.environment == ["--sglang-config none.yaml: there is no such file."] and problems.wrong == []


def test_what_slime_sets_for_a_group_exists_in_server_args():
    known = {option["dest"].removeprefix("sglang_") for option in table_of("sglang").options} | set(OWNED)
    assert set(GROUP_OWNED) <= known


PIECES = st.sampled_from([*"{}[]:,-&*!|'\"#\n 0", "null", "encoder", "name: a", "1e999", "engine_groups: ", "pp_size"])


@settings(max_examples=100, deadline=None)
@given(text=edited(VALID, PIECES))
def test_a_mutated_file_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "mutated_engines.yaml"
    path.write_text(text)
    problems = read_topology(flags(sglang_config=str(path)))[1]
    assert all(isinstance(sentence, str) for sentence in problems.all())
    with contextlib.suppress(UsageError):
        SglangConfig.from_yaml(str(path))
