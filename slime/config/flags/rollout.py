"""Flags of the rollout: prompts and batches, generation and its hooks, evaluation, weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.parser import flag
from slime.weights.transports import TRANSPORTS


@dataclass
class DataFlags:
    """Data and batches."""

    prompt_data: str | list[str] | None = flag(
        None,
        "prompts: .jsonl or .parquet, optionally path@[a:b] for a slice; several files, or a YAML file with weights, "
        "are a mixture",
        nargs="+",
    )
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
    max_image_tokens_per_gpu: int | None = flag(
        None,
        "tokens of images in a micro-batch, at most: the part of the model that sees images keeps activations for "
        "them, too (default: --max-tokens-per-gpu alone bounds them)",
        needs="multimodal_keys",
        at_least=1,
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
        "JSON: modality (image) -> field of a data row that holds the images of its prompt",
        is_json=True,
    )
    image_min_pixels: int | None = flag(
        None, "images are scaled up to so many pixels (default: as the processor does)", at_least=1
    )
    image_max_pixels: int | None = flag(
        None, "images are scaled down to so many pixels, which bounds their tokens", at_least=1
    )
    allow_image_urls: bool = flag(False, "fetch images that a data row names by an http address")
    balance_by_flops: bool = flag(
        False,
        "form micro-batches of equal work (FLOPs) instead of tokens: a batch of short samples may then have more than "
        "--max-tokens-per-gpu; implies --balance-data",
        needs="use_dynamic_batch_size",
    )
    balance_data: bool = flag(False, "give each data-parallel rank about the same work")


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
    stream_prompts: bool = flag(
        False, "read --prompt-data as streams, as directories and URLs always are: files larger than memory"
    )
    stream_shuffle_rows: int = flag(
        16384, "rows of a stream that --rollout-shuffle permutes together and memory holds", at_least=1
    )
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
    advantage_range_min: float = flag(
        1e-6,
        "least size of the largest advantage of a group that the filter check_advantage_range keeps",
        needs="dynamic_sampling_filter_path",
        at_least=0,
    )
    advantage_range_max: float | None = flag(
        None, "largest size that it keeps (default: any)", needs="dynamic_sampling_filter_path", at_least=0
    )
    curriculum_target: float = flag(0.5, "pass rate to which CurriculumDataSource steers", at_least=0, at_most=1)
    curriculum_lookahead: int = flag(
        4, "prompts of the epoch of which it takes the best; the others come again in the next", at_least=1
    )
    curriculum_retire_after: int = flag(
        2, "visits in a row at which a whole group passes until it retires the prompt", at_least=1
    )
    curriculum_pass_reward: float = flag(1.0, "reward from which a response passes")
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
    agent_history: str = flag(
        "append",
        "prompts of an agent's later turns: the session's own tokens and what is new, or the template's rendering of "
        "the whole conversation",
        choices=("append", "render"),
        needs="custom_generate_function_path",
    )
    agent_gateway_host: str = flag(
        "127.0.0.1",
        "address that the gateway for agents binds; sandboxes on other hosts need one that they reach",
        needs="custom_generate_function_path",
    )
    agent_gateway_port: int = flag(
        0, "its port; 0 takes a free one", at_least=0, at_most=65535, needs="custom_generate_function_path"
    )
    agent_harness: str | None = flag(
        None,
        "agent of slime.agent.generate, before the custom config's: claude_code, codex, mini_swe_agent, opencode, "
        "scripted, or module:function of a program of your own",
        needs="custom_generate_function_path",
    )
    sandbox_unsafe: bool = flag(
        False,
        "local sandboxes of slime.agent.generate do without the protections that this host's kernel refuses",
        needs="custom_generate_function_path",
    )
    max_dynamic_sampling_rounds: int = flag(
        100,
        "give up when the filter, or --on-untrusted-reward drop, has dropped this many batches of groups in a rollout",
        at_least=1,
        needs=("dynamic_sampling_filter_path", "on_untrusted_reward=drop"),
    )
    on_sample_error: str = flag(
        "fail",
        "when generating or scoring a sample fails, or makes one that cannot be trained on (without tokens, say): end "
        "the run, take another prompt, or first try the group again",
        choices=("fail", "drop", "retry"),
    )
    on_untrusted_reward: str = flag(
        "mask",
        "what becomes of a sample whose reward_is_trusted is False (its sandbox or its grader failed): it is not "
        "trained on and counts in no baseline, its group is replaced by another prompt, it is generated again (then "
        "masked), or it is trained on all the same",
        choices=("mask", "drop", "retry", "keep"),
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


_DATA = ("eval_prompt_data", "eval_config")


@dataclass
class EvalFlags:
    """Evaluation."""

    eval_interval: int | None = flag(
        None, "evaluate before training, every N rollouts, at epoch ends and after the last rollout", at_least=1
    )
    eval_only: bool = flag(
        False, "evaluate the loaded weights and end; needs no training data, and what only training reads is ignored"
    )
    eval_prompt_data: list[str] | None = flag(None, "NAME PATH pairs", nargs="+", needs="eval_interval")
    eval_config: str | None = flag(None, "YAML or JSON file with the evaluation datasets", needs="eval_interval")
    eval_function_path: str | None = flag(
        None, "hook: as --rollout-function-path (default), called with evaluation=True", needs=_DATA
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout", needs="eval_interval")
    eval_input_key: str | None = flag(None, "as --input-key (default), for evaluation", needs=_DATA)
    eval_label_key: str | None = flag(None, "as --label-key (default), for evaluation", needs=_DATA)
    eval_tool_key: str | None = flag(None, "as --tool-key (default), for evaluation", needs=_DATA)
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt", needs=_DATA, at_least=1)
    eval_temperature: float | None = flag(
        None, "as --rollout-temperature (default), for evaluation; 0 = greedy", needs=_DATA, at_least=0
    )
    eval_top_p: float | None = flag(None, "as --rollout-top-p (default), for evaluation", needs=_DATA)
    eval_top_k: int | None = flag(None, "as --rollout-top-k (default), for evaluation", needs=_DATA)
    eval_max_response_len: int | None = flag(
        None, "as --rollout-max-response-len (default), for evaluation", needs=_DATA, at_least=1
    )
    eval_max_prompt_len: int | None = flag(
        None, "most tokens of an evaluation prompt; see --prompt-truncation", needs=_DATA, at_least=1
    )
    eval_min_new_tokens: int | None = flag(None, "fewest tokens of an evaluation response", needs=_DATA, at_least=0)
    eval_max_context_len: int | None = flag(
        None, "as --rollout-max-context-len (default), for evaluation", needs=_DATA, at_least=1
    )


@dataclass
class WeightSyncFlags:
    """Weight sync."""

    update_weight_buffer_size: int = flag(512 * 1024**2, "bytes of one bucket of weights", at_least=1)
    update_weights_interval: int = flag(
        1, "train_async.py: sync the weights every N rollouts (train.py: every rollout, more is refused)", at_least=1
    )
    update_weights_in_flight: bool | None = flag(
        None,
        "requests stay in flight during a sync: engines put them aside and run without prefix cache (default: only "
        "with the fully async rollout)",
    )
    update_weight_transport: str = flag(
        "nccl",
        "how weights travel: nccl = the device's collective (NCCL, on CPU gloo), with --colocate through memory; disk "
        "= as files in --update-weight-disk-dir",
        choices=tuple(TRANSPORTS),
    )
    update_weight_mode: str = flag(
        "full",
        "full = every weight in each sync, delta = the changed bytes (disk only); the first sync is always full",
        choices=("full", "delta"),
    )
    update_weight_disk_dir: str | None = flag(
        None,
        "directory that trainer and engines share, for weight_v000001 and so on; with --update-weight-transport nccl "
        "or --colocate it is used only where weights do not come through otherwise",
    )
    update_weight_disk_keep_files: bool = flag(
        False,
        "keep each version's directory after the engines have read it",
        needs="update_weight_transport.is_over_files",
    )
    update_weight_delta_encoding: str = flag(
        "xor",
        "encoding of changed bytes: xor of old and new, or positions and new values",
        choices=("xor", "overwrite"),
        needs="update_weight_mode=delta",
    )
    update_weight_delta_checksum: str = flag(
        "xxh3-128",
        "checksum of each tensor in a delta",
        choices=("xxh3-128", "blake3", "adler32"),
        needs="update_weight_mode=delta",
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "directory on each engine host for its copy of the weights, which deltas are applied to and engines load from",
        needs="update_weight_transport.is_over_files",
    )
    custom_update_weight_post_write_path: str | None = flag(
        None,
        "hook: fn(args, version_dir, rollout_engines), on every rank, after the files are written and before engines "
        "read them",
        needs="update_weight_transport.is_over_files",
    )
    check_weight_update_equal: bool = flag(
        False,
        "engines keep a copy of the weights they start with and overwrite them; the first sync must restore every bit",
    )
    release_train: bool = flag(
        False,
        "train.py: end the trainers while engines generate, and start them again from --save for each train step",
    )
