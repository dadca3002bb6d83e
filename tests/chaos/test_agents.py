"""Agents whose sandboxes are killed or stopped at any moment: no sample is lost, doubled or trained untrusted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from slime.agent import rollout
from slime.agent.gateway import Gateway
from slime.agent.sandbox.local import LocalSandbox
from slime.rollout.train_data import mask_untrusted, response_loss_mask
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.unit.agent_fakes import ScriptedEngine, served
from tests.unit.test_agent_generate import END, FIX, TASK, TOKENIZER, arguments, call

FAILURES = ("env_error", "grader_error", "transport")
AGENT = {
    "harness": "scripted",
    "at_a_time": 4,
    "sandbox": {"options": {"show": sorted({sys.prefix, sys.base_prefix}), "memory_mb": 256, "disk_mb": 64}},
    "budgets": {"turns": 6, "seconds": 30},
    "grader": {"kind": "tests", "python": sys.executable, "seconds": 30},
}


async def wound(sandbox: LocalSandbox, how: signal.Signals, after_s: float) -> None:
    await asyncio.sleep(after_s)
    pid = sandbox._process.pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)
        if how == signal.SIGSTOP:
            await asyncio.sleep(0.3)
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "num_samples", [8, pytest.param(150, marks=[pytest.mark.slow, pytest.mark.timeout(900)])], ids=["short", "soak"]
)
def test_wounded_sandboxes_lose_and_double_no_sample_and_train_nothing_untrusted(monkeypatch, num_samples):
    rng, wounds, tasks = random.Random(31), Counter[str](), []
    enter = LocalSandbox.__aenter__

    async def enter_and_be_wounded(sandbox: LocalSandbox) -> LocalSandbox:
        await enter(sandbox)
        how = [signal.SIGKILL, signal.SIGSTOP, None][sum(wounds.values()) % 3]
        wounds[str(how)] += 1
        if how:
            tasks.append(asyncio.create_task(wound(sandbox, how, rng.uniform(0.0, 0.5))))
        return sandbox

    monkeypatch.setattr(LocalSandbox, "__aenter__", enter_and_be_wounded)
    monkeypatch.setattr(rollout, "GenerateState", lambda args: SimpleNamespace(aborted=False))
    SingletonMeta.clear_instances(rollout.Places)
    given = [Sample(index=i, group_index=i // 2, prompt="fix it", metadata=dict(TASK)) for i in range(num_samples)]
    texts = [call(FIX), call("true"), "done"] * 3 * num_samples  # in whichever session each falls
    engine = ScriptedEngine(TOKENIZER, [text + END for text in texts])
    with served(engine.app) as url:
        gateway = Gateway(tokenizer=TOKENIZER, sglang_url=url).start()

        async def shared(args: Any) -> Gateway:
            return gateway

        async def run() -> list[Any]:
            runs = [rollout.generate(arguments(AGENT), sample, {"max_new_tokens": 99}) for sample in given]
            returned = await asyncio.gather(*runs)
            await asyncio.gather(*tasks)
            return returned

        monkeypatch.setattr(rollout, "shared_gateway", shared)
        try:
            returned = asyncio.run(run())
            assert not gateway.sessions.store and not gateway.sessions.inflight, "every session has ended"
        finally:
            gateway.stop()
            SingletonMeta.clear_instances(rollout.Places)
    samples = [one for found in returned for one in (found if isinstance(found, list) else [found])]
    assert Counter(sample.index for sample in samples) == Counter(range(num_samples)), "none is lost or doubled"
    assert min(wounds.values()) >= num_samples // 3, wounds
    failed = [sample for sample in samples if sample.end_reason in FAILURES]
    assert failed and len(failed) < num_samples, Counter(sample.end_reason for sample in samples)
    assert all(sample.reward_is_trusted == (sample not in failed) for sample in samples)
    assert all(sample.reward == 0.0 for sample in failed)
    mask_untrusted(SimpleNamespace(on_untrusted_reward="mask"), samples)
    trained = [sample for sample in samples if any(response_loss_mask(sample))]
    assert trained and not any(sample in failed for sample in trained)
