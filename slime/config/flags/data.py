"""Flags of the prompt data, of the batch arithmetic and of packing. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.parser import flag


@dataclass
class DataFlags:
    """Data and batches."""

    prompt_data: str | None = flag(None, "prompts: .jsonl or .parquet, optionally path@[a:b] for a slice")
    input_key: str = flag("input", "field of a data row with the prompt or the list of messages")
    label_key: str | None = flag(None, "field with the label that the reward compares with")
    metadata_key: str = flag("metadata", "field copied to Sample.metadata")
    tool_key: str = flag("tools", "field with tool schemas")
    apply_chat_template: bool = flag(False, "render messages with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "JSON: more arguments for the chat template", is_json=True)
    trust_remote_code: bool = flag(False, "let transformers and SGLang run Python code that comes with the checkpoint")
    skip_malformed_data: bool = flag(False, "leave out lines of a .jsonl that are no JSON object, instead of ending")
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "hook: class cls(args) with get_samples, add_samples, save, load, __len__",
    )
    loss_mask_type: str = flag(
        "qwen", "chat family for the loss mask of demonstrations", choices=("qwen", "qwen3", "qwen3_5", "distill_qwen")
    )
    num_rollout: int | None = flag(None, "number of rollouts; 0 = --eval-only", at_least=0)
    num_epoch: int | None = flag(None, "passes over the prompts, where --num-rollout is not given", at_least=1)
    start_rollout_id: int | None = flag(
        None, "first rollout id (default: after the loaded checkpoint's, else 0)", at_least=0
    )
    rollout_batch_size: int | None = flag(None, "REQUIRED: prompts per rollout", at_least=1)
    n_samples_per_prompt: int = flag(1, "responses per prompt", at_least=1)
    global_batch_size: int | None = flag(
        None, "samples per train step (default: all samples of a rollout)", at_least=1
    )
    num_steps_per_rollout: int | None = flag(None, "train steps per rollout; sets --global-batch-size", at_least=1)
    drop_last_rollouts: bool = flag(
        False, "drop the samples of a rollout that do not fill its last train step, instead of refusing to run"
    )
    micro_batch_size: int = flag(1, "samples per micro-batch, without --use-dynamic-batch-size", at_least=1)
    use_dynamic_batch_size: bool = flag(False, "fill micro-batches up to --max-tokens-per-gpu tokens")
    max_tokens_per_gpu: int | None = flag(
        None, "token budget of a micro-batch", needs="use_dynamic_batch_size", at_least=1
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        "token budget of the passes without gradients: old and reference log-probs (default: --max-tokens-per-gpu)",
        needs="use_dynamic_batch_size",
        at_least=1,
    )
    rollout_global_dataset: bool = flag(
        True,
        "no --prompt-data: samples come without prompts, which a custom function makes",
        option="--disable-rollout-global-dataset",
    )
    multimodal_keys: dict[str, str] | None = flag(
        None,
        "JSON: modality (image) -> field of a data row; only with --debug-rollout-only or --eval-only, since nothing "
        "but text can be trained on",
        is_json=True,
    )
    balance_by_flops: bool = flag(
        False,
        "form micro-batches of equal work (FLOPs) instead of tokens: a batch of short samples may then have more than "
        "--max-tokens-per-gpu; implies --balance-data",
        needs="use_dynamic_batch_size",
    )
    balance_data: bool = flag(False, "give each data-parallel rank about the same work")
