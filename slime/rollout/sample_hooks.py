"""--rollout-sample-hook-path: edit or replace each generated sample before it is scored.

It does not generate or score samples; the rollout id that hooks may ask for is set by the rollout function.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

from slime.config.args import Args
from slime.rollout.hooks.sample_errors import SampleTypeError, blame, check_sample, describe, hook_name
from slime.rollout.hooks.signatures import accepts_keyword
from slime.utils.misc import load_function
from slime.utils.types import Sample

# A context variable: tasks inherit it, so a rollout and a background evaluation each see their own.
_rollout_id: ContextVar[int | None] = ContextVar("slime_rollout_id", default=None)
_begun_last: list[int | None] = [None]
_DONE = "sample_hooks_done"


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Name the rollout that hooks called from this context belong to."""
    _rollout_id.set(rollout_id)
    _begun_last[0] = rollout_id


def current_rollout_id() -> int | None:
    """Return the rollout that this context generates or scores for; None before the first one.

    A hook's own threads, executors and event loops do not inherit its context: there it is the rollout, or the
    evaluation, that this process has begun last.
    """
    known = _rollout_id.get(None)  # the value of this context; it waits for nobody
    return _begun_last[0] if known is None else known


async def apply_rollout_sample_hooks(args: Args, value: Any, **kwargs: Any) -> Any:
    """Run every sample hook on a sample, or on each sample of (nested) lists, once in the sample's life.

    Args:
        args: reads `rollout_sample_hook_path`.
        value: a Sample or a list of any depth; lists keep their shape. Aborted samples are left alone: their hooks run
            when they are finished.
        kwargs: offered to hooks that have such parameters (`evaluation`); `rollout_id` is added.

    Raises:
        SampleError: a hook failed, or returned neither a Sample nor None.
    """
    if not args.rollout_sample_hook_path:
        return value
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, entry, **kwargs) for entry in value]
    if value.status is Sample.Status.ABORTED or vars(value).get(_DONE):
        return value
    for path in args.rollout_sample_hook_path:
        value = await _apply_one(path, args, value, {"rollout_id": current_rollout_id(), **kwargs})
    setattr(value, _DONE, True)  # a finished sample of an incomplete group comes by again, in the next rollout
    return value


async def _apply_one(path: str, args: Args, sample: Sample, offered: dict[str, Any]) -> Sample:
    hook = load_function(path)
    name = f"--rollout-sample-hook-path {hook_name(path)}"
    with blame(name, sample):
        result = hook(args, sample, **{key: value for key, value in offered.items() if accepts_keyword(hook, key)})
        if inspect.isawaitable(result):
            result = await result
    result = sample if result is None else result
    if not isinstance(result, Sample):
        raise SampleTypeError(
            f"{name} returned {type(result).__name__} for {describe(sample)}; it must return a Sample or None"
        )
    check_sample(args, name, result, evaluation=bool(offered.get("evaluation")))
    return result
