"""Agents whose parts are killed or stopped at any moment: no sample is lost, doubled or trained untrusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from slime.agent import rollout
from slime.agent.gateway import Gateway
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.results import SERVER_KEY_ENV, SandboxError
from slime.rollout.train_data import mask_untrusted, response_loss_mask
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.unit.agent_fakes import ScriptedEngine, served
from tests.unit.test_agent_generate import END, FIX, TASK, TOKENIZER, arguments, call

FAILURES = ("env_error", "grader_error", "transport")
SHOWN = sorted({sys.prefix, sys.base_prefix})
AGENT = {
    "harness": "scripted",
    "at_a_time": 4,
    "sandbox": {"options": {"show": SHOWN, "memory_mb": 256, "disk_mb": 64}},
    "budgets": {"turns": 6, "seconds": 30},
    "grader": {"kind": "tests", "python": sys.executable, "seconds": 30},
}


class Run:
    """Executions of one agent: the gateway, its engine, the sandboxes that were opened, and the samples at the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_samples: int) -> None:
        texts = [call(FIX), call("true"), "done"] * 3 * num_samples  # in whichever session each falls
        self.engine = ScriptedEngine(TOKENIZER, [text + END for text in texts])
        self.num_samples, self.tasks = num_samples, list[asyncio.Task[None]]()
        self.returned: list[Any] = []
        monkeypatch.setattr(rollout, "GenerateState", lambda args: SimpleNamespace(aborted=False))
        monkeypatch.setattr(rollout, "shared_gateway", self._shared)
        self.patch = monkeypatch

    async def _shared(self, _args: Any) -> Gateway:
        return self.gateway

    def in_each_sandbox(self, wound: Callable[[LocalSandbox, int], Awaitable[None]]) -> None:
        """Have a sandbox wounded as soon as it is open; the second argument counts them."""
        enter = LocalSandbox.__aenter__

        async def enter_and_be_wounded(sandbox: LocalSandbox) -> LocalSandbox:
            await enter(sandbox)
            self.tasks.append(asyncio.ensure_future(wound(sandbox, len(self.tasks))))  # type: ignore[arg-type]
            return sandbox

        self.patch.setattr(LocalSandbox, "__aenter__", enter_and_be_wounded)

    def execute(self, agent: Any, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[Sample]:
        """Run all, and return their samples: each of the prompts has one."""
        given = [
            Sample(index=i, group_index=i // 2, prompt="fix it", metadata=dict(TASK)) for i in range(self.num_samples)
        ]

        async def run() -> None:
            runs = [rollout.generate(arguments(agent), sample, {"max_new_tokens": 99}) for sample in given]
            if meanwhile:
                self.tasks.append(asyncio.ensure_future(meanwhile()))  # type: ignore[arg-type]
            self.returned = await asyncio.gather(*runs)
            await asyncio.gather(*self.tasks)

        SingletonMeta.clear_instances(rollout.Places)
        with served(self.engine.app) as url:
            self.gateway = Gateway(tokenizer=TOKENIZER, sglang_url=url).start()
            try:
                asyncio.run(run())
                assert not self.gateway.sessions.store and not self.gateway.sessions.inflight, (
                    "every session has ended"
                )
            finally:
                self.gateway.stop()
                SingletonMeta.clear_instances(rollout.Places)
        samples = [one for found in self.returned for one in (found if isinstance(found, list) else [found])]
        assert Counter(sample.index for sample in samples) == Counter(range(self.num_samples)), "none lost or doubled"
        return samples


def check_untrusted(samples: list[Sample]) -> list[Sample]:
    """The samples that failed: they are untrusted, and the loss does not see them, but others."""
    failed = [sample for sample in samples if sample.end_reason in FAILURES]
    assert all(sample.reward_is_trusted == (sample not in failed) for sample in samples)
    assert all(sample.reward == 0.0 for sample in failed)
    mask_untrusted(SimpleNamespace(on_untrusted_reward="mask"), samples)
    trained = [sample for sample in samples if any(response_loss_mask(sample))]
    assert trained and not any(sample in failed for sample in trained), Counter(s.end_reason for s in samples)
    return failed


@pytest.mark.parametrize(
    "num_samples", [8, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["short", "soak"]
)
def test_wounded_sandboxes_lose_and_double_no_sample_and_train_nothing_untrusted(monkeypatch, num_samples):
    rng, wounds = random.Random(31), Counter[str]()

    async def wound(sandbox: LocalSandbox, number: int) -> None:
        how = [signal.SIGKILL, signal.SIGSTOP, None][number % 3]
        wounds[str(how)] += 1
        if how is None:
            return
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        pid = sandbox.process.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
            if how == signal.SIGSTOP:
                await asyncio.sleep(0.3)
                os.kill(pid, signal.SIGCONT)

    run = Run(monkeypatch, num_samples)
    run.in_each_sandbox(wound)
    failed = check_untrusted(run.execute(AGENT))
    assert min(wounds.values()) >= num_samples // 3, wounds
    assert 0 < len(failed) < num_samples


def test_agents_that_are_killed_or_stopped_lose_no_turn_that_they_have_got(monkeypatch):
    rng = random.Random(32)

    async def wound(sandbox: LocalSandbox, number: int) -> None:
        await asyncio.sleep(rng.uniform(0.1, 0.6))
        with contextlib.suppress(SandboxError):  # it has ended
            if number % 2:
                await sandbox.exec("pkill -9 -f scripted_agent")
            else:
                await sandbox.exec("pkill -STOP -f scripted_agent; sleep 0.3; pkill -CONT -f scripted_agent")

    run = Run(monkeypatch, 6)
    run.in_each_sandbox(wound)
    samples = run.execute(AGENT)
    trained = sum(sum(sample.loss_mask) for sample in samples)
    got = sum(map(len, run.engine.outputs))
    assert trained <= got, "no turn is trained twice"
    longest = max(map(len, run.engine.outputs))
    assert trained >= got - 3 * longest, "an agent that is killed loses at most the turn that it waits for"
    assert {sample.end_reason for sample in check_untrusted(samples) + samples} <= {"done", "env_error", "budget"}


def test_a_gateway_that_stops_makes_what_its_agents_had_not_finished_untrusted(monkeypatch):
    run = Run(monkeypatch, 8)

    async def stop() -> None:
        while not run.gateway.sessions.closed:  # one has finished
            await asyncio.sleep(0.01)
        await asyncio.to_thread(run.gateway.stop)

    samples = run.execute(AGENT, stop)
    failed = check_untrusted(samples)
    assert failed and {sample.end_reason for sample in failed} <= {"transport", "env_error"}


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """(addresses, processes) of two sandbox servers."""
    monkeypatch.setenv(SERVER_KEY_ENV, "a-key-of-sixteen-or-more")
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            ports.append(probe.getsockname()[1])
    command = [sys.executable, "-m", "slime.agent.sandbox_server", "--show", *SHOWN, "--port"]
    processes = [subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL) for port in ports]
    for port in ports:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield [f"http://127.0.0.1:{port}" for port in ports], processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_sandbox_server_that_is_killed_costs_its_sandboxes_and_another_goes_on(monkeypatch, servers):
    urls, (first, second) = servers
    run = Run(monkeypatch, 6)

    async def wound() -> None:
        while len(run.engine.outputs) < 3:
            await asyncio.sleep(0.01)
        first.kill()
        second.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        second.send_signal(signal.SIGCONT)

    options = {"urls": urls, "memory_mb": 256, "disk_mb": 64}
    monkeypatch.setattr("slime.agent.sandbox.results.random.uniform", lambda low, high: 0.1)  # pauses of seconds
    with monkeypatch.context() as patch:
        patch.setattr(rollout.Execution, "sandbox", _with_gateway(run, rollout.Execution.sandbox))
        sandbox = {"backend": "http", "options": options, "gateway_url": "http://here"}
        samples = run.execute({**AGENT, "sandbox": sandbox}, wound)
    failed = check_untrusted(samples)
    assert {sample.end_reason for sample in failed} <= {"env_error", "grader_error"}
    assert len(failed) <= 4 + 1, "what begins after the end of a server begins at the other"


def _with_gateway(run: Run, make: Any) -> Any:
    """`Execution.sandbox` with the gateway's address, which is known when it has been started."""

    def sandbox(execution: Any, task: Any, access: Any) -> Any:
        if access is not None:
            access = type(access)(run.gateway.url, access.key)
        return make(execution, task, access)

    return sandbox
