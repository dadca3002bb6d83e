"""Hooks as a user would write them; loaded by path in the integration tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import torch

from slime.backends.sglang_utils.server_control import list_workers_sync
from slime.utils.http_utils import post_sync

PERTURBATION = 0.5
BEFORE_LOG_PROBS_OF_ROLLOUT = 1
BEFORE_TRAIN_STEP_OF_ROLLOUT = 2
_passes = 0


async def share_of_digits(args: Any, sample: Any, **_: Any) -> float:
    """How much of the response are digits: differs between the samples of a group, so that there is a gradient."""
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))


def perturb_before_log_probs(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    """Change the trainer's weights after the sync, before the old-log-prob pass of one rollout."""
    global _passes
    if _passes == BEFORE_LOG_PROBS_OF_ROLLOUT:
        _perturb(model)
    _passes += 1


def perturb_before_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[torch.nn.Module], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Change the trainer's weights between the old-log-prob pass and the train step of one rollout."""
    if rollout_id == BEFORE_TRAIN_STEP_OF_ROLLOUT:
        _perturb(model)


def _perturb(model: list[torch.nn.Module]) -> None:
    name, weight = next((n, p) for n, p in model[0].named_parameters() if "linear_fc2" in n)
    with torch.no_grad():
        weight.add_(PERTURBATION * torch.randn_like(weight) * weight.std())


def sign_version(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Leave a file in each version of the weights; every rank is called."""
    if torch.distributed.get_rank() == 0:
        text = f"{torch.distributed.get_world_size()} ranks, {len(rollout_engines)} engine"
        (Path(version_dir) / "signed_by").write_text(text)


def kill_an_engine_after_rollout_1(rollout_id: int, args: Any, samples: Any, metrics: Any, seconds: float) -> bool:
    """As a machine would lose it: the server of engine 1, with all of its processes. After rollout 3 every engine
    behind the router is asked for the same tokens."""
    logs = Path(args.output_dir).absolute() / "logs"
    if rollout_id == 1:
        launch_file = str(logs / "engine_1.json")
        servers = [one for one in psutil.process_iter(["cmdline"]) if launch_file in (one.info["cmdline"] or [])]
        for process in [child for server in servers for child in [*server.children(recursive=True), server]]:
            process.kill()
    if rollout_id == 3:
        request = {
            "input_ids": [5, 6, 7, 8],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True},
            "return_logprob": True,
        }
        router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        answers = {url: post_sync(f"{url}/generate", request)["meta_info"] for url in list_workers_sync(router)}
        (logs.parent / "answers.json").write_text(json.dumps(answers))
    return False
