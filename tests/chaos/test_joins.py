"""Engines join a run of train.py and leave it, at moments that it does not choose (--elastic-rollout)."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from slime.backends.sglang_utils.join import SERVING, Guest, GuestBook, JoinRequest, read_launch_file, server_values
from slime.backends.sglang_utils.server_control import list_workers_sync
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.checkpoints.rollout_files import load_samples
from slime.processes.wait import wait
from slime.utils.http_utils import post_sync
from slime.utils.misc import get_free_port
from tests.integration.launch import ROOT, Run, command_of, environment, grpo_flags, make_model, write_prompts
from tests.integration.user_code import share_of_digits

pytestmark = pytest.mark.timeout(900)
GROUP = 16  # Samples of a rollout.
ELASTIC = ["--use-fault-tolerance", "--elastic-rollout", "--rollout-num-gpus", 1, "--rollout-health-check-interval", 1]
QUESTION = {"text": "12+34=", "sampling_params": {"max_new_tokens": 4, "temperature": 0}, "return_logprob": True}


async def reward_when_allowed(args: Any, sample: Any, **more: Any) -> float:
    """A reward that the test lets go on, rollout by rollout."""
    go = Path(args.output_dir) / f"go_{sample.index // GROUP}"
    while not go.exists():
        await asyncio.sleep(0.05)
    return await share_of_digits(args, sample, **more)


def ask_all(rollout_id: int, args: Any, samples: Any, metrics: dict[str, Any], seconds: float) -> None:
    """Ask every engine behind the router the same, and note what each says."""
    router = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    answers = {url: post_sync(f"{url}/generate", QUESTION)["meta_info"] for url in list_workers_sync(router)}
    (Path(args.output_dir) / f"answers_{rollout_id}.json").write_text(json.dumps(answers))


@contextmanager
def going(out: Path, *flags: Any, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A run that goes on; it is killed where the test fails."""
    work = out.parent
    grpo = grpo_flags(make_model(work / "model"), write_prompts(work / "prompts.jsonl"))
    dumps = ["--save-debug-rollout-data", out / "rollouts" / "{rollout_id}.pt"]
    with (work / "printed").open("w") as printed:
        command = command_of(out, *grpo, *ELASTIC, *dumps, *flags)
        run = subprocess.Popen(command, cwd=ROOT, env=environment() | env, text=True, stdout=printed, stderr=printed)
        try:
            yield run
        finally:
            if run.poll() is None:
                run.kill()
            run.wait(60)


def trained_indices(out: Path) -> list[int]:
    """Of the samples of all rollouts."""
    paths = sorted((out / "rollouts").glob("*.pt"), key=lambda path: int(path.stem))
    return sorted(int(sample.index or 0) for path in paths for sample in load_samples(path, option="the dump"))


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_engine_joins_in_the_middle_of_a_rollout_serves_and_leaves(tmp_path: Path, lora: bool) -> None:
    out, book, command = tmp_path / "out", GuestBook(tmp_path / "out"), [sys.executable, "-m"]
    command += ["slime.backends.sglang_utils.join", "--run", str(out)]
    hooks = ["--custom-rm-path", f"{ROOT}/tests/chaos/test_joins.py:reward_when_allowed"]
    hooks += ["--custom-rollout-log-function-path", f"{ROOT}/tests/chaos/test_joins.py:ask_all", "--num-rollout", 3]
    if lora:  # the engine gets the live adapter before it serves
        hooks += ["--lora-rank", 8, "--lr", 2e-2, "--update-weight-disk-dir", tmp_path / "adapters"]
    with going(out, *hooks) as run:
        wait("the run to take engines", 120, lambda: book.last_beat(), check=lambda: _is_well(run, tmp_path))
        guest = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE)
        try:
            wait("the engine to serve", 120, lambda: _states(book) == [SERVING], check=lambda: _is_well(run, tmp_path))
            assert not list(out.glob("rollouts/*")), "rollout 0 still waits for its rewards: it serves at once"
            for rollout_id in (0, 1):
                (out / f"go_{rollout_id}").touch()
            last = out / "answers_1.json"
            wait("two rollouts", 120, last.exists, check=lambda: _is_well(run, tmp_path))
            guest.send_signal(signal.SIGTERM)
            assert guest.wait(60) == 0 and "it has left" in (guest.stdout.read() if guest.stdout else "")
        finally:
            guest.kill()
            guest.wait(60)
        (out / "go_2").touch()
        assert run.wait(120) == 0, (tmp_path / "printed").read_text()[-3000:]
    answers = [json.loads((out / f"answers_{n}.json").read_text()) for n in range(3)]
    assert [len(found) for found in answers] == [2, 2, 1]
    for number, found in enumerate(answers):
        assert {answer["weight_version"] for answer in found.values()} == {str(number + 1)}
        values = [[value for value, *_ in answer["output_token_logprobs"]] for answer in found.values()]
        assert values[0] == pytest.approx(values[-1], abs=1e-5), "all have the same weights"
    assert trained_indices(out) == list(range(3 * GROUP))
    finished = Run(out, 0, "")
    assert max(finished.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    last_record = finished.records("rollout/step")[-1]
    assert (last_record["rollout/engines_joined"], last_record["rollout/engines_left"]) == (1, 1)


@pytest.mark.slow
def test_a_hundred_random_joins_and_leaves_cost_no_sample(tmp_path: Path) -> None:
    out, book, dice = tmp_path / "out", GuestBook(tmp_path / "out"), random.Random(0)
    flags = ["--num-rollout", 10_000, "--exit-signal-handler", "--save", tmp_path / "saved", "--save-interval", 10_000]
    with going(out, *flags) as run, _servers(out, book, 2) as servers:
        visits: dict[str, Guest] = {}
        joins = leaves = 0
        while joins + leaves < 100:
            _is_well(run, tmp_path)
            request = dice.choice(servers)
            if (guest := visits.pop(request.url, None)) is None:
                visits[request.url] = guest = Guest(book, request)
                guest.arrive()
                joins += 1
            else:  # as it is: serving, or without weights yet
                assert guest.leave(60.0)
                book.forget(guest.name)
                leaves += 1
            time.sleep(dice.random())
        run.send_signal(signal.SIGTERM)
        assert run.wait(180) == 0, (tmp_path / "printed").read_text()[-3000:]
    found = trained_indices(out)
    assert found == list(range(len(found))) and len(found) >= 10 * GROUP
    finished = Run(out, 0, "")
    last = finished.records("rollout/step")[-1]
    print(f"{joins} joins, {leaves} leaves, {len(found) // GROUP} rollouts")
    assert last["rollout/engines_joined"] >= 40 and last["rollout/engines_lost"] == 0
    assert max(finished.column("train/train_rollout_logprob_abs_diff")) < 1e-4


@pytest.mark.slow
def test_an_engine_leaves_a_node_that_ray_drains_and_no_sample_is_lost(tmp_path: Path) -> None:
    """The node comes in the middle of the run, and is drained as before a spot machine is taken away."""
    out, cluster = tmp_path / "out", Cluster()
    node = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    try:
        cluster.add_node(node_ip_address="127.0.0.2", resources={"slime_slot": 2}, **node)
        with going(out, "--num-rollout", 10_000, "--exit-signal-handler", RAY_ADDRESS=cluster.address) as run:
            wait("a rollout", 120, (out / "rollouts/0.pt").exists, check=lambda: _is_well(run, tmp_path))
            spot = cluster.add_node(node_ip_address="127.0.0.3", resources={"slime_slot": 1}, **node)
            _wait_for_metric(out, "rollout/engines_joined", run)
            drain = ["drain-node", "--address", cluster.address, "--node-id", spot.node_id]
            drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the spot machine is taken"]
            subprocess.run([Path(sys.executable).with_name("ray"), *drain], check=True, timeout=60)
            _wait_for_metric(out, "rollout/engines_left", run)
            cluster.remove_node(spot)
            num_before = len(list(out.glob("rollouts/*.pt")))
            wait("two more rollouts", 120, lambda: len(list(out.glob("rollouts/*.pt"))) >= num_before + 2)
            run.send_signal(signal.SIGTERM)
            assert run.wait(120) == 0, (tmp_path / "printed").read_text()[-3000:]
    finally:
        cluster.shutdown()
    found = trained_indices(out)
    assert found == list(range(len(found)))
    finished = Run(out, 0, "")
    last = finished.records("rollout/step")[-1]
    counts = [last[f"rollout/engines_{what}"] for what in ("joined", "left", "lost")]
    assert counts == [1, 1, 0]
    assert max(finished.column("train/train_rollout_logprob_abs_diff")) < 1e-4


def _wait_for_metric(out: Path, name: str, run: subprocess.Popen[str]) -> None:
    """Until a record of the run counts one."""

    def is_counted() -> bool:
        return Run(out, 0, "").records("rollout/step")[-1].get(name, 0) == 1

    wait(f"{name} to be 1", 120, is_counted, check=lambda: _is_well(run, out.parent))


@contextmanager
def _servers(out: Path, book: GuestBook, count: int) -> Iterator[list[JoinRequest]]:
    """Servers of somebody else's, like those of the run, once it goes on."""
    wait("the run to take engines", 120, lambda: book.last_beat())
    launch, engines = read_launch_file(out), []
    try:
        for number in range(count):
            values = server_values(launch["server_args"], "127.0.0.1", get_free_port(25000, 4), 0)
            engine = SGLangEngine(values, rank=90 + number, log_path=out / f"other_{number}.log", accelerator="cpu")
            engines.append(engine)
            engine.start(120.0)
        yield [JoinRequest(engine.url) for engine in engines]
    finally:
        for engine in engines:
            engine.shutdown()


def _states(book: GuestBook) -> list[str]:
    return [book.answer_to(name)[0] for name in book.requests()]


def _is_well(run: subprocess.Popen[str], work: Path) -> None:
    assert run.poll() is None, (work / "printed").read_text()[-3000:]
