"""Evaluation: every data set of the run generated and graded, each with its own sampling parameters and grader.

All data sets run at once under the shared semaphore. Where an evaluation runs beside training, a training rollout that
ends aborts every request of the engines; an evaluation sample that this hits is generated again. It does not reduce to
metrics: that is slime.observability.rollout_metrics.

Wait graph: a sample waits for the semaphore, its requests and its grader; after an abort for the end of that abort (at
most `ABORT_DEADLINE_S`). The evaluation waits for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import time
from typing import Any

from slime.config.args import Args
from slime.processes.progress import progress_bar
from slime.rollout.base_types import RolloutFnEvalOutput, flatten
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sampling.generation import GenerateState, generate_and_rm, sampling_seed
from slime.rollout.sampling.images import with_small_images
from slime.utils.async_utils import gather_or_cancel
from slime.utils.data import Dataset
from slime.utils.errors import UsageError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.files.streams import is_stream
from slime.utils.http_utils import get_rollout_num_engines
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import image_options
from slime.utils.rewards import part_of
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
_MOST_ABORTS = 50  # of one sample, by rollouts that end
ABORT_DEADLINE_S = 300.0
_ABORT_POLL_S = 0.1


class EvalDatasets(metaclass=SingletonMeta):
    """Owner of the evaluation data sets that this process has read."""

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], Dataset] = {}

    def get(self, args: Args, config: EvalDatasetConfig, tokenizer: Any) -> Dataset:
        """The data set, read once."""
        key = (*config.cache_key, args.eval_max_prompt_len)
        if key not in self._read:
            self._read[key] = Dataset(
                config.path,
                tokenizer,
                GenerateState(args).processor if config.multimodal_keys else None,
                args.eval_max_prompt_len,
                prompt_key=config.input_key,
                multimodal_keys=config.multimodal_keys,
                label_key=config.label_key,
                tool_key=config.tool_key,
                metadata_key=config.metadata_key,
                apply_chat_template=config.apply_chat_template,
                apply_chat_template_kwargs=config.apply_chat_template_kwargs,
                truncation=args.prompt_truncation,
                num_workers=args.filter_prompts_workers,
                skip_malformed=args.skip_malformed_data,
                keep_messages=args.reward_model_path is not None,
                images=image_options(args),
                stream_window=1 if is_stream(config.path) else None,
                flag=f"{config.where}:",
            )
        return self._read[key]


async def eval_rollout(args: Args, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate every data set of args.eval_datasets.

    Raises:
        UsageError: a data set without a grader of its own under --group-rm, whose grader needs whole groups.
    """
    set_current_rollout_id(rollout_id)
    results = await gather_or_cancel(
        eval_rollout_single_dataset(args, rollout_id, config) for config in args.eval_datasets
    )
    data = {config.name: result for config, result in zip(args.eval_datasets, results, strict=True)}
    failures = {f"eval/{name}-failed_samples": float(result.pop("num_failed")) for name, result in data.items()}
    return RolloutFnEvalOutput(data=data, metrics={name: count for name, count in failures.items() if count})


async def eval_rollout_single_dataset(args: Args, rollout_id: int, dataset_cfg: EvalDatasetConfig) -> dict[str, Any]:
    """Evaluate one data set.

    Returns:
        {"rewards": [...], "truncated": [...], "samples": [...], "num_failed": n}, one entry per prompt and repetition,
        in the order of the file. Of a fan-out rollout the last sibling stands for the execution. Samples that failed,
        and were not to end the run (--on-sample-error), are missing. Those whose reward is not trusted
        (--on-untrusted-reward) are in a list of their own, "untrusted", where there are any.
    """
    if args.group_rm and not dataset_cfg.custom_rm_path:
        raise UsageError(
            f"--group-rm cannot grade evaluation samples one by one: give {dataset_cfg.name} a custom_rm_path"
        )
    state = GenerateState(args)
    dataset = EvalDatasets().get(args, dataset_cfg, state.tokenizer)
    params = eval_sampling_params(dataset_cfg)
    repetitions = dataset_cfg.n_samples_per_eval_prompt
    at_once = 2 * args.sglang_server_concurrency * get_rollout_num_engines(args)
    places = asyncio.Semaphore(max(at_once // repetitions, 1)) if dataset_cfg.multimodal_keys else None

    async def of_prompt(position: int) -> list[Sample | None]:
        async with places or contextlib.nullcontext():  # the images of a whole data set would fill the memory
            prompt, calls = dataset.at(position), []
            if prompt is None:  # of a stream: too long, empty, or malformed and skipped
                return []
            for repetition in range(repetitions):
                sample = eval_sample(dataset_cfg, prompt, index=position * repetitions + repetition, group=position)
                # Upstream gives repetition j of every prompt the seed rollout_seed + j. Prompts of one length then
                # draw the same noise and err together: the accuracy says more about the seed than about the model.
                seed = sampling_seed(args.rollout_seed, "eval", position, repetition)
                more = {"sampling_seed": seed} if args.sglang_enable_deterministic_inference else {}
                calls.append(_one(args, sample, {**params, **more}, bar))
            return list(await gather_or_cancel(calls))

    with progress_bar(len(dataset) * repetitions, f"eval {dataset_cfg.name}") as bar:
        groups = await gather_or_cancel(of_prompt(position) for position in range(len(dataset)))
    if not any(groups):
        raise UsageError(f"{dataset_cfg.where}: no row of {dataset_cfg.path} has a prompt that is short enough")
    made = [sample for group in groups for sample in group if sample is not None]
    samples = [sample for sample in made if sample.counts(args)]
    key = args.eval_reward_key or args.reward_key
    return {
        "rewards": [_reward(sample, key, dataset_cfg.name) for sample in samples],
        "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
        "num_failed": sum(map(len, groups)) - len(made),
        **({"untrusted": untrusted} if (untrusted := [one for one in made if not one.counts(args)]) else {}),
    }


def eval_sampling_params(config: EvalDatasetConfig) -> dict[str, Any]:
    """The engine's sampling parameters for a data set; what nothing set is left to the engine."""
    params = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "min_new_tokens": config.min_new_tokens,
        "repetition_penalty": config.repetition_penalty,
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "skip_special_tokens": config.skip_special_tokens,
        "no_stop_trim": config.no_stop_trim,
        "spaces_between_special_tokens": False,
    }
    return {name: value for name, value in params.items() if value is not None}


def eval_sample(config: EvalDatasetConfig, prompt: Sample, *, index: int, group: int) -> Sample:
    """A sample of one evaluation prompt, with the data set's grader and generate function."""
    sample = copy.deepcopy(prompt)
    sample.index, sample.group_index = index, group
    sample.metadata = config.inject_metadata(sample.metadata)
    sample.custom_rm_path = config.custom_rm_path
    sample.generate_function_path = config.custom_generate_function_path
    return sample


async def _one(args: Args, sample: Sample, params: dict[str, Any], bar: Any) -> Sample | None:
    """The sample, generated and graded; None where it failed and --on-sample-error goes on without it."""
    tries = args.max_group_retries if args.on_sample_error == "retry" else 0
    while True:
        try:
            completed = await _until_not_aborted(args, sample.snapshot(), params)
            bar.update(1)
            completed.multimodal_train_inputs = None  # untrained; a whole data set's would fill the memory
            completed.multimodal_inputs = with_small_images(completed)
            return completed
        except SampleError as error:
            if args.on_sample_error == "fail":
                raise
            if error.is_final or tries == 0:
                logger.warning("left out of the evaluation: %s", error)
                return None
            tries -= 1


async def _until_not_aborted(args: Args, sample: Sample, params: dict[str, Any]) -> Sample:
    state = GenerateState(args)
    for _ in range(_MOST_ABORTS):
        completed = flatten(await generate_and_rm(args, sample.snapshot(), dict(params), evaluation=True))
        if not any(one.status is Sample.Status.ABORTED for one in completed):
            return completed[-1]
        deadline = time.monotonic() + ABORT_DEADLINE_S
        while state.aborted and time.monotonic() < deadline:
            await asyncio.sleep(_ABORT_POLL_S)
    raise SampleError(f"evaluation sample {sample.index} was aborted {_MOST_ABORTS} times")


def _reward(sample: Sample, key: str | None, name: str) -> float:
    value = sample.reward
    if isinstance(value, dict):
        assert key is not None, "a reward is checked when it is given"
        value = part_of(value, key, "--eval-reward-key")
    if value is None:
        raise RuntimeError(f"evaluation {name}: sample {sample.index} (status {sample.status.value}) has no reward")
    return float(value)
