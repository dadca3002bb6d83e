"""The cost of recording a rollout (critical path, thread, bytes) and of reading it again.

    python benchmarks/rollout_records.py [--samples 512] [--tokens 4096] [--step-s 60]

The critical path is what the rollout manager does before it goes on; the thread runs beside the step, and the part of
its time that holds the interpreter's lock competes with the event loop. The step of 60 s is an assumption: give the
time of a step of your own. Where the machine is busy, seconds of CPU say more than seconds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from slime.config.args import Args
from slime.observability.rollout_records import RolloutRecords
from slime.observability.rollout_records.recorder import SampleRecorder
from slime.utils.types import Sample

LIMIT = 0.01


def make_samples(count: int, num_tokens: int) -> list[Sample]:
    """Samples with token ids as frequent as words are, in groups of 8."""
    rng = np.random.default_rng(0)
    response = num_tokens * 15 // 16
    made = []
    for index in range(count):
        tokens = (rng.zipf(1.3, num_tokens) % 150_000).tolist()
        text = " ".join(map(str, tokens[: response // 2]))
        log_probs = (-rng.exponential(0.5, response)).tolist()
        made.append(
            Sample(
                group_index=index // 8,
                index=index,
                prompt=text[:1000],
                response=text,
                tokens=tokens,
                response_length=response,
                loss_mask=[1] * response,
                rollout_log_probs=log_probs,
                reward=float(index % 2),
                status=Sample.Status.COMPLETED,
                weight_versions=["1"],
            )
        )
    return made


def measure(directory: Path, samples: list[Sample]) -> dict[str, float]:
    """Seconds and bytes of recording one rollout, and CPU seconds of reading it."""
    args = SimpleNamespace(output_dir=directory, keep_rollouts="all", rollout_record_fraction=1.0, reward_key=None)
    recorder = SampleRecorder(cast(Args, args))
    with recorder.rollout(0, samples[:1]):
        pass  # imports; in a run the shares of the trainers are made here
    recorder.finish(60)
    recorder = SampleRecorder(cast(Args, args))
    start, cpu = time.perf_counter(), time.process_time()
    with recorder.rollout(1, samples):
        pass
    submitted = time.perf_counter() - start
    recorder.finish(600)
    found: dict[str, Any] = {
        "critical": submitted,
        "thread": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
    }
    records = RolloutRecords(directory)
    start = time.process_time()
    file = records.open(1)
    file.table()
    found["list"] = time.process_time() - start
    start = time.process_time()
    file.sample(file.num_rows - 1)
    return found | {"sample": time.process_time() - start, "bytes": file.path.stat().st_size}


def main() -> int:
    """Command line of this benchmark; 1 where the critical path takes more than 1% of a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--step-s", type=float, default=60.0, help="seconds of a step, to compare with")
    options = parser.parse_args()
    samples = make_samples(options.samples, options.tokens)
    with tempfile.TemporaryDirectory() as directory:
        found = measure(Path(directory), samples)
    share, of_thread = found["critical"] / options.step_s, found["cpu"] / options.step_s
    print(f"{options.samples} samples of {options.tokens} tokens, {found['bytes'] / 1e6:.1f} MB")
    print(f"critical path {found['critical'] * 1e3:.2f} ms = {share:.4%} of a step of {options.step_s:g} s")
    print(f"thread {found['thread']:.2f} s, {found['cpu']:.2f} s of CPU = {of_thread:.2%}")
    print(f"list of all samples {found['list'] * 1e3:.0f} ms, one sample {found['sample'] * 1e3:.0f} ms, of CPU")
    return int(share > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
