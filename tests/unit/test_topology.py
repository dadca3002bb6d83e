"""Which engines the flags describe: models, groups, slots, settings and roles; and what cannot be started."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.config.sglang.topology import (
    EngineGroupPlan,
    ModelPlan,
    num_policy_engines,
    plan_engines,
    topology_problems,
)

YAML = """\
sglang:
  - name: policy
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 4, overrides: {mem_fraction_static: 0.5}}
      - {worker_type: placeholder, num_gpus: 1}
      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 4}
  - name: teacher
    model_path: /models/teacher
    server_groups: [{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1, overrides: {dtype: float16}}]
"""


def flags(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "accelerator": "cuda",
        "actor_num_gpus_per_node": 0,
        "actor_num_nodes": 1,
        "colocate": False,
        "debug_rollout_only": False,
        "debug_train_only": False,
        "hf_checkpoint": "/models/policy",
        "num_gpus_per_node": 8,
        "prefill_num_servers": None,
        "reward_model_num_gpus": None,
        "reward_model_path": None,
        "rollout_external": False,
        "rollout_external_engine_addrs": None,
        "rollout_num_gpus": 4,
        "rollout_num_gpus_per_engine": 2,
        "sglang_config": None,
        "sglang_overrides": {"dtype": "bfloat16", "mem_fraction_static": 0.8},
        "sglang_pp_size": 1,
    }
    return argparse.Namespace(**(values | changes))


@pytest.fixture
def topology(tmp_path: Path) -> str:
    path = tmp_path / "engines.yaml"
    path.write_text(YAML)
    return str(path)


@pytest.fixture
def reward_model(tmp_path: Path) -> str:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    return str(tmp_path / "judge")


def test_without_a_file_there_is_one_model_with_engines_alike() -> None:
    (model,) = plan_engines(flags())
    assert (model.name, model.model_path, model.update_weights) == ("default", "/models/policy", True)
    (group,) = model.groups
    assert (group.worker_type, list(group.engine_slots), group.settings["dtype"]) == ("regular", [0, 2], "bfloat16")
    assert num_policy_engines([model], num_external=0) == 2


def test_groups_take_slots_in_the_order_of_the_file_and_placeholders_keep_theirs_free(topology: str) -> None:
    policy, teacher = plan_engines(flags(sglang_config=topology, rollout_num_gpus=11))
    assert [(g.worker_type, list(g.engine_slots)) for g in policy.groups] == [
        ("prefill", [0, 2]),
        ("placeholder", []),
        ("decode", [5]),  # behind 4 + 1 slots
    ]
    assert [list(group.engine_slots) for group in teacher.groups] == [[9, 10]]
    assert (policy.num_engines, teacher.num_engines) == (3, 2)
    assert num_policy_engines([policy, teacher], num_external=0) == 3


def test_overrides_of_a_group_win_over_flags_for_its_engines_only(topology: str) -> None:
    policy, teacher = plan_engines(flags(sglang_config=topology, rollout_num_gpus=11))
    prefill, _, decode = policy.groups
    assert (prefill.settings["mem_fraction_static"], decode.settings["mem_fraction_static"]) == (0.5, 0.8)
    assert (decode.settings["dtype"], teacher.groups[0].settings["dtype"]) == ("bfloat16", "float16")


def test_only_the_model_of_hf_checkpoint_takes_the_trainers_weights(topology: str) -> None:
    policy, teacher = plan_engines(flags(sglang_config=topology, rollout_num_gpus=11))
    assert (policy.update_weights, teacher.update_weights) == (True, False)
    assert (teacher.model_path, policy.kind, teacher.kind) == ("/models/teacher", "pd", "generate")
    assert not EngineGroupPlan("encoder", 1, 1, 0).takes_weights  # its server has no such endpoint


def test_groups_that_cannot_serve_adapters_are_refused_as_flags_are(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    groups = "[{worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2, overrides: {pp_size: 2}}]"
    path.write_text(f"sglang:\n- {{name: a, server_groups: {groups}}}\n")
    lora = {"lora_rank": 8, "lora_alpha": None, "lora_target_modules": None, "lora_exclude_modules": None}
    lora |= {"update_weight_transport": "nccl", "update_weight_mode": "full"}
    more = {"lora_use_rslora": False, "lora_dropout": 0.0, "lora_init": "default", "sglang_config": str(path)}
    told = "--sglang-config: pp_size 2 of model a does not go with --lora-serve adapter: an engine of several pipeline"
    served, merged = (flags(**lora, **more, lora_serve=serve) for serve in ("adapter", "merged"))
    assert any(told in text for text in topology_problems(served).wrong), topology_problems(served).wrong
    assert not any("--lora-serve" in text for text in topology_problems(merged).wrong)
    path.write_text(f"{YAML.partition('  - name: teacher')[0]}")
    split = [text for text in topology_problems(served).wrong if "worker_type" in text]
    assert [text.split()[2] for text in split] == ["prefill", "decode"]


def test_prefill_num_servers_is_short_for_two_groups() -> None:
    (model,) = plan_engines(flags(prefill_num_servers=1, rollout_num_gpus=6))
    assert [(g.worker_type, list(g.engine_slots)) for g in model.groups] == [("prefill", [0]), ("decode", [2, 4])]


def test_a_reward_model_comes_last_with_engines_of_one_slot_that_classify(reward_model: str) -> None:
    policy, reward = plan_engines(flags(reward_model_path=reward_model, reward_model_num_gpus=2))
    assert (reward.name, reward.model_path, reward.update_weights) == ("reward", reward_model, False)
    (group,) = reward.groups
    assert list(group.engine_slots) == [4, 5]  # behind the policy's four
    assert group.settings == {"is_embedding": True}, "the flags are the policy's"
    assert (policy.kind, reward.kind) == ("generate", "classify")
    assert num_policy_engines([policy, reward], num_external=0) == 2


def test_a_reward_model_of_the_file_keeps_its_place_and_classifies(tmp_path: Path, reward_model: str) -> None:
    path = tmp_path / "engines.yaml"
    groups = "server_groups: [{worker_type: regular, num_gpus: 2}]"
    path.write_text(f"sglang:\n- {{name: a, {groups}}}\n- {{name: reward, model_path: {reward_model}, {groups}}}\n")
    args = flags(sglang_config=str(path), reward_model_path=reward_model)
    assert not topology_problems(args).all()
    assert [(model.name, model.kind) for model in plan_engines(args)] == [("a", "generate"), ("reward", "classify")]
    args = flags(sglang_config=str(path), reward_model_path=str(tmp_path), reward_model_num_gpus=1)
    wrong = topology_problems(args).wrong
    assert "is another model than" in wrong[0] and "--reward-model-num-gpus 1 contradicts --sglang-config" in wrong[1]


def test_no_engine_is_ours_with_external_ones_or_with_none_at_all(reward_model: str) -> None:
    (external,) = plan_engines(flags(rollout_external=True))
    assert external == ModelPlan("default", "/models/policy", True)
    assert num_policy_engines([external], num_external=3) == 3
    assert plan_engines(flags(rollout_num_gpus=0)) == [external]
    assert plan_engines(flags(debug_train_only=True)) == []
    args = flags(rollout_external=True, reward_model_path=reward_model, reward_model_num_gpus=1)
    assert [list(group.engine_slots) for model in plan_engines(args) for group in model.groups] == [[0]]


def test_a_reward_model_needs_a_directory_and_slots(tmp_path: Path) -> None:
    problems = topology_problems(flags(reward_model_path=str(tmp_path)))
    assert problems.environment == [f"--reward-model-path {tmp_path} is no HF directory: it has no config.json."]
    assert "needs --reward-model-num-gpus" in problems.wrong[0]


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}", "hand over their KV cache"),
        ("{worker_type: encoder, num_gpus: 1}, {worker_type: regular, num_gpus: 1}", "process images on GPUs"),
    ],
)
def test_what_needs_gpus_is_refused_on_cpu_with_the_reason(tmp_path: Path, group: str, reason: str) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(f"sglang: [{{name: a, num_gpus_per_engine: 1, server_groups: [{group}]}}]")
    args = flags(sglang_config=str(path), rollout_num_gpus=2)
    assert not topology_problems(args).all()
    args.accelerator = "cpu"
    (sentence,) = topology_problems(args).unsupported
    assert reason in sentence and "--accelerator cpu" in sentence


def test_prefill_servers_are_refused_on_cpu_too() -> None:
    (sentence,) = topology_problems(flags(accelerator="cpu", prefill_num_servers=1)).unsupported
    assert "hand over their KV cache" in sentence and "--prefill-num-servers" in sentence


@pytest.mark.parametrize(
    ("trainers", "size", "per_node", "shares"),
    [
        (0, 4, 2, None),
        (0, 4, 4, None),
        (4, 8, 8, None),  # four on each
        (2, 4, 4, None),
        (3, 4, 4, "1 on node 0 and 3 on node 1"),
        (1, 8, 4, "3 on node 0 and 4 on node 1 and 1 on node 2"),
    ],
)
def test_an_engine_over_several_nodes_has_as_many_gpus_of_each(
    trainers: int, size: int, per_node: int, shares: str | None
) -> None:
    given = {"actor_num_gpus_per_node": trainers, "debug_rollout_only": not trainers, "accelerator": "cuda"}
    args = flags(rollout_num_gpus=size, rollout_num_gpus_per_engine=size, num_gpus_per_node=per_node, **given)
    sentences = topology_problems(args).wrong
    assert [shares in sentence for sentence in sentences] == [True] * bool(shares)
    args.accelerator = "cpu"
    assert not topology_problems(args).wrong, "slots of a machine without GPUs are on one node"


def test_the_example_of_the_docs_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    (tmp_path / "engines.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    args = flags(sglang_config=str(tmp_path / "engines.yaml"), rollout_num_gpus=8)
    problems = topology_problems(args)
    assert problems.wrong == [] and problems.unsupported == []
    assert [(model.name, model.num_engines) for model in plan_engines(args)] == [("policy", 2), ("teacher", 1)]


def test_the_plan_travels_to_actors() -> None:
    import pickle

    plan = plan_engines(flags())
    info = ExternalEngineInfo("http://e:1", 2)
    assert pickle.loads(pickle.dumps((plan, info))) == (plan, info)


@pytest.mark.parametrize(("model_type", "reason"), [("qwen3_5_moe_text", "delta nets"), ("deepseek_v32", "sparse")])
def test_a_model_that_only_gpus_serve_is_refused_on_cpu_with_what_to_do(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"model_type": model_type}}))
    args = flags(accelerator="cpu", hf_checkpoint=str(tmp_path))
    (sentence,) = topology_problems(args).unsupported
    assert model_type in sentence and reason in sentence and "--debug-train-only" in sentence
    args.accelerator = "cuda"
    assert topology_problems(args).unsupported == []


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ({}, True),
        ({"update_weight_transport": "disk"}, True),  # the first stage's answer would remove what the next one reads
        ({"update_weight_transport": "disk", "update_weight_disk_keep_files": True}, False),
        (
            {"update_weight_transport": "disk", "update_weight_disk_keep_files": True, "update_weight_mode": "delta"},
            True,
        ),
        ({"debug_rollout_only": True}, False),
    ],
)
def test_engines_of_several_pipeline_stages_take_weights_from_files_that_stay(
    changes: dict[str, Any], is_refused: bool
) -> None:
    given = {"update_weight_transport": "nccl", "update_weight_mode": "full", "update_weight_disk_keep_files": False}
    args = flags(sglang_overrides={"pp_size": 2}, **(given | changes))
    sentences = topology_problems(args).wrong
    assert ["engines of 2 pipeline stages (--sglang-pp-size)" in sentence for sentence in sentences] == [
        True
    ] * is_refused
    args.sglang_overrides = {"pp_size": 1}
    assert not topology_problems(args).wrong
