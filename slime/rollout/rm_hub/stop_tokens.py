"""The end-of-turn tokens that engines keep at the end of a response, as text.

Rollouts ask engines for the stop token (`no_stop_trim`, `skip_special_tokens` off), because the trainer needs its
log-prob. Graders compare answers, so they read the response without it.
"""

from __future__ import annotations

import re

# Names of end-of-turn and end-of-text tokens, and of the roles whose turn would follow. No other special token: a tag
# such as <|end_of_box|> may belong to the answer.
_NAMES = (
    "im_end|endoftext|end_of_text|eot_id|eom_id|eot|eos|end|end_of_turn|end_of_sentence|return|call"
    "|im_start|user|assistant|observation|system"
)
_STOP_TOKENS = re.compile(rf"(?:(?:<\|(?:{_NAMES})\|>|<｜[\w▁]{{1,40}}｜>|</s>|<eos>|<end_of_turn>|\[e~\[)\s*)+\Z")
_WINDOW_CHARS = 256  # longer than any such token: the search does not walk through the whole response


def without_stop_tokens(response: str) -> str:
    """Return the response without the end-of-turn tokens at its end, and without the blanks after them.

    Example:
        >>> without_stop_tokens("Answer: 42<|im_end|>\\n<|endoftext|>")
        'Answer: 42'
        >>> without_stop_tokens("<|im_start|>Answer: 42 \\n")
        '<|im_start|>Answer: 42 \\n'
    """
    end = len(response)
    while run := _STOP_TOKENS.search(response, max(0, end - _WINDOW_CHARS), end):
        end = run.start()
    return response[:end]
