"""A curriculum: easy rows first, a place of its own in the checkpoint, and a rollout function that uses it."""

from __future__ import annotations

import asyncio

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer, pop_first
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.types import Sample


class CurriculumDataSource(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(args)
        self.update_metadata({"level": 0})

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        groups.sort(key=lambda group: group[0].metadata["level"])
        for group in groups:
            for sample in group:
                sample.source = f"level_{sample.metadata['level']}"
        return groups

    def raise_level(self):
        self.update_metadata({"level": self.get_metadata()["level"] + 1})


def easiest_first(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    buffer.sort(key=lambda group: group[0].metadata["level"])
    return pop_first(args, rollout_id, buffer, num_samples)


async def generate_all(args, groups):
    state = GenerateState(args)
    state.reset()
    return await asyncio.gather(
        *(generate_and_rm_group(args, group, state.sampling_params.copy(), evaluation=False) for group in groups)
    )


def generate_rollout(args, rollout_id, data_source, evaluation=False):
    assert not evaluation, "evaluate with slime.rollout.sglang_rollout.generate_rollout"
    groups = run(generate_all(args, data_source.get_samples(args.rollout_batch_size)))
    mean = sum(sample.reward for group in groups for sample in group) / sum(map(len, groups))
    if mean > args.level_up_at:
        data_source.raise_level()
    return RolloutFnTrainOutput(samples=groups, metrics={"rollout/level": data_source.get_metadata()["level"]})
