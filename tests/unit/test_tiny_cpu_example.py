"""The quick start's data, reward and summary."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from examples.tiny_cpu import make_data, summarize
from examples.tiny_cpu.reward import exact_match
from slime.utils.types import Sample


def write(path: Path, *flags: str) -> dict[str, int]:
    return make_data.write_data(make_data.build_parser().parse_args(["--output", str(path), *flags]))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_problems_are_disjoint_from_training_and_from_demonstrations(tmp_path: Path):
    write(tmp_path, "--num-demonstrations", "3000")
    held_out = {row["prompt"][0]["content"] for row in rows(tmp_path / "eval.jsonl")}
    training = {row["prompt"][0]["content"] for row in rows(tmp_path / "train.jsonl")}
    shown = {row["messages"][0]["content"] for row in rows(tmp_path / "sft.jsonl")}
    assert len(held_out) >= 200 and len(held_out) + len(training) == 100 * 100
    assert not held_out & (training | shown)


def test_labels_are_sums_and_about_half_of_the_demonstrations_are_wrong(tmp_path: Path):
    write(tmp_path, "--num-demonstrations", "2000")

    def total(question: str) -> str:
        a, b = question.rstrip("=").split("+")
        return str(int(a) + int(b))

    for name in ("train.jsonl", "eval.jsonl"):
        assert all(row["label"] == total(row["prompt"][0]["content"]) for row in rows(tmp_path / name))
    answers = [row["messages"] for row in rows(tmp_path / "sft.jsonl")]
    right = sum(m[1]["content"] == total(m[0]["content"]) for m in answers)
    assert 0.45 < right / len(answers) < 0.55


def test_the_seed_changes_demonstrations_but_not_what_is_held_out(tmp_path: Path):
    for seed in "01":
        write(tmp_path / seed, "--seed", seed, "--num-demonstrations", "50")
    assert (tmp_path / "0/eval.jsonl").read_text() == (tmp_path / "1/eval.jsonl").read_text()
    assert (tmp_path / "0/sft.jsonl").read_text() != (tmp_path / "1/sft.jsonl").read_text()


def test_the_evaluation_names_its_own_grader(tmp_path: Path):
    write(tmp_path, "--num-demonstrations", "1")
    (dataset,) = yaml.safe_load((tmp_path / "eval.yaml").read_text())["eval"]["datasets"]
    assert dataset["custom_rm_path"] == "examples.tiny_cpu.reward:exact_match"
    assert len(rows(Path(dataset["path"]))) == 250


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [
        ("46<|im_end|>", Sample.Status.COMPLETED, 1.0),
        ("46", Sample.Status.COMPLETED, 1.0),
        ("046<|im_end|>", Sample.Status.COMPLETED, 0.0),
        ("4<|im_end|>", Sample.Status.COMPLETED, 0.0),
        ("46", Sample.Status.TRUNCATED, 0.0),
    ],
)
def test_only_the_exact_answer_that_ended_is_rewarded(response: str, status: Sample.Status, expected: float):
    sample = Sample(response=response, label="46", status=status)
    assert asyncio.run(exact_match(Namespace(), sample)) == expected


def test_the_sft_run_gets_the_evaluation_of_its_model_once(tmp_path: Path):
    sft, grpo = tmp_path / "sft.jsonl", tmp_path / "grpo.jsonl"
    sft.write_text(json.dumps({"step_key": "train/step", "train/step": 7}) + "\n")
    evaluation = {"step_key": "eval/step", "eval/step": 0, "eval/addition": 0.4}
    grpo.write_text(json.dumps(evaluation) + "\n" + json.dumps(evaluation | {"eval/addition": 0.8}) + "\n")
    for _ in range(2):
        summarize.give_sft_its_evaluation(sft, grpo)
    (record,) = summarize.eval_records(sft)
    assert record["eval/addition"] == 0.4 and record["eval/step"] == 7
