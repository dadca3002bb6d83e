"""`--dry-run`: facts are gathered without starting anything, and the plan is printed and written."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.config.problems import Problems
from slime.plan import Facts, make_plan
from slime.plan.render import WIDTH, head_of, read_rows_of, render
from slime.plan.times import DEFAULT_GPU, DEVICES
from slime.ray import driver
from slime.ray.driver import dry_run, engine_kinds, find_device, hook_report, hook_reports
from slime.rollout.base_types import GenerateFn, RewardFn
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig
from tests.integration.launch import make_model
from tests.unit.plan_fakes import CUDA, plan_args
from tools.make_tiny_model import build_tokenizer

CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    return directory


def written(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def checked(**changes) -> SimpleNamespace:
    problems = {name: changes.pop(name, []) for name in ("wrong", "environment", "unsupported")}
    values = {"hf_checkpoint": "nowhere", "rollout_max_response_len": 64}
    said = changes.pop("warnings", [])
    args = plan_args(**(values | changes))
    return SimpleNamespace(args=args, problems=Problems(**problems), explicit=frozenset(), warnings=lambda: said)


def text_of(plan) -> str:
    stream = io.StringIO()
    render(plan, stream)
    return stream.getvalue()


def test_a_run_that_nothing_refuses_ends_with_status_0_and_shows_its_data_row(model_dir, tmp_path, capsys):
    data = written(tmp_path / "d.jsonl", {"input": "1+1=", "label": "2"}, {"input": "12+13=", "label": "25"})
    line = checked(hf_checkpoint=str(model_dir), prompt_data=data, label_key="label", apply_chat_template=True)
    assert dry_run(line) == 0
    shown = capsys.readouterr().out
    # each of the two markers, the role names, newlines and characters is one token of this tokenizer
    prompt = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    num_tokens = len(build_tokenizer().encode(prompt))
    assert f"prompts: {data}:1, {num_tokens} tokens" in shown
    assert "| <|im_start|>user\n    | 1+1=<|im_end|>\n" in shown and "label: 2" in shown
    assert "A run would be refused" not in shown


def test_what_refuses_a_run_is_listed_last_and_gives_status_2(capsys):
    line = checked(environment=["a file is missing."], unsupported=["[PP] is not supported yet."])
    assert dry_run(line) == 2
    assert capsys.readouterr().out.rstrip().splitlines()[-3:] == [
        "A run would be refused:",
        "- a file is missing.",
        "- [PP] is not supported yet.",
    ]


def test_what_a_run_would_warn_of_is_in_the_plan(tmp_path, capsys):
    line = checked(warnings=["--no-such-effect: accepted."], dry_run_json=str(tmp_path / "plan.json"))
    assert dry_run(line) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-2:] == ["Warnings", "- --no-such-effect: accepted."]
    assert json.loads((tmp_path / "plan.json").read_text())["warnings"] == ["--no-such-effect: accepted."]


def test_a_contradictory_command_line_has_no_plan(capsys):
    with pytest.raises(UsageError, match="--tp 3 does not divide"):
        dry_run(checked(wrong=["--tp 3 does not divide 8."]))
    assert capsys.readouterr().out == ""


def test_the_plan_as_json_holds_what_was_printed(tmp_path, capsys):
    line = checked(dry_run_json=str(tmp_path / "plan.json"))
    dry_run(line)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["does_fit"] is True and plan["batch"]["samples_per_rollout"] == 32
    assert plan["trainer_memory"]["stages"][0]["state"] == 16 * plan["params"]["total"]
    with pytest.raises(UsageError, match="--dry-run-json .*/no/plan.json cannot be written: No such file"):
        dry_run(checked(dry_run_json=str(tmp_path / "no" / "plan.json")))


def test_missing_weights_data_and_model_flags_do_not_stop_the_plan(capsys):
    line = checked(prompt_data="gone.jsonl", num_layers=None, actor_num_nodes=2, actor_num_gpus_per_node=8)
    assert dry_run(line) == 0
    shown = capsys.readouterr().out
    missing = shown[shown.index("Missing") :]
    assert "prompts: gone.jsonl does not exist" in missing and "--model-args-from-hf" in missing
    assert "rank 0-15" in shown and "8 prompts x 4 samples = 32" in shown


def test_without_a_tokenizer_the_row_is_shown_as_it_is_written(tmp_path):
    data = written(tmp_path / "d.jsonl", {"input": CHAT})
    facts, (row,), missing = read_rows_of(checked(prompt_data=data).args)
    assert row.text == str(CHAT) and row.num_tokens is None and facts.num_rows == 1
    assert "shown raw" in missing[0]


def test_a_broken_tokenizer_is_said_and_the_row_is_shown_raw(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    data = written(tmp_path / "d.jsonl", {"input": "1+1="})
    _, (row,), missing = read_rows_of(checked(hf_checkpoint=str(tmp_path), prompt_data=data).args)
    assert row.text == "1+1=" and missing[0].startswith("a tokenizer: ")


def test_a_demonstration_is_shown_with_its_loss_mask(model_dir, tmp_path):
    data = written(tmp_path / "d.jsonl", {"input": CHAT})
    args = checked(hf_checkpoint=str(model_dir), prompt_data=data, loss_type="sft_loss").args
    _, (row,), _ = read_rows_of(args)
    assert row.pieces == [
        ("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n", False),
        ("2<|im_end|>\n", True),
    ]
    assert row.num_trained_tokens == 3
    shown = text_of(make_plan(args, Facts(rows=[row])))
    assert "    | >>>2<|im_end|>\n    | <<<\n" in shown


def test_a_row_that_the_terminal_cannot_show_is_no_error(tmp_path):
    data = written(tmp_path / "d.jsonl", {"input": "1 ≤ 2"})
    _, rows, _ = read_rows_of(checked(prompt_data=data).args)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    render(make_plan(plan_args(), Facts(rows=rows)), stream)
    stream.flush()
    assert b"| 1 ? 2" in stream.buffer.getvalue()


def test_every_evaluation_set_shows_a_row_under_its_own_keys(model_dir, tmp_path):
    train = written(tmp_path / "t.jsonl", {"input": "1+1="})
    held_out = written(tmp_path / "e.jsonl", {"question": "2+2=", "answer": "4"})
    datasets = [
        EvalDatasetConfig(name="held-out", path=held_out, input_key="question", label_key="answer"),
        EvalDatasetConfig(name="gone", path=str(tmp_path / "gone.jsonl")),
    ]
    args = checked(hf_checkpoint=str(model_dir), prompt_data=train, eval_datasets=datasets).args
    _, rows, missing = read_rows_of(args)
    assert [(row.data, row.text, row.num_tokens, row.label) for row in rows] == [
        ("prompts", "1+1=", 4, None),
        ("held-out", "2+2=", 4, "4"),
    ]
    assert missing == [f"gone: {tmp_path}/gone.jsonl does not exist"]


@pytest.mark.parametrize(
    ("row", "changes", "problem"),
    [
        ({"text": "1"}, {}, "no key 'input'"),
        ({"input": "1"}, {"label_key": "answer"}, "no label under 'answer'"),
        ({"input": "1+1="}, {"loss_type": "sft_loss"}, "needs a message list"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(model_dir, tmp_path, row, changes, problem):
    data = written(tmp_path / "d.jsonl", row)
    _, (report,), _ = read_rows_of(checked(hf_checkpoint=str(model_dir), prompt_data=data, **changes).args)
    assert report.text is None and problem in report.problem


def test_the_tokens_of_images_are_counted_in_prompts_and_their_tower_in_the_plan(tmp_path, capsys):
    """Images of 64 x 64 pixels are 16 x 16 patches of 4 x 4 pixels, of which four make a token."""
    from PIL import Image

    make_model(tmp_path / "model", "--family", "qwen3_vl")
    vision = json.loads((tmp_path / "model" / "config.json").read_text())["vision_config"]
    tokens = (64 // vision["patch_size"]) ** 2 // vision["spatial_merge_size"] ** 2
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    image, none = str(tmp_path / "a.png"), {"input": "none", "images": []}
    data = written(tmp_path / "d.jsonl", {"input": "<image>how many?", "images": [image]}, none)
    line = {"hf_checkpoint": str(tmp_path / "model"), "prompt_data": data, "apply_chat_template": True}
    line |= {"multimodal_keys": {"image": "images"}}
    facts, (row,), _ = read_rows_of(checked(**line).args)
    prompt = "<|im_start|>user\n<|vision_start|>*<|vision_end|>how many?<|im_end|>\n<|im_start|>assistant\n"
    assert row.num_tokens == facts.max_prompt == len(build_tokenizer(sees_images=True).encode(prompt)) - 1 + tokens
    assert facts.max_images == tokens - 1
    assert dry_run(checked(**line)) == 0
    shown = capsys.readouterr().out
    assert ", tower " in shown and f"- {tokens - 1} tokens of images in a micro-batch" in shown


def test_prompts_are_measured_at_the_start_of_the_file(model_dir, tmp_path):
    data = written(tmp_path / "d.jsonl", *({"input": "x" * (1 + i % 3)} for i in range(300)))
    facts, _, _ = read_rows_of(checked(hf_checkpoint=str(model_dir), prompt_data=data).args)
    assert (facts.num_rows, facts.num_measured, facts.mean_prompt, facts.max_prompt) == (300, 200, 2, 3)


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("d.jsonl", "d.jsonl@[0:5]"),
        ("d.jsonl@[3:]", "d.jsonl@[3:8]"),
        ("d.jsonl@[3:6]", "d.jsonl@[3:6]"),
        ("d.jsonl@[-4:]", "d.jsonl@[-4:]"),
    ],
)
def test_the_head_of_a_slice(path, head):
    assert head_of(path, 5) == head


def test_hooks_are_shown_with_their_place_or_why_they_do_not_load(tmp_path):
    file = tmp_path / "mine.py"
    functions = "\nasync def reward(args, sample, **kwargs):\n    return 1.0\n\n\ndef no_sample():\n    pass\n"
    file.write_text(functions + "\n\ndef plain(args, sample, sampling_params):\n    return sample\n")
    good = hook_report("--custom-rm-path", f"{file}:reward", RewardFn)
    assert good.where is not None and good.where.endswith("mine.py:2") and good.problem is None
    assert "it is called as (args, sample" in str(hook_report("--x", f"{file}:no_sample", RewardFn).problem)
    assert "no attribute 'gone'" in str(hook_report("--x", f"{file}:gone", RewardFn).problem)
    assert "write it as `async def`" in str(hook_report("--x", f"{file}:plain", GenerateFn).problem)
    held_out = EvalDatasetConfig(name="held-out", path="e.jsonl", custom_rm_path=f"{file}:reward")
    changes = {"rollout_sample_hook_path": [f"{file}:gone"], "eval_datasets": [held_out]}
    args = checked(custom_rm_path=f"{file}:reward", **changes).args
    shown = {report.flag: report for report in hook_reports(args)}
    assert shown["--custom-rm-path"].where == good.where
    assert shown["custom_rm_path of held-out"].where == good.where
    assert shown["--rollout-sample-hook-path"].where is None
    assert shown["--rollout-function-path"].where.startswith("slime/rollout/sglang_rollout.py:")


def test_engines_of_sglang_config_take_slots_in_its_order(tmp_path):
    (tmp_path / "sglang.yaml").write_text(
        "sglang:\n"
        "  - name: policy\n"
        "    server_groups:\n"
        "      - {worker_type: prefill, num_gpus: 2, overrides: {mem_fraction_static: 0.5}}\n"
        "      - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 2}\n"
        "  - {name: judge, model_path: /models/judge, server_groups: [{worker_type: regular, num_gpus: 2}]}\n"
    )
    args = checked(
        **CUDA,
        actor_num_gpus_per_node=8,
        rollout_num_gpus=8,
        sglang_config=str(tmp_path / "sglang.yaml"),
        hf_checkpoint="/models/policy",
    ).args
    kinds = engine_kinds(args)
    assert [(kind.group.name, kind.group.num_gpus, kind.group.num_gpus_per_engine) for kind in kinds] == [
        ("policy prefill", 2, 1),
        ("policy decode", 4, 2),
        ("judge regular", 2, 1),
    ]
    plan = make_plan(args, Facts(engines=kinds))
    assert [engine.name for engine in plan.engine_memory] == ["policy prefill", "policy decode"]  # not the judge's
    assert plan.engine_memory[0].mem_fraction == 0.5
    assert [seat.engine_name for seat in plan.seats[-3:]] == ["policy decode", "judge regular", "judge regular"]


def test_a_reward_model_is_in_the_plan_behind_the_slots_of_the_trainer(tmp_path):
    shared = {"colocate": True, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 2}
    args = checked(**shared, reward_model_path=str(tmp_path), reward_model_num_gpus=1, hf_checkpoint="/m").args
    plan = make_plan(args, Facts(engines=engine_kinds(args)))
    assert [seat.engine_name for seat in plan.seats] == [
        "default regular",
        "default regular",
        "",
        "",
        "reward regular",
    ]
    assert [seat.trainer_rank for seat in plan.seats] == [0, 1, 2, 3, None]
    assert [engine.name for engine in plan.engine_memory] == ["default regular"]  # the size of the other is unknown


def test_a_plan_for_gpus_names_the_device_that_it_assumes(monkeypatch):
    monkeypatch.setattr(driver, "cuda_is_available", lambda: False)
    assert find_device("cuda") == DEVICES[DEFAULT_GPU]
    assert find_device("cuda", "h200-141gb") == DEVICES["h200-141gb"]
    assert find_device("cpu").is_shared


def test_the_plan_is_for_the_device_that_is_named(tmp_path, capsys):
    names = ("h200-141gb", "l40s-48gb")
    for name in names:
        dry_run(checked(**CUDA, plan_device=name, dry_run_json=str(tmp_path / f"{name}.json")))
    large, small = (json.loads((tmp_path / f"{name}.json").read_text())["device"] for name in names)
    assert large["memory_bytes"] > 2 * small["memory_bytes"]


def test_a_plan_for_several_nodes_fits_the_page_and_survives_json():
    args = plan_args(
        **CUDA,
        actor_num_nodes=4,
        actor_num_gpus_per_node=8,
        rollout_num_gpus=16,
        rollout_num_gpus_per_engine=8,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        num_moe_experts=8,
        moe_ffn_hidden_size=32,
        rollout_max_response_len=4096,
    )
    plan = make_plan(args)
    shown = text_of(plan)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "TP 4  PP 2  VPP 1  CP 2  DP 2  EP 2" in shown and "layers of the stages: 0-1; 2-3" in shown
    assert "engine 1 (tp 0-7)" in shown and shown.startswith("Plan\n48 x h100-80gb; fits; one rollout about ")
    json.dumps(dataclasses.asdict(plan))


def test_a_plan_imports_neither_torch_nor_ray_nor_the_backends():
    program = (
        "import sys\n"
        "from tests.unit.plan_fakes import plan_args\n"
        "before = set(sys.modules)\n"
        "from slime.plan import make_plan\n"
        "from slime.plan.render import render\n"
        "import io; render(make_plan(plan_args()), io.StringIO())\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new & {'torch', 'ray', 'sglang', 'megatron', 'transformers'}))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr[-1000:]
