"""The deepscaler reward: a boxed answer that must come after the reasoning. It knows only two strings."""

from __future__ import annotations

from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer

END_OF_REASONING = "</think>"
START_OF_RESPONSE = "###Response"


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
