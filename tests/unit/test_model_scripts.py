"""The model scripts say what the HF configs say, and both models have the published parameters; the run scripts start
train.py with flags that it knows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.arguments import add_megatron_arguments
from slime.backends.megatron_utils.hf_config import model_args_from_hf
from slime.backends.megatron_utils.megatron_to_hf.rules import FAMILIES, strip_wrappers
from slime.utils.arguments import CommandLine
from slime.utils.arguments.debug import AskFlags
from slime.utils.arguments.flags import option_name
from tests.unit.megatron_fakes import make_args, run_world

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "hf_configs"
# Scripts under the names of older documents, or of a platform.
ALIASES = {
    "llama3-8B": "llama3.1-8B-Instruct",
    "llama3.2-3B-Instruct-amd": "llama3.2-3B-Instruct",
    "qwen3-4b": "qwen3-4B",
}
# The first layers of a larger model.
SHORTENED = {"deepseek-v3-5layer": ("deepseek-v3", 5), "deepseek-v3-20layer": ("deepseek-v3", 20)}
# Parameters of the published models, tied embeddings counted once; the hub counts as many. Known only rounded are
# deepseek-v3 (671 B), glm4-32B (33 B) and moonlight (16 B). The hub counts the two glm4.5 with their prediction layer:
# HUB_WITH_PREDICTION_LAYER. Nobody publishes the first layers of deepseek-v3: those numbers say only that both models
# agree.
PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3-5layer": 26_618_387_456,
    "deepseek-v3-20layer": 199_227_677_696,
    "glm4-9B": 9_400_279_040,
    "glm4-32B": 32_566_081_536,
    "glm4.5-106B-A12B": 106_852_245_504,
    "glm4.5-355B-A32B": 352_797_814_784,
    "llama3.1-8B-Instruct": 8_030_261_248,
    "llama3.2-3B-Instruct": 3_212_749_824,
    "moonlight": 15_960_108_544,
    "qwen2.5-0.5B": 494_032_768,
    "qwen2.5-1.5B": 1_543_714_304,
    "qwen2.5-3B": 3_085_938_688,
    "qwen2.5-7B": 7_615_616_512,
    "qwen2.5-32B": 32_763_876_352,
    "qwen3-0.6B": 596_049_920,
    "qwen3-1.7B": 1_720_574_976,
    "qwen3-4B": 4_022_468_096,
    "qwen3-4B-Instruct-2507": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "qwen3-14B": 14_768_307_200,
    "qwen3-32B": 32_762_123_264,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "smollm2-135M": 134_515_008,
}
HUB_WITH_PREDICTION_LAYER = {"glm4.5-106B-A12B": 110_468_824_832, "glm4.5-355B-A32B": 358_337_791_296}
# transformers joins the experts of a layer (Megatron name in a layer, all experts as one -> HF).
JOINED_EXPERTS = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.linear_fc1.weight": "mlp.experts.gate_up_proj",
    "mlp.experts.linear_fc2.weight": "mlp.experts.down_proj",
}
Shapes = dict[str, tuple[int, ...]]


def hf_config(name: str) -> dict[str, Any]:
    whole, num_layers = SHORTENED.get(name, (name, None))
    config = json.loads((FIXTURES / f"{whole}.json").read_text())
    return config if num_layers is None else config | {"num_hidden_layers": num_layers}


def script_flags(name: str) -> list[str]:
    """MODEL_ARGS of a model script, as bash expands it."""
    command = f'set -eu; . scripts/models/{name}.sh; printf "%s\\0" "${{MODEL_ARGS[@]}}"'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


def parse(flags: list[str]) -> argparse.Namespace:
    return add_megatron_arguments(argparse.ArgumentParser()).parse_args(flags)


def test_every_model_script_has_a_fixture_and_a_number_of_parameters():
    scripts = {path.stem for path in ROOT.glob("scripts/models/*.sh")}
    assert scripts == PARAMETERS.keys() | ALIASES.keys()
    assert {path.stem for path in FIXTURES.glob("*.json")} == PARAMETERS.keys() - SHORTENED.keys()


@pytest.mark.parametrize(("name", "meant"), ALIASES.items())
def test_a_model_script_under_another_name_says_the_same(name, meant):
    assert script_flags(name) == script_flags(meant)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_script_says_what_the_hf_config_says_and_nothing_else(name):
    derived = vars(parse([])) | model_args_from_hf(hf_config(name))
    assert vars(parse(script_flags(name))) == derived


def num_kept(config: dict[str, Any]) -> int:
    """Layers that are built: the dense ones and two behind them, which all others are like."""
    return min(config["num_hidden_layers"], config.get("first_k_dense_replace", 0) + 2)


def num_parameters(shapes: Shapes, config: dict[str, Any]) -> int:
    """Parameters of the whole model, whose last kept layer stands for all that were left out."""
    kept = num_kept(config)
    last = [shape for name, shape in shapes.items() if f".layers.{kept - 1}." in name]
    left_out = (config["num_hidden_layers"] - kept) * sum(map(math.prod, last))
    return sum(map(math.prod, shapes.values())) + left_out


def hf_shapes(config: dict[str, Any]) -> Shapes:
    """Parameters of the kept layers of the transformers model, built without memory."""
    import transformers

    values = {key: value for key, value in config.items() if key not in ("_source", "model_type")}
    built = transformers.AutoConfig.for_model(
        config["model_type"], **(values | {"num_hidden_layers": num_kept(config)})
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    return {key: tuple(param.shape) for key, param in model.named_parameters()}


def megatron_shapes(args: argparse.Namespace) -> Shapes:
    """Parameters of the Megatron model, built without memory; all experts of a layer are one, as in transformers."""
    from slime.backends.megatron_utils.model_provider import build_gpt

    with torch.device("meta"):
        model = build_gpt(args)
    shapes: Shapes = {}
    experts: Counter[str] = Counter()
    for key, param in model.named_parameters():
        before, is_expert, after = key.partition("local_experts.")
        together = before + after.split(".", 1)[1] if is_expert else key
        experts[together] += 1
        shapes[together] = (experts[together], *param.shape) if is_expert else tuple(param.shape)
    return shapes


def hf_names(model_type: str, megatron_name: str) -> tuple[str, ...]:
    """The HF parameters that are in a Megatron parameter."""
    name = strip_wrappers(megatron_name)
    layer, _, inner = name.removeprefix("decoder.layers.").partition(".")
    if name.startswith("decoder.layers.") and inner in JOINED_EXPERTS:
        return (f"model.layers.{layer}.{JOINED_EXPERTS[inner]}",)
    return FAMILIES[model_type].find(name, num_layers=0)[1]


def check_shapes(args: argparse.Namespace, config: dict[str, Any], hf: Shapes, total: int) -> None:
    ours = megatron_shapes(args)
    assert num_parameters(ours, config) == total
    used = []
    for name, shape in ours.items():
        names = hf_names(config["model_type"], name)
        parts = [hf[part] for part in names]
        used += names
        # Joined are rows (q, k and v; gate and up); everything else of the shapes is the same.
        assert shape == (sum(part[0] for part in parts), *parts[0][1:]), name
    assert sorted(used) == sorted(hf)


@pytest.mark.parametrize("name", PARAMETERS)
def test_both_models_have_the_published_number_of_parameters_and_the_same_shapes(name):
    config = hf_config(name)
    hf, kept = hf_shapes(config), num_kept(config)
    assert num_parameters(hf, config) == PARAMETERS[name]
    flags = [*script_flags(name), "--no-initialization", "--num-layers", str(kept)]
    if dense := config.get("first_k_dense_replace"):
        flags += ["--moe-layer-freq", f"[0]*{dense}+[1]*{kept - dense}"]
    args = make_args(None, " ".join(flags))
    assert args.padded_vocab_size == args.vocab_size  # else Megatron's model has rows that HF's does not have
    run_world(1, check_shapes, args, config, hf, PARAMETERS[name])


@pytest.mark.parametrize(("name", "on_the_hub"), HUB_WITH_PREDICTION_LAYER.items())
def test_with_its_prediction_layer_and_biases_a_model_has_as_many_numbers_as_on_the_hub(name, on_the_hub):
    config, sizes = hf_config(name), hf_shapes(hf_config(name))
    last = num_kept(config) - 1
    layer = sum(math.prod(shape) for key, shape in sizes.items() if f".layers.{last}." in key)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # Three norms, the product of two hidden states side by side, an embedding and an output layer of its own.
    predicting = layer + 3 * hidden + hidden * 2 * hidden + 2 * vocab * hidden
    with_experts = config["num_hidden_layers"] + 1 - config["first_k_dense_replace"]
    biases = with_experts * config["n_routed_experts"]  # of the choice of experts: no parameters for torch
    assert PARAMETERS[name] + predicting + biases == on_the_hub


RUN_SCRIPTS = ["run-glm4-9B", "run-qwen3-4B"]
# Stands for python: says what it was told to do, and plays Ray's part, down to running a submitted job.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$@" >>"$FAKE_LOG"
case "$*" in
    train.py*) printf '%s\\0' "$@" ;;
    *create_server*) echo 1001 1002 1003 1004 ;;
    *env_vars*) echo '{}' ;;
    *"job submit"*) bash "${@: -1}" ;;
esac
"""
# A flag that needs another one says how that one's answer is to be.
QUESTIONS = ["-h", "--help", *(option_name(f) for f in dataclasses.fields(AskFlags) if not f.metadata["needs"])]
GROUPS = ["MODEL", "CKPT", "ROLLOUT", "EVAL", "PERF", "GRPO", "OPTIMIZER", "WANDB", "SGLANG", "MISC"]


def run_script(tmp_path: Path, name: str, *arguments: str, **environment: str) -> tuple[list[str], str]:
    """(the flags with which a run script starts train.py, everything that python was told to do)."""
    fake, log = tmp_path / "python", tmp_path / "log"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLIME_", "WANDB_", "RAY_"))}
    done = subprocess.run(
        ["bash", f"scripts/{name}.sh", *arguments],
        cwd=ROOT,
        env=kept | {"SLIME_PYTHON": str(fake), "FAKE_LOG": str(log), "TMPDIR": str(tmp_path)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    program, *flags = done.stdout.split("\0")[:-1]
    assert program == "train.py"
    return flags, log.read_text()


@pytest.mark.parametrize("name", RUN_SCRIPTS)
def test_a_run_script_has_the_groups_that_users_know_and_the_model_of_its_name(tmp_path, name):
    flags, _ = run_script(tmp_path, name, "--dry-run", SLIME_HOME="/data")
    text = "".join((ROOT / "scripts" / file).read_text() for file in (f"{name}.sh", "dapo_math.sh"))
    assert all(f'"${{{group}_ARGS[@]}}"' in text for group in GROUPS)
    model = script_flags(name.removeprefix("run-"))
    assert flags[: len(model)] == model
    paths = [flag for flag in flags if flag.startswith("/")]
    assert len(paths) == 6 and all(path.startswith("/data/") for path in paths)


@pytest.mark.parametrize("name", RUN_SCRIPTS)
def test_every_flag_of_a_run_script_is_known_and_none_is_wrong(tmp_path, name):
    flags, _ = run_script(tmp_path, name, "--dry-run", SLIME_HOME=str(tmp_path), WANDB_API_KEY="key")
    checked = CommandLine().check(flags)
    assert checked.problems.wrong == []
    assert (checked.args.use_wandb, checked.args.dry_run) == (True, True)
    assert (checked.args.actor_num_gpus_per_node, checked.args.colocate, checked.args.accelerator) == (8, True, "cuda")
    assert checked.args.global_batch_size == checked.args.rollout_batch_size * checked.args.n_samples_per_prompt


@pytest.mark.parametrize("name", [*PARAMETERS, *ALIASES])
def test_every_flag_of_a_model_script_is_known(name):
    wrong = CommandLine().check(script_flags(name)).problems.wrong
    assert not [sentence for sentence in wrong if "unknown" in sentence or "did you mean" in sentence], wrong


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
