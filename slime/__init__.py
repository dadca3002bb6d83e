"""slime: reinforcement learning for large language models on Megatron and SGLang.

A line of the prompt file becomes a `Sample` in the **data source**, is copied into a **group** of
`n_samples_per_prompt`, completed by an SGLang **engine** (tokens + rollout log-probs appended), scored by a **reward
function**, kept or dropped by the **dynamic filter**, converted with its batch to `TrainData` (rewards normalised by
group, loss masks filled), **scheduled** into equal numbers of micro-batches per DP rank and put in Ray's object store;
each Megatron rank takes its share as a `RolloutBatch`, adds reference and old log-probs, computes **advantages**, runs
the **policy loss** per micro-batch, reduces gradients and steps the optimizer; then the **weight updater** gathers
each parameter, renames it to its HF name, sends it to the paused engines as weight version *v+1*, and they resume
generating.

Layers, each importing only those below it (docs/architecture.md, tests/test_layering.py):

    5  train.py  train_async.py  tools/              drivers: schedule only
    4  slime.ray                                     placement, actor groups, RolloutManager: alone imports ray
    3  slime.backends.megatron_utils | slime.rollout siblings; never import each other
       slime.training                                a rollout's training on one rank, over any trainer backend
    2  slime.backends.sglang_utils                   start, control and configure an engine
    1  slime.observability                           loggers, timers, metrics over plain dicts
    0  slime.utils, slime.processes                  types, pure maths, schedules, files, HTTP; processes on a host
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["log"]


def log(metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Log numbers of your own where the run logs its own: metrics.jsonl, and TensorBoard and W&B where they are on.

    It may be called in the driver and from every function that the rollout manager calls (generate, reward and sample
    hooks, rollout, data source and log functions), also from several threads. What these log of one name and step is
    averaged over the calls since the last rollout or evaluation was logged, so each sample may log its own value.

    Example: `slime.log({"search/s": seconds})` in a generate function, `slime.log({"mine/x": 1.0}, rollout_id)`
    in a log function.

    Args:
        metrics: name -> number; a tensor or array of one element is one.
        step: the rollout's number. None: the rollout, or the evaluation, that the caller generates or scores for; in
            threads and event loops of the caller's own, the one that this process has begun last.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a value is no number, a name is taken, or no step is given where it is not known.
    """
    # Imported here: `import slime` stays free of everything else.
    from slime.observability.logging_utils import log_of_user

    if step is None:
        from slime.rollout.sample_hooks import current_rollout_id

        step = current_rollout_id()
        if step is None:
            raise ValueError("slime.log was called before any rollout has begun: give step, the rollout's number")
    log_of_user(metrics, step)
