"""Measure the driver's own work at n and at 2n samples: CPU seconds and memory, without engines and trainers.

    python benchmarks/driver_scale.py [--only CASE ...] [--sizes 1000 10000 50000] [--tries 3]

Each case runs in a child process of its own with samples of 64 + 64 tokens in groups of 8, and shows the best of at
least three tries and two CPU seconds (at most 30 tries: a short case is disturbed in more of them). The 500 engines
are fake: a custom generate function writes the tokens, and telling an engine to abort costs nothing, so that only the
driver is measured. For `streamed response` n is the number of tokens of one response, sent as SGLang sends it: each
event holds everything so far.

Ends with status 1 where doubling n costs more than 2.3 times the CPU time or the memory. What takes less than 0.1 s or
32 MiB at 2n is shown and not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import multiprocessing
import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import orjson

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.rollout_overhead import GROUP, PROMPT, RESPONSE, make_args  # noqa: E402
from slime.backends.sglang_utils import server_control  # noqa: E402
from slime.config.args import publish_runtime  # noqa: E402
from slime.observability.rollout_metrics import compute_rollout_metrics  # noqa: E402
from slime.ray.rollout.shares import split_train_data  # noqa: E402
from slime.rollout import sglang_streaming_rollout  # noqa: E402
from slime.rollout.data_source import RolloutDataSourceWithBuffer  # noqa: E402
from slime.rollout.fully_async_rollout import generate_rollout_fully_async, stop_worker  # noqa: E402
from slime.rollout.sampling.generation import GenerateState  # noqa: E402
from slime.rollout.sglang_rollout import generate_rollout  # noqa: E402
from slime.rollout.train_data import post_process_rewards, samples_to_train_data  # noqa: E402
from slime.utils import async_utils, http_utils  # noqa: E402
from slime.utils.misc import spare_garbage_collector  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

ENGINES, DP_SIZE = 500, 8
MOST_TIMES, QUICK_S, LEAST_S, SMALL_MIB, MIB = 2.3, 0.1, 2.0, 32.0, 1 << 20
Work = Callable[[], Any]
Figures = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sizes", nargs="*", type=int, default=[1_000, 10_000, 50_000])
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as work:
        args = driver_args(Path(work))
        post_process_rewards(args, _samples(args, GROUP))  # imports transformers and torch once, for every child
        print("| case | n | CPU s at n | at 2n | times | MiB at n | at 2n | times |")
        print("|---|---|---|---|---|---|---|---|")
        for case in options.only:
            for n in options.sizes:
                once, twice = best(case, args, n, options.tries)
                cpu, memory = (growth(once[i], twice[i], least) for i, least in enumerate((QUICK_S, SMALL_MIB)))
                seconds, sizes = (f"{once[0]:.3f} | {twice[0]:.3f}", f"{once[1]:.0f} | {twice[1]:.0f}")
                print(f"| {case} | {n:,} | {seconds} | {shown(cpu)} | {sizes} | {shown(memory)} |", flush=True)
                problems += [f"{case} at {n:,}"] * (max(cpu or 0, memory or 0) > MOST_TIMES)
    if problems:
        sys.exit(f"doubling costs more than {MOST_TIMES} times: {', '.join(problems)}")


def best(case: str, args: Any, n: int, tries: int) -> tuple[Figures, Figures]:
    """Return the figures at n and at 2n; measure both again, at most three times, where the CPU time grew too much.

    Other processes only ever add to a CPU time (they take the caches), so the lesser of two is nearer to the truth.
    """
    found: list[Figures] = []
    for _ in range(4):
        now = [measure(case, args, size, tries) for size in (n, 2 * n)]
        found = [(min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(found or now, now, strict=True)]
        if (growth(found[0][0], found[1][0], QUICK_S) or 0) <= MOST_TIMES:
            break
    return found[0], found[1]


def growth(once: float, twice: float, least: float) -> float | None:
    """Return what doubling multiplies a cost by; None where the cost is too small to tell."""
    return twice / max(once, 1e-9) if twice >= least else None


def shown(times: float | None) -> str:
    """Format a ratio for the table."""
    return "" if times is None else f"{times:.2f}"


def driver_args(work: Path) -> Any:
    """The flags of a real run, with 500 engines that do not exist."""
    args = make_args(work / "run", RESPONSE)
    me = Path(__file__).resolve()
    publish_runtime(args, sglang_router_ip="127.0.0.1", sglang_router_port=1, sglang_model_routers={})
    return args.replace(
        rollout_num_gpus=ENGINES * args.rollout_num_gpus_per_engine,
        custom_generate_function_path=f"{me}:generate",
        custom_rm_path=f"{me}:reward",
        save=str(work / "save"),
        load=str(work / "save"),
    )


def measure(case: str, args: Any, n: int, tries: int) -> Figures:
    """(CPU seconds, MiB) of a case, the best of some tries in a process of their own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_measure_here, args=(case, args, n, tries, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join(60)


def _measure_here(case: str, args: Any, n: int, tries: int, sender: Any) -> None:
    groups, at_once = n // GROUP, -(-n // ENGINES)
    args = args.replace(rollout_batch_size=groups, over_sampling_batch_size=groups, global_batch_size=n)
    args = args.replace(sglang_server_concurrency=at_once)
    figures: list[Figures] = []
    with mock.patch.multiple(server_control, list_workers=_list_workers, abort_all=_abort):
        while len(figures) < tries or (len(figures) < 10 * tries and sum(f[0] for f in figures) < LEAST_S):
            figures.append(_once(CASES[case](args, n)))
    sender.send((min(f[0] for f in figures), max(f[1] for f in figures)))  # a later try finds freed memory


def _once(work: Work) -> Figures:
    spare_garbage_collector()  # as the rollout manager does once its data is open
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    begin = time.process_time()
    result = work()
    taken = time.process_time() - begin
    grown = (_memory("VmHWM") - before) / MIB
    del result
    gc.unfreeze()
    return taken, max(grown, 0.0)


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


async def _list_workers(router: str) -> list[str]:
    return [f"http://engine-{number}" for number in range(ENGINES)]


async def _abort(worker: str) -> None:
    """Nothing: the fake engine has nothing in flight."""


# ---- what stands for engines and prompts

META = {"finish_reason": {"type": "length"}, "weight_version": "1", "prompt_tokens": PROMPT}


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """--custom-generate-function-path: an answer after one turn of the loop."""
    await asyncio.sleep(0)
    sample.tokens = list(range(PROMPT))
    return _answered(sample)


def _answered(sample: Sample) -> Sample:
    tokens, log_probs = list(range(RESPONSE)), [-0.5] * RESPONSE
    sample.append_response_tokens(tokens=tokens, log_probs=log_probs, meta_info={}, text="x" * RESPONSE)
    sample.status = Sample.Status.TRUNCATED
    sample.weight_versions.append("1")
    return sample


async def reward(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """--custom-rm-path: differs within a group."""
    return float((sample.index or 0) % 3)


def _source(args: Any) -> RolloutDataSourceWithBuffer:
    GenerateState.clear_instances()
    return RolloutDataSourceWithBuffer(args)


def _groups(args: Any, n: int) -> list[list[Sample]]:
    """n finished samples in groups, of lengths that differ."""
    lengths = random.Random(0)
    groups = _source(args).get_samples(n // GROUP)
    for sample in (sample for group in groups for sample in group):
        sample.tokens = list(range(lengths.randint(1, 2 * PROMPT)))
        _answered(sample).reward = float((sample.index or 0) % 3)
    return groups


def _samples(args: Any, n: int) -> list[Sample]:
    return [sample for group in _groups(args, n) for sample in group]


# ---- the cases: what is prepared is not measured


def draw(args: Any, n: int) -> Work:
    """Prompts of the file, as groups."""
    source = _source(args)
    return lambda: source.get_samples(n // GROUP)


def draw_from_buffer(args: Any, n: int) -> Work:
    """Groups that were given back, one by one, as the fully async worker draws them."""
    source = _source(args)
    source.add_samples(_groups(args, n))
    return lambda: [source.get_samples(1) for _ in range(n // GROUP)]


def save_and_load(args: Any, n: int) -> Work:
    """The data source's state with n samples that are partly generated."""
    source, other = _source(args), _source(args)
    source.add_samples(_groups(args, n))

    def work() -> None:
        source.save(0)
        other.load(0)

    return work


def rollout(args: Any, n: int) -> Work:
    """generate_rollout, with the abort of every engine at its end."""
    source = _source(args)
    return lambda: generate_rollout(args, 0, source)


def fully_async(args: Any, n: int) -> Work:
    """Two rollouts of the fully async worker, whose queue has room for n samples."""
    source = _source(args)

    def work() -> list[Any]:
        outputs = [generate_rollout_fully_async(args, number, source) for number in range(2)]
        stop_worker()
        return outputs

    return work


def normalise(args: Any, n: int) -> Work:
    """Rewards minus the mean of their group."""
    samples = _samples(args, n)
    return lambda: post_process_rewards(args, samples)


def metrics(args: Any, n: int) -> Work:
    """Every metric of a rollout."""
    samples = _samples(args, n)
    args = args.replace(log_passrate=True, log_multi_turn=True, log_correct_samples=True)
    return lambda: compute_rollout_metrics(args, samples, 10.0)


def convert(args: Any, n: int) -> Work:
    """Samples to TrainData."""
    samples = _samples(args, n)
    raw_rewards, rewards = post_process_rewards(args, samples)
    return lambda: samples_to_train_data(samples, raw_rewards, rewards)


def split(args: Any, n: int, **flags: bool) -> Work:
    """TrainData to 8 data-parallel ranks; micro-batches by first fit."""
    train_data = convert(args, n)()
    args = args.replace(use_dynamic_batch_size=True, max_tokens_per_gpu=512, **flags)
    return lambda: split_train_data(args, train_data, {"dp_size": DP_SIZE, "cp_size": 1})


def split_balanced(args: Any, n: int) -> Work:
    """The same with --balance-data and --balance-by-flops."""
    return split(args, n, balance_data=True, balance_by_flops=True)


def streamed(args: Any, n: int) -> Work:
    """One response of n tokens, in as many events as the request asks for."""
    GenerateState.clear_instances()
    GenerateState(args)
    sample, params = Sample(index=0, prompt="1+1=", tokens=[1, 2, 3]), {"max_new_tokens": n, "temperature": 1.0}
    pairs = [[-0.5, number, None] for number in range(n)]

    def work() -> None:
        with mock.patch.object(http_utils, "shared_session", lambda: _Session(pairs)):
            async_utils.run(sglang_streaming_rollout.generate_streaming(args, sample, params))

    return work


class _Session:
    """Stands for aiohttp: the events of one response, cut into pieces as a socket cuts them."""

    status = 200

    def __init__(self, pairs: list[Any]) -> None:
        self._pairs, self.content = pairs, self
        self._every = 1

    @contextlib.asynccontextmanager
    async def post(self, url: str, *, data: bytes, headers: Any) -> AsyncIterator[_Session]:
        self._every = orjson.loads(data)["sampling_params"].get("stream_interval", 1)
        yield self

    async def iter_any(self) -> AsyncIterator[bytes]:
        ends = [*range(1, len(self._pairs), self._every), len(self._pairs)]
        for end in ends:
            line = b"data: " + orjson.dumps(self._event(end)) + b"\n\n"
            for piece in _pieces(line):
                yield piece

    def _event(self, end: int) -> dict[str, Any]:
        reason = {"type": "length"} if end == len(self._pairs) else None
        meta = {**META, "finish_reason": reason, "completion_tokens": end, "output_token_logprobs": self._pairs[:end]}
        return {"text": "x" * end, "meta_info": meta}


def _pieces(line: bytes) -> Iterator[bytes]:
    return (line[start : start + (1 << 16)] for start in range(0, len(line), 1 << 16))


CASES: dict[str, Callable[[Any, int], Work]] = {
    "draw prompts": draw,
    "draw from the buffer": draw_from_buffer,
    "buffer save and load": save_and_load,
    "rollout": rollout,
    "fully async": fully_async,
    "reward normalisation": normalise,
    "metrics": metrics,
    "TrainData": convert,
    "split, first fit": split,
    "split, by FLOPs": split_balanced,
    "streamed response": streamed,
}


if __name__ == "__main__":
    main()
