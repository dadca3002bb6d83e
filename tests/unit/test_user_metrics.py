"""`slime.log`: numbers of a user's own functions beside those of the run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import slime
from slime.observability import logging_utils
from slime.observability.logging_utils import finish_tracking, init_tracking, log, take_pending
from slime.rollout.sample_hooks import set_current_rollout_id


@pytest.fixture(autouse=True)
def no_tracking_is_left_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging_utils, "_tracking", logging_utils._Tracking())


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return Namespace(output_dir=str(tmp_path), use_tensorboard=False, use_wandb=False, load=None, save=None)


def test_the_driver_writes_a_record_at_once(args: Namespace):
    init_tracking(args)
    slime.log({"mine/x": np.float32(0.5)}, 4)
    finish_tracking()
    [line] = Path(args.output_dir, "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["step_key"], record["rollout/step"], record["mine/x"]) == ("rollout/step", 4, 0.5)


def test_elsewhere_the_calls_of_one_step_are_averaged_and_come_before_the_rollouts_record(args: Namespace):
    init_tracking(args, primary=False)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda value: slime.log({"mine/x": value, f"mine/{value % 2}": value}, 7), range(100)))
    slime.log({"mine/x": 1.0}, 6)
    log(args, {"rollout/step": 7, "rollout/y": 2.0}, "rollout/step")
    means = {
        "mine/x": sum(range(100)) / 100,
        "mine/0": sum(range(0, 100, 2)) / 50,
        "mine/1": sum(range(1, 100, 2)) / 50,
    }
    assert take_pending() == [
        ({"mine/x": 1.0, "rollout/step": 6}, "rollout/step"),
        ({**means, "rollout/step": 7}, "rollout/step"),
        ({"rollout/step": 7, "rollout/y": 2.0}, "rollout/step"),
    ]
    assert take_pending() == []


def test_without_a_step_it_is_the_rollout_of_the_context(args: Namespace):
    init_tracking(args, primary=False)

    async def scores() -> None:
        set_current_rollout_id(5)
        await asyncio.gather(*(asyncio.to_thread(slime.log, {"mine/x": value}) for value in (1, 2)))

    asyncio.run(scores())
    assert take_pending() == [({"mine/x": 1.5, "rollout/step": 5}, "rollout/step")]
    with pytest.raises(ValueError, match="outside of a rollout's generation: give step"):
        slime.log({"mine/x": 1.0})


def test_a_process_of_which_nobody_takes_records_says_once_that_it_leaves_them_out(caplog: pytest.LogCaptureFixture):
    slime.log({"mine/x": 1.0, "mine/y": 1.0}, 1)
    slime.log({"mine/x": 1.0}, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "slime.log leaves mine/x, mine/y out: only the driver and the rollout manager log"
    ]
    assert take_pending() == []


@pytest.mark.parametrize(
    ("metrics", "step", "error", "message"),
    [
        (0.5, 1, TypeError, "takes a dict of metric names and numbers, not '0.5'"),
        ({3: 0.5}, 1, TypeError, "takes a dict of metric names"),
        ({"x": "high"}, 1, ValueError, "metric 'x' is no number: 'high'"),
        ({"x": 1}, 1.5, TypeError, "the number of the rollout as its step, a whole number, not 1.5"),
        ({"x": 1}, -1, ValueError, "got the step -1; rollouts are counted from 0"),
        ({"time": 1}, 1, ValueError, "a metric named 'time', which every record has"),
    ],
)
def test_what_cannot_be_logged_is_refused(metrics, step, error, message):
    with pytest.raises(error, match=message):
        slime.log(metrics, step)


def test_importing_slime_imports_nothing_else_of_weight():
    heavy = ("torch", "numpy", "ray", "sglang", "megatron", "slime.observability", "slime.rollout")
    code = f"import slime, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
