"""examples/self_play: proposals and answers are samples of one execution, judged by a program."""

from __future__ import annotations

import json
import re
from argparse import Namespace

import pytest
import yaml

from examples.multi_agent.make_data import NUM_EVAL
from examples.self_play import make_data
from examples.self_play.rollout import by_role, generate
from examples.self_play.task import QUESTION
from examples.tiny import data_parser
from slime.utils.types import Sample
from tests.rollout.example_fakes import play, trained_text

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Set a problem."}]


def run(monkeypatch, replies, *, label=None, evaluation=False):
    sample = Sample(index=7, group_index=2, prompt=PROMPT, label=label)
    monkeypatch.setattr("slime.log", lambda metrics: None)
    custom = {"self_play": {"num_solvers": 4}}
    return play(monkeypatch, generate, sample, replies, evaluation=evaluation, custom=custom)


@pytest.mark.parametrize(("num_right", "worth"), [(0, 0.0), (1, 0.75), (3, 0.25), (4, 0.0)])
def test_a_problem_is_worth_most_where_few_answers_are_right_but_one(monkeypatch, num_right, worth):
    answers = ["\\boxed{321}"] * num_right + ["\\boxed{123}"] * (4 - num_right)
    samples, model = run(monkeypatch, ["\\boxed{123}", *answers])
    assert samples[0].reward == worth
    assert sorted(part.reward for part in samples[1:]) == [0.0] * (4 - num_right) + [1.0] * num_right
    assert [part.metadata["role"] for part in samples] == ["proposer"] + ["solver"] * 4
    assert {(part.rollout_id, part.group_index) for part in samples} == {(7, 2)}
    for part in samples:
        assert part.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
        assert trained_text(model.tokenizer, part) == part.response
    assert all("user\n123 backwards?<|im_end|>" in part.prompt for part in samples[1:])


@pytest.mark.parametrize("proposal", ["123", "\\boxed{}", "\\boxed{12", ("\\boxed{123}", "length")])
def test_what_is_no_problem_is_asked_of_nobody(monkeypatch, proposal):
    samples, model = run(monkeypatch, [proposal])
    assert [(part.metadata["role"], part.reward) for part in samples] == [("proposer", 0.0)]
    assert len(model.requests) == 1


def test_a_row_with_a_label_is_a_problem_that_is_answered_once(monkeypatch):
    sample, _ = run(monkeypatch, ["\\boxed{1}"], label="1", evaluation=True)
    assert sample.metadata["role"] == "solver" and sample.reward == 0.0, "the prompt asks for something else"


def test_an_execution_that_is_aborted_begins_anew(monkeypatch):
    sample, _ = run(monkeypatch, ["\\boxed{12}", "\\boxed{21}", ("\\boxed", "abort"), "\\boxed{21}", "\\boxed{21}"])
    assert (sample.status, sample.tokens, sample.reward) == (Sample.Status.ABORTED, [], None)


def test_rewards_are_compared_with_those_of_the_same_role_and_problem():
    def made(role, rollout_id, reward, group=0):
        return Sample(rollout_id=rollout_id, group_index=group, reward=reward, metadata={"role": role})

    samples = [
        *(made("proposer", 1, 0.5), made("solver", 1, 1.0), made("solver", 1, 0.0)),
        *(made("proposer", 2, 0.0), made("solver", 2, 1.0), made("solver", 2, 1.0)),
        made("proposer", 3, 0.25, group=1),
    ]
    raw, normalized = by_role(Namespace(reward_key=None), samples)
    assert raw == [sample.reward for sample in samples]
    # Two values lie half their difference from their mean, which is 1 / sqrt(2) of their unbiased deviation.
    expected = [0.5**0.5, 0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0, 0, 0]
    assert normalized == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_solvers": 1}, "num_solvers 1 in self_play of --custom-config-path: give 2 or more"),
        ({"solvers": 4}, "self_play"),
        ({"task": "examples.tiny"}, "problem_of of the task examples.tiny"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_the_run(settings, said):
    assert said in " ".join(generate.check_args(Namespace(self_play=settings)))
    assert list(generate.check_args(Namespace())) == []


def test_no_problem_is_trained_on_and_no_held_out_one_is_demonstrated(tmp_path):
    counts = make_data.write_data(data_parser(None).parse_args([f"--output={tmp_path}", "--num-demonstrations=4000"]))
    assert counts == {"sft.jsonl": 4000, "train.jsonl": 4096, "eval.jsonl": NUM_EVAL}
    assert set((tmp_path / "train.jsonl").read_text().split("\n")) == {
        json.dumps({"prompt": [{"role": "user", "content": "Set a problem."}]}),
        "",
    }
    held_out = {json.loads(row)["prompt"][0]["content"] for row in (tmp_path / "eval.jsonl").open()}
    chats = [[turn["content"] for turn in json.loads(row)["messages"]] for row in (tmp_path / "sft.jsonl").open()]
    proposals = [answer for asked, answer in chats if asked == make_data.PROPOSE]
    answers = [(asked.removesuffix(QUESTION), answer) for asked, answer in chats if asked != make_data.PROPOSE]
    assert not held_out & {number + QUESTION for number, _ in answers}
    assert len(proposals) / len(chats) == pytest.approx(0.3, abs=0.03)
    valid = sum(bool(re.fullmatch(r"\\boxed\{[1-9]{1,6}\}", text)) for text in proposals) / len(proposals)
    assert valid == pytest.approx(0.8, abs=0.04)
    right = sum(answer == f"\\boxed{{{number[::-1]}}}" for number, answer in answers) / len(answers)
    # Copies of one digit and of palindromes are right as well: at least 1/6 of a quarter.
    assert 0.5 < right < 0.6
    assert yaml.safe_load((tmp_path / "self_play.yaml").read_text()) == {"self_play": {"num_solvers": 4}}
