"""What a step costs beside generation, passes and copies of memory: the driver, data between processes, preparation.

    nice -n 10 python benchmarks/step_overhead.py [--steps 10] [--prompts 64] [--samples 8] [--tokens 512]

train.py on the CPU with a real engine, trainer and weight sync, of 64 x 8 samples of 64 + 512 tokens. Two stand-ins
make it the schedule of GPUs that are shared: a rollout function that returns made samples at once (a rollout of the
engine would take minutes here), and a trainer whose sleep and wake-up wait for --move seconds, as copies of memory do
(they need no Python; engines have nothing to release). The model is as small as possible: how long its passes take
does not count.

Printed are medians over the steps after the second, and the lowest values, which say more on a busy machine: the whole
rest (`perf/other_time` without the moves), and those of its parts that have a timer; "untimed" is what none of them
explains.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.utils.types import Sample  # noqa: E402

DRIVE = "drive"
MOVE_S = "STEP_OVERHEAD_MOVE_S"
WARM_UP = 2
PROMPT_TOKENS = 64
VOCABULARY = 96
MOVES = ("sleep", "wake_up")
PARTS = ("data_preprocess", "update_weights", "engine_release", "engine_resume")


def made_samples(args: Any, rollout_id: int, data_source: Any, *, evaluation: bool = False) -> list[list[Sample]]:
    """Groups of samples as an engine leaves them (--rollout-function-path)."""
    rng, length = random.Random(rollout_id), args.rollout_max_response_len
    prompts, samples = args.rollout_batch_size, args.n_samples_per_prompt
    number = itertools.count()
    return [[made_sample(rng, group, next(number), length) for _ in range(samples)] for group in range(prompts)]


def made_sample(rng: random.Random, group: int, index: int, length: int) -> Sample:
    """One sample; lists of objects of their own, as JSON gives them."""
    return Sample(
        group_index=group,
        index=index,
        tokens=rng.choices(range(3, VOCABULARY), k=PROMPT_TOKENS + length),
        response="x" * length,
        response_length=length,
        rollout_log_probs=[-rng.random() for _ in range(length)],
        reward=rng.random(),
        status=Sample.Status.TRUNCATED,
    )


def drive_with_turns() -> int:
    """train.py's driver, as if trainer and engines left the memory to each other."""
    import train
    from slime.ray import run_parts
    from slime.ray.actor_group import RayTrainGroup
    from slime.ray.driver import drive
    from slime.ray.run_parts import GpuTurns
    from slime.ray.train_actor import TrainRayActor

    class Turns(GpuTurns):
        def __init__(self, args: Any, manager: Any) -> None:
            super().__init__(args, manager)
            self.trainers_leave = self.engines_leave = True

    class Trainer(TrainRayActor):
        def init(self, *where: Any) -> dict[str, Any]:
            started = super().init(*where)
            seconds = float(os.environ[MOVE_S])
            self._actor.backend.sleep = self._actor.backend.wake_up = functools.partial(time.sleep, seconds)
            return started

    group = functools.partial(RayTrainGroup, actor_cls=Trainer)
    with mock.patch.multiple(run_parts, GpuTurns=Turns, RayTrainGroup=group):
        return drive(train.train)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of a response")
    parser.add_argument("--move", type=float, default=0.2, help="seconds of a sleep and of a wake-up")
    parser.add_argument("--output", type=Path, help="keep the run in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        steps = run_train(options.output or Path(work), options)
    found = rest_of(steps[WARM_UP:])
    print(f"{options.prompts} x {options.samples} samples x {PROMPT_TOKENS} + {options.tokens} tokens, ms")
    for name, statistic in (("median", statistics.median), ("lowest", min)):
        print(f"{name}: " + "  ".join(f"{part} {1e3 * statistic(values):.0f}" for part, values in found.items()))


def run_train(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Do the run; the metrics of each step."""
    model, prompts = folder / "model", folder / "prompts.jsonl"
    shape = ["--layers", 1, "--hidden-size", 16, "--ffn-size", 16, "--heads", 1, "--kv-heads", 1]
    make = [sys.executable, ROOT / "tools/make_tiny_model.py", "--output", model, *shape]
    subprocess.run(list(map(str, make)), check=True, stdout=subprocess.DEVNULL)
    prompts.write_text(json.dumps({"prompt": "1+1="}) + "\n")
    command = [
        sys.executable, __file__, DRIVE, "--accelerator", "cpu", "--colocate", "--actor-num-gpus-per-node", 1,
        "--hf-checkpoint", model, "--model-args-from-hf", "--prompt-data", prompts, "--input-key", "prompt",
        "--rollout-batch-size", options.prompts, "--n-samples-per-prompt", options.samples,
        "--global-batch-size", options.prompts * options.samples, "--rollout-max-response-len", options.tokens,
        "--num-rollout", options.steps, "--use-dynamic-batch-size", "--max-tokens-per-gpu", 32768, "--lr", "1e-6",
        "--rollout-function-path", f"{ROOT}/benchmarks/step_overhead.py:made_samples", "--rm-type", "random",
        "--train-env-vars", json.dumps({MOVE_S: str(options.move)}), "--output-dir", folder / "run",
        "--fresh-output",
    ]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    by_step: dict[float, dict[str, float]] = {}
    for line in (folder / "run/metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step_key"] == "rollout/step":
            by_step.setdefault(record["rollout/step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)]


def rest_of(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Seconds of the whole rest and of its parts in each step."""
    timed = {name: [step.get(f"perf/{name}_time", 0.0) for step in steps] for name in ("other", *MOVES, *PARTS)}
    rest = [other - sum(moves) for other, *moves in zip(timed["other"], *(timed[name] for name in MOVES), strict=True)]
    untimed = [whole - sum(parts) for whole, *parts in zip(rest, *(timed[name] for name in PARTS), strict=True)]
    return {"rest": rest, **{name: timed[name] for name in PARTS}, "untimed": untimed}


if __name__ == "__main__":
    if sys.argv[1:2] == [DRIVE]:
        del sys.argv[1]
        sys.exit(drive_with_turns())
    main()
