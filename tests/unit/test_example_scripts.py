"""The examples as a whole: all are in the table, known names load, and the flags of scripts fit each other."""

from __future__ import annotations

import re

import pytest

from slime.config.parse import CommandLine
from slime.utils.misc import load_function
from tests.unit.script_fakes import ROOT, run_script, script_flags, start_script

ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
# Script -> (model script, driver, flags of args).
SCRIPTS = {
    "fully_async/run-qwen2.5-0.5B-fully_async": (
        "qwen2.5-0.5B",
        "train_async.py",
        {"rollout_function_path": ASYNC, "actor_num_gpus_per_node": 1, "rollout_num_gpus": 3},
    ),
    "fully_async/run-qwen3.5-9B-fully_async": (
        "qwen3.5-9B",
        "train_async.py",
        {"rollout_function_path": ASYNC, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 4},
    ),
    "eval_multi_task/run-qwen3-4B-eval_multi_task": ("qwen3-4B", "train.py", {"eval_interval": 20}),
    "on_policy_distillation/run-qwen3-8B-opd": (
        "qwen3-8B",
        "train.py",
        {"opd_type": "sglang", "rollout_num_gpus": 4, "actor_num_gpus_per_node": 2},
    ),
    "on_policy_distillation/run-qwen3-8B-opd-megatron": ("qwen3-8B", "train.py", {"opd_type": "megatron"}),
    "delta_weight_sync/run-glm4.7-30B-A3B-delta": (
        "glm4.7-30B-A3B",
        "train.py",
        {"update_weight_mode": "delta", "update_weight_transport": "disk", "rollout_num_gpus": 16},
    ),
}


# Folder that its script puts on PYTHONPATH ("" where the example is a package) -> functions that its flags name.
FUNCTIONS = {
    "search-r1": "generate_with_search.generate generate_with_search.reward_func qa_em_format.compute_score_em",
    "retool": "generate_with_retool.generate generate_with_retool.reward_func tool_sandbox.code_interpreter",
    "tau-bench": "generate_with_tau.generate generate_with_tau.res_to_sample token_delta.get_token_delta",
    "": """
    examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
    examples.multi_agent.agent_system.run_agent_system
    examples.self_play.rollout.generate examples.self_play.rollout.by_role
    examples.llm_judge.judge.rubric examples.llm_judge.judge.pairwise
    examples.strands_sglang.generate_with_strands.generate examples.strands_sglang.generate_with_strands.reward_func
    examples.coding_agent_rl.generate.generate examples.coding_agent_rl.swe.run_evaluation
    examples.train_infer_mismatch_helper.mis.compute_mis
    """,
}


@pytest.mark.parametrize("folder", FUNCTIONS)
def test_functions_load_by_the_names_that_users_know(monkeypatch, folder):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / folder))
    assert all(callable(load_function(name)) for name in FUNCTIONS[folder].split())


def test_every_example_is_in_the_table_with_its_readme():
    table = (ROOT / "examples" / "README.md").read_text()
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name[0] not in "._"}
    assert set(re.findall(r"^\| \[([\w-]+)\]", table, re.MULTILINE)) == folders
    for target in re.findall(r"\]\((\S+)\)", table):
        assert (ROOT / "examples" / target).is_file(), target


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_of_an_example_fit_each_other(tmp_path, name):
    model, driver, expected = SCRIPTS[name]
    where = {"SLIME_HOME": str(tmp_path), "LOCAL_DIR": str(tmp_path / "local")}
    flags, _ = run_script(tmp_path, f"../examples/{name}", "--dry-run", driver=driver, **where)
    assert flags[: len(script_flags(model))] == script_flags(model)
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported) == ([], [])
    said = [text for text in checked.warnings() if not text.startswith("requests stay in flight during weight syncs")]
    assert said == []
    assert {key: vars(checked.args)[key] for key in expected} == expected


def test_the_multi_task_evaluation_has_a_reward_for_each_set(tmp_path):
    name = "../examples/eval_multi_task/run-qwen3-4B-eval_multi_task"
    flags, _ = run_script(tmp_path, name, "--dry-run", SLIME_HOME=str(tmp_path))
    datasets = CommandLine().check(flags).args.eval_datasets
    assert [(d.name, d.rm_type, d.n_samples_per_eval_prompt, d.top_p) for d in datasets] == [
        ("aime", "deepscaler", 16, 0.7),
        ("gpqa", "gpqa", 2, 0.7),
        ("ifbench", "ifbench", 1, 0.7),
    ]


def test_a_script_is_tried_with_its_own_flags_a_tiny_model_of_its_family_and_those_of_the_user(tmp_path):
    script, where = "fully_async/run-qwen2.5-0.5B-fully_async", {"OUTPUT": str(tmp_path / "tried")}
    own, _ = run_script(tmp_path, f"../examples/{script}", "--dry-run", driver="train_async.py", SLIME_HOME="/none")
    flags, log = run_script(
        *(tmp_path, "../examples/smoke", f"{script}.sh", "--lr", "1e-3", "--dry-run"), driver="train_async.py", **where
    )
    assert "make_tiny_model.py --family qwen2 --output" in log
    model = f"{tmp_path}/tried/model"
    begin = len(own) - 1  # without --dry-run
    assert [text.replace(f"{tmp_path}/tried/home", "/none") for text in flags[:begin]] == own[:-1]
    added = flags[begin:]
    assert added[added.index("--hf-checkpoint") + 1] == model and added[added.index("--num-rollout") + 1] == "2"
    assert added[-3:] == ["--lr", "1e-3", "--dry-run"]
    done, _ = start_script(tmp_path, "../examples/smoke", "fully_async/run.sh", **where)
    assert done.returncode == 2 and done.stderr.startswith("error: examples/fully_async/run.sh does not exist; name a")
