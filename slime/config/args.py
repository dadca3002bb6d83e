"""`Args`: the parsed flags, read-only once they are checked, and the copy of them that hooks may assign to."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from slime.utils.http.api_keys import make_keys
from slime.utils.misc import hook_args

if TYPE_CHECKING:
    from typing import Literal

    from slime.backends.sglang_utils.external import ExternalEngineInfo
    from slime.config.flags.rollout import DataFlags, EvalFlags, RolloutBufferFlags, RolloutFlags, WeightSyncFlags
    from slime.config.flags.run import (
        AskFlags,
        CiFlags,
        ClusterFlags,
        DebugFlags,
        FaultToleranceFlags,
        ObservabilityFlags,
        ProfileFlags,
    )
    from slime.config.flags.train import (
        AlgorithmFlags,
        CheckpointFlags,
        DistillationFlags,
        ModelPartFlags,
        RewardFlags,
        TrainFlags,
    )
    from slime.config.lora_policies import LoraPolicy
    from slime.config.megatron.values import MegatronValues
    from slime.config.sglang.engine_flags import SglangFlags
    from slime.config.sglang.topology import ModelPlan
    from slime.config.sglang.values import SglangValues
    from slime.utils.eval_config import EvalDatasetConfig, PromptSource
    from slime.utils.http.api_keys import RunKeys

    class Settled:
        """What `parse_args` sets beside the flags, and flags that have a value behind it though none need be given."""

        # Not flags: what follows from them.
        api_key_per_run: bool
        engine_models: list[ModelPlan]
        eval_datasets: list[EvalDatasetConfig]
        megatron_role_values: dict[str, dict[str, Any]]
        params_dtype: str
        policies: tuple[LoraPolicy, ...]
        prompt_sources: list[PromptSource]
        rank: int
        remote_urls: dict[str, str]
        rollout_external: bool
        rollout_external_engine_infos: list[ExternalEngineInfo]
        rollout_num_engines: int
        router_overrides: dict[str, Any]
        run_keys: RunKeys
        sglang_dp_size: int
        sglang_overrides: dict[str, Any]
        sglang_pp_size: int
        use_critic: bool
        virtual_pipeline_model_parallel_size: int | None
        # What `publish_runtime` adds once the engines run.
        sglang_model_routers: dict[str, tuple[str, int]]

        # Flags without a default that have a value behind `parse_args`.
        checkpoint_contents: list[str]
        distributed_backend: str
        eps_clip_high: float
        eval_function_path: str
        ffn_hidden_size: int
        global_batch_size: int
        hf_checkpoint: str
        hidden_size: int
        kv_channels: int
        load: str
        max_position_embeddings: int
        num_attention_heads: int
        num_layers: int
        num_query_groups: int
        offload_rollout: bool
        offload_train: bool
        output_dir: str
        over_sampling_batch_size: int
        padded_vocab_size: int
        rollout_batch_size: int
        rollout_num_gpus: int
        rope_type: str
        seq_length: int
        update_weights_in_flight: bool
        vocab_size: int

        # Flags whose choices say more than their type.
        verify_checkpoint: Literal["full", "sizes", "none"]

    class _Flags(  # type: ignore[misc]  # ours and `Settled` win over Megatron's and SGLang's
        Settled,
        AlgorithmFlags,
        AskFlags,
        CheckpointFlags,
        CiFlags,
        ClusterFlags,
        DataFlags,
        DebugFlags,
        DistillationFlags,
        EvalFlags,
        FaultToleranceFlags,
        ModelPartFlags,
        ObservabilityFlags,
        ProfileFlags,
        RewardFlags,
        RolloutBufferFlags,
        RolloutFlags,
        SglangFlags,
        TrainFlags,
        WeightSyncFlags,
        MegatronValues,
        SglangValues,
    ): ...
else:
    _Flags = argparse.Namespace


class Args(_Flags):
    """A Namespace that can be frozen. Copies and pickles (Ray sends it to every actor) stay frozen."""

    __slots__ = ("_copy", "_frozen")

    @property
    def is_frozen(self) -> bool:
        """Whether setting an attribute is an error."""
        try:
            return bool(object.__getattribute__(self, "_frozen"))
        except AttributeError:
            return False

    @property
    def for_hooks(self) -> Args:
        """The copy that hooks of this process get as `args` (`slime.utils.misc.hook_args`); not frozen."""
        if not self.is_frozen:
            return self
        return cast(Args, object.__getattribute__(self, "_copy"))

    def freeze(self) -> Args:
        """Make every later change an error; returns itself."""
        if not self.is_frozen:
            # Before anyone else has the object: threads that asked for it at the same time would get two.
            object.__setattr__(self, "_copy", self.replace())
            object.__setattr__(self, "_frozen", True)
        return self

    def replace(self, **changes: Any) -> Args:
        """A copy with other values (and new attributes), frozen if this is."""
        changed = Args.of(vars(self) | changes)
        return changed.freeze() if self.is_frozen else changed

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Args:
        """Return args with these values, not frozen."""
        args = cls()
        vars(args).update(values)  # not one by one through __setattr__
        return args

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_frozen:
            raise AttributeError(
                f"args.{name} cannot be set: flags do not change after parse_args; use args.replace({name}=...)"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self.is_frozen:
            raise AttributeError(f"args.{name} cannot be deleted: flags do not change after parse_args")
        super().__delattr__(name)

    def __getstate__(self) -> tuple[dict[str, Any], bool]:
        return dict(vars(self)), self.is_frozen

    def __setstate__(self, state: tuple[dict[str, Any], bool]) -> None:
        values, is_frozen = state
        vars(self).update(values)
        if is_frozen:
            self.freeze()


def with_run_keys(args: Args) -> Args:
    """The flags with the keys of the run's servers as `run_keys`, whose text shows none of them.

    Args:
        args: reads `api_key_per_run`, `sglang_overrides` and `router_overrides`; without engines it stays as it is.
    """
    if args.debug_train_only:
        return args
    router, engine = args.router_overrides.get("api_key"), args.sglang_overrides.get("api_key")
    return args.replace(run_keys=make_keys(is_wanted=args.api_key_per_run, router=router, engine=engine))


def publish_runtime(
    args: Args,
    *,
    sglang_router_ip: str,
    sglang_router_port: int,
    sglang_model_routers: dict[str, tuple[str, int]],
) -> None:
    """Write what exists only once the engines run into `args`, for generate and reward functions that read it there.

    The only place that changes frozen args; RolloutManager calls it once, on its own copy.
    """
    for values in (args, hook_args(args)):
        vars(values).update(
            sglang_router_ip=sglang_router_ip,
            sglang_router_port=sglang_router_port,
            sglang_model_routers=sglang_model_routers,
        )
