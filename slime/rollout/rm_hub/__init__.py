"""Rewards: which function scores a sample, by hook path or by name.

The table `RM_TYPES` is the whole list of names, those of installed packages included. Groups and normalisation are in
`slime.rollout.train_data`.

The short graders are here: deepscaler (a boxed answer that must come after the reasoning), f1 (of tokens, as SQuAD
defines it) and gpqa (which letter does a response settle on, and is it the right one).
"""

from __future__ import annotations

import inspect
import random
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from slime.config.args import Args
from slime.plugins import Table
from slime.processes.wait import DaemonThreads
from slime.rollout.rm_hub.code_sandbox import code_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer, grade_answer_verl, without_stop_tokens
from slime.rollout.rm_hub.service import RewardError, classify_reward, remote_rm, take_reward_failures
from slime.utils.async_utils import gather_or_cancel
from slime.utils.misc import load_function
from slime.utils.types import Sample

__all__ = [
    "RM_TYPES",
    "RewardError",
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
    "remote_rm",
    "rm_needs_label",
    "take_reward_failures",
]

Reward = float | dict[str, Any]
Grader = Callable[[Args, str, Sample], Reward | Awaitable[Reward]]
BOXED_PREFIX = "boxed_"
END_OF_REASONING = "</think>"
START_OF_RESPONSE = "###Response"
CLOSED_ANSWERS = ("yes", "no", "noanswer")
DEFAULT_VALID_LETTERS = tuple(string.ascii_uppercase[:10])
STATEMENTS = (
    # each run of blanks can be matched in one way only: a run of 10 kB is looked at once
    r"(?i:final\s+answer)\s*(?:(?i:is)\s*)?(?::\s*)?\(?([A-Za-z])\b",
    r"(?i:answer|option|choice)\s*(?:(?i:is)|:)\s*(?::\s*)?\(?([A-Za-z])\b",
    r"\(?\b([A-Z])\)?\s+(?i:is\s+(?:the\s+)?correct)",
)
_threads = DaemonThreads("grader", 32)


def _on_boxed_answer(grade: Grader) -> Grader:
    """Grade the content of the response's last box ("" without one) in place of the response."""
    return lambda args, response, sample: grade(args, extract_boxed_answer(response) or "", sample)


_PLAIN: dict[str, Grader] = {
    "remote_rm": lambda args, response, sample: remote_rm(args, sample),
    # In threads: sympy may take its two seconds, and the event loop feeds the engines meanwhile.
    "math": lambda args, response, sample: _threads.run(lambda: int(grade_answer_verl(response, sample.label))),
    "deepscaler": lambda args, response, sample: _threads.run(
        get_deepscaler_rule_based_reward, response, sample.label
    ),
    "dapo": lambda args, response, sample: compute_score_dapo(response, sample.label),
    "f1": lambda args, response, sample: f1_score(response, sample.label)[0],
    "gpqa": lambda args, response, sample: compute_gpqa_reward(response, sample.label, sample.metadata),
    "ifbench": lambda args, response, sample: compute_ifbench_reward(response, sample.label, sample.metadata),
    "code": lambda args, response, sample: code_reward(args, response, sample),
    "classify": lambda args, response, sample: classify_reward(args, response, sample),
    "random": lambda args, response, sample: random.randint(0, 1),
}


def _call_problem(name: str, grade: Grader) -> str | None:
    try:
        inspect.signature(grade).bind(None, None, None)
    except ValueError:  # a function of C may say nothing of itself
        return None
    except TypeError as error:
        return f"is called with (args, response, sample): {error}"
    return None


# math and deepscaler look for the box themselves: unboxing first would leave them nothing to find.
_BOXED = {name: _PLAIN[name] for name in ("math", "deepscaler")}
_BOXED |= {name: _on_boxed_answer(_PLAIN[name]) for name in ("dapo", "f1", "gpqa", "ifbench")}
RM_TYPES: Table[Grader] = Table(
    "slime.rewards",
    Callable,
    _PLAIN | {BOXED_PREFIX + name: grade for name, grade in _BOXED.items()},
    check=_call_problem,
)
_NEED_LABEL = frozenset({"math", "deepscaler", "dapo", "f1"})


def rm_needs_label(rm_type: str | None) -> bool:
    """Whether samples without a label cannot be scored by this reward (gpqa may find its answer in the metadata)."""
    return (rm_type or "").strip().removeprefix(BOXED_PREFIX) in _NEED_LABEL


async def async_rm(args: Args, sample: Sample, **kwargs: Any) -> Reward:
    """Score one sample: by its own hook, else by `--custom-rm-path`, else by the name in its metadata or `--rm-type`.

    The built-in graders read the response without the engine's stop token; hooks and `remote_rm` get the sample as is.

    Raises:
        NotImplementedError: no reward is named, or the name is not built in.
        RewardError: a reward service failed.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path is not None:
        return await _call(load_function(path), args, sample, **kwargs)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or args.rm_type or "").strip()
    if not rm_type:
        raise NotImplementedError(
            "Rule-based RM type is not specified. Give --rm-type, --custom-rm-path, or rm_type in the metadata."
        )
    try:
        grade = RM_TYPES[rm_type]
    except KeyError:
        raise NotImplementedError(
            f"Rule-based RM for {rm_type} is not implemented. Built in are: {', '.join(sorted(RM_TYPES))}."
        ) from None
    return await _call(grade, args, without_stop_tokens(sample.response), sample)


async def batched_async_rm(args: Args, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """Score several samples: one call of `--custom-rm-path` with the list when given, else each by `async_rm`."""
    if args.custom_rm_path is not None:
        rewards = await _call(load_function(args.custom_rm_path), args, samples, **kwargs)
        if not isinstance(rewards, Iterable) or isinstance(rewards, str | dict):
            raise TypeError(f"the reward function got {len(samples)} samples and returned {rewards!r:.80}, not a list")
        return list(rewards)
    return await gather_or_cancel(async_rm(args, sample, **kwargs) for sample in samples)


async def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a reward function, which may be a coroutine function or a plain one."""
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def get_deepscaler_rule_based_reward(response: str, label: object) -> int:
    r"""1 when the boxed answer after the last `</think>` (else after the first `###Response`) is right, else 0.

    Raises:
        TypeError: the label is no str, int or float.
    """
    if END_OF_REASONING in response:
        solution = response.rpartition(END_OF_REASONING)[2]
    elif START_OF_RESPONSE in response:
        solution = response.partition(START_OF_RESPONSE)[2]
    else:
        return 0
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise TypeError(f"the deepscaler reward needs a label that is a text or a number, got {label!r}")
    given, truth = extract_boxed_answer(solution), str(label)
    if given is None or not truth:
        return 0
    if r"\boxed" in truth:
        truth = extract_boxed_answer(truth) or ""
    return int(grade_answer(given, truth))


def normalize_answer(s: str) -> str:
    """Lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in s.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def f1_score(prediction: str | None, ground_truth: str | None) -> tuple[float, float, float]:
    """(F1, precision, recall) over tokens; yes, no and noanswer count only as a whole, and None as nothing.

    Example:
        >>> f1_score("the brown fox", "a quick brown fox")[0]
        0.8
    """
    nothing = (0.0, 0.0, 0.0)
    if prediction is None or ground_truth is None:
        return nothing
    given, truth = normalize_answer(prediction), normalize_answer(ground_truth)
    if given != truth and (given in CLOSED_ANSWERS or truth in CLOSED_ANSWERS):
        return nothing
    given_tokens, truth_tokens = given.split(), truth.split()
    common = sum((Counter(given_tokens) & Counter(truth_tokens)).values())
    if common == 0:
        return nothing
    precision, recall = common / len(given_tokens), common / len(truth_tokens)
    return 2 * precision * recall / (precision + recall), precision, recall


def compute_gpqa_reward(response: str | None, label: object, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 when the response settles on the right choice, else 0.0.

    Args:
        response: only the text after the last `</think>` counts.
        label: a letter, the index of a choice, or the text of the right choice.
        metadata: may hold choices (list, or dict by letter), valid_letters, correct_letter,
            correct_answer, answer_text.
    """
    if response is None:
        return 0.0
    facts = dict(metadata or {})
    choices = _choices_by_letter(facts.get("choices"))
    letters = tuple(str(x).upper() for x in facts.get("valid_letters") or choices or DEFAULT_VALID_LETTERS)
    text = response.rpartition(END_OF_REASONING)[2]
    correct = _correct_letter(label, facts, letters, choices)
    chosen = extract_letter(text, letters)
    if chosen is not None and correct is not None:
        return float(chosen == correct)
    answers = [facts.get("correct_answer"), facts.get("answer_text"), choices.get(correct or ""), label]
    return float(any(_contains(text, str(a)) for a in answers if a is not None and not isinstance(a, int)))


def extract_letter(text: str, letters: Sequence[str]) -> str | None:
    """The letter of the last statement such as "the answer is C", else the last valid capital that stands alone."""
    for pattern in STATEMENTS:
        stated = [m.upper() for m in re.findall(pattern, text) if m.upper() in letters]
        if stated:
            return stated[-1]
    alone = [m for m in re.findall(r"\b([A-Z])\b", text) if m in letters]
    return alone[-1] if alone else None


def _choices_by_letter(choices: Any) -> dict[str, str]:
    if isinstance(choices, Mapping):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    return {letter: str(text) for letter, text in zip(string.ascii_uppercase, choices or [], strict=False)}


def _correct_letter(
    label: object, facts: Mapping[str, Any], letters: Sequence[str], choices: Mapping[str, str]
) -> str | None:
    if facts.get("correct_letter"):
        return str(facts["correct_letter"]).strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    for candidate in (label, facts.get("correct_answer"), facts.get("answer_text")):
        text = str(candidate or "").strip()
        if text.upper() in letters:
            return text.upper()
        for letter, choice in choices.items():
            if text and _words(choice) == _words(text):
                return letter
    return None


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())


def _contains(text: str, answer: str) -> bool:
    needle = _words(answer)
    return bool(needle) and f" {needle} " in f" {_words(text)} "
