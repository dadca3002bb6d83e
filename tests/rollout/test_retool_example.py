"""examples/retool: programs run in sandboxes, in three forms; rewards are ReTool's; data and scripts fit the loop."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from slime.agent.sandbox import SandboxError
from slime.config.parse import CommandLine
from slime.rollout.multi_turn import ToolError
from slime.rollout.tool_calls import ToolCall
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.types import Sample
from tests.rollout.example_fakes import load_example, play, trained_text
from tests.unit.script_fakes import ROOT, run_script, script_flags
from tools.make_tiny_model import build_tokenizer

FOLDER = "retool"
tool = load_example(FOLDER, "tool_sandbox")
gen = load_example(FOLDER, "generate_with_retool")
sft = load_example(FOLDER, "sft_data_processing")
rl = load_example(FOLDER, "rl_data_preprocess")
data = load_example(FOLDER, "make_data", own_name="retool_make_data")
Status = Sample.Status
END = "<|im_end|>"
TOOL = {"tool_function_path": "tool_sandbox.code_interpreter"}
ANSWER = "Answer: \\boxed{42}"


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'code_interpreter', 'arguments': {'code': code}})}</tool_call>"


def program(code: str) -> list[ToolCall]:
    return [ToolCall("code_interpreter", {"code": code})]


@pytest.mark.parametrize(
    ("turn", "calls"),
    [
        (call("print(1)"), program("print(1)")),
        ('<tool_call>\n{\n  "name": "code_interpreter",\n  "arguments": {"code": "x"}\n}\n</tool_call>', program("x")),
        ("so <code>\nprint(1)\n</code>", program("print(1)")),
        ("<code>\n```python\nprint(1)\nprint(2)\n```\n</code>", program("print(1)\nprint(2)")),
        ("so\n```python\nprint(1)\n```\nyes", program("print(1)\n")),
        (f"{call('print(1)')} {ANSWER}", []),
        ("<code>print(1)</code>" + call("print(2)"), program("print(2)")),
        (f"<think>{call('print(1)')}</think>it is 1", []),
        ("```text\nprint(1)\n```", []),
    ],
)
def test_a_program_is_called_for_in_three_forms_and_an_answer_ends(turn, calls):
    assert gen.postprocess_predictions(turn) == calls


def new_sample() -> Sample:
    prompt = [{"role": "user", "content": "6*7"}]
    return Sample(index=3, group_index=1, prompt=prompt, label="42", metadata={"tools": [tool.SCHEMA]})


def settings(path: str = "tool_sandbox.code_interpreter", **more) -> dict:
    return {"tool_function_path": path, "tool_timeout_s": 60, "retool": {"python_timeout": 10.0, **more}}


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / FOLDER))


def test_a_program_runs_in_a_sandbox_and_its_result_is_an_untrained_turn(monkeypatch, on_path):
    turn = "<code>print(6*7)</code>"
    sample, model = play(monkeypatch, gen.generate, new_sample(), [turn, ANSWER], custom=settings())
    result = "<tool_response>\n<interpreter>\n42\n</interpreter>\n</tool_response>"
    assert result in model.seen(1) and model.seen(1).endswith(f"{END}\n<|im_start|>assistant\n")
    assert trained_text(model.tokenizer, sample) == turn + END + ANSWER + END
    assert sample.tokens[: len(model.requests[1]["input_ids"])] == model.requests[1]["input_ids"]
    assert (sample.status, sample.metadata["tool_calls"]) == (Status.COMPLETED, 1)
    assert asyncio.run(gen.reward_func(Namespace(), sample))["score"] == 1.0


def test_calls_above_the_limit_are_refused_in_words(monkeypatch, on_path):
    replies = [call("print(1)") + call("print(2)"), ANSWER]
    sample, model = play(monkeypatch, gen.generate, new_sample(), replies, custom=settings(max_tool_calls=1))
    assert "<interpreter>\n1\n" in model.seen(1) and "error: no call is left, all 1 are made" in model.seen(1)
    assert (sample.metadata["tool_calls"], sample.metadata["tool_errors"]) == (2, 1)


def test_without_a_sandbox_the_reward_is_not_trusted(monkeypatch, on_path):
    def refuse(*args, **kwargs):
        raise SandboxError("the kernel refuses")

    monkeypatch.setattr(tool, "make_sandbox", refuse)
    sample, _ = play(monkeypatch, gen.generate, new_sample(), [call("print(1)")], custom=settings())
    assert (sample.end_reason, sample.reward_is_trusted) == ("env_error", False)


def run(code: str, **config) -> str:
    return asyncio.run(tool.PythonSandbox({**tool.TOOL_CONFIGS, "python_timeout": 10.0, **config}).execute_code(code))


def test_a_program_is_bounded_in_time_output_and_memory_and_its_error_is_told():
    assert run("print(sum(range(10)))") == "45"
    assert "ZeroDivisionError" in run("1/0") and "exit code 1" in run("1/0")
    assert run("while True: pass", python_timeout=0.5) == "error: the program took more than 0.5 s"
    long = run("print('ab' * 10**6)", max_output_chars=100)
    assert len(long) < 200 and "characters cut" in long
    assert "error (exit code" in run("x = bytearray(600 * 2**20); print(len(x))", python_memory_mb=128)


def test_a_program_has_nothing_of_the_run(monkeypatch):
    monkeypatch.setenv("MY_SECRET_KEY", "hunter2")
    assert "hunter2" not in run("import os; print(dict(os.environ))")
    assert "error (exit code 1)" in run(f"print(open({str(ROOT / 'train.py')!r}).read())")
    assert "error (exit code 1)" in run("import urllib.request as u; u.urlopen('http://127.0.0.1:8000', timeout=2)")


@pytest.mark.parametrize("arguments", [{}, {"code": 3}, {"code": " "}])
def test_a_call_without_a_program_is_the_models_error(arguments):
    with pytest.raises(ToolError, match='"code" must be a program'):
        asyncio.run(tool.code_interpreter(Namespace(), Sample(), "code_interpreter", arguments))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"timeout": 1}, "'timeout' is unknown"),
        ({"tool_concurrency": 0}, "tool_concurrency is 0"),
        ({"backend": "podman"}, "there is no backend 'podman'; there is local, docker"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_the_run(settings, said):
    (problem,) = gen.generate.check_args(Namespace(**(TOOL | {"retool": settings})))
    assert said in problem


def test_the_tool_has_to_be_named():
    (problem,) = gen.generate.check_args(Namespace())
    assert "tool_function_path: tool_sandbox.code_interpreter" in problem
    assert not list(gen.generate.check_args(Namespace(**TOOL)))


@pytest.mark.parametrize(
    ("said", "calls", "score"),
    [
        (ANSWER, 0, 1.0),
        (ANSWER, 5, 1.0),
        ("Answer: \\boxed{41}", 0, -1.1),
        ("Answer: \\boxed{41}", 2, -1.0),
        ("Answer: \\boxed{41}", 4, -0.9),
        ("Answer: \\boxed{41}", 10, -0.6),
        ("Answer: \\boxed{41}", 16, -0.6),
        ("42", 2, -1.0),
        (ANSWER + "." * 101, 2, -1.0),
    ],
)
def test_a_wrong_answer_loses_less_for_each_call(said, calls, score):
    messages = [{"role": "assistant", "content": said}]
    sample = Sample(label="42", status=Status.COMPLETED, metadata={"messages": messages, "tool_calls": calls})
    result = asyncio.run(gen.reward_func(Namespace(), sample))
    assert result["score"] == pytest.approx(score) and result["acc"] is (score == 1)


def test_what_a_program_prints_or_a_cut_off_turn_is_no_answer():
    messages = [{"role": "assistant", "content": call("x")}, {"role": "tool", "content": ANSWER}]
    sample = Sample(label="42", status=Status.TRUNCATED, metadata={"messages": messages, "tool_calls": 2})
    assert asyncio.run(gen.reward_func(Namespace(), sample))["score"] == -1.0


def test_demonstrations_of_retool_become_tool_turns(tmp_path, monkeypatch, capsys):
    text = "I compute.\n<code>print(1)</code>\n<interpreter>\n1\n</interpreter>\nAnswer: \\boxed{1}"
    told = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    unfinished = [told[0], {"role": "assistant", "content": "<code>x</code><interpreter>1</interpreter>"}]
    pq.write_table(pa.Table.from_pylist([{"messages": told}, {"messages": unfinished}]), tmp_path / "in.parquet")
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["x", "--input", str(tmp_path / "in.parquet"), "--output", str(out)])
    sft.main()
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert row["messages"][3]["content"] == "<interpreter>\n1\n</interpreter>"
    assert gen.postprocess_predictions(row["messages"][2]["content"]) == program("print(1)")
    assert "1 conversations; 1 left out" in capsys.readouterr().out


def test_problems_get_the_system_message_and_the_tool(tmp_path, monkeypatch):
    problem = {"prompt": [{"role": "user", "content": "1+1"}], "label": 2}
    (tmp_path / "in.jsonl").write_text(json.dumps(problem) + "\n")
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["x", "--input", str(tmp_path / "in.jsonl"), "--output", str(out)])
    rl.main()
    system = {"role": "system", "content": sft.SYSTEM}
    assert json.loads(out.read_text()) == {
        "prompt": [system, *problem["prompt"]],
        "label": "2",
        "tools": [tool.SCHEMA],
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    output = tmp_path_factory.mktemp("data")
    flags = ["--output", str(output), "--num-demonstrations", "400", "--num-train", "500"]
    data.write_data(data.build_parser().parse_args(flags))
    return output


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_four_in_ten_demonstrations_compute_and_no_problem_is_in_two_sets(files):
    asked = {
        name: {row["prompt"][0]["content"] for row in rows(files / f"{name}.jsonl")} for name in ("train", "eval")
    }
    assert len(asked["eval"]) == 128 and not asked["train"] & asked["eval"]
    good = 0
    for row in rows(files / "sft.jsonl"):
        messages = row["messages"]
        value = eval(messages[0]["content"].rstrip("="))
        good += len(messages) == 4 and messages[-1]["content"] == f"Answer: \\boxed{{{value}}}"
        if len(messages) == 4 and messages[2]["content"] != "<interpreter>\n\n</interpreter>":
            (made,) = gen.postprocess_predictions(messages[1]["content"])
            assert made.arguments["code"] == f"print({messages[0]['content'].rstrip('=')})"
    assert good / 400 == pytest.approx(0.4, abs=0.1)
    assert all(row["label"] == str(eval(row["prompt"][0]["content"][:-1])) for row in rows(files / "train.jsonl"))


def test_a_demonstration_fits_the_limit_and_the_files_name_what_there_is(files):
    tokenizer = build_tokenizer(data.PIECES)
    assert len(tokenizer) <= 128, "the vocabulary of the tiny model"
    for row in rows(files / "sft.jsonl")[:20]:
        _, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(row["messages"])
        assert len(mask) - mask.index(1) < data.MAX_RESPONSE_TOKENS
    for path in (files / "tools.yaml", ROOT / "examples" / FOLDER / "tools.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert settings["tool_function_path"] == "tool_sandbox.code_interpreter"
        config = tool.config_of(Namespace(retool=settings["retool"]))
        assert config["python_timeout"] < settings["tool_timeout_s"]


@pytest.mark.parametrize(("name", "model"), [("rl", "qwen3-4B-Instruct-2507"), ("sft", "qwen3-4B-Instruct-2507")])
def test_the_runs_for_gpus_have_flags_that_fit_each_other(tmp_path, on_path, name, model):
    script = f"../examples/{FOLDER}/retool_qwen3_4b_{name}"
    flags, _ = run_script(tmp_path, script, "--dry-run", SLIME_HOME=str(tmp_path))
    assert flags[: len(script_flags(model))] == script_flags(model)
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])
