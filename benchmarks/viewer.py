"""How long the pages take over many samples, and how much memory their server.

    python benchmarks/viewer.py                      100,000 samples of 4,096 tokens in one rollout (6 GB of disk)
    python benchmarks/viewer.py --samples 10000 --tokens 400 --keep DIR

A run is written by the run's own recorder (slime.observability.rollout_records), `slime view` is started over it, and
each page's requests are timed, the first time and again. Limits: a page of samples < 1 s, a sample < 0.3 s, 500 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from slime.checkpoints.rollout_files import ROWS_PER_GROUP, samples_path, trainer_path, write_tables
from slime.observability.rollout_records.schema import PLAIN, PLAIN_TRAINER, SAMPLES, TRAINER, preview

WORDS = "we add the two numbers so that carry digits check answer therefore not maybe".split()  # noqa: SIM905
GROUP = 8
LIMITS = {"samples, first time": 1.0, "samples": 1.0, "sample": 0.3, "tokens": 0.3}
LIMIT_MB = 500


def sample_rows(start: int, stop: int, *, tokens: int, random_: random.Random) -> list[dict[str, Any]]:
    """Rows of samples; the reward of a group's samples is the share of it that is right."""
    text = " ".join(random_.choices(WORDS, k=tokens))
    rows = []
    for number in range(start, stop):
        group, length = number // GROUP, random_.randint(tokens // 2, tokens)
        prompt = f"What is {group % 97} + {group % 89}?"
        response = f"sample {number} of {group}: {text[: 5 * length]}"
        row: dict[str, Any] = dict.fromkeys(SAMPLES.names)
        row |= {
            "sample_id": number,
            "group_index": group,
            "index": number,
            "rollout_id": number,
            "dataset": ("addition", "words")[group % 2],
            "prompt": prompt,
            "response": response,
            "tokens": np.arange(10 + length, dtype=np.int32) % 250,
            "response_length": length,
            "loss_mask": np.ones(length, np.int8),
            "rollout_log_probs": -np.abs(np.sin(np.arange(length, dtype=np.float32) + number)),
            "reward": float(number % GROUP < group % (GROUP + 1)),
            "status": "completed" if length < tokens else "truncated",
            "weight_versions": [str(group % 3)],
            "num_turns": 1,
            "times": json.dumps({"begin": 1e9 + group, "end": 1e9 + group + length / 100}),
            "label": str(group % 97 + group % 89),
            "metadata": "{}",
            "removed": False,
            "end_reason": "done" if length < tokens else "length",
            "reward_is_trusted": True,
            "images": 0,
            "prompt_chars": len(prompt),
            "response_chars": len(response),
            "prompt_preview": preview(prompt),
            "response_preview": preview(response),
            "prompt_length": 10,
            "thumbnails": None,
        }
        rows.append(row)
    return rows


def trainer_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a trainer's columns; its log-probs differ a little from the engine's."""
    found = []
    for row in rows:
        log_probs = row["rollout_log_probs"]
        values: dict[str, Any] = dict.fromkeys(TRAINER.names)
        values |= {"sample_id": row["sample_id"], "index": row["index"], "rank": row["sample_id"] % 2}
        values |= {
            "log_probs": log_probs - 0.01,
            "entropy": -log_probs,
            "advantages": 0 * log_probs + row["reward"] - 0.5,
        }
        found.append(values)
    return found


def write_rollout(directory: Path, rollout_id: int, *, samples: int, tokens: int, has_trainer: bool = True) -> None:
    """Write the files of one rollout."""

    def parts() -> Iterator[list[dict[str, Any]]]:
        random_ = random.Random(rollout_id)
        for start in range(0, samples, ROWS_PER_GROUP):
            yield sample_rows(start, min(samples, start + ROWS_PER_GROUP), tokens=tokens, random_=random_)

    folder = directory / "rollouts"
    tables = (pa.Table.from_pylist(rows, schema=SAMPLES) for rows in parts())
    write_tables(samples_path(folder, rollout_id), SAMPLES, tables, plain=PLAIN)
    if has_trainer:
        tables = (pa.Table.from_pylist(trainer_rows(rows), schema=TRAINER) for rows in parts())
        write_tables(trainer_path(folder, rollout_id, 0), TRAINER, tables, plain=PLAIN_TRAINER)


def measure(directory: Path) -> tuple[dict[str, float], float]:
    """(seconds of each request, MB that the server has taken at most)."""
    command = [sys.executable, "-m", "slime.dashboard", str(directory)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        found = re.search(r"(http://\S+)/\?token=(\S+)", server.stdout.readline())
        assert found is not None

        def ask(path: str) -> Any:
            headers = {"authorization": f"Bearer {found[2]}"}
            with urllib.request.urlopen(
                urllib.request.Request(found[1] + path, headers=headers), timeout=600
            ) as answer:
                return json.load(answer)

        page = urllib.request.Request(found[1], headers={"authorization": f"Bearer {found[2]}"})
        with urllib.request.urlopen(page, timeout=60):  # a browser begins with the page
            time.sleep(2)
        [run] = ask("/api/runs")["runs"]
        return _timed(ask, f"/api/runs/{run['id']}/rollouts/00000"), _peak_mb(server.pid)
    finally:
        server.terminate()
        server.wait()


def _timed(ask: Any, rollout: str) -> dict[str, float]:
    requests = {
        "samples, first time": "?sort=reward&desc=1",
        "samples": "?sort=response_length&start=5000",
        "sample": "/4321",
        "tokens": "/4321/tokens?count=4000",
        "search, first time": "?q=SAMPLE+4321+",
        "search": "?q=SAMPLE+4321+&sort=reward",
    }
    seconds = {}
    for name, rest in requests.items():
        begin = time.perf_counter()
        found = ask(rollout + rest)
        seconds[name] = time.perf_counter() - begin
        assert name != "search" or found["found"] >= 1
    return seconds


def _peak_mb(pid: int) -> float:
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak) / 1000


def main() -> int:
    """Measure, print a table, and fail where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--keep", type=Path, help="directory to write the run to, and to leave it in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "metrics.jsonl").touch()
        if not samples_path(directory / "rollouts", 0).exists():
            write_rollout(directory, 0, samples=options.samples, tokens=options.tokens)
        seconds, peak_mb = measure(directory)
    for name, value in seconds.items():
        print(f"{name:22} {value:8.3f} s  (limit {LIMITS.get(name, '-')})")
    print(f"{'memory of the server':22} {peak_mb:8.0f} MB (limit {LIMIT_MB})")
    return int(peak_mb > LIMIT_MB or any(seconds[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
