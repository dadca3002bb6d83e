"""Load on two real engines on CPU behind a real router: no request is lost or doubled, memory is flat, one may die."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import pytest

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.processes.wait import wait
from slime.ray.rollout.router import Router
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils, http_utils
from slime.utils.types import Sample
from tests.integration.conftest import HOST, make_engine
from tests.integration.launch import make_model
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

pytestmark = pytest.mark.timeout(900)
CONCURRENT, TOKENS = 512, 8
GROUP = 8
ROLLOUTS, WARM_UP, REQUESTS_OF_ONE = 20, 5, 128
OURS_MB, THEIRS_MB = 2.0, 7.0  # from rollouts 5 to 9 to the last five; one rollout is 128 requests


class Servers(NamedTuple):
    engines: list[SGLangEngine]
    router: Router


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    root = tmp_path_factory.mktemp("load")
    model = make_model(root / "model")
    settings = {"max_total_tokens": 32768, "enable_metrics": True}
    engines = [make_engine(model, root / f"engine_{i}.log", **settings) for i in range(2)]
    flags: dict[str, Any] = {"sglang_router_ip": None, "sglang_router_port": None, "router_overrides": {}}
    args = Namespace(**flags, sglang_router_request_timeout_secs=120)
    router = Router(args, host=HOST, log_path=root / "router.log")
    try:
        router.launch()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda engine: engine.start(deadline_s=600), engines))
        router.wait_ready()
        for engine in engines:
            server_control.register_worker_sync(router.address.url, server_control.Worker(engine.url))
        yield Servers(engines, router)
    finally:
        router.shutdown()
        for engine in engines:
            engine.shutdown()


@pytest.fixture
def args(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    GenerateState.clear_instances()
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    yield rollout_args(
        sglang_router_ip=servers.router.address.ip,
        sglang_router_port=servers.router.address.port,
        sglang_server_concurrency=CONCURRENT // 2,
        # How fast two engines answer 512 requests is the machine's affair: beside another test it took 30 s.
        sglang_router_request_timeout_secs=120,
        rollout_num_engines=2,
        n_samples_per_prompt=GROUP,
        rollout_max_response_len=TOKENS,
        rollout_ignore_eos=True,
    )
    async_utils.run(http_utils.close_http_client())
    GenerateState.clear_instances()


class Prompts:
    """A data source without an end: every prompt another one of 16 letters."""

    def __init__(self) -> None:
        self.drawn = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = range(self.drawn, self.drawn + num_samples)
        self.drawn += num_samples
        return [
            [Sample(prompt=f"{group:016d}", group_index=group, index=group * GROUP + i) for i in range(GROUP)]
            for group in groups
        ]


def answered(engines: list[SGLangEngine]) -> int:
    """Requests that the engines have finished, by their own count."""
    texts = [http_utils.get_sync(f"{engine.url}/metrics") for engine in engines]
    return sum(
        int(float(n)) for text in texts for n in re.findall(r"^sglang:num_requests_total\{.*\} (\S+)$", text, re.M)
    )


def test_of_512_requests_at_once_none_is_lost_and_none_doubled(servers: Servers, args: Namespace) -> None:
    http_utils.init_http_client(args)
    url, before = f"{servers.router.address.url}/generate", answered(servers.engines)

    async def one(i: int) -> Any:
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
        payload = {"rid": f"request-{i}", "input_ids": [8 + i % 64, 8 + i // 64], "sampling_params": sampling}
        return await http_utils.post(url, payload)

    async def together() -> list[Any]:
        return await asyncio.gather(*map(one, range(CONCURRENT)))

    answers = async_utils.run(together())
    assert [answer["meta_info"]["id"] for answer in answers] == [f"request-{i}" for i in range(CONCURRENT)]
    assert {len(answer["output_ids"]) for answer in answers} == {TOKENS}
    assert answered(servers.engines) - before == CONCURRENT


def own_mb(*processes: psutil.Process) -> float:
    """Memory of processes, without the files that they map: of those the kernel keeps as much as it likes."""
    texts = [Path(f"/proc/{process.pid}/status").read_text() for process in processes]
    return sum(int(n) for text in texts for n in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", text, re.M)) / 2**10


def growth_mb(found: list[float]) -> float:
    """From the five rollouts after the warm-up to the last five; one rollout alone may have met a collection."""
    return median(found[-5:]) - median(found[WARM_UP : WARM_UP + 5])


def test_memory_is_flat_over_20_rollouts(servers: Servers, args: Namespace) -> None:
    args.rollout_batch_size = args.over_sampling_batch_size = REQUESTS_OF_ONE // GROUP
    prompts, client = Prompts(), psutil.Process()
    roots = [psutil.Process(engine.pid) for engine in servers.engines]
    engines = [process for root in roots for process in [root, *root.children(recursive=True)]]
    ours, theirs = list[float](), list[float]()
    for rollout_id in range(ROLLOUTS):
        output = generate_rollout(args, rollout_id, prompts)
        samples = [sample for group in output.samples for sample in group]
        expected = range(rollout_id * REQUESTS_OF_ONE, (rollout_id + 1) * REQUESTS_OF_ONE)
        assert [sample.index for sample in samples] == list(expected)
        ours.append(own_mb(client))
        theirs.append(own_mb(*engines))
    assert growth_mb(ours) < OURS_MB, ours
    assert growth_mb(theirs) < THEIRS_MB, theirs


async def of_its_own_length(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generation.generate(args, sample, {**sampling_params, "max_new_tokens": length_of(sample)})


def length_of(sample: Sample) -> int:
    """Different lengths: when the first of the requests has ended, the others go on for seconds."""
    assert sample.index is not None
    return 4 * TOKENS + sample.index % 128


def test_an_engine_killed_in_the_middle_costs_no_sample(
    servers: Servers, args: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    args.rollout_batch_size = args.over_sampling_batch_size = CONCURRENT // GROUP
    args.custom_generate_function_path = f"{__file__}:of_its_own_length"
    victim, survivor = servers.engines
    assert victim.pid is not None
    group, before, before_of_victim = os.getpgid(victim.pid), answered([survivor]), answered([victim])

    def kill_in_the_middle() -> None:
        wait("the first answers of the victim", 300, lambda: answered([victim]) > before_of_victim, interval_s=0.02)
        os.killpg(group, signal.SIGKILL)

    with ThreadPoolExecutor(1) as thread, caplog.at_level("WARNING"):
        killing = thread.submit(kill_in_the_middle)
        output = generate_rollout(args, 0, Prompts())
        killing.result()
    assert not victim.health()
    samples = [sample for group in output.samples for sample in group]
    assert [sample.index for sample in samples] == list(range(CONCURRENT))
    assert [sample.response_length for sample in samples] == [length_of(sample) for sample in samples]
    num_answered = answered([survivor]) - before
    # All of them, if the few answers of the victim were still on their way when it was killed.
    assert CONCURRENT / 2 < num_answered <= CONCURRENT, "what the victim had in flight was done by the survivor, once"
    # Once more at the most if the router gives the victim up at once; without its circuit breaker, fifteen times.
    assert not [text for text in caplog.messages if "attempt 5" in text], "the router gave the victim up"
