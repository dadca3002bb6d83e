"""A rollout function that replays dumped samples while the engines are live: training and weight syncs without waiting
for generation.

Use: --rollout-function-path slime.rollout.forge_load.generate_rollout --load-forge-rollout-data DIR/{rollout_id}.pt,
with files that --save-debug-rollout-data wrote. Evaluations generate, as by default. It scores nothing: the dumped
rewards are used.
"""

from __future__ import annotations

import logging
from typing import Any

from slime.checkpoints.rollout_files import load_samples, subsample
from slime.config.args import Args
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import generate_rollout as generate_live
from slime.utils.errors import UsageError
from slime.utils.misc import group_by
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Args, rollout_id: int, data_source: Any, evaluation: bool = False
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
    samples = load_samples(path, option="--load-forge-rollout-data")
    samples = subsample(samples, args.load_debug_rollout_data_subsample)
    groups = group_by(enumerate(samples), lambda pair: _group_of(*pair)).values()
    logger.info("rollout %d: %d samples of %d prompts replayed from %s", rollout_id, len(samples), len(groups), path)
    return RolloutFnTrainOutput(samples=[[sample for _, sample in group] for group in groups])


def _group_of(position: int, sample: Sample) -> tuple[str, int]:
    """Samples of one prompt; one without a group stands alone."""
    return ("group", sample.group_index) if sample.group_index is not None else ("alone", position)
