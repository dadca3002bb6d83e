"""Megatron options of training that only Megatron-LM's argument parser has.

Precision, optimizer, schedule, checkpoints, logs, data. Declarations only, in the form of parser_flags.py.
"""

from __future__ import annotations

import argparse
from typing import Any

from slime.backends.megatron_utils.parser_flags import Row


class RecomputeActivations(argparse.Action):
    """Sets --recompute-granularity selective, unless that is given, and remembers so for check_recompute."""

    def __init__(self, option_strings: list[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **{**kwargs, "nargs": 0, "default": False})

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        """Set both attributes."""
        setattr(namespace, self.dest, True)
        if vars(namespace).get("recompute_granularity") is None:
            namespace.recompute_granularity = "selective"


PRECISION: tuple[Row, ...] = (
    Row("--bf16", "train in bfloat16 (the default on CUDA)"),
    Row("--fp16", "train in float16 (CUDA)"),
    Row("--fp16-lm-cross-entropy", "cross entropy in 16 bit"),
    Row("--grad-reduce-in-bf16", "keep and reduce gradients in bfloat16 (default with --bf16: fp32)"),
    Row(
        "--attention-backend",
        "flash: torch's varlen kernel (CUDA, 16 bit); unfused: torch's SDPA; auto: flash where it runs",
        str,
        "auto",
        choices=("auto", "flash", "unfused", "fused", "local"),
    ),
    Row("--use-flash-attn", "Megatron's older name for --attention-backend flash"),
    Row("--attention-softmax-in-fp32", "softmax of the attention in fp32"),
    Row(
        "--no-check-for-nan-in-loss-and-grad",
        "go on when a gradient is not finite",
        default=True,
        dest="check_for_nan_in_grad",
    ),
    Row("--fp8-param-gather", "keep and gather parameters in fp8"),
    Row("--main-grads-dtype", "type of the optimizer's gradients", str, "fp32", choices=("fp32", "bf16")),
    Row("--main-params-dtype", "type of the optimizer's weights", str, "fp32", choices=("fp32", "fp16")),
    Row("--exp-avg-dtype", "type of Adam's first moment", str, "fp32", choices=("fp32", "fp16", "bf16", "fp8")),
    Row("--exp-avg-sq-dtype", "type of Adam's second moment", str, "fp32", choices=("fp32", "fp16", "bf16", "fp8")),
)

OPTIMIZER: tuple[Row, ...] = (
    Row(
        "--optimizer",
        "Adam with decoupled weight decay by default",
        str,
        "adam",
        choices=("adam", "sgd", "muon", "dist_muon"),
    ),
    Row("--start-weight-decay", "weight decay at the first step (default: --weight-decay)", float),
    Row("--end-weight-decay", "weight decay at the last step (default: --weight-decay)", float),
    Row("--weight-decay-incr-style", "between the two", str, "constant", choices=("constant", "linear", "cosine")),
    Row(
        "--no-weight-decay-cond-type",
        "which parameters have no weight decay",
        str,
        choices=("apply_wd_to_qk_layernorm",),
    ),
    Row(
        "--lr-decay-style",
        "after warm-up (Megatron-LM's own default is linear)",
        str,
        "constant",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    ),
    Row("--lr-decay-iters", "train steps until --min-lr is reached (default: the whole run)", int),
    Row("--lr-decay-samples", "samples until then", int),
    Row(
        "--lr-wsd-decay-style",
        "with --lr-decay-style WSD: the decay at the end",
        str,
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    ),
    Row("--lr-wsd-decay-iters", "with --lr-decay-style WSD: train steps of that decay", int),
    Row("--lr-wsd-decay-samples", "samples of that decay", int),
    Row("--lr-warmup-iters", "train steps of linear warm-up", int, 0),
    Row("--lr-warmup-samples", "samples of it", int, 0),
    Row("--lr-warmup-fraction", "warm-up as a share of the decay steps, instead of a number", float),
    Row("--lr-warmup-init", "learning rate at which warm-up starts", float, 0.0),
    Row("--warmup", "Megatron's older warm-up, in percent", int),
    Row(
        "--override-opt_param-scheduler --override-opt-param-scheduler",
        "on resume take the flags' schedule, not the checkpoint's",
        dest="override_opt_param_scheduler",
    ),
    Row(
        "--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler",
        "on resume take the checkpoint's schedule",
        dest="use_checkpoint_opt_param_scheduler",
    ),
    Row("--check-for-spiky-loss", "say so when the loss jumps: train/spiky_loss, and a line in the trainer's log"),
)

TRAINING: tuple[Row, ...] = (
    Row("--recompute-activations", "the same as --recompute-granularity selective", action=RecomputeActivations),
    Row("--train-iters", "train steps of the run", int),
    Row("--train-samples", "samples of the run", int),
    Row("--skip-train", "evaluate only"),
    Row("--batch-size", "Megatron's older name of --micro-batch-size", int),
    Row("--rampup-batch-size", "start with smaller batches", int, nargs="*"),
    Row("--decrease-batch-size-if-needed", "make the batch divide"),
    Row("--data-parallel-random-init", "other weights on each data-parallel rank"),
    Row("--exit-interval", "end after so many train steps", int),
    Row("--exit-duration-in-mins", "after so many minutes finish the rollout, save and end", int),
    Row("--exit-signal-handler", "on --exit-signal finish the rollout, save and end with status 0"),
    Row(
        "--exit-signal",
        "signal of --exit-signal-handler",
        str,
        "SIGTERM",
        choices=("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"),
    ),
    Row("--train-sync-interval", "train steps between synchronisations with the GPU", int),
    Row("--check-weight-hash-across-dp-replicas-interval", "train steps between checks of equal weights", int),
    Row(
        "--empty-unused-memory-level",
        "empty torch's cache: 1 after, 2 also before each step",
        int,
        0,
        choices=(0, 1, 2),
    ),
    Row("--manual-gc", "run Python's garbage collector at fixed steps"),
    Row("--manual-gc-interval", "steps between two such runs", int, 0),
    Row("--no-manual-gc-eval", "not around evaluation", default=True, dest="manual_gc_eval"),
    Row("--use-mcore-models", "models of megatron-core"),
    Row("--use-legacy-models", "models older than megatron-core"),
    Row("--eval-iters", "batches of an evaluation", int, 100),
    Row("--full-validation", "evaluate on the whole set"),
    Row("--yaml-cfg", "file with all settings", str),
    Row(
        "--distribute-checkpointed-activations",
        "Megatron's older name of --distribute-saved-activations",
        dest="distribute_saved_activations",
    ),
)

CHECKPOINTS: tuple[Row, ...] = (
    Row("--ckpt-step", "load this iteration instead of the newest", int),
    Row("--no-load-optim", "do not load the optimizer's state"),
    Row("--no-load-rng", "do not load the random states"),
    Row("--no-save-rng", "leave the random states out of checkpoints"),
    Row("--finetune", "load weights only and start at iteration 0"),
    Row("--pretrained-checkpoint", "weights to start from where --load has none", str),
    Row(
        "--save-retain-interval",
        "keep the checkpoint of every Nth rollout, and of others only the newest (--keep-checkpoints: how many)",
        int,
    ),
    Row("--exit-on-missing-checkpoint", "end when --load has no checkpoint"),
    Row("--use-checkpoint-args", "take the model's flags from the checkpoint"),
    Row("--use-mp-args-from-checkpoint-args", "take the parallel sizes from the checkpoint"),
    Row(
        "--no-use-tokenizer-model-from-checkpoint-args",
        "not the tokenizer",
        default=True,
        dest="use_tokenizer_model_from_checkpoint_args",
    ),
    Row("--load-main-params-from-ckpt", "load the optimizer's fp32 weights"),
    Row("--load-model-opt-format", "load ModelOpt's format"),
    Row(
        "--ckpt-format",
        "format of checkpoints",
        str,
        "torch_dist",
        choices=("torch_dist", "torch", "zarr", "torch_dcp", "fsdp_dtensor"),
    ),
    Row("--dist-ckpt-format", "Megatron's older name of --ckpt-format", str, choices=("torch_dist", "zarr")),
    Row("--use-dist-ckpt", "distributed checkpoints"),
    Row("--auto-detect-ckpt-format", "find out the format of --load"),
    Row("--ckpt-convert-format", "convert to this format and end", str, choices=("torch", "torch_dist", "zarr")),
    Row("--ckpt-convert-save", "directory of the converted checkpoint", str),
    Row("--ckpt-convert-update-legacy-dist-opt-format", "update an older format"),
    Row(
        "--dist-ckpt-strictness",
        "what to do about unexpected keys",
        str,
        "assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    ),
    Row("--dist-ckpt-save-pre-mcore-014", "write the format of before 0.14"),
    Row("--dist-ckpt-optim-fully-reshardable", "optimizer state that any layout can load"),
    Row("--distrib-optim-fully-reshardable-mem-efficient", "with less memory"),
    Row(
        "--ckpt-fully-parallel-save",
        "all ranks write (Megatron's older name of its default)",
        dest="ckpt_fully_parallel_save_deprecated",
    ),
    Row(
        "--no-ckpt-fully-parallel-save", "one data-parallel rank writes", default=True, dest="ckpt_fully_parallel_save"
    ),
    Row("--ckpt-fully-parallel-load", "all ranks read"),
    Row("--ckpt-assume-constant-structure", "keep the plan of the first checkpoint"),
    Row("--use-persistent-ckpt-worker", "one process writes all checkpoints of --async-save"),
    Row("--replication", "keep checkpoints of other ranks in memory"),
    Row("--replication-jump", "distance of those ranks", int),
    Row("--replication-factor", "copies", int, 2),
    Row("--non-persistent-save-interval", "train steps between checkpoints that are replaced", int),
    Row("--non-persistent-ckpt-type", "where those lie", str, choices=("global", "local", "in_memory")),
    Row("--non-persistent-global-ckpt-dir", "their directory", str),
    Row("--non-persistent-local-ckpt-dir", "their directory on each node", str),
    Row(
        "--non-persistent-local-ckpt-algo",
        "how they are written",
        str,
        "fully_parallel",
        choices=("fully_parallel", "atomic"),
    ),
)

LOGS: tuple[Row, ...] = (
    Row("--log-params-norm", "log the norm of the weights"),
    Row("--log-throughput", "log FLOPs"),
    Row("--log-progress", "write progress.txt"),
    Row("--log-energy", "log the energy used"),
    Row("--log-interval", "train steps between two lines", int, 100),
    Row("--log-memory-interval", "train steps between reports of memory", int),
    Row("--log-device-memory-used", "log memory of the whole device"),
    Row("--log-straggler", "look for slow ranks"),
    Row("--disable-straggler-on-startup", "not from the start"),
    Row("--straggler-ctrlr-port", "port of that", int, 65535),
    Row("--straggler-minmax-count", "ranks to name", int, 1),
    Row("--logging-level", "log level", int),
    Row("--timing-log-level", "which parts are timed", int, 0, choices=(0, 1, 2)),
    Row("--timing-log-option", "what of the times is shown", str, "minmax", choices=("max", "minmax", "all")),
    Row("--tensorboard-dir", "directory of TensorBoard", str),
    Row("--tensorboard-log-interval", "train steps between two points", int, 1),
    Row("--tensorboard-queue-size", "points that wait", int, 1000),
    Row("--log-timers-to-tensorboard", "times to TensorBoard"),
    Row("--log-batch-size-to-tensorboard", "batch size to TensorBoard"),
    Row("--log-learning-rate-to-tensorboard", "learning rate to TensorBoard", dest="log_learning_rate_to_tensorboard"),
    Row(
        "--no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard",
        "not the learning rate",
        default=True,
        dest="log_no_learning_rate_to_tensorboard",
    ),
    Row(
        "--no-log-loss-scale-to-tensorboard", "not the loss scale", default=True, dest="log_loss_scale_to_tensorboard"
    ),
    Row("--log-validation-ppl-to-tensorboard", "perplexity to TensorBoard"),
    Row("--log-memory-to-tensorboard", "memory to TensorBoard"),
    Row("--log-world-size-to-tensorboard", "world size to TensorBoard"),
    Row("--wandb-exp-name", "name of a W&B run", str, ""),
    Row("--wandb-entity", "team of a W&B run", str, ""),
    Row("--wandb-save-dir", "directory of W&B", str, ""),
    Row("--memory-snapshot-path", "file in --memory-snapshot-dir, after rank<r>_", str, "snapshot.pickle"),
)

DATA: tuple[Row, ...] = (
    Row("--data-path", "Megatron's tokenised data", str, nargs="*"),
    Row("--train-data-path", "the same, for training", str, nargs="*"),
    Row("--valid-data-path", "the same, for validation", str, nargs="*"),
    Row("--test-data-path", "the same, for tests", str, nargs="*"),
    Row("--data-cache-path", "directory of their index", str),
    Row("--mock-data", "made-up data"),
    Row("--split", "shares of train, validation and test", str),
    Row("--num-workers", "processes that load data", int, 2),
    Row("--dataloader-type", "how data are read", str, choices=("single", "cyclic", "external")),
    Row("--no-mmap-bin-files", "read instead of mapping", default=True, dest="mmap_bin_files"),
    Row("--reset-position-ids", "positions start again after each document"),
    Row("--reset-attention-mask", "documents do not see each other"),
    Row("--eod-mask-loss", "no loss on end-of-document tokens"),
    Row(
        "--no-create-attention-mask-in-dataloader",
        "no mask from the loader",
        default=True,
        dest="create_attention_mask_in_dataloader",
    ),
    Row("--tokenizer-type", "kind of tokenizer (default: HuggingFaceTokenizer)", str),
    Row("--tokenizer-model", "tokenizer (default: --hf-checkpoint)", str),
    Row("--vocab-file", "vocabulary file", str),
    Row("--merge-file", "file of BPE merges", str),
)

TRAINING_GROUPS = {
    "precision and attention": PRECISION,
    "optimizer and schedule": OPTIMIZER,
    "training": TRAINING,
    "checkpoints": CHECKPOINTS,
    "logs and profiles": LOGS,
    "data and tokenizer": DATA,
}
