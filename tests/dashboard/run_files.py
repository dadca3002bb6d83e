"""Files as a run writes them."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from slime.dashboard.app import Guard, make_app

TOKEN = "a-token"
HOST = "http://127.0.0.1"


def client_of(*directories: Path, host: str = "127.0.0.1", token: str | None = TOKEN) -> TestClient:
    """A client of a server over directories, which has the token unless it is given another."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return TestClient(Guard(make_app(directories), token=TOKEN, host=host), base_url=HOST, headers=headers)


def only_run(client: TestClient) -> str:
    """The id of the only run."""
    [run] = client.get("/api/runs").json()["runs"]
    return run["id"]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    """Append JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def records_of_rollout(rollout: int, begin: float, *, seconds: float = 20.0) -> list[dict[str, Any]]:
    """The three records of a rollout that takes so many seconds; its reward is 1 - exp(-rollout / 20)."""
    end = begin + (rollout + 1) * seconds
    generated = {
        "rollout/response_len/mean": 100.0 + rollout,
        "rollout/response_len/min": 20.0,
        "rollout/response_len/max": 300.0 + rollout,
        "rollout/truncated_ratio": 0.1,
        "perf/rollout_time": 0.6 * seconds,
        "perf/tokens_per_gpu_per_sec": 900.0,
    }
    trained = {
        "rollout/raw_reward": 1 - math.exp(-rollout / 20),
        "perf/step_time": seconds,
        "perf/actor_train_time": 0.3 * seconds,
    }
    step = {"train/pg_loss": 0.01, "train/entropy_loss": 2 * math.exp(-rollout / 40), "train/grad_norm": 1.0}
    return [
        {"step_key": "rollout/step", "time": end - 2, "rollout/step": rollout, **generated},
        {"step_key": "rollout/step", "time": end - 1, "rollout/step": rollout, **trained},
        {"step_key": "train/step", "time": end, "train/step": rollout, **step},
    ]


def write_run(directory: Path, num_rollouts: int = 10, *, flags: dict[str, Any] | None = None, **start: Any) -> Path:
    """A run of this process that goes on: its events, if there are flags, and its metrics."""
    begin = time.time() - 20.0 * num_rollouts
    if flags is not None:
        process = {"host": socket.gethostname(), "pid": os.getpid(), "command": "python train.py", "resume": None}
        events = [
            {"event": "start", "time": time.time(), "flags": flags, **process, **start},
            {"event": "plan", "time": begin, "first": 0, "num_rollout": 2 * num_rollouts},
            {"event": "begin", "time": begin, "phase": "generate", "rollout": num_rollouts},
        ]
        write_lines(directory / "run_events.jsonl", events)
    records = [record for rollout in range(num_rollouts) for record in records_of_rollout(rollout, begin)]
    write_lines(directory / "metrics.jsonl", records)
    return directory
