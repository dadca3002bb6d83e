"""The flags of the public interface against the parser, both ways.

flags.tsv is the interface: name, type and default of every flag (the default as Python writes it). What differs on
purpose is listed here with its reason; anything else that differs is a bug.
"""

from __future__ import annotations

import argparse
import ast
import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from slime.config.parse import FLAG_CLASSES, build_parser
from slime.config.parser import Parser, option_name
from slime.config.sglang.engine_flags import SglangFlags

with (Path(__file__).parent / "flags.tsv").open() as file:
    CONTRACT = {row["flag"]: row for row in csv.DictReader(file, delimiter="\t")}

OTHER_DEFAULT = {
    "--rollout-batch-size": (None, "it is required; our own check says so together with everything else"),
    "--distributed-backend": (None, "it follows from --accelerator: nccl, on CPU gloo"),
}
# Flags of our own, beside those of the interface.
OURS = {
    "--allow-image-urls": "images",
    "--image-max-pixels": "images",
    "--image-min-pixels": "images",
    "--accelerator": "one code path on GPUs and without",
    "--async-buffer-size": "how far train_async.py may be ahead",
    "--checkpoint-contents": "what a checkpoint holds",
    "--code-sandbox-concurrency": "code rewards",
    "--code-sandbox-url": "code rewards",
    "--completion": "a question",
    "--strict-flags": "errors for what is a warning",
    "--attn-implementation": "FSDP2",
    "--fsdp-replicate-size": "FSDP2",
    "--fsdp-cpu-offload": "FSDP2",
    "--disable-fsdp-reshard-after-forward": "FSDP2",
    "--fsdp-forward-prefetch": "FSDP2",
    "--fsdp-compile": "FSDP2",
    "--fsdp-min-group-params": "FSDP2",
    "--freeze-vision-tower": "image training",
    "--max-image-tokens-per-gpu": "image training",
    "--rm-batch-size": "reward services that take several samples in a request",
    "--rm-concurrency": "how many requests a reward service has at a time",
    "--require-deepep": "an error for what is a warning",
    "--dashboard-host": "pages over the run",
    "--prometheus-port": "one scrape target for the whole run",
    "--prometheus-host": "one scrape target for the whole run",
    "--dashboard-port": "pages over the run",
    "--spec-auto-off": "drafts that lose are stopped",
    "--spec-break-even-length": "drafts that lose are seen",
    "--elastic-dp": "fault tolerance",
    "--max-restarts": "fault tolerance",
    "--disable-api-key-per-run": "engines and routers ask for a key",
    "--drop-last-rollouts": "upstream's silent dropping, by request",
    "--deterministic": "a run that can be repeated bit for bit",
    "--dry-run": "a question",
    "--dry-run-json": "a question",
    "--eval-only": "evaluation without training data",
    "--explain": "a question",
    "--filter-prompts-workers": "parallel length filter",
    "--fresh-output": "an earlier run is moved aside",
    "--agent-harness": "which agent slime.agent.generate runs",
    "--alarms-config": "thresholds of alarms",
    "--keep-rollouts": "samples of rollouts, kept to be looked at",
    "--rollout-record-fraction": "samples of rollouts, kept to be looked at",
    "--keep-checkpoints": "old checkpoints are deleted",
    "--kl-ctrl": "adaptive KL",
    "--kl-horizon": "adaptive KL",
    "--kl-target": "adaptive KL",
    "--list-unsupported": "a question",
    "--log-eval-samples": "samples of an evaluation",
    "--lora-alpha": "LoRA",
    **dict.fromkeys(
        (
            "--lora-adapter-path",
            "--lora-dropout",
            "--lora-exclude-modules",
            "--lora-init",
            "--lora-policies",
            "--lora-use-rslora",
        ),
        "LoRA",
    ),
    "--lora-rank": "LoRA",
    "--lora-serve": "LoRA",
    "--lora-target-modules": "LoRA",
    "--loss-agg-mode": "how token losses become one number",
    "--ignore-plan": "a run that does not fit is refused",
    "--max-dynamic-sampling-rounds": "a filter that rejects everything is noticed",
    "--max-group-retries": "crashed groups",
    "--max-turns": "multi-turn",
    "--sandbox-unsafe": "sandboxes where the kernel refuses a part",
    "--tool-concurrency": "multi-turn",
    "--agent-history": "agents",
    "--agent-gateway-host": "agents",
    "--agent-gateway-port": "agents",
    "--max-weight-staleness": "asynchronous training",
    "--model-args-from-hf": "model flags from the HF config",
    "--on-sample-error": "what an exception in a hook does",
    "--on-untrusted-reward": "what a failed sandbox or grader does",
    "--on-stall": "what a stall does",
    "--output-dir": "where metrics and logs go",
    "--stream-prompts": "prompts larger than memory",
    "--stream-shuffle-rows": "prompts larger than memory",
    **dict.fromkeys(
        (
            "--advantage-range-max",
            "--advantage-range-min",
            "--curriculum-lookahead",
            "--curriculum-pass-reward",
            "--curriculum-retire-after",
            "--curriculum-target",
        ),
        "curricula",
    ),
    "--process-reward-path": "rewards of tokens and turns",
    "--overlong-buffer-len": "soft overlong punishment",
    "--overlong-penalty-factor": "soft overlong punishment",
    "--max-engine-restarts-per-hour": "fault tolerance",
    "--elastic-rollout": "fault tolerance",
    "--peer-checkpoint-interval": "fault tolerance",
    "--pf-ppo-reweight": "policy filtration",
    "--pf-ppo-weight-pow": "policy filtration",
    "--plan-device": "a question",
    "--ppo-epochs": "passes over one rollout",
    "--profile": "Megatron's name",
    "--profile-ranks": "which ranks are profiled",
    "--profile-step-end": "Megatron's name",
    "--profile-step-start": "Megatron's name",
    "--prompt-truncation": "over-long prompts",
    "--ray-timeline-path": "Ray's own trace",
    "--recompute-old-log-probs": "always a pass of its own",
    "--resume": "which checkpoint to go on from",
    "--reward-model-num-gpus": "a served reward model",
    "--reward-model-path": "a served reward model",
    "--rollout-fire-temperature": "FIRE sampling",
    "--rollout-ignore-eos": "sampling",
    "--rollout-min-new-tokens": "sampling",
    "--shuffle-mini-batches": "passes over one rollout",
    "--skip-malformed-data": "upstream's skipping, by request",
    "--stall-timeout": "when a stall is noticed",
    "--tune": "a plan that looks for better flags",
    "--compile-cache-dir": "a start that compiles nothing",
    "--tracker": "where metrics go",
    "--trust-remote-code": "off by default",
    "--update-weights-in-flight": "weights change while requests are in flight",
    "--use-pytorch-profiler": "Megatron's name",
    "--verify-checkpoint": "a damaged checkpoint is found out",
}


@pytest.fixture(scope="module")
def parser() -> Parser:
    return build_parser()


def our_flags() -> set[str]:
    return {option_name(field) for flags in (*FLAG_CLASSES, SglangFlags) for field in dataclasses.fields(flags)}


def type_of(action: argparse.Action) -> str:
    """The type of an option in the words of flags.tsv."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool optional"
    if action.nargs == 0:
        return "flag (store_false)" if action.default is True else "flag"
    kind = getattr(action.type, "__name__", "str")
    if kind.startswith("json"):
        return "json.loads"
    return f"{kind} nargs={action.nargs}" if action.nargs else kind


def default_of(text: str) -> Any:
    """The default in a row of flags.tsv, evaluated; arithmetic such as 512 * 1024 ** 2 is multiplied out."""
    if power := re.fullmatch(r"(\d+) \* (\d+) \*\* (\d+)", text):
        factor, base, exponent = map(int, power.groups())
        return factor * base**exponent
    return ast.literal_eval(text)


WIDER = {"--prompt-data": "str nargs=+"}
"""Flags that take more than upstream's: several files are a mixture, and one is still a text."""


@pytest.mark.parametrize("flag", CONTRACT)
def test_every_flag_of_the_interface_is_there_with_its_type_and_default(parser: Parser, flag: str) -> None:
    row, action = CONTRACT[flag], parser.options()[flag]
    kind, _, choices = row["type"].partition(" in ")
    if choices:
        wanted = ast.literal_eval(choices.split(" nargs")[0])
        assert set(wanted) <= set(action.choices or ()), "a value of the interface is missing"
        kind += choices.partition("]")[2]
    if kind.strip().startswith("nargs"):
        kind = "str " + kind.strip()
    if kind == "str, repeatable":
        assert isinstance(action, argparse._AppendAction)
        kind = "str"
    kind = WIDER.get(flag, kind)
    assert type_of(action) == kind.strip().replace("_positive_int", "int")
    if row["default"] != "REQUIRED" and flag not in OTHER_DEFAULT:
        wanted = default_of(row["default"])
        is_json = kind == "json.loads" and wanted is not None
        assert action.default == (json.loads(wanted) if is_json else wanted)


def test_every_other_flag_of_ours_is_listed_with_its_reason() -> None:
    assert our_flags() - set(CONTRACT) == set(OURS)
    assert all(OURS.values())


def test_differences_are_only_listed_where_they_exist(parser: Parser) -> None:
    for flag, (default, _) in OTHER_DEFAULT.items():
        assert parser.options()[flag].default == default != CONTRACT[flag]["default"]
