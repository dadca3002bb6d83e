"""examples/multi_agent: each agent has a chat turn and a sample of its own, with the contract's rewards."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections import Counter

import pytest
import yaml

from examples.multi_agent import make_data
from examples.multi_agent.agent_system import SelectorAgent
from examples.multi_agent.rollout_with_multi_agents import generate_with_multi_agents
from examples.tiny import data_parser
from slime.config.parse import CommandLine
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.rollout.example_fakes import play, trained_text
from tests.unit.script_fakes import run_script, script_flags
from tools.make_tiny_model import build_tokenizer

Status = Sample.Status
RIGHT, WRONG = "<think>so</think>\\boxed{3}", "<think>hm</think>\\boxed{4}"
END = "<|im_end|>"


def new_sample() -> Sample:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
    return Sample(index=7, group_index=2, prompt=prompt, label="3")


def run(monkeypatch, replies, *, evaluation=False, flags=None, **settings):
    config = {"multi_agent": {"num_parallel": 2} | settings}
    given = {"evaluation": evaluation, "custom": config, "rm_type": "deepscaler", "custom_rm_path": None}
    return play(monkeypatch, generate_with_multi_agents, new_sample(), replies, **given | (flags or {}))


@pytest.mark.parametrize(
    ("judgment", "chosen"),
    [("Judgment: 2", 1), ("Judgment: 1", 0), ("Judgment: 3", None), ("the first", None)],
)
def test_all_rewards_are_weighted_by_whether_the_choice_was_right(monkeypatch, judgment, chosen):
    samples, _ = run(monkeypatch, [RIGHT, WRONG, WRONG, RIGHT, judgment])
    # Which of two agents at a time has which reply is up to the engine.
    raw = [float("boxed{3}" in part.response) for part in samples[:4]]
    assert sorted(raw[:2]) == sorted(raw[2:]) == [0, 1]
    raw.append(0.0 if chosen is None else raw[2 + chosen])
    weight = 1.2 if raw[4] == 1 else 0.8
    assert [part.reward for part in samples] == pytest.approx([weight * reward for reward in raw])


def test_rewards_with_parts_keep_them(monkeypatch):
    async def parts(args, sample, **kwargs):
        return {"score": float("boxed{3}" in sample.response), "length": 7}

    monkeypatch.setattr("examples.multi_agent.agent_system.async_rm", parts)
    replies = [RIGHT, RIGHT, RIGHT, RIGHT, "Judgment: 1"]
    samples, _ = run(monkeypatch, replies, flags={"reward_key": "score"})
    assert [part.reward for part in samples] == [{"score": 1.2, "length": 7}] * 5
    samples, _ = run(monkeypatch, [*replies[:4], "none"], flags={"reward_key": "score", "eval_reward_key": "acc"})
    assert samples[-1].reward == {"score": 0.0, "acc": 0.0}


CUT = ("<think>", "length")


@pytest.mark.parametrize(
    ("replies", "rewards"),
    [
        ([RIGHT, RIGHT, CUT, CUT], [0.8, 0.8, 0, 0]),
        (["a</think></think>b", CUT], [0, 0]),
        ([RIGHT, CUT, RIGHT, CUT, "Judgment: 1"], [1.2, 0, 1.2, 0, 1.2]),
    ],
)
def test_a_stage_without_a_solution_ends_the_execution(monkeypatch, replies, rewards):
    samples, model = run(monkeypatch, replies)
    assert len(samples) == len(model.requests)
    assert sorted(part.reward for part in samples) == pytest.approx(sorted(rewards))


def test_every_agent_has_a_chat_turn_and_a_sample_of_one_execution(monkeypatch):
    samples, model = run(monkeypatch, [RIGHT, RIGHT, WRONG, WRONG, "Judgment: 1"])
    assert [part.metadata["role"] for part in samples] == ["solver"] * 2 + ["rewriter"] * 2 + ["selector"]
    assert {(part.rollout_id, part.group_index, part.index) for part in samples} == {(7, 2, 7)}
    for part in samples:
        assert part.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+2?")
        assert part.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert part.status is Status.COMPLETED and part.end_reason == "done"
        assert trained_text(model.tokenizer, part) == part.response
    assert "Solution 1:\n\\boxed{3}\n\nSolution 2:\n\\boxed{3}" in samples[2].prompt, "no thought, no end marker"
    assert "Solution 2:\n\\boxed{4}" in samples[4].prompt and "Judgment: IDX" in samples[4].prompt


def test_an_evaluation_counts_the_choice_alone_and_without_weights(monkeypatch):
    samples, _ = run(monkeypatch, [RIGHT, RIGHT, RIGHT, RIGHT, "Judgment: 1"], evaluation=True)
    assert [part.reward for part in samples] == [1] * 5 and samples[-1].metadata["role"] == "selector"


def test_an_execution_that_is_aborted_begins_anew(monkeypatch):
    (sample,), _ = run(monkeypatch, [RIGHT, RIGHT, ("<think>", "abort"), RIGHT])
    assert (sample.status, sample.tokens, sample.reward) == (Status.ABORTED, [], None)


@pytest.mark.parametrize(
    ("said", "index"),
    [
        ("Judgment: 1", 0),
        ("Judgment: 1\nno, Judgment: 2", 1),
        ("Judgment: 0", None),
        ("Judgment: 3", None),
        ("1", None),
    ],
)
def test_the_last_judgment_names_a_solution(said, index):
    assert SelectorAgent.extract_selected_solution_idx(said, ["a", "b"]) == index


def test_prompts_can_be_others_and_have_to_be_messages(monkeypatch):
    samples, _ = run(monkeypatch, [RIGHT, RIGHT, RIGHT, RIGHT, "1"], templates={"selector": "{count}:{solutions}?"})
    assert "user\n2:Solution 1:" in samples[-1].prompt
    with pytest.raises(UsageError, match="--apply-chat-template off"):
        SelectorAgent(Namespace(), Sample(prompt="1+2?"), {}, False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parallel": 1}, "'parallel' is unknown"),
        ({"num_parallel": 2.5}, "num_parallel is 2.5"),
        ({"templates": {"judge": "{problem}"}}, "there is no 'judge'; there is solver, rewriter, selector"),
        ({"templates": {"solver": "{problem} as {json}"}}, "the template of solver has braces around something else"),
        ({"custom_multi_agent_function_path": "no.such.function"}, "cannot load 'no.such.function'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_the_run(settings, said):
    (problem,) = generate_with_multi_agents.check_args(Namespace(multi_agent=settings))
    assert said in problem


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    output = tmp_path_factory.mktemp("agents")
    make_data.write_data(data_parser(None).parse_args(["--output", str(output), "--num-demonstrations", "3000"]))
    return output


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_half_of_the_demonstrations_of_each_role_are_right(files):
    tokenizer, counts, right = build_tokenizer(make_data.PIECES), Counter(), Counter()
    assert len(tokenizer) <= 128, "the vocabulary of the tiny model"
    for row in rows(files / "sft.jsonl"):
        asked, answer = (message["content"] for message in row["messages"])
        assert len(tokenizer.encode(answer)) + len([END]) < make_data.MAX_RESPONSE_TOKENS
        role = {"?": "solver", "Rewrite.": "rewriter", "Select.": "selector"}[re.search(r"\?$|\w+\.$", asked)[0]]
        boxed = make_data.boxed(asked[:4][::-1])
        shown = re.findall(r"\\boxed{\w+}", asked)
        named = SelectorAgent.extract_selected_solution_idx(answer, shown)
        counts[role] += 1
        right[role] += (answer if named is None else shown[named]) == boxed and (named is None) == (role != "selector")
    assert {role: right[role] / count for role, count in counts.items()} == pytest.approx(
        dict.fromkeys(("solver", "rewriter", "selector"), 0.5), abs=0.07
    )


def test_no_number_is_in_two_files_and_labels_read_backwards(files):
    training, held_out = rows(files / "train.jsonl"), rows(files / "eval.jsonl")
    questions = [row["prompt"][0]["content"] for row in training + held_out]
    assert len(set(questions)) == len(questions) and len(held_out) == make_data.NUM_EVAL
    assert all(row["prompt"][0]["content"][:4] == row["label"][::-1] for row in training + held_out)
    shown = {row["messages"][0]["content"].split("\n")[0] for row in rows(files / "sft.jsonl")}
    assert not shown & set(questions[-len(held_out) :])


def test_agents_of_the_tiny_run_see_what_the_demonstrations_showed(monkeypatch, files):
    settings = yaml.safe_load((files / "multi_agent.yaml").read_text())["multi_agent"]
    assert not list(generate_with_multi_agents.check_args(Namespace(multi_agent=settings)))
    samples, _ = run(monkeypatch, [RIGHT, RIGHT, RIGHT, RIGHT, "Judgment: 1"], **settings)
    solutions = "Solution 1:\n\\boxed{3}\n\nSolution 2:\n\\boxed{3}"
    for part, end in ((samples[2], "Rewrite."), (samples[4], "Select.")):
        assert f"user\n1+2?\n{solutions}\n{end}<|im_end|>" in part.prompt


def test_the_run_for_gpus_has_flags_that_fit_each_other(tmp_path):
    script = "../examples/multi_agent/run-qwen3-30B-A3B-multi-agent"
    flags, _ = run_script(tmp_path, script, "--dry-run", SLIME_HOME=str(tmp_path))
    assert flags[: len(script_flags("qwen3-30B-A3B"))] == script_flags("qwen3-30B-A3B")
    checked = CommandLine().check(flags)
    assert (checked.problems.wrong, checked.problems.unsupported, checked.warnings()) == ([], [], [])
