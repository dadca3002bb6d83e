"""The command line of the teacher server: its own flags and Megatron's.

    python -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIR [--load CHECKPOINT] [flags]

It opens no weights and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime.config.args import Args
from slime.utils.errors import UsageError, refuse

TRAINER_DEFAULTS: dict[str, Any] = {
    "actor_num_nodes": 1,
    "distributed_timeout_minutes": 10,
    "dry_run": False,
    "loss_type": "policy_loss",
    "lr": 0.0,
    "megatron_deepgemm_forward_layers": None,
    "megatron_deepgemm_moe_forward_layers": None,
    "multimodal_keys": None,
    "offload_train": False,
    "qwen_gdn_backend": "fla",
    "ref_ckpt_step": None,
    "ref_load": None,
    "seed": 1234,
    "train_env_vars": {},
    "trust_remote_code": False,
}
"""Attributes that the trainer's own flags give, with the values that mean nothing here."""


class ServerArgs(Args):
    """The flags of the server, beside Megatron's."""

    megatron_server_max_length: int
    megatron_server_update_timeout_s: float
    megatron_server_warmup: bool
    teacher_host: str
    teacher_label_reduction_chunk_size: int
    teacher_max_tokens_per_batch: int
    teacher_max_waiting_requests: int
    teacher_port: int
    teacher_request_timeout_s: float
    teacher_sample_reduction_chunk_size: int
    teacher_warmup_port: int
    teacher_warmup_timeout_s: int


def at_least(lowest: float, kind: type) -> Callable[[str], Any]:
    """A type for argparse: a number of `kind` that is at least `lowest` (above 0 where that is 0 and not whole)."""

    def parse(text: str) -> Any:
        value = kind(text)
        if value < lowest or (kind is float and value <= lowest):
            raise argparse.ArgumentTypeError(f"{text} is too small")
        return value

    parse.__name__ = f"{kind.__name__} value"
    return parse


_WHOLE, _POSITIVE = at_least(1, int), at_least(0, float)
MODEL_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--hf-checkpoint", {"required": True, "help": "HF directory: config, and weights unless --load has them"}),
    ("--load", {"help": "weights: Megatron checkpoint root or HF directory (default: --hf-checkpoint)"}),
    ("--model-args-from-hf", {"action": "store_true", "help": "derive the model flags from the HF config"}),
    ("--model-name", {"help": "family of the weights' names (default: from --hf-checkpoint)"}),
    ("--custom-model-provider-path", {"help": "function that builds the Megatron model"}),
    ("--accelerator", {"default": "auto", "help": "auto, cuda or cpu"}),
)
SERVER_FLAGS: tuple[tuple[str, Any, Any, str], ...] = (
    ("--teacher-host", str, "127.0.0.1", "address to listen at (default: this machine only)"),
    ("--teacher-port", _WHOLE, "$TEACHER_PORT or 7999", "port to listen at"),
    (
        "--teacher-warmup-port",
        _WHOLE,
        "$TEACHER_WARMUP_PORT",
        "port of this machine that the warm-up request goes to (default: $TEACHER_WARMUP_PORT or --teacher-port)",
    ),
    ("--teacher-warmup-timeout-s", _WHOLE, "$TEACHER_WARMUP_TIMEOUT_S or 3000", "seconds that it may take"),
    (
        "--teacher-sample-reduction-chunk-size",
        _WHOLE,
        4096,
        "logit rows made float32 at a time for top and sampled tokens",
    ),
    (
        "--teacher-label-reduction-chunk-size",
        _WHOLE,
        4096,
        "logit rows made float32 at a time for input tokens and labels",
    ),
    (
        "--megatron-server-max-length",
        at_least(0, int),
        "$MEGATRON_SERVER_MAX_LENGTH or 0",
        "most tokens of a sequence; 0 = any number",
    ),
    (
        "--megatron-server-update-timeout-s",
        _POSITIVE,
        "$MEGATRON_SERVER_UPDATE_TIMEOUT_S or 3600",
        "seconds that /update_weights_from_disk may take",
    ),
    (
        "--teacher-max-tokens-per-batch",
        _WHOLE,
        16384,
        "tokens of the requests that are scored together; one request may have more",
    ),
    ("--teacher-max-waiting-requests", _WHOLE, 4096, "requests that may wait; further ones get status 503"),
    ("--teacher-request-timeout-s", _POSITIVE, "600", "seconds until a request gets status 504"),
)
"""(flag, type, default, help); "$NAME or value" is read from the environment."""


def make_parser() -> argparse.ArgumentParser:
    """The command line: ours, then all of Megatron's flags."""
    from slime.config.megatron.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(
        prog="python -m slime.backends.megatron_utils.server.megatron_server",
        usage="%(prog)s --hf-checkpoint DIR [--load CHECKPOINT] [flags]",
        description="Serve a Megatron model that scores sequences: the teacher of on-policy distillation.",
        epilog="Under torchrun, its processes are the tensor-parallel ranks of one teacher.",
    )
    model, server = parser.add_argument_group("model"), parser.add_argument_group("server")
    for flag, settings in MODEL_FLAGS:
        model.add_argument(flag, **settings)
    for flag, kind, default, text in SERVER_FLAGS:
        shown = text if "(default" in text else f"{text} (default: {default})"
        name, _, value = str(default).removeprefix("$").partition(" or ")
        if str(default).startswith("$"):
            default = os.environ.get(name, value or None)
        server.add_argument(flag, type=kind, default=default, help=shown)
    server.add_argument(
        "--megatron-server-warmup",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get("MEGATRON_SERVER_WARMUP", "1").lower() not in ("0", "false", "no", ""),
        help="score a short sequence before /healthz says that the server is there",
    )
    return add_megatron_arguments(parser)


def parse_server_args(argv: Sequence[str] | None, world_size: int) -> ServerArgs:
    """Parse, derive and check.

    Args:
        argv: the command line; None takes the process's.
        world_size: processes of torchrun, which are tensor-parallel ranks.

    Raises:
        UsageError: flags that disagree with each other, with the HF config or with what is at their paths.
    """
    from slime.checkpoints.paths import classify_checkpoint
    from slime.config.megatron.arguments import (
        kernel_problems,
        megatron_problems,
        model_args_from_hf,
        model_differences,
        set_default_megatron_args,
    )
    from slime.utils import accelerator

    args = make_parser().parse_args(argv, namespace=ServerArgs())
    vars(args).update(TRAINER_DEFAULTS, actor_num_gpus_per_node=world_size)
    args.accelerator = accelerator.resolve(args.accelerator)
    args.teacher_warmup_port = args.teacher_warmup_port or args.teacher_port
    config_file = Path(args.hf_checkpoint) / "config.json"
    if not config_file.is_file():
        raise UsageError(f"--hf-checkpoint {args.hf_checkpoint} is no HF checkpoint: it has no config.json.")
    if args.load is not None and classify_checkpoint(args.load) is None:
        raise UsageError(f"--load {args.load} is no checkpoint: neither a Megatron root nor an HF directory.")
    hf_config = json.loads(config_file.read_text())
    if args.model_args_from_hf or args.num_layers is None:
        vars(args).update(model_args_from_hf(hf_config))
    if world_size > 1 and args.tensor_model_parallel_size == 1:
        args.tensor_model_parallel_size = world_size
    problems = [*megatron_problems(args, hf_config).all(), *kernel_problems(args, hf_config).all()]
    if args.tensor_model_parallel_size != world_size:
        problems.append(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with {world_size} processes: a server is "
            "one copy of the model, split over tensor-parallel ranks; start one server per copy."
        )
    refuse(problems)
    set_default_megatron_args(args)
    refuse(model_differences(args, "--load", args.load, args.ckpt_step) if args.load is not None else ())
    return args
