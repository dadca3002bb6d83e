"""Every hook's contract on one page, and the outputs of rollout functions.

A hook is a user's function that a flag names (`pkg.mod.attr`, `pkg.mod:attr`, `path/to/file.py:attr`). Each Protocol
below is the exact call that slime makes, with when it makes it and what must come back; docs/reference/hooks.md is
made of them. `HOOKS` maps the flag's attribute to its Protocol; slime.rollout.hooks.signatures tells before anything
starts whether a function can be called that way. Nothing here calls a hook except `call_rollout_fn`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slime.config.args import Args
from slime.rollout.filter_hub import DynamicFilterOutput
from slime.rollout.hooks.errors import blame_hook
from slime.utils.misc import function_name, kind_of
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

    Called: by the RolloutManager, once for each rollout, and once for each evaluation with `evaluation=True`.
    Returns: RolloutFnTrainOutput; for an evaluation RolloutFnEvalOutput. Legacy returns are understood: a list of
        samples, of groups, or of groups of fan-out lists; for an evaluation, the data dict alone.
    """

    def __call__(self, args: Args, rollout_id: int, data_source: Any, *, evaluation: bool = False) -> Any: ...


class GenerateFn(Protocol):
    """--custom-generate-function-path: complete one sample (tokens, text, status). It must be `async def`.

    Called: for each sample of a training rollout and of an evaluation, with a place among the requests that the
        engines take at once. A path in `Sample.generate_function_path`, or of an evaluation set, wins.
    Returns: the Sample, or a list of them (fan-out, e.g. sub-agents); these share one rollout_id and count once in
        every mean. A sample that comes back with a reward is not scored again. Where its environment failed it says
        so: `end_reason` and `reward_is_trusted` (--on-untrusted-reward).
    """

    def __call__(
        self, args: Args, sample: Sample, sampling_params: dict[str, Any]
    ) -> Awaitable[Sample | list[Sample]]: ...


class SampleHook(Protocol):
    """--rollout-sample-hook-path: edit or replace a generated sample. The flag is repeatable; sync or async.

    Called: for each sample after its generation, before its reward; for each of the samples of a fan-out list.
    Returns: a Sample, or None, which keeps the one that came in.
    """

    def __call__(self, args: Args, sample: Sample) -> Sample | None | Awaitable[Sample | None]: ...


class RewardFn(Protocol):
    """--custom-rm-path: score a sample, or with --group-rm a group. Async or sync.

    Called: with one sample; with the list of samples when a generate function returned a list; with --group-rm with
        the list of the group's samples. Not for aborted samples, nor for samples that have a reward. A path in
        `Sample.custom_rm_path`, or of an evaluation set, wins; those are always called with one sample.
    Returns: a finite number, or a dict that --reward-key reads; of a list a list of them, one for each sample. A
        grader that failed sets `sample.reward_is_trusted` to False, and may return None (--on-untrusted-reward).
    """

    def __call__(self, args: Args, sample: Any, **kwargs: Any) -> Awaitable[Any]: ...


class ProcessReward(Protocol):
    """--process-reward-path: reward the tokens or the turns of a sample beside its response. Async or sync.

    Called: for each finished sample of a training rollout once it is scored, unless it has `token_rewards` or
        `turn_rewards` already, or its reward is not trusted.
    Returns: a list with a number or None for each response token, or for each turn (a run of ones in the loss mask).
    """

    def __call__(self, args: Args, sample: Sample) -> list[float | None] | Awaitable[list[float | None]]: ...


class DynamicFilter(Protocol):
    """--dynamic-sampling-filter-path: keep or drop a finished group (a dropped one is replaced by a new prompt).

    Called: for each finished and scored group of a training rollout, until --rollout-batch-size groups were kept;
        with the samples of it whose reward counts (--on-untrusted-reward).
    Returns: slime.rollout.filter_hub.base_types.DynamicFilterOutput, or a bool.
    """

    def __call__(self, args: Args, group: Group) -> DynamicFilterOutput | bool: ...


class BufferFilter(Protocol):
    """--buffer-filter-path: pick at most `num_samples` groups from the data source's buffer.

    Called: whenever prompts are drawn and the buffer is not empty; `rollout_id` is always None.
    Returns: the list of the groups that it picked, which it must have removed from `buffer`.
    """

    def __call__(self, args: Args, rollout_id: None, buffer: list[Group], num_samples: int) -> list[Group]: ...


class RolloutSampleFilter(Protocol):
    """--rollout-sample-filter-path: set `remove_sample` on samples that shall not be trained on.

    Called: once at the end of a training rollout, with the groups of the batch.
    Returns: nothing; it changes the samples.
    """

    def __call__(self, args: Args, data: list[Group]) -> None: ...


class AllSamplesProcess(Protocol):
    """--rollout-all-samples-process-path: see every finished group, those that the filter dropped too.

    Called: once at the end of a training rollout, after the sample filter. `data_source` is the data source object;
        calling it draws prompts, as its `get_samples` does.
    Returns: anything; it is ignored.
    """

    def __call__(self, args: Args, all_samples: list[Group], data_source: Any) -> None: ...


class RewardPostProcess(Protocol):
    """--custom-reward-post-process-path: turn rewards into those that advantages are made of.

    Called: once for each training rollout with all of its samples whose reward counts (--on-untrusted-reward) as a
        flat list, before they become training data.
    Returns: (raw rewards, rewards for training), two lists with one number for each sample.
    """

    def __call__(self, args: Args, samples: list[Sample]) -> tuple[list[float], list[float]]: ...


class ConvertSamples(Protocol):
    """--custom-convert-samples-to-train-data-path: make the training data, in slime's place.

    Called: once for each training rollout with all of its samples as a flat list.
    Returns: slime.utils.train_data.TrainData, a dict of columns with one entry for each sample. `tokens`,
        `response_lengths`, `rewards`, `raw_reward`, `truncated`, `sample_indices`, `rollout_ids` and `loss_masks` must
        be there. Columns of your own reach a custom loss.
    """

    def __call__(self, args: Args, samples: list[Sample]) -> dict[str, Any]: ...


class RolloutLog(Protocol):
    """--custom-rollout-log-function-path: log a training rollout.

    Called: once for each training rollout with all of its samples as a flat list and the time it took in seconds.
    Returns: a dict of metrics to log beside slime's; or true to leave slime's out, false or nothing to have them. What
        it puts into `rollout_extra_metrics` is logged with slime's; `slime.log(metrics, rollout_id)` logs always.
    """

    def __call__(
        self,
        rollout_id: int,
        args: Args,
        samples: list[Sample],
        rollout_extra_metrics: dict[str, Any] | None,
        rollout_time: float,
    ) -> bool | dict[str, Any] | None: ...


class EvalLog(Protocol):
    """--custom-eval-rollout-log-function-path: log an evaluation.

    Called: once for each evaluation, with what the evaluation function returned.
    Returns: as --custom-rollout-log-function-path; what it puts into `extra_metrics` is logged with slime's.
    """

    def __call__(
        self, rollout_id: int, args: Args, data: dict[str, dict[str, Any]], extra_metrics: dict[str, Any] | None
    ) -> bool | dict[str, Any] | None: ...


class DataSourceClass(Protocol):
    """--data-source-path: a class; its objects give the prompts.

    Called: once, by the RolloutManager.
    Returns: an object with `get_samples(num_samples)` -> groups, `add_samples(groups)`, `save(rollout_id)`,
        `load(rollout_id=None)` and `__len__` (slime.rollout.data_source.DataSource is such a class). If it has
        `observe(groups)`, slime's rollout functions call it with all scored groups, and log the dict that it returns.
    """

    def __call__(self, args: Args) -> Any: ...


class ModelProvider(Protocol):
    """--custom-model-provider-path: build the Megatron model.

    Called: when the trainer builds its model, on every rank, once for each virtual pipeline stage.
    Returns: the model.
    """

    def __call__(self, *, pre_process: bool, post_process: bool) -> torch.nn.Module: ...


class MegatronInit(Protocol):
    """--custom-megatron-init-path: set up what your Megatron code needs.

    Called: once after Megatron's initialisation, on every rank.
    Returns: nothing.
    """

    def __call__(self, args: Args) -> None: ...


class BeforeLogProb(Protocol):
    """--custom-megatron-before-log-prob-hook-path: prepare the model for a forward-only pass.

    Called: before each forward-only pass, on every rank; `store_prefix` is `""` or `"ref_"`.
    Returns: nothing.
    """

    def __call__(self, args: Args, model: list[torch.nn.Module], store_prefix: str) -> None: ...


class BeforeTrainStep(Protocol):
    """--custom-megatron-before-train-step-hook-path: prepare the model for an optimizer step.

    Called: before each optimizer step, after gradients were zeroed, on every rank.
    Returns: nothing.
    """

    def __call__(
        self,
        args: Args,
        rollout_id: int,
        step_id: int,
        model: list[torch.nn.Module],
        optimizer: Any,
        opt_param_scheduler: Any,
    ) -> None: ...


class RolloutDataPostprocess(Protocol):
    """--rollout-data-postprocess-path: edit a rank's rollout data in place.

    Called: once for each rollout after advantages, before logging and training, on every rank.
    Returns: nothing.
    """

    def __call__(self, args: Args, rollout_id: int, rollout_data: dict[str, Any]) -> None: ...


class CustomLoss(Protocol):
    """--custom-loss-function-path: a loss of your own (with --loss-type custom_loss).

    Called: for each micro-batch, where the logits are.
    Returns: (the loss, name -> scalar tensor to log).
    """

    def __call__(
        self,
        args: Args,
        batch: dict[str, Any],
        logits: torch.Tensor,
        sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


class CustomAdvantage(Protocol):
    """--custom-advantage-function-path: compute advantages.

    Called: once for each rollout, after `kl` is there, before whitening.
    Returns: nothing; it sets rollout_data["advantages"] and ["returns"].
    """

    def __call__(self, args: Args, rollout_data: dict[str, Any]) -> None: ...


class TisFunction(Protocol):
    """--custom-tis-function-path: correct the policy loss for the difference between engine and trainer.

    Called: for each micro-batch with --use-tis or --get-mismatch-metrics. Lists are per sample, of response length,
        also with context parallelism (`all_gather_with_cp` and `slice_log_prob_with_cp` leave them whole here); masked
        tokens have log-probs of 0.
    Returns: (the loss, loss masks for all losses, name -> per-token metric, whose mean over a rollout's trained
        tokens, then over rollouts, is logged; with --loss-agg-mode token-mean over all tokens).
    """

    def __call__(
        self,
        *,
        args: Args,
        pg_loss: torch.Tensor,
        train_log_probs: list[torch.Tensor],
        rollout_log_probs: list[torch.Tensor],
        loss_masks: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]: ...


class PgLossReducer(Protocol):
    """--custom-pg-loss-reducer-function-path: reduce the policy loss of tokens to a number.

    Called: for each micro-batch.
    Returns: the function that reduces.
    """

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[torch.Tensor],
        calculate_per_token_loss: bool,
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...


class PostWrite(Protocol):
    """--custom-update-weight-post-write-path: do something with the files of a weight version, such as copying them.

    Called: on every trainer rank (gate yourself), once the files of `version_dir` are written and before engines read
        them; `rollout_engines` are the handles of the engines that will. Engines wait for the slowest rank, and an
        exception ends the run.
    Returns: nothing.
    """

    def __call__(self, args: Args, version_dir: str, rollout_engines: list[Any]) -> None: ...


# Attribute of the flag (its name with underscores) -> the Protocol of its function
HOOKS: dict[str, type] = {
    "rollout_function_path": RolloutFn,
    "eval_function_path": RolloutFn,
    "custom_generate_function_path": GenerateFn,
    "rollout_sample_hook_path": SampleHook,
    "custom_rm_path": RewardFn,
    "process_reward_path": ProcessReward,
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


def call_rollout_fn(fn: RolloutFn, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function and bring legacy returns into RolloutFnTrainOutput / RolloutFnEvalOutput.

    Raises:
        HookError: it raised SystemExit or the like; other errors pass.
        TypeError: it returned something else.
        ValueError: it returned no sample, or an evaluation without rewards.
    """
    option = "--eval-function-path" if evaluation else "--rollout-function-path"
    with blame_hook(f"{option} {function_name(fn)}", only_exits=True):
        output = fn(*args, evaluation=evaluation, **kwargs)
    return _as_eval_output(fn, output) if evaluation else _as_train_output(fn, output)


def _as_train_output(fn: RolloutFn, output: Any) -> RolloutFnTrainOutput:
    name = f"--rollout-function-path {function_name(fn)}"
    samples, metrics = (output.samples, output.metrics) if isinstance(output, RolloutFnTrainOutput) else (output, None)
    if not isinstance(samples, list):
        raise TypeError(
            f"{name} returned {kind_of(output)}; it must return a RolloutFnTrainOutput or a list of samples"
        )
    try:
        groups = [flatten(entry) for entry in samples]
    except TypeError as error:
        raise TypeError(f"{name} returned a list that holds something else than samples: {error}") from error
    if not any(groups):
        raise ValueError(f"{name} returned no sample; there is nothing to train on")
    return RolloutFnTrainOutput(samples=groups, metrics=metrics)


def _as_eval_output(fn: RolloutFn, output: Any) -> RolloutFnEvalOutput:
    name = f"--eval-function-path {function_name(fn)}"
    output = RolloutFnEvalOutput(data=output) if isinstance(output, dict) else output
    if not isinstance(output, RolloutFnEvalOutput) or not isinstance(output.data, dict):
        raise TypeError(f"{name} returned {kind_of(output)}; it must return a RolloutFnEvalOutput or its data dict")
    for data_set, result in output.data.items():
        if not isinstance(result, dict) or "rewards" not in result:
            found = f"the keys {sorted(result)}" if isinstance(result, dict) else kind_of(result)
            raise ValueError(
                f"{name} returned {found} for the data set {data_set!r}; "
                'it must return {"rewards": [...], "truncated": [...], "samples": [...]} for each'
            )
    return output


def flatten(value: Any) -> list[Sample]:
    """The samples of an arbitrarily nested list, in order."""
    if isinstance(value, Sample):
        return [value]
    if isinstance(value, list | tuple):
        return [sample for entry in value for sample in flatten(entry)]
    raise TypeError(f"expected a Sample or a list of them, got {type(value).__name__}")
