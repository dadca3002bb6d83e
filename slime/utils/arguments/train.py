"""Flags of the training process itself, beside Megatron's own. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.utils.arguments.flags import flag


@dataclass
class TrainFlags:
    """Training process."""

    model_args_from_hf: bool = flag(False, "take every Megatron model flag that is not given from the HF config")
    log_probs_chunk_size: int = flag(-1, "tokens per chunk when log-probs and entropy are computed; -1 = one chunk")
    data_pad_size_multiplier: int = flag(
        128, "packed tokens of a micro-batch are padded to a multiple of this x tensor parallel size", at_least=1
    )
    custom_model_provider_path: str | None = flag(
        None, "hook: fn(pre_process=, post_process=[, vp_stage=]) builds the Megatron model"
    )
    custom_megatron_init_path: str | None = flag(None, "hook: fn(args), after Megatron's start on every rank")
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, "hook: fn(args, model, store_prefix), before each forward-only pass"
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        "hook: fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), before each train step",
    )
