"""A rollout function that replays dumped samples while the engines are live: training and weight syncs without waiting
for generation.

Use: --rollout-function-path slime.rollout.forge_load.generate_rollout --load-forge-rollout-data DIR/{rollout_id}.pt,
with files that --save-debug-rollout-data wrote. Evaluations generate, as by default. It scores nothing: the dumped
rewards are used.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import generate_rollout as generate_live
from slime.utils.errors import UsageError
from slime.utils.misc import group_by
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The samples that were dumped for this rollout, in their groups.

    Args:
        args: reads `load_forge_rollout_data`, `load_debug_rollout_data_subsample`.
        rollout_id: number of the rollout; names the file.
        data_source: keeps its place: no prompt is drawn.
        evaluation: evaluate args.eval_datasets with the live engines instead.

    Raises:
        UsageError: there is no such file, or it is no dump.
    """
    if evaluation:
        return generate_live(args, rollout_id, data_source, evaluation=True)
    if args.load_forge_rollout_data is None:
        raise UsageError("forge_load needs --load-forge-rollout-data, the samples that it replays")
    path = args.load_forge_rollout_data.format(rollout_id=rollout_id)
    samples = subsample(load_samples(path), args.load_debug_rollout_data_subsample)
    groups = group_by(enumerate(samples), lambda pair: _group_of(*pair)).values()
    logger.info("rollout %d: %d samples of %d prompts replayed from %s", rollout_id, len(samples), len(groups), path)
    return RolloutFnTrainOutput(samples=[[sample for _, sample in group] for group in groups])


def load_samples(path: str) -> list[Sample]:
    """The samples of a file that --save-debug-rollout-data wrote.

    Raises:
        UsageError: there is no such file, or it is no dump.
    """
    import torch

    if not os.path.isfile(path):
        raise UsageError(f"--load-forge-rollout-data: there is no file {path}; dump it with --save-debug-rollout-data")
    dump = torch.load(path, weights_only=False)
    if not isinstance(dump, dict) or not isinstance(dump.get("samples"), list):
        raise UsageError(f"--load-forge-rollout-data: {path} is no dump of samples (--save-debug-rollout-data)")
    return [Sample.from_dict(sample) for sample in dump["samples"]]


def subsample(samples: list[Sample], share: float | None) -> list[Sample]:
    """A share of the samples, half of it from each end; all where `share` is None."""
    if share is None:
        return samples
    wanted = max(1, int(len(samples) * share))
    head = wanted // 2
    return samples[:head] + samples[len(samples) - (wanted - head) :]


def _group_of(position: int, sample: Sample) -> tuple[str, int]:
    """Samples of one prompt; one without a group stands alone."""
    return ("group", sample.group_index) if sample.group_index is not None else ("alone", position)
