"""The run scripts start train.py with flags that it knows, for their models, on as many GPUs as their plan fits on."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.flags.run import AskFlags
from slime.config.parse import CommandLine
from slime.config.parser import option_name
from slime.ray.driver import dry_run
from slime.weights.formats import EXPERTS_ONLY, Int4Format
from tests.unit.script_fakes import ROOT, hf_config, run_script, script_flags, start_script

# Run script -> its model script.
MODEL_OF = {
    "low_precision/run-qwen3-30b-a3b-fp8": "qwen3-30B-A3B",
    "low_precision/run-qwen3-4b-fp8": "qwen3-4B",
    "low_precision/run-kimi-k2-Thinking-int4": "kimi-k2-thinking",
    "low_precision/run-moonlight-16B-A3B-int4": "moonlight",
    "low_precision/run-qwen3-235B-A22B-int4": "qwen3-235B-A22B",
    "low_precision/run-qwen3-30B-A3B-int4": "qwen3-30B-A3B",
    "run-deepseek-r1": "deepseek-v3",
    "run-glm4-9B": "glm4-9B",
    "run-glm4.5-355B-A32B": "glm4.5-355B-A32B",
    "run-glm4.7-30B-A3B": "glm4.7-30B-A3B",
    "run-glm4.7-355B-A32B": "glm4.5-355B-A32B",
    "run-glm5-744B-A40B": "glm5-744B-A40B",
    "run-glm5.2-744B-A40B": "glm5.2-744B-A40B",
    "run-kimi-k2-Instruct": "kimi-k2",
    "run-kimi-k2-Thinking": "kimi-k2-thinking",
    "run-mimo-7B-rl-eagle": "mimo-7B-rl",
    "run-minimax-m2": "minimax-m2",
    "run-moonlight-16B-A3B": "moonlight",
    "run-qwen2.5-0.5B-gb10-smoke": "qwen2.5-0.5B",
    "run-qwen2.5-0.5B-reproducibility": "qwen2.5-0.5B",
    "run-qwen3-235B-A22B": "qwen3-235B-A22B",
    "run-qwen3-235B-A22B-sft": "qwen3-235B-A22B",
    "run-qwen3-30B-A3B": "qwen3-30B-A3B",
    "run-qwen3-30B-A3B-lora": "qwen3-30B-A3B",
    "run-qwen3-32B": "qwen3-32B",
    "run-qwen3-4B": "qwen3-4B",
    "run-qwen3-4B-amd": "qwen3-4B",
    "run-qwen3-4B-base-sft": "qwen3-4B",
    "run-qwen3-4B-lora": "qwen3-4B",
    "run-qwen3-next-80B-A3B": "qwen3-next-80B-A3B",
    "run-qwen3.5-27B": "qwen3.5-27B",
    "run-qwen3.5-35B-A3B-sft": "qwen3.5-35B-A3B",
}
NUM_NODES = {
    "low_precision/run-kimi-k2-Thinking-int4": 32,
    "low_precision/run-qwen3-235B-A22B-int4": 8,
    "run-deepseek-r1": 16,
    "run-glm4.5-355B-A32B": 8,
    "run-glm4.7-355B-A32B": 8,
    "run-glm5-744B-A40B": 32,
    "run-glm5.2-744B-A40B": 32,
    "run-kimi-k2-Instruct": 32,
    "run-kimi-k2-Thinking": 32,
    "run-minimax-m2": 8,
    "run-qwen3-235B-A22B": 8,
    "run-qwen3-235B-A22B-sft": 8,
    "run-qwen3-next-80B-A3B": 4,
}
NUM_GPUS = {"run-qwen2.5-0.5B-gb10-smoke": 1, "run-qwen3-4B-lora": 1, "run-qwen3-30B-A3B-lora": 4}
# Whose engines run the weights of a checkpoint in fp8.
FP8 = {
    "low_precision/run-qwen3-30b-a3b-fp8",
    "low_precision/run-qwen3-4b-fp8",
    "run-deepseek-r1",
    "run-kimi-k2-Instruct",
    "run-kimi-k2-Thinking",
    "run-minimax-m2",
}
FP8_FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
# Whose engines run the experts of a checkpoint in int4.
INT4 = {name for name in MODEL_OF if name.endswith("-int4")}
# Fit only with what their config.json says of fp8 or int4.
NEEDS_CONFIG = {
    "low_precision/run-kimi-k2-Thinking-int4",
    "run-deepseek-r1",
    "run-kimi-k2-Instruct",
    "run-kimi-k2-Thinking",
}
# The small runs that are real tests (docs/quick_start.md), and the one whose model transformers makes, not flags.
ON_ITS_OWN = {"run-tiny-cpu", "run-smollm2-135M", "run-qwen3-4B-fsdp"}
# A flag that needs another one says how that one's answer is to be.
QUESTIONS = ["-h", "--help", *(option_name(f) for f in dataclasses.fields(AskFlags) if not f.metadata["needs"])]
GROUPS = ["MODEL", "CKPT", "ROLLOUT", "EVAL", "PERF", "GRPO", "OPTIMIZER", "WANDB", "SGLANG", "MISC"]


def test_every_run_script_is_in_the_table():
    found = {str(path.relative_to(ROOT / "scripts").with_suffix("")) for path in ROOT.glob("scripts/**/run-*.sh")}
    assert found == MODEL_OF.keys() | ON_ITS_OWN


def test_the_page_of_scripts_names_every_run_and_every_model():
    page = (ROOT / "docs" / "scripts.md").read_text()
    assert [name for name in [*MODEL_OF, *ON_ITS_OWN] if f"`{name}.sh`" not in page] == []
    listed = page[page.index("## `scripts/models/`") :]
    named = {
        prefix + size for prefix, sizes in re.findall(r"`([\w.-]+)\{(.*?)\}`", listed) for size in sizes.split(",")
    }
    named |= set(re.findall(r"`([\w.-]+)`", listed))
    assert {path.stem for path in ROOT.glob("scripts/models/*.sh")} - named == set()


def test_the_recipes_pass_the_groups_of_flags_that_users_know_in_one_place():
    text = (ROOT / "scripts" / "recipe.sh").read_text()
    assert all(text.count(f'"${{{group}_ARGS[@]}}"') == 1 for group in GROUPS)


@pytest.mark.parametrize("name", MODEL_OF)
def test_a_run_script_has_its_model_and_all_its_paths_below_slime_home(tmp_path, name):
    flags, _ = run_script(tmp_path, name, "--dry-run", SLIME_HOME="/data")
    model = script_flags(MODEL_OF[name])
    assert flags[: len(model)] == model
    paths = [flag for flag in flags if "/" in flag]
    assert paths and all(path.startswith("/data/") for path in paths)
    assert f"bash scripts/{name}.sh --dry-run " in (ROOT / "scripts" / f"{name}.sh").read_text()


@pytest.mark.parametrize("has_config", [False, True], ids=["nothing downloaded", "config downloaded"])
@pytest.mark.parametrize("name", MODEL_OF)
def test_a_dry_run_without_weights_and_data_says_that_the_plan_fits_gpus_of_80_gb(tmp_path, capsys, name, has_config):
    flags, _ = run_script(tmp_path, name, "--dry-run", SLIME_HOME=str(tmp_path), WANDB_API_KEY="key")
    model_path = Path(flags[flags.index("--hf-checkpoint") + 1])
    if has_config:  # the flags are compared with it, and fp8 is found in it
        model_path.mkdir()
        formats = {"quantization_config": FP8_FORMAT if name in FP8 else Int4Format(ignored=EXPERTS_ONLY).config()}
        quantized = formats if name in FP8 | INT4 else {}
        (model_path / "config.json").write_text(json.dumps(hf_config(MODEL_OF[name]) | quantized))
    json_path = tmp_path / "plan.json"
    checked = CommandLine().check([*flags, "--dry-run-json", str(json_path), "--plan-device", "h100-80gb"])
    assert (checked.problems.wrong, checked.warnings()) == ([], [])
    args = checked.args
    assert (args.use_wandb, args.dry_run, args.accelerator) == (True, True, "cuda")
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (NUM_NODES.get(name, 1), NUM_GPUS.get(name, 8))
    assert args.colocate != args.debug_train_only
    assert args.global_batch_size == args.rollout_batch_size * args.n_samples_per_prompt
    assert checked.problems.unsupported == []
    # What a run still lacks is files.
    lacking = ("no directory", "does not exist", "safetensors", "tokenizer")
    assert [said for said in checked.problems.environment if not any(part in said for part in lacking)] == []

    assert dry_run(checked) == 2
    shown, plan = capsys.readouterr().out, json.loads(json_path.read_text())
    assert len(plan["fit"]) == (1 if args.debug_train_only else 2) and "A run would be refused" in shown
    guesses = not has_config and not args.debug_train_only
    assert ("engines are planned in 16 bit, and may run in less" in " ".join(shown.split())) == guesses
    assert plan["does_fit"] == (has_config or name not in NEEDS_CONFIG)
    assert ("; fits; " in shown) == plan["does_fit"]


@pytest.mark.parametrize(
    ("name", "accelerator"), [("run-tiny-cpu", "cpu"), ("run-smollm2-135M", "cpu"), ("run-smollm2-135M", "cuda")]
)
def test_a_small_run_has_a_dry_run_of_flags_that_fit_each_other(tmp_path, name, accelerator):
    where = {"ACCELERATOR": accelerator, "OUTPUT": str(tmp_path / "out")}
    done, _ = start_script(tmp_path, name, "--dry-run", **where)
    assert done.returncode == 0, done.stderr
    lines = [text[: text.rindex("\0")].split("\0") for text in done.stdout.split("train.py\0")[1:]]
    assert len(lines) == (2 if name == "run-tiny-cpu" else 1) and not (tmp_path / "out").exists()
    (tmp_path / "config.json").write_text(json.dumps(hf_config("qwen3-0.6B")))  # the stand-in makes no model
    for flags in lines:
        assert flags[-1] == "--dry-run"
        if "--model-args-from-hf" in flags:
            flags[flags.index("--hf-checkpoint") + 1] = str(tmp_path)
        checked = CommandLine().check(flags)
        assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])


def test_the_run_with_fsdp_has_flags_that_fit_each_other_and_needs_no_others_of_the_model(tmp_path):
    (tmp_path / "Qwen3-4B").mkdir()
    (tmp_path / "Qwen3-4B" / "config.json").write_text(json.dumps(hf_config("qwen3-4B")))
    flags, _ = run_script(tmp_path, "run-qwen3-4B-fsdp", "--dry-run", SLIME_HOME=str(tmp_path))
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])
    assert (checked.args.train_backend, checked.args.num_layers, checked.args.colocate) == ("fsdp", 36, False)


def test_the_quick_start_refuses_flags_as_it_has_none(tmp_path):
    done, log = start_script(tmp_path, "run-tiny-cpu", "--lr", "1")
    assert done.returncode == 2 and log == "" and "--lr 1: settings of this script are environment" in done.stderr


def test_a_dry_run_of_a_script_prints_the_verdict(tmp_path):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLIME_", "WANDB_", "RAY_"))}
    done = subprocess.run(
        ["bash", "scripts/run-qwen3-235B-A22B.sh", "--dry-run", "--plan-device", "h100-80gb"],
        cwd=ROOT,
        env=kept | {"SLIME_PYTHON": sys.executable, "SLIME_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "\n64 x h100-80gb; fits; " in done.stdout, done.stdout + done.stderr


def test_a_run_on_several_machines_needs_a_ray_that_spans_them(tmp_path):
    done, log = start_script(tmp_path, "run-qwen3-235B-A22B")
    assert done.returncode == 2 and log == ""
    assert "this run takes 8 machines" in done.stderr
    assert all(name in done.stderr for name in ("MASTER_ADDR", "WORKERS=", "ray_worker.sh", "RAY_ADDRESS="))


def test_a_ray_that_is_there_is_used_and_left_running(tmp_path):
    flags, log = run_script(tmp_path, "run-qwen3-235B-A22B", "--lr", "3e-6", RAY_ADDRESS="10.0.0.9:6379")
    assert flags[-2:] == ["--lr", "3e-6"]
    assert "ray.scripts" not in log and log.startswith("train.py ")


def test_on_amd_an_environment_with_rocm_is_asked_for(tmp_path):
    done, log = start_script(tmp_path, "run-qwen3-4B-amd", SLIME_PYTHON="")
    assert done.returncode == 2 and log == ""
    assert "set SLIME_PYTHON=/path/to/python, of an environment with torch and SGLang for ROCm" in done.stderr


def test_a_flag_on_the_command_line_of_a_script_overrides_the_scripts(tmp_path):
    flags, _ = run_script(tmp_path, "run-glm4-9B", "--dry-run", "--lr", "3e-6")
    assert flags[-3:] == ["--dry-run", "--lr", "3e-6"]
    assert CommandLine().check(flags).args.lr == 3e-6


def test_weights_and_biases_is_used_where_there_is_a_key(tmp_path):
    assert "--use-wandb" not in run_script(tmp_path, "run-qwen3-4B", "--dry-run")[0]
    assert "--use-wandb" in run_script(tmp_path, "run-qwen3-4B", "--dry-run", WANDB_API_KEY="key")[0]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_to_a_script_starts_no_ray(tmp_path, question):
    flags, log = run_script(tmp_path, "run-glm4-9B", question)
    assert flags[-1] == question
    assert "ray" not in log


def test_a_question_is_answered_by_a_complete_environment_as_it_is(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup_env.sh").write_text("echo installing >&2; exit 7")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"')
    python.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLIME_")}

    def dry_run() -> subprocess.CompletedProcess[str]:
        command = ["bash", str(tmp_path / "scripts" / "run-qwen3-4B.sh"), "--dry-run"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert (dry_run().returncode, dry_run().stderr) == (7, "installing\n")
    (tmp_path / ".venv" / ".stamp-slime").touch()
    assert dry_run().stdout.startswith("train.py --num-layers 36")


def test_a_script_submits_its_flags_to_a_ray_of_its_own_unchanged_by_any_shell(tmp_path):
    odd = ["--custom-config-path", "a b/$HOME (1)*.yaml", "--router-x", '{"y": [1, "it\'s"]}']
    flags, log = run_script(tmp_path, "run-glm4-9B", *odd)
    assert flags[-4:] == odd
    assert "start --head" in log and "job submit" in log
    assert not list(tmp_path.glob("slime-ray.*"))
