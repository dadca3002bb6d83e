"""Rewards: which function scores a sample, by hook path or by name.

The table `RM_TYPES` is the whole list of names, those of installed packages included. Groups and normalisation are in
`slime.rollout.rewards`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from slime.config.args import Args
from slime.rollout.rm_hub.code_sandbox import code_reward
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from slime.rollout.rm_hub.math_utils import extract_boxed_answer, grade_answer_verl
from slime.rollout.rm_hub.service import RewardError, classify_reward, remote_rm, take_reward_failures
from slime.rollout.rm_hub.stop_tokens import without_stop_tokens
from slime.utils.async_utils import gather_or_cancel
from slime.utils.misc import load_function
from slime.utils.names import Table
from slime.utils.threads import DaemonThreads
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
    "ifbench": lambda args, response, sample: ifbench_reward(response, sample.metadata),
    "code": lambda args, response, sample: code_reward(args, response, sample),
    "classify": lambda args, response, sample: classify_reward(args, response, sample),
    "random": lambda args, response, sample: random.randint(0, 1),
}


def _call_problem(name: str, grade: Grader) -> str | None:
    try:
        inspect.signature(grade).bind(None, None, None)
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
    if rm_type not in RM_TYPES:
        raise NotImplementedError(
            f"Rule-based RM for {rm_type} is not implemented. Built in are: {', '.join(sorted(RM_TYPES))}."
        )
    return await _call(RM_TYPES[rm_type], args, without_stop_tokens(sample.response), sample)


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
