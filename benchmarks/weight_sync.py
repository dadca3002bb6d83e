"""Where the time of a colocated weight sync goes, on CPU: a real Megatron model, a real engine, a tiny model.

    python benchmarks/weight_sync.py [--buckets 3] [--layers 28] [--repeat 30] [--rest 6] [--lora-rank 32]

Prints medians over the syncs after the first: milliseconds of each stage on the source rank, as wall time and as CPU
time of its main thread (which other work on the machine disturbs less), CPU time of the engine's processes, and what
does not depend on the load at all: HTTP requests and torch calls from Python in one sync. The stages:

    convert    until the iterator has the next buckets   prepare   copy into shared memory, handles
    room       waiting for a slot                        look      samples of what is sent
    finish     waiting for the engine after the last     compare   version and samples of the engine

With --lora-rank the engine serves adapters, and the row is another one: pack (gather, check, copy to the host; before
the pause), pause, load (shared memory to loaded), continue, and from pause to continue together.

The tensors are tiny: what is measured is the work for each of them, which a GPU does not make faster. Tests use the
same model and engine; benchmarks/gpu_weight_sync.py measures a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from slime.backends.megatron_utils import initialize  # noqa: E402
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights  # noqa: E402
from slime.backends.megatron_utils.layers.lora import adapter_tensors, attach_adapters  # noqa: E402
from slime.backends.megatron_utils.model_provider import get_model_provider_func  # noqa: E402
from slime.backends.megatron_utils.update_weight import base, buckets, from_tensor  # noqa: E402
from slime.backends.megatron_utils.update_weight.from_adapters import AdapterUpdater  # noqa: E402
from slime.config.args import Args  # noqa: E402
from slime.utils import http_utils  # noqa: E402
from slime.utils.misc import listen_anywhere  # noqa: E402
from tests.integration.conftest import make_engine  # noqa: E402
from tests.integration.launch import make_model  # noqa: E402
from tests.integration.trainer_world import trainer_args  # noqa: E402
from tests.unit.megatron_fakes import make_args  # noqa: E402

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STAGES = {
    "room": (buckets.BucketStream, "make_room"),
    "look": (base.SyncChecks, "note"),
    "prepare": (from_tensor.HandOver, "prepare"),
    "finish": (buckets.BucketStream, "finish"),
    "compare": (base.SyncChecks, "compare"),
    "release": (from_tensor.HandOver, "release"),
}


class Watch:
    """Seconds of each stage of a sync, wall and CPU, and its HTTP requests."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.cpu: dict[str, float] = defaultdict(float)
        self.requests: Counter[str] = Counter()
        for stage, (owner, method) in STAGES.items():
            setattr(owner, method, self._timed(stage, getattr(owner, method)))
        for function in ("get_sync", "post_sync"):
            setattr(http_utils, function, self._counted(getattr(http_utils, function)))
        iterate = base.iter_hf_buckets

        def timed(*values: Any, **keywords: Any) -> Iterator[Any]:
            return self._timed_items(iterate(*values, **keywords))

        base.iter_hf_buckets = timed

    def clear(self) -> None:
        """Forget the last sync."""
        for counts in (self.wall, self.cpu, self.requests):
            counts.clear()

    def _timed(self, stage: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*values: Any, **keywords: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return action(*values, **keywords)
            finally:
                self.wall[stage] += time.perf_counter() - wall
                self.cpu[stage] += time.thread_time() - cpu

        return timed

    def _counted(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def counted(url: str, *values: Any, **keywords: Any) -> Any:
            self.requests[url.rpartition("/")[2]] += 1
            return ask(url, *values, **keywords)

        return counted

    def _timed_items(self, items: Iterator[Any]) -> Iterator[Any]:
        advance, end = self._timed("convert", next), object()
        while (item := advance(items, end)) is not end:
            yield item


class TorchCalls(TorchFunctionMode):
    """Counts what this thread asks of torch."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything on."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=3)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between syncs, as a step of a run has")
    parser.add_argument("--lora-rank", type=int, help="send adapters of this rank in place of weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "model", "--layers", options.layers)
        engine = make_engine(path, Path(folder) / "engine_0.log", **adapter_room(options.lora_rank))
        engine.start(deadline_s=600)
        try:
            (measure_adapters if options.lora_rank else measure)(engine, path, options)
        finally:
            engine.shutdown()


def adapter_room(rank: int | None) -> dict[str, Any]:
    """Return the settings of an engine that serves adapters."""
    if rank is None:
        return {}
    room: dict[str, Any] = {"max_lora_rank": rank, "lora_target_modules": DENSE, "max_loras_per_batch": 2}
    return {"enable_lora": True, "lora_backend": "torch_native", **room}


def measure_adapters(engine: Any, path: Path, options: Namespace) -> None:
    """Sync adapters `repeat` times after one that nobody times, and print the medians."""
    more = {"lora_rank": options.lora_rank, "sglang_max_lora_rank": None, "output_dir": "", "offload_rollout": False}
    args, model = build_model(path, **more, load=str(path), update_weight_buffer_size=2**30)
    attach_adapters(args, model)
    updater = AdapterUpdater(args, model)
    updater.connect([engine], engine_sizes=[1])
    updater.update()
    rows: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.repeat):
        time.sleep(options.rest)
        found = {name.removeprefix("perf/update_weights_"): value for name, value in updater.update().items()}
        pack, pause, load = (found[f"{name}_time"] for name in ("pack", "pause", "send"))
        stages = {"pack": pack, "pause": pause, "load": load, "continue": found["time"] - pack - pause - load}
        for name, seconds in (stages | {"paused": found["time"] - pack, "sync": found["time"]}).items():
            rows[name].append(seconds)
    tensors = adapter_tensors(model).values()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    print(f"adapters: {len(tensors)} tensors, {num_bytes} bytes; {options.repeat} syncs; ms")
    print(f"{'stage':10}{'median':>8}{'min':>8}{'max':>8}")
    for name, values in rows.items():
        print(f"{name:10}" + "".join(f"{1e3 * f(values):8.1f}" for f in (statistics.median, min, max)))


def build_model(path: Path, **flags: Any) -> tuple[Args, list[Any]]:
    """A world of one rank with the Megatron model of an HF directory, and its flags."""
    fixed: dict[str, Any] = {
        "check_weight_update_equal": False,
        "update_weight_buffer_size": 1,
        "train_backend": "megatron",
        "multimodal_keys": None,
    }
    args = cast(Args, trainer_args(path, **fixed | flags) if flags else make_args(path, **fixed))
    torch.set_num_threads(1)
    initialize.init(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=listen_anywhere("127.0.0.1"))
    model = [get_model_provider_func(args)()]
    load_hf_weights(args, model, args.hf_checkpoint)
    return args, model


def buffer_size_for(args: Args, model: list[Any], num_buckets: int) -> int:
    """The smallest --update-weight-buffer-size, in KiB, with which there are at most so many buckets."""
    sizes = [tensor.nbytes for (bucket) in base.iter_hf_buckets(args, model, buffer_size=1) for _, tensor in bucket]
    size = max(max(sizes), sum(sizes) // num_buckets)
    while sum(1 for _ in base.iter_hf_buckets(args, model, buffer_size=size)) > num_buckets:
        size += 1024
    return size


def engine_seconds(engine: Any) -> dict[str, float]:
    """CPU seconds that each process of the engine has taken so far, by the name it gives itself."""
    main = psutil.Process(engine.pid)
    processes = [main, *main.children(recursive=True)]
    return {" ".join(p.cmdline())[:40].strip(): sum(p.cpu_times()[:2]) for p in processes}


def measure(engine: Any, path: Path, options: Namespace) -> None:
    """Sync `repeat` times after one that nobody times, and print the medians."""
    args, model = build_model(path)
    args.update_weight_buffer_size = buffer_size_for(args, model, options.buckets)
    watch = Watch()
    updater = from_tensor.TensorWeightUpdater(args, model)
    updater.connect([engine], engine_sizes=[1])
    updater.update()
    rows: dict[str, list[float]] = defaultdict(list)
    cpu_rows: dict[str, list[float]] = defaultdict(list)
    before = engine_seconds(engine)
    for _ in range(options.repeat):
        time.sleep(options.rest)
        watch.clear()
        cpu, times = time.thread_time(), updater.update()
        cpu_rows["sync"].append(time.thread_time() - cpu)
        rows["sync"].append(times["perf/update_weights_time"] - times["perf/update_weights_pause_time"])
        for stage in ("convert", *STAGES):
            rows[stage].append(watch.wall[stage])
            cpu_rows[stage].append(watch.cpu[stage])
    after = engine_seconds(engine)
    requests = dict(watch.requests)
    with TorchCalls() as calls:
        updater.update()
    sizes = [(len(bucket), sum(tensor.nbytes for _, tensor in bucket)) for bucket in sent_by(args, model)]
    print(f"buckets (tensors, bytes): {sizes}; {options.repeat} syncs; ms, medians")
    print(f"{'stage':10}{'wall':>8}{'min':>8}{'CPU':>8}")
    for name, values in rows.items():
        columns = (statistics.median(values), min(values), statistics.median(cpu_rows[name]))
        print(f"{name:10}" + "".join(f"{1e3 * value:8.1f}" for value in columns))
    for name, seconds in after.items():
        spent = 1e3 * (seconds - before.get(name, 0.0)) / options.repeat
        print(
            f"{spent:18.1f} ms CPU a sync: engine's {name}" if spent >= 0.1 else "", end="\n" if spent >= 0.1 else ""
        )
    print(f"{sum(requests.values())} HTTP requests a sync: {requests}")
    print(f"{calls.count} torch calls of the main thread a sync")


def sent_by(args: Args, model: list[Any]) -> Iterator[Any]:
    """The buckets of a sync."""
    return base.iter_hf_buckets(args, model, buffer_size=args.update_weight_buffer_size)


if __name__ == "__main__":
    main()
