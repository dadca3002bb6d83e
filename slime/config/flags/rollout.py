"""Flags of generation: the HF checkpoint, sampling, and the hooks of the rollout loop. Declarations only."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.parser import flag


@dataclass
class RolloutFlags:
    """Rollout."""

    hf_checkpoint: str | None = flag(
        None,
        "REQUIRED: HF directory of the engines' model, tokenizer and config; the weights to start from when --load "
        "and --ref-load have none",
    )
    model_name: str | None = flag(
        None, "weight-conversion family, or the path of your own as module:NAME (default: from the HF config)"
    )
    rollout_temperature: float = flag(
        1.0, "sampling temperature; the trainer divides its logits by it too, except in sft_loss"
    )
    rollout_top_p: float = flag(1.0, "top-p; the trainer's log-probs are then of the nucleus too")
    rollout_top_k: int = flag(
        -1,
        "top-k; only -1 with the policy loss, whose trainer could not replay another (upstream accepts it)",
    )
    rollout_max_response_len: int | None = flag(None, "most tokens of a response", at_least=1)
    rollout_min_new_tokens: int = flag(
        0, "fewest tokens of a response: before, the end token is not sampled", at_least=0
    )
    rollout_max_prompt_len: int | None = flag(
        None, "most tokens of a prompt; --prompt-truncation says what happens to longer ones", at_least=1
    )
    prompt_truncation: str = flag(
        "drop",
        "longer prompts: drop them, end with an error, or cut tokens off on the left, on the right or in the middle",
        choices=("drop", "error", "left", "right", "middle"),
        needs=("rollout_max_prompt_len", "eval_max_prompt_len"),
    )
    filter_prompts_workers: int = flag(
        1,
        "threads that count the prompts' tokens",
        needs=("rollout_max_prompt_len", "eval_max_prompt_len"),
        at_least=1,
    )
    rollout_max_context_len: int | None = flag(None, "most tokens of prompt and response together", at_least=1)
    rollout_stop: list[str] | None = flag(None, "texts that end a response", nargs="+")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response", nargs="+")
    rollout_ignore_eos: bool = flag(False, "do not end a response at the end token: it goes on to the length limit")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the returned text")
    rollout_shuffle: bool = flag(False, "shuffle the prompts in every epoch")
    rollout_seed: int = flag(
        42, "seed of the shuffle, and of sampling with --sglang-enable-deterministic-inference", at_least=0
    )
    over_sampling_batch_size: int | None = flag(
        None, "prompts asked for at once (default: --rollout-batch-size)", at_least=1
    )
    rollout_function_path: str = flag(
        "slime.rollout.sglang_rollout.generate_rollout",
        "hook: fn(args, rollout_id, data_source, evaluation=False)",
    )
    custom_generate_function_path: str | None = flag(
        None, "hook: async fn(args, sample, sampling_params[, evaluation]) completes one sample"
    )
    rollout_sample_hook_path: list[str] = flag(
        [], "hook (repeatable): fn(args, sample) edits a sample before its reward", repeatable=True
    )
    dynamic_sampling_filter_path: str | None = flag(None, "hook: fn(args, group) keeps or drops a group")
    buffer_filter_path: str | None = flag(None, "hook: fn(args, None, buffer, num_samples) picks buffered groups")
    rollout_sample_filter_path: str | None = flag(None, "hook: fn(args, groups) sets sample.remove_sample")
    rollout_all_samples_process_path: str | None = flag(
        None, "hook: fn(args, all_samples, data_source) sees every group, dropped ones too"
    )
    rollout_data_postprocess_path: str | None = flag(
        None, "hook: fn(args, rollout_id, rollout_data) on the trainer, after advantages"
    )
    custom_rollout_log_function_path: str | None = flag(
        None,
        "hook: fn(rollout_id, args, samples, extra_metrics, rollout_time); what it adds to extra_metrics or returns "
        "as a dict is logged too; true = no default log",
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None,
        "hook: fn(rollout_id, args, data, extra_metrics); what it adds to extra_metrics or returns "
        "as a dict is logged too; true = no default log",
        needs="eval_interval",
    )
    partial_rollout: bool = flag(
        False, "keep unfinished and surplus groups when a rollout ends and go on with them in the next"
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "do not train on tokens that were generated before the rollout that uses them", needs="partial_rollout"
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None, "host:port of SGLang servers that run already", nargs="+"
    )
    rollout_data_transport: str = flag(
        "object-store",
        "how training data reaches the trainers: Ray's object store, or NIXL (RDMA; the package nixl)",
        choices=("object-store", "nixl"),
    )
    rollout_fire_temperature: float | None = flag(
        None, "temperature of the first token of a response only (FIRE sampling); that token is not trained on"
    )
    max_turns: int | None = flag(
        None, "most turns that a multi-turn generate function lets the model write (its default: 8)", at_least=1
    )
    tool_concurrency: int = flag(
        64,
        "calls of a plain (not async) tool function of slime.rollout.multi_turn at a time, each in a thread",
        at_least=1,
        needs="custom_config_path",
    )
    max_dynamic_sampling_rounds: int = flag(
        100,
        "give up when the filter has dropped this many batches of groups in one rollout",
        at_least=1,
        needs="dynamic_sampling_filter_path",
    )
    on_sample_error: str = flag(
        "fail",
        "when generating or scoring a sample fails, or makes one that cannot be trained on (without tokens, say): end "
        "the run, take another prompt, or first try the group again",
        choices=("fail", "drop", "retry"),
    )
    async_buffer_size: int = flag(
        1, "rollouts that train_async.py may be ahead: give a correction, such as --use-rollout-logprobs", at_least=1
    )
    max_weight_staleness: int | None = flag(
        None, "weight versions (syncs) that a trained token may be old; older ones are generated again", at_least=0
    )
    use_distributed_post: bool = flag(False, "send requests through a Ray actor on every node")
    http_proxy: str | None = flag(
        None, "proxy for requests to --rm-url and --code-sandbox-url", needs=("rm_url", "code_sandbox_url")
    )


@dataclass
class RolloutBufferFlags:
    """Rollout buffer. The server of slime_plugins.rollout_buffer."""

    rollout_buffer_url: str | None = flag(None, "address of the buffer server, as http://host:8889")
    fetch_trajectory_retry_times: int = flag(
        -1,
        "empty answers in a row, half a second apart, after which a rollout fails; -1: until a request to an engine "
        "would time out",
        needs="rollout_buffer_url",
        at_least=-1,
    )
    min_batch_collection_ratio: float = flag(
        1,
        "share of --rollout-batch-size that is enough to train on when the server has nothing new",
        needs="rollout_buffer_url",
        at_most=1,
    )
    rollout_task_type: str = flag(
        "math", "the generator: its TASK_TYPE on the buffer server", needs="rollout_buffer_url"
    )
