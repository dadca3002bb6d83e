"""--tune: what the search over the plan's model of memory and time finds, and how it says so."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from slime.config.parse import CommandLine
from slime.plan import Facts, Plan, make_plan
from slime.plan.times import DEVICES
from slime.plan.tune import knobs, tune, tuned_lines, without
from slime.ray.driver import print_tuned
from tests.unit.plan_fakes import CUDA, plan_args
from tests.unit.test_plan_engine import QWEN3_4B
from tools.make_tiny_model import build_tokenizer

IDEAS = list(knobs(8, has_experts=False, colocated=True))
OPTIONS = {option: num_values for idea in IDEAS for option, num_values in idea.options.items()}


def judge(argv: Sequence[str]) -> Plan:
    """The plan of Qwen3-4B on eight shared H100s; the parser of a run is left out, which takes 50 ms a line."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    for option, num_values in OPTIONS.items():
        parser.add_argument(option, **({"type": number} if num_values else {"action": "store_true"}))
    values = vars(parser.parse_args(argv))
    values |= {"offload_train": not values.pop("no_offload_train", False), "offload_rollout": True}
    sizes = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_max_response_len": 4096}
    batch = {"rollout_batch_size": 64, "n_samples_per_prompt": 8, "global_batch_size": 512}
    args = plan_args(**CUDA, **QWEN3_4B, **sizes, **batch, colocate=True, **values)
    return make_plan(args, Facts(device=DEVICES["h100-80gb"]))


def number(text: str) -> int | float | str:
    return json.loads(text) if text[:1].isdigit() else text


def test_a_model_that_fits_on_one_gpu_loses_its_model_parallelism_and_gets_large_micro_batches():
    argv = ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--micro-batch-size", "1"]
    best, changes = tune(argv, judge(argv), judge, IDEAS)
    layout = best.plan.layout
    assert layout is not None and (layout.tp, layout.pp, layout.cp) == (1, 1, 1)
    assert "--max-tokens-per-gpu" in best.argv and "--micro-batch-size" not in best.argv
    assert best.plan.does_fit and best.plan.rollout_seconds < changes[0].was.plan.rollout_seconds


def test_a_run_that_does_not_fit_is_made_to_fit_first():
    argv = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "131072"]
    plan = judge(argv)
    assert not plan.does_fit
    best, changes = tune(argv, plan, judge, IDEAS)
    assert best.plan.does_fit
    assert any("were lacking on a device" in line for line in tuned_lines(best, changes))


def test_the_best_line_stays_as_it_is():
    best, _ = tune([], judge([]), judge, IDEAS)
    again, changes = tune(best.argv, best.plan, judge, IDEAS)
    assert again == best and not changes
    assert list(tuned_lines(again, changes))[-1] == "no change that was tried saves 1% of a rollout"


def test_a_refused_change_is_never_taken():
    def without_layouts(argv: Sequence[str]) -> Plan | None:
        return None if "--context-parallel-size" in argv else judge(argv)

    argv = ["--tensor-model-parallel-size", "4", "--sequence-parallel", "--micro-batch-size", "1"]
    best, _ = tune(argv, judge(argv), without_layouts, IDEAS)
    assert best.plan.layout is not None and best.plan.layout.tp == 4


@pytest.mark.parametrize("line", ["--a 1 --b --c=2 --d -1 x", "--c=2 --a=1 --d -1 x --b", "--c=2 --d -1 x"])
def test_flags_leave_a_line_in_whatever_form_they_are_given(line: str):
    rest, removed = without(line.split(), {"--a": 1, "--b": 0})
    assert rest == ["--c=2", "--d", "-1", "x"] and sorted(rest + removed) == sorted(line.split())


def test_a_dry_run_prints_a_line_that_a_run_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    build_tokenizer().save_pretrained(model)
    sizes = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128}
    config |= sizes | {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config | {"hidden_act": "silu", "max_position_embeddings": 40960}))
    prompts.write_text('{"input": "1+1=", "label": "2"}\n')
    argv = f"--accelerator cuda --hf-checkpoint {model} --ref-load {model} --model-args-from-hf --label-key label "
    argv += f"--prompt-data {prompts} --num-rollout 2 --rollout-batch-size 8 --n-samples-per-prompt 8 --rm-type math "
    argv += "--rollout-max-response-len 1024 --global-batch-size 64 --actor-num-gpus-per-node 2 --colocate --bf16 "
    argv += "--tensor-model-parallel-size 2 --sequence-parallel --plan-device h200-141gb --dry-run --tune"
    command_line = CommandLine()
    print_tuned(argv.split(), command_line)
    *_, line = capsys.readouterr().out.splitlines()
    assert "--tune" not in line and "--tensor-model-parallel-size 1" in line
    assert not command_line.check([*shlex.split(line), "--dry-run"]).problems.wrong
