"""Hooks as a user would write them; loaded by path in the integration tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import torch

import slime
from slime.backends.sglang_utils.server_control import list_workers_sync
from slime.processes.registry import MARK, processes_of
from slime.utils.http_utils import post_sync

PERTURBATION = 0.5
BEFORE_LOG_PROBS_OF_ROLLOUT = 1
BEFORE_TRAIN_STEP_OF_ROLLOUT = 2
_passes = 0


async def share_of_digits(args: Any, sample: Any, **_: Any) -> float:
    """How much of the response are digits: differs between the samples of a group, so that there is a gradient."""
    return sum(character.isdigit() for character in sample.response) / max(1, len(sample.response))


def log_length(args: Any, sample: Any, evaluation: bool) -> None:
    """Log from where a sample is made; the step is not known there."""
    if not evaluation:
        slime.log({"mine/length": sample.response_length})


def log_own(rollout_id: int, args: Any, samples: Any, metrics: dict[str, Any], seconds: float) -> dict[str, float]:
    """All three ways of logging metrics of one's own."""
    slime.log({"mine/logged": 10 * rollout_id}, rollout_id)
    metrics["mine/put"] = 1.0
    return {"mine/returned": len(samples)}


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


def kill_this_rank_in_rollout_3(
    args: Any, rollout_id: int, step_id: int, model: list[torch.nn.Module], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """As the kernel ends a process that takes too much memory; once in a run."""
    note = Path(args.output_dir) / "killed_a_rank"
    if rollout_id == 3 and not note.exists():
        note.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def kill_this_rank_in_rollout_1(args: Any, rollout_id: int, *rest: Any) -> None:
    """As above, before anything was saved."""
    kill_this_rank_in_rollout_3(args, 3 if rollout_id == 1 else -1, *rest)


def sign_version(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Leave a file in each version of the weights; every rank is called."""
    if torch.distributed.get_rank() == 0:
        text = f"{torch.distributed.get_world_size()} ranks, {len(rollout_engines)} engine"
        (Path(version_dir) / "signed_by").write_text(text)


def kill_router_and_engine(rollout_id: int, args: Any, samples: Any, metrics: Any, seconds: float) -> bool:
    """As a machine would lose them: after rollout 0 the router, after rollout 1 the server of engine 1 with all of its
    processes. After rollout 3 every engine behind the router is asked for the same tokens."""
    logs = Path(args.output_dir).absolute() / "logs"
    if rollout_id == 0:
        children = psutil.Process().children()  # of the rollout manager, in which this runs
        next(child for child in children if "router" in " ".join(child.cmdline())).kill()
    if rollout_id == 1:
        for process in _processes_of_engine(logs, 1):
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


def stop_an_engine_after_rollout_0(rollout_id: int, args: Any, samples: Any, metrics: Any, seconds: float) -> bool:
    """A server that hangs: its processes are stopped, and its sockets stay open. Before, whoever may has knocked at
    every server, and looked at every command line."""
    directory = Path(args.output_dir).absolute()
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    key, doors = os.environ["SLIME_API_KEY"], {}
    for url in (router, *list_workers_sync(router)):
        without, wrong = _knock(url, {}), _knock(url, {"Authorization": "Bearer of nothing"})
        doors[url] = [without, wrong, _knock(url, {"Authorization": f"Bearer {key}"})]
    shown = [
        one.info["cmdline"] for one in psutil.process_iter(["cmdline"]) if key in " ".join(one.info["cmdline"] or [])
    ]
    names = {process.pid: process.info["name"] for process in psutil.process_iter(["name"])}
    pids = {process.pid: names[process.pid] for process in processes_of(os.environ[MARK]) if process.pid in names}
    ports = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.pid in pids]
    bound = [(pids[one.pid], one.laddr.ip) for one in ports if one.pid is not None]
    found = {"key": key, "doors": doors, "shown": shown, "bound": bound}
    (directory.parent / "doors.json").write_text(json.dumps(found))
    for process in _processes_of_engine(directory / "logs", 0):
        process.send_signal(signal.SIGSTOP)
    return False


def _knock(url: str, headers: dict[str, str]) -> int:
    """Status of a request by a client that knows nothing of slime."""
    body = json.dumps({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _processes_of_engine(logs: Path, number: int) -> list[psutil.Process]:
    launch_file = str(logs / f"engine_{number}.json")
    servers = [one for one in psutil.process_iter(["cmdline"]) if launch_file in (one.info["cmdline"] or [])]
    return [process for server in servers for process in [*server.children(recursive=True), server]]


async def show_to_a_stranger(args: Any, sample: Any, **_: Any) -> float:
    """Have another user look at the files of the run while it goes on; once."""
    note = Path(args.output_dir) / "stranger.json"
    if args.sglang_router_ip and not note.exists():
        note.touch()
        command = [sys.executable, "-m", "tests.integration.file_stranger", str(note.parent.parent)]
        note.write_bytes(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    return await share_of_digits(args, sample)


async def end_the_only_engine_in_rollout_1(args: Any, sample: Any, **_: Any) -> float:
    """Lose the engine while others of its requests are in flight: its scheduler logs an error, then is killed."""
    if sample.index < args.rollout_batch_size * args.n_samples_per_prompt:
        return await share_of_digits(args, sample)
    logs = Path(args.output_dir).absolute() / "logs"
    if processes := _processes_of_engine(logs, 0):
        with (logs / "engine_0.log").open("a") as log:
            log.write("torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n")
        for process in processes:
            process.kill()
    return 0.0
