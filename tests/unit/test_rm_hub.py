"""Every built-in reward against the table of observed scores, and the dispatch between hooks and names.

Three rows of the table differ from upstream on purpose: they score right answers (math with label 0, boxed_math,
boxed_deepscaler).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slime.rollout import rm_hub
from slime.rollout.rm_hub import (
    RM_TYPES,
    async_rm,
    batched_async_rm,
    compute_score_dapo,
    math_utils,
    rm_needs_label,
)
from slime.rollout.rm_hub.math_utils import (
    extract_answer,
    grade_answer_mathd,
    grade_answer_sympy,
    is_symbolically_equal,
    without_stop_tokens,
)
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args

TABLE = [
    ("math", "so \\boxed{42}", "42", {}, 1),
    ("math", "\\boxed{1} then \\boxed{42}", "42", {}, 1),
    ("math", "42", "42", {}, 0),
    ("math", "\\boxed{0.5}", "\\frac{1}{2}", {}, 1),
    ("math", "\\boxed{\\frac12}", "0.5", {}, 1),
    ("math", "\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", {}, 0),
    ("math", "\\boxed{x+1}", "1+x", {}, 1),
    ("math", "\\boxed{1,000}", "1000", {}, 1),
    ("math", "\\boxed{42}", "\\boxed{42}", {}, 1),
    ("math", "\\boxed{42.0}", "42", {}, 1),
    ("math", "\\boxed{42 cm}", "42", {}, 1),
    ("math", "\\boxed{(1,2)}", "(1, 2)", {}, 1),
    ("math", "\\boxed{(1,2)}", "[1,2]", {}, 0),
    ("math", "\\boxed{50\\%}", "50", {}, 1),
    ("math", "\\boxed{\\text{yes}}", "Yes", {}, 1),
    ("math", "\\boxed 42", "42", {}, 0),
    ("math", "\\fbox{42}", "42", {}, 0),
    ("math", "\\boxed{42}", "", {}, 0),
    ("math", "\\boxed{42}", 42, {}, 1),
    ("math", "\\boxed{0}", 0, {}, 0),
    ("math", "\\boxed{2\\sqrt{2}}", "\\sqrt{8}", {}, 1),
    ("math", "\\boxed{x=5}", "5", {}, 1),
    ("math", "\\boxed{42", "42", {}, 0),
    ("math", "\\boxed{2^{10}}", "1024", {}, 0),
    ("math", "\\boxed{1/2}", "0.5", {}, 1),
    ("math", "\\boxed{90^\\circ}", "90", {}, 1),
    ("deepscaler", "\\boxed{42}", "42", {}, 0),
    ("deepscaler", "x</think>\\boxed{42}", "42", {}, 1),
    ("deepscaler", "x</think>\\boxed{42}", 42, {}, 1),
    ("deepscaler", "###Response\\boxed{42}", "42", {}, 1),
    ("deepscaler", "\\boxed{42}</think>nothing", "42", {}, 0),
    ("deepscaler", "</think>\\boxed{1}</think>\\boxed{2}", "2", {}, 1),
    ("deepscaler", "</think>\\boxed{42}", "", {}, 0),
    ("dapo", "Answer: 42", "42", {}, {"score": 1.0, "acc": True, "pred": "42"}),
    ("dapo", "Answer: 42\nAnswer: 43", "43", {}, {"score": 1.0, "acc": True, "pred": "43"}),
    ("dapo", "answer: $42$", "42", {}, {"score": 1.0, "acc": True, "pred": "42"}),
    ("dapo", "Answer: \\boxed{42}", "42", {}, {"score": 1.0, "acc": True, "pred": "42"}),
    ("dapo", "\\boxed{42}", "42", {}, {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ("dapo", "Answer: 42.0", "42", {}, {"score": -1.0, "acc": False, "pred": "42.0"}),
    ("dapo", "Answer: 1,234", "1234", {}, {"score": 1.0, "acc": True, "pred": "1234"}),
    ("dapo", "Answer: 42" + " " * 400, "42", {}, {"score": -1.0, "acc": False, "pred": "[INVALID]"}),
    ("dapo", "Answer: x = 42 units", "42", {}, {"score": 1.0, "acc": True, "pred": "42"}),
    ("f1", "the brown fox", "a quick brown fox", {}, 0.8),
    ("f1", "yes", "no", {}, 0),
    ("f1", "Yes.", "yes", {}, 1.0),
    ("f1", "", "abc", {}, 0),
    ("f1", "yes it is", "yes", {}, 0),
    ("gpqa", "The answer is C.", "C", {}, 1.0),
    ("gpqa", "The answer is C.", "D", {}, 0.0),
    ("gpqa", "Answer: C", 2, {"choices": ["a", "b", "c", "d"]}, 1.0),
    ("gpqa", "Definitely paris.", "Paris", {"choices": ["London", "Paris", "Berlin"], "correct_answer": "Paris"}, 1.0),
    ("gpqa", "random text", "some answer", {}, 0.0),
    ("gpqa", "Answer: A", "x", {"correct_letter": "a"}, 1.0),
    ("gpqa", "<think>Answer: A</think> final answer B", "B", {}, 1.0),
    ("gpqa", "I pick (K)", "K", {}, 1.0),
    ("boxed_gpqa", "blah \\boxed{C}", "C", {}, 1.0),
    ("boxed_gpqa", "C", "C", {}, 0.0),
    ("boxed_f1", "x \\boxed{quick fox}", "quick fox", {}, 1.0),
    ("boxed_math", "\\boxed{42}", "42", {}, 0),
    ("boxed_deepscaler", "</think>\\boxed{42}", "42", {}, 0),
    (None, "\\boxed{42}", "42", {"rm_type": "math"}, 1),
]
RIGHT_HERE = [
    ("math", "\\boxed{0}", 0, {}, 1),
    ("boxed_math", "\\boxed{42}", "42", {}, 1),
    ("boxed_math", "\\boxed{41}", "42", {}, 0),
    ("boxed_deepscaler", "</think>\\boxed{42}", "42", {}, 1),
    ("boxed_dapo", "\\boxed{Answer: 42}", "42", {}, {"score": 1.0, "acc": True, "pred": "42"}),
    ("boxed_ifbench", "a, \\boxed{b}", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, 1.0),
    ("ifbench", "a, \\boxed{b}", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, 0.0),
]
OVERTURNED = {(row[0], row[1], row[2]) for row in RIGHT_HERE}


def score(rm_type: str | None, response: str, label: Any, metadata: dict) -> Any:
    args = Namespace(custom_rm_path=None, rm_type=rm_type, rm_url=None)
    return asyncio.run(async_rm(args, Sample(prompt="p", response=response, label=label, metadata=metadata)))


@pytest.mark.parametrize(
    ("rm_type", "response", "label", "metadata", "expected"),
    [row for row in TABLE if row[:3] not in OVERTURNED] + RIGHT_HERE,
)
def test_the_observed_scores(rm_type: str | None, response: str, label: Any, metadata: dict, expected: Any):
    assert score(rm_type, response, label, metadata) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rm_type", "message"),
    [
        (None, r"^Rule-based RM type is not specified\."),
        (" ", r"^Rule-based RM type is not specified\."),
        ("nosuch", r"^Rule-based RM for nosuch is not implemented\."),
        ("boxed_nosuch", r"^Rule-based RM for boxed_nosuch is not implemented\."),
    ],
)
def test_an_unknown_name_is_an_error_that_says_so(rm_type: str | None, message: str):
    with pytest.raises(NotImplementedError, match=message):
        score(rm_type, "x", "y", {})


STOP_MARKERS = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|user|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<end_of_turn>",
    "[e~[",
    "<|im_end|>\n<|endoftext|>\n",
]
# How a solution may begin, and whether deepscaler finds the end of the reasoning in it.
OPENINGS = [
    ("", False),
    ("<think>\nFirst \\boxed{7}, Answer: 7.\n</think>\n\n", True),
    ("so it is 7.</think>", True),
    ("<|im_start|>assistant\n" + "word " * 100, False),
]
# The end of a solution to a problem with answer 42; whether math and dapo take it for right.
CLOSINGS = [
    ("\\boxed{42}", 1, False),
    ("\\boxed{42}.", 1, False),
    ("\\boxed{42.0}\n", 1, False),
    ("\\boxed{41}", 0, False),
    ("\\boxed{42", 0, False),
    ("Answer: 42", 0, True),
    ("Answer: 42.", 0, True),
    ("answer: $42$", 0, True),
    ("Answer: 43", 0, False),
    ("Answer: 42\n", 0, True),
    ("Answer: \\boxed{42}", 1, True),
    ("**Answer: 42", 0, True),
    ("Answer: x = 42 units", 0, True),
    ("yes", 0, False),
    ("The answer is C", 0, False),
]
SOLUTIONS = [
    (opening + closing, math, deepscaler and math, dapo)
    for opening, deepscaler in OPENINGS
    for closing, math, dapo in CLOSINGS
]


def test_solutions_have_the_same_score_with_and_without_a_stop_token():
    assert len(SOLUTIONS) == 60
    for text, math, deepscaler, dapo in SOLUTIONS:
        for marker in ["", *STOP_MARKERS]:
            assert score("math", text + marker, "42", {}) == math, (text, marker)
            assert score("deepscaler", text + marker, "42", {}) == int(deepscaler), (text, marker)
            assert score("dapo", text + marker, "42", {})["score"] == (1.0 if dapo else -1.0), (text, marker)


@pytest.mark.parametrize("rm_type", sorted(set(RM_TYPES) - {"remote_rm", "random"}))
def test_no_reward_sees_the_engines_stop_token(rm_type: str, monkeypatch: pytest.MonkeyPatch):
    async def characters(args: Any, response: str, sample: Sample) -> float:
        return float(len(response))  # stands for the two services: any character more changes the score

    monkeypatch.setattr(rm_hub, "code_reward", characters)
    monkeypatch.setattr(rm_hub, "classify_reward", characters)
    metadata = {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "yes"}]}
    labels = {"f1": "yes", "boxed_f1": "42", "gpqa": "C"}
    for text, *_ in SOLUTIONS:
        expected = score(rm_type, text, labels.get(rm_type, "42"), metadata)
        for marker in STOP_MARKERS:
            assert score(rm_type, text + marker, labels.get(rm_type, "42"), metadata) == expected, (text, marker)


def test_a_special_token_that_ends_no_turn_belongs_to_the_answer():
    assert without_stop_tokens("<|begin_of_box|>42<|end_of_box|><|user|>") == "<|begin_of_box|>42<|end_of_box|>"


def test_dapo_scores_as_examples_call_it():
    assert compute_score_dapo("so \\boxed{x^2}<|im_end|>", "x^2", strict_box_verify=True) == {
        "score": 1.0,
        "acc": True,
        "pred": "x^2",
    }
    for marker in STOP_MARKERS:  # as an engine leaves it behind the response
        assert compute_score_dapo(f"Answer: 42{marker}", "42")["score"] == 1.0, marker
    assert compute_score_dapo("Answer: 42", "42", strict_box_verify=True)["pred"] is None
    too_early = "\\boxed{42}" + "." * 100
    assert compute_score_dapo(too_early, "42", True)["acc"] is False
    assert compute_score_dapo(too_early, "42", True, [1, 2, 3, 10])["acc"] is True
    assert compute_score_dapo(solution_str="Answer: 42", ground_truth="42")["acc"] is True
    with pytest.raises(ValueError, match=r"needs four positions, got \[1\]"):
        compute_score_dapo("", "42", True, [1])


def test_random_is_zero_or_one():
    assert {score("random", "x", None, {}) for _ in range(64)} == {0, 1}


def test_a_name_in_the_metadata_wins_and_spaces_are_stripped():
    assert score("f1", "\\boxed{42}", "42", {"rm_type": " math "}) == 1


@pytest.mark.parametrize(
    ("given", "truth", "expected"),
    [
        ("(1/2, 3]", "(0.5,3]", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("x^2+2x+1", "(x+1)^3", False),
        ("a+b+c", "c+b+a", False),  # more than two unknown letters never reach sympy
        (r"\frac{\pi}{2}", "pi/2", True),
        (r"\frac{x+1}{2}", "(x+1)/2", True),
        (r"\sqrt[3]{8}", "2", False),  # an integer is only equal to an integer
        (r"1\frac{1}{2}", "3/2", True),
        ("3.50", "3.5", True),
        ("__import__('os')", "x", False),
        ("", "x", False),
    ],
)
def test_algebra(given: str, truth: str, expected: bool):
    assert grade_answer_sympy(given, truth) is expected


def test_latex_forms_that_mean_the_same_are_equal_strings():
    assert grade_answer_mathd(r"\dfrac{1}{2}", r"\frac12") and grade_answer_mathd(r"\left(1, 2\right)", "(1,2)")


def test_the_boxed_answer_is_the_last_with_balanced_braces():
    assert extract_answer(r"\boxed{1} \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert extract_answer("none") is None


def test_a_sympy_check_that_takes_too_long_counts_as_wrong_and_is_logged(caplog: pytest.LogCaptureFixture):
    assert is_symbolically_equal("x+1", "1+x")  # the child is up
    with caplog.at_level(logging.WARNING):
        assert not is_symbolically_equal("(x+y)**(9**9**9)", "x", limit_s=0.3)
    assert "counted as wrong" in caplog.text
    assert "did not answer" not in caplog.text, "it ended at its own limit, not when we lost patience with it"
    assert is_symbolically_equal("x+1", "1+x")  # the next check gets a new child


@pytest.mark.parametrize("length", [10, 1_000_000], ids=["waits for the answer", "waits to be heard"])
def test_a_stopped_sympy_child_is_ended_and_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, length: int
):
    worker = math_utils._Worker()
    assert worker.is_equal("x+1", "1+x", 2.0)
    child = worker.process
    assert child is not None
    child.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(math_utils, "ANSWER_MARGIN_S", 0.3)
    try:
        with caplog.at_level(logging.ERROR):
            assert worker.is_equal("x" * length, "x", 0.2) is None
        assert f"sympy child {child.pid} did not answer" in caplog.text
        assert child.poll() == -signal.SIGKILL
        monkeypatch.undo()
        assert worker.is_equal("x+1", "1+x", 2.0), "the next check gets a new child"
    finally:
        worker.end()


def test_a_slow_check_does_not_stop_the_event_loop(monkeypatch: pytest.MonkeyPatch):
    def slow(response: str, label: Any) -> bool:
        time.sleep(0.3)
        return True

    monkeypatch.setattr(rm_hub, "grade_answer_verl", slow)

    async def ticks_while_grading() -> int:
        args = Namespace(custom_rm_path=None, rm_type="math")
        task, ticks = asyncio.ensure_future(async_rm(args, Sample(response="x", label="y"))), 0
        while not task.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(ticks_while_grading()) > 5


@pytest.mark.parametrize("label", [None, "4.5", "four"])
def test_dapo_names_a_label_that_is_no_whole_number(label: Any):
    if label == "4.5":
        assert score("dapo", "Answer: 4", label, {})["acc"]  # int(float("4.5")) is 4
        return
    with pytest.raises(ValueError, match="whole number"):
        score("dapo", "Answer: 4", label, {})


def test_deepscaler_refuses_a_label_of_another_type():
    with pytest.raises(TypeError, match="text or a number"):
        score("deepscaler", "</think>x", ["42"], {})


def test_which_rewards_need_a_label():
    assert all(rm_needs_label(name) for name in ("math", "boxed_math", "deepscaler", "dapo", "f1", " boxed_f1"))
    assert not any(rm_needs_label(name) for name in (None, "", "random", "remote_rm", "gpqa", "nosuch"))


REWARD_FILE = """
async def one(args, sample, **kwargs):
    return 10.0 + len(sample.response)

def plain(args, sample, **kwargs):
    return 20.0

async def batch(args, samples, **kwargs):
    return [float(i) for i, _ in enumerate(samples)]
"""


def test_the_samples_own_hook_goes_before_the_flags_which_goes_before_names(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD_FILE)
    args = Namespace(custom_rm_path=f"{path}:plain", rm_type="f1")
    named = {"rm_type": "math"}
    assert asyncio.run(async_rm(args, Sample(response="ab", metadata=named, custom_rm_path=f"{path}:one"))) == 12.0
    assert asyncio.run(async_rm(args, Sample(response="ab", metadata=named))) == 20.0
    args.custom_rm_path = None
    assert asyncio.run(async_rm(args, Sample(response="\\boxed{1} 1", label="1", metadata=named))) == 1
    assert asyncio.run(async_rm(args, Sample(response="one two", label="one"))) == pytest.approx(2 / 3)


def test_custom_rewards_by_sample_by_flag_and_in_a_batch(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD_FILE)
    args = Namespace(custom_rm_path=f"{path}:one", rm_type="random")
    assert asyncio.run(async_rm(args, Sample(response="abc"))) == 13.0
    assert asyncio.run(async_rm(args, Sample(response="abc", custom_rm_path=f"{path}:plain"))) == 20.0
    batch_args = Namespace(custom_rm_path=f"{path}:batch", rm_type=None)
    assert asyncio.run(batched_async_rm(batch_args, [Sample(), Sample()])) == [0.0, 1.0]
    sync_args = Namespace(custom_rm_path=f"{path}:plain", rm_type=None)
    with pytest.raises(TypeError, match="got 2 samples and returned 20.0, not a list"):
        asyncio.run(batched_async_rm(sync_args, [Sample(), Sample()]))
    by_name = Namespace(custom_rm_path=None, rm_type="f1")
    samples = [Sample(response="fox", label="fox"), Sample(response="dog", label="fox")]
    assert asyncio.run(batched_async_rm(by_name, samples)) == [1.0, 0.0]


@pytest.mark.parametrize("rm_type", ["math", "deepscaler"])
def test_graders_do_not_wait_for_threads_that_user_code_keeps(rm_type):
    """Every thread of asyncio.to_thread hangs, as in a user's hook that calls a dead service."""
    release = threading.Event()
    sample = Sample(label="3", response="</think>\\boxed{3}")

    async def grade():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        hanging = loop.run_in_executor(None, release.wait, 30)
        try:
            return await async_rm(rollout_args(custom_rm_path=None, rm_type=rm_type), sample)
        finally:
            release.set()
            await hanging

    assert asyncio.run(asyncio.wait_for(grade(), 20)) == 1
