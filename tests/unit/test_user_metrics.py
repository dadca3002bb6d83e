"""`slime.log`: numbers of a user's own functions beside those of the run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import slime
from slime.observability import logging_utils
from slime.observability.logging_utils import finish_tracking, init_tracking, log, take_pending
from slime.rollout import sample_hooks
from slime.rollout.sample_hooks import set_current_rollout_id


@pytest.fixture(autouse=True)
def no_tracking_is_left_over(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging_utils, "tracking", logging_utils._Tracking())
    sample_hooks.set_current_rollout_id(None)  # of an earlier test
    monkeypatch.setattr(sample_hooks, "_begun_last", [None])


@pytest.fixture
def args(tmp_path: Path) -> Namespace:
    return Namespace(
        output_dir=str(tmp_path),
        alarms_config=None,
        tracker=[],
        use_tensorboard=False,
        use_wandb=False,
        load=None,
        save=None,
    )


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


def test_threads_executors_and_event_loops_of_a_hook_log_to_the_rollout_that_was_begun_last(args: Namespace):
    """They do not inherit the context in which the rollout function has named the rollout."""
    with pytest.raises(ValueError, match="before any rollout has begun: give step"):
        slime.log({"mine/x": 1.0})
    init_tracking(args, primary=False)

    async def logs(value: int) -> None:
        slime.log({"mine/x": value})

    async def scores() -> None:
        set_current_rollout_id(5)
        with ThreadPoolExecutor(2) as pool:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(pool, slime.log, {"mine/x": 1})
            await loop.run_in_executor(pool, lambda: asyncio.run(logs(2)))
        thread = threading.Thread(target=slime.log, args=({"mine/x": 3},))
        thread.start()
        thread.join()

    asyncio.run(scores())
    assert take_pending() == [({"mine/x": 2.0, "rollout/step": 5}, "rollout/step")]


def test_threads_of_a_driver_write_one_record_each(args: Namespace, monkeypatch: pytest.MonkeyPatch):
    init_tracking(args)
    busy = threading.Lock()

    def write(metrics, step_key):
        assert busy.acquire(blocking=False), "two threads write at once"
        time.sleep(0.001)
        busy.release()

    monkeypatch.setattr(logging_utils.tracking.console, "write", write)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda value: slime.log({"mine/x": value}, value), range(40)))
    finish_tracking()
    lines = Path(args.output_dir, "metrics.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["rollout/step"] for line in lines) == list(range(40))


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
