"""Command lines of upstream's scripts, end-to-end tests and documents start here, but for a few that are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slime.config.parse import Checked, CommandLine
from slime.ray.driver import dry_run
from slime.utils.misc import load_function
from tests.contracts.corpus import command_lines, place, write_hooks

LINES = command_lines()
ON_GPUS = ["--dry-run", "--accelerator", "cuda", "--plan-device", "h200-141gb"]
# Name -> a part of the reason; not one of these could run upstream as it stands, or it waits for what is not built.
REFUSED = {
    "examples_delta_weight_sync_run-glm4.7-30B-A3B-delta.sh": "--num-layers 47 does not divide into 2 pipeline stages",
    "scripts_run-glm4.7-30B-A3B.sh": "8 trainer GPUs or slots do not divide by",  # EP 8 x PP 2 = 16
    "scripts_run-minimax-m2.sh": "needs --tb-project-name, or the environment variable TENSORBOARD_DIR",
    # 1408 / 4 columns are no tiles of the int4 kernels
    "scripts_low_precision_run-moonlight-16B-A3B-int4.sh": "its part of moe_intermediate_size is 352",
    "examples_geo3k_vlm_run_geo3k_qwen35.sh": "--experimental-attention-variant: the flags say None",
}
# What anyone must give, and these documents leave out.
COMPLETED = {
    "skill_quick_start": "--rm-type math --label-key label",
    "skill_workflow_1": "--rm-type math",
    "skill_workflow_2_async": "--rm-type math --label-key label --rollout-batch-size 32 --num-rollout 3000",
    "skill_workflow_3_agent": "--rm-type math --rollout-batch-size 32 --num-rollout 3000 --rollout-num-gpus 8",
}


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


@pytest.fixture
def planned(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Check a line of the corpus, with more flags behind it, for GPUs that are not here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    write_hooks(tmp_path)
    for module in [module for module in sys.modules if module.startswith(("generate_with_", "examples"))]:
        monkeypatch.delitem(sys.modules, module)  # the repository's own, which another test has loaded
    load_function.cache_clear()

    def check(name: str, *more: str) -> Checked:
        completed = COMPLETED.get(name, "").split()
        return command_line.check(place([*LINES[name][1], *completed], tmp_path) + [*ON_GPUS, *more])

    yield check
    load_function.cache_clear()
    for module in [module for module in sys.modules if module.startswith(("generate_with_", "examples."))]:
        if str(tmp_path) in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_upstream_starts(planned, name: str) -> None:
    checked = planned(name)
    if name in REFUSED:
        assert any(REFUSED[name] in sentence for sentence in checked.problems.all())
    else:
        assert checked.problems.all() == []


def test_no_more_than_six_lines_are_refused() -> None:
    assert len(REFUSED) <= 6 and REFUSED.keys() <= LINES.keys()


def test_a_plan_of_a_line_shows_its_flags_without_effect(planned, capsys: pytest.CaptureFixture[str]) -> None:
    checked = planned("test_qwen2.5_0.5B_async_short")
    assert [sentence.flags for sentence in checked.problems.no_effect] == [("--sequence-parallel",)]
    assert dry_run(checked) == 0
    assert "1 flag has no effect here (--strict-flags refuses them): --sequence-parallel" in " ".join(
        capsys.readouterr().out.split()
    )
    strict = planned("test_qwen2.5_0.5B_async_short", "--strict-flags").problems
    assert any("--sequence-parallel has no effect" in sentence for sentence in strict.wrong)


@pytest.mark.parametrize("flag", ["--rollout-bach-size", "--sglang-mem-fraction-statik", "--num-layer"])
def test_a_misspelt_flag_of_a_line_is_an_error_with_the_nearest_name(planned, flag: str) -> None:
    wrong = planned("test_qwen2.5_0.5B_async_short", flag, "4").problems.wrong
    assert any(sentence.startswith(f"unknown flag {flag}: did you mean --") for sentence in wrong)


def test_what_is_not_installed_is_a_line_of_the_plan_and_refuses_a_run(
    planned, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", _without("nixl", "deep_ep"))
    name = "test_qwen3_30B_A3B_r3"  # DeepEP and nixl
    checked = planned(name)
    assert dry_run(checked) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--rollout-data-transport nixl needs the package nixl, which is not installed" in shown
    assert "--moe-enable-deepep: DeepEP (the package deep_ep) is not installed here; tokens go to" in shown
    fp8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-param-gather"]
    assert dry_run(planned(name, *fp8)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--fp8-format e4m3 --fp8-recipe blockwise: experts are trained in 16 bit" in shown
    assert "--fp8-param-gather (weights stay in 16 bit" in shown
    required = planned(name, "--require-deepep").problems.environment
    assert any("which --require-deepep refuses" in sentence for sentence in required)
    run = _as_run(planned, name)
    assert any("needs the package nixl" in sentence for sentence in run)


def _as_run(planned, name: str) -> list[str]:
    """Why the run itself would be refused, without --dry-run."""
    index = ON_GPUS.index("--dry-run")
    dry = ON_GPUS.pop(index)
    try:
        return planned(name).problems.all()
    finally:
        ON_GPUS.insert(index, dry)


def _without(*packages: str):
    import importlib.util

    real = importlib.util.find_spec
    return lambda name, package=None: None if name in packages else real(name, package)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "scripts_run-qwen3.5-27B.sh",
            {"experimental_attention_variant": "gated_delta_net", "linear_num_value_heads": 48},
        ),
        ("scripts_run-glm5-744B-A40B.sh", {"experimental_attention_variant": "dsa", "dsa_indexer_topk": 2048}),
        ("scripts_run-kimi-k2-Instruct.sh", {"beta_fast": 1.0, "kv_channels": 128}),
        ("scripts_run-minimax-m2.sh", {"qk_layernorm": True}),
    ],
)
def test_what_a_specification_leaves_out_comes_from_the_hf_config(planned, name: str, expected: dict) -> None:
    args = planned(name).args
    assert {key: vars(args)[key] for key in expected} == expected
    if args.spec:
        from slime.utils.misc import load_function

        assert callable(load_function(".".join(args.spec)))


def test_a_router_has_the_policies_of_its_library(planned) -> None:
    line = "test_qwen2.5_0.5B_async_short"
    for policy in ("consistent_hashing", "prefix_hash"):
        checked = planned(line, "--router-policy", policy)
        assert (checked.problems.all(), checked.args.router_policy) == ([], policy)
    (wrong,) = planned(line, "--router-policy", "consistent_hash").problems.wrong
    assert "--router-policy" in wrong


def test_a_config_of_evaluation_may_have_keys_that_change_nothing(planned, tmp_path: Path) -> None:
    name = "examples_eval_multi_task_multi_task.sh"
    planned(name)
    data = {"name": "a", "path": str(tmp_path / "eval.jsonl"), "min_eval_samples": 3, "eval_task_timeout": 9}
    (tmp_path / "more.yaml").write_text(json.dumps({"eval": {"datasets": [data]}}))
    problems = planned(name, "--eval-config", str(tmp_path / "more.yaml")).problems
    assert problems.all() == [] and len(problems.no_effect) == 2
    (tmp_path / "more.yaml").write_text(json.dumps({"eval": {"datasets": [data | {"min_eval_sample": 3}]}}))
    (wrong,) = planned(name, "--eval-config", str(tmp_path / "more.yaml")).problems.wrong
    assert "min_eval_sample" in wrong and "did you mean" in wrong


def test_an_option_of_a_patched_engine_is_named_so(planned) -> None:
    hook = ["--sglang-custom-pull-weights-pre-read-hook", "a.b"]
    (wrong,) = planned("test_qwen2.5_0.5B_async_short", *hook).problems.wrong
    assert wrong.startswith(f"{hook[0]} belongs to a patch of SGLang, which the installed ")
