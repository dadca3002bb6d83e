"""Every hook's contract on one page, and the outputs of rollout functions.

A hook is a user's function that a flag names (`pkg.mod.attr`, `pkg.mod:attr`, `path/to/file.py:attr`). Each Protocol
below is the exact call that slime makes; `HOOKS` maps the flag's attribute to it, and `signature_problem` tells before
anything starts, whether a function can be called that way. Nothing here calls a hook except `call_rollout_fn`.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

if TYPE_CHECKING:
    import torch

Group = list[Sample]


@dataclass
class RolloutFnTrainOutput:
    """What a training rollout returns: groups of samples, and metrics to log verbatim."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What an evaluation returns: per data set {"rewards", "truncated", "samples"}, and metrics to log verbatim."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class RolloutFn(Protocol):
    """--rollout-function-path, --eval-function-path: one whole rollout, or one whole evaluation.

    Returns RolloutFnTrainOutput / RolloutFnEvalOutput. Legacy returns are understood: a list of samples, of groups,
    or of groups of fan-out lists; for an evaluation, the data dict alone.
    """

    def __call__(self, args: Namespace, rollout_id: int, data_source: Any, *, evaluation: bool = False) -> Any: ...


class GenerateFn(Protocol):
    """--custom-generate-function-path, `Sample.generate_function_path`: complete one sample (tokens, text, status).

    May return several samples (fan-out, e.g. sub-agents); they share one rollout_id and count once in every mean.
    May set the reward. Gets `evaluation=` too if it has such a parameter.
    """

    def __call__(
        self, args: Namespace, sample: Sample, sampling_params: dict[str, Any]
    ) -> Awaitable[Sample | list[Sample]]: ...


class SampleHook(Protocol):
    """--rollout-sample-hook-path (repeatable): edit or replace a generated sample before its reward; None keeps it.

    Sync or async. Gets `rollout_id=` and `evaluation=` if it has such parameters.
    """

    def __call__(self, args: Namespace, sample: Sample) -> Sample | None | Awaitable[Sample | None]: ...


class RewardFn(Protocol):
    """--custom-rm-path, `Sample.custom_rm_path`: a number, or a dict that --reward-key reads.

    With --group-rm it gets the group's list of samples and returns a list of rewards; without, always one sample, also
    when a custom generate function returned several.
    """

    def __call__(self, args: Namespace, sample: Any, **kwargs: Any) -> Awaitable[Any]: ...


class DynamicFilter(Protocol):
    """--dynamic-sampling-filter-path: keep or drop a finished group (a dropped one is replaced by a new prompt)."""

    def __call__(self, args: Namespace, group: Group) -> DynamicFilterOutput | bool: ...


class BufferFilter(Protocol):
    """--buffer-filter-path: pick at most `num_samples` groups from the buffer and remove them from it."""

    def __call__(self, args: Namespace, rollout_id: None, buffer: list[Group], num_samples: int) -> list[Group]: ...


class RolloutSampleFilter(Protocol):
    """--rollout-sample-filter-path: set `remove_sample` on samples of the accepted groups, at the end of a rollout."""

    def __call__(self, args: Namespace, data: list[Group]) -> None: ...


class AllSamplesProcess(Protocol):
    """--rollout-all-samples-process-path: see every finished group, those that the filter dropped too.

    `data_source` is the data source object; calling it gets prompts, as its `get_samples`.
    """

    def __call__(self, args: Namespace, all_samples: list[Group], data_source: Any) -> None: ...


class RewardPostProcess(Protocol):
    """--custom-reward-post-process-path: (raw rewards, rewards used for training) of the flat list of samples."""

    def __call__(self, args: Namespace, samples: list[Sample]) -> tuple[list[float], list[float]]: ...


class ConvertSamples(Protocol):
    """--custom-convert-samples-to-train-data-path: the flat list of samples as slime.utils.train_data.TrainData."""

    def __call__(self, args: Namespace, samples: list[Sample]) -> dict[str, Any]: ...


class RolloutLog(Protocol):
    """--custom-rollout-log-function-path: a true return value skips the default logging."""

    def __call__(
        self,
        rollout_id: int,
        args: Namespace,
        samples: list[Sample],
        rollout_extra_metrics: dict[str, Any] | None,
        rollout_time: float,
    ) -> bool | None: ...


class EvalLog(Protocol):
    """--custom-eval-rollout-log-function-path: a true return value skips the default logging."""

    def __call__(
        self, rollout_id: int, args: Namespace, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None
    ) -> bool | None: ...


class DataSourceClass(Protocol):
    """--data-source-path: a class; its objects have get_samples, add_samples, save, load and __len__."""

    def __call__(self, args: Namespace) -> Any: ...


class ModelProvider(Protocol):
    """--custom-model-provider-path: build the Megatron model. Gets `vp_stage=` if it has such a parameter."""

    def __call__(self, *, pre_process: bool, post_process: bool) -> torch.nn.Module: ...


class MegatronInit(Protocol):
    """--custom-megatron-init-path: after Megatron's initialisation, on every rank."""

    def __call__(self, args: Namespace) -> None: ...


class BeforeLogProb(Protocol):
    """--custom-megatron-before-log-prob-hook-path: before each forward-only pass; the prefix is "" or "ref_"."""

    def __call__(self, args: Namespace, model: list[torch.nn.Module], store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    """--custom-megatron-before-train-step-hook-path: before each optimizer step, after gradients were zeroed."""

    def __call__(
        self,
        args: Namespace,
        rollout_id: int,
        step_id: int,
        model: list[torch.nn.Module],
        optimizer: Any,
        opt_param_scheduler: Any,
    ) -> None: ...


class RolloutDataPostprocess(Protocol):
    """--rollout-data-postprocess-path: edit the rank's rollout data in place, after advantages, before training."""

    def __call__(self, args: Namespace, rollout_id: int, rollout_data: dict[str, Any]) -> None: ...


class CustomLoss(Protocol):
    """--custom-loss-function-path (with --loss-type custom_loss): the loss of one micro-batch and its metrics."""

    def __call__(
        self,
        args: Namespace,
        batch: dict[str, Any],
        logits: torch.Tensor,
        sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


class CustomAdvantage(Protocol):
    """--custom-advantage-function-path: set rollout_data["advantages"] and ["returns"]."""

    def __call__(self, args: Namespace, rollout_data: dict[str, Any]) -> None: ...


class TisFunction(Protocol):
    """--custom-tis-function-path: correct the policy loss for the difference between engine and trainer.

    Lists are per sample, of response length. Returns the loss, the loss masks to use, and per-token metrics.
    """

    def __call__(
        self,
        *,
        args: Namespace,
        pg_loss: torch.Tensor,
        train_log_probs: list[torch.Tensor],
        rollout_log_probs: list[torch.Tensor],
        loss_masks: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]: ...


class PgLossReducer(Protocol):
    """--custom-pg-loss-reducer-function-path: make the function that reduces the policy loss to a number."""

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[torch.Tensor],
        calculate_per_token_loss: bool,
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...


class PostWrite(Protocol):
    """--custom-update-weight-post-write-path: on every rank, once the files of a weight version are written."""

    def __call__(self, args: Namespace, version_dir: str, rollout_engines: list[Any]) -> None: ...


HOOKS: dict[str, type] = {
    "rollout_function_path": RolloutFn,
    "eval_function_path": RolloutFn,
    "custom_generate_function_path": GenerateFn,
    "rollout_sample_hook_path": SampleHook,
    "custom_rm_path": RewardFn,
    "dynamic_sampling_filter_path": DynamicFilter,
    "buffer_filter_path": BufferFilter,
    "rollout_sample_filter_path": RolloutSampleFilter,
    "rollout_all_samples_process_path": AllSamplesProcess,
    "custom_reward_post_process_path": RewardPostProcess,
    "custom_convert_samples_to_train_data_path": ConvertSamples,
    "custom_rollout_log_function_path": RolloutLog,
    "custom_eval_rollout_log_function_path": EvalLog,
    "data_source_path": DataSourceClass,
    "custom_model_provider_path": ModelProvider,
    "custom_megatron_init_path": MegatronInit,
    "custom_megatron_before_log_prob_hook_path": BeforeLogProb,
    "custom_megatron_before_train_step_hook_path": BeforeTrainStep,
    "rollout_data_postprocess_path": RolloutDataPostprocess,
    "custom_loss_function_path": CustomLoss,
    "custom_advantage_function_path": CustomAdvantage,
    "custom_tis_function_path": TisFunction,
    "custom_pg_loss_reducer_function_path": PgLossReducer,
    "custom_update_weight_post_write_path": PostWrite,
}
"""Attribute of the flag (its name with underscores) -> the Protocol of its function."""


def signature_problem(fn: Any, protocol: type) -> str | None:
    """Why `fn` cannot be called as `protocol` says; None when it can (or has no readable signature).

    Positional parameters are passed by position, so their names are free.
    """
    if not callable(fn):
        return f"it is a {type(fn).__name__}, not a function"
    try:
        own = inspect.signature(fn)
    except (TypeError, ValueError):
        return None  # written in C
    parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    try:
        own.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        wanted = ", ".join([p.name for p in positional] + [f"{name}=..." for name in keywords])
        return f"it is called as ({wanted}), but its signature is {own}: {error}"
    return None


def accepts_keyword(fn: Any, name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any keyword."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.kind is p.VAR_KEYWORD or p.name == name for p in parameters)


def call_rollout_fn(fn: RolloutFn, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function and bring legacy returns into RolloutFnTrainOutput / RolloutFnEvalOutput.

    Raises:
        TypeError: it returned something else.
    """
    output = fn(*args, evaluation=evaluation, **kwargs)
    if evaluation:
        if isinstance(output, dict):
            return RolloutFnEvalOutput(data=output)
        if isinstance(output, RolloutFnEvalOutput):
            return output
        raise TypeError(f"the eval function returned {type(output).__name__}; expected RolloutFnEvalOutput or a dict")
    if isinstance(output, list):
        return RolloutFnTrainOutput(samples=as_groups(output))
    if isinstance(output, RolloutFnTrainOutput):
        return RolloutFnTrainOutput(samples=as_groups(output.samples), metrics=output.metrics)
    raise TypeError(f"the rollout function returned {type(output).__name__}; expected RolloutFnTrainOutput or a list")


def as_groups(samples: list[Any]) -> list[Group]:
    """Groups of samples from any shape: flat samples (each its own group), groups, or groups of fan-out lists."""
    return [flatten(entry) for entry in samples]


def flatten(value: Any) -> list[Sample]:
    """The samples of an arbitrarily nested list, in order."""
    if isinstance(value, Sample):
        return [value]
    if isinstance(value, list | tuple):
        return [sample for entry in value for sample in flatten(entry)]
    raise TypeError(f"expected a Sample or a list of them, got {type(value).__name__}")
