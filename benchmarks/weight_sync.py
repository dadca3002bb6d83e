"""Where the time of a colocated weight sync goes, with a real engine and a tiny model on CPU.

    python benchmarks/weight_sync.py [--buckets 16] [--layers 8] [--repeat 10]

Prints medians in milliseconds: the whole sync, its pause, its send, and of the send what the sender does (flatten,
handle) and what it waits for. Model and engine are those of the tests; benchmarks/gpu_weight_sync.py measures a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402

from slime.backends.megatron_utils.update_weight import base, from_tensor  # noqa: E402
from tests.integration.conftest import make_engine  # noqa: E402
from tests.integration.launch import make_model  # noqa: E402


class Timed(from_tensor.HandOver):
    """The transport of colocated runs, with the seconds that the sender spends in it."""

    seconds = 0.0

    def prepare(self, bucket: base.Bucket, *, slot: int) -> Any:
        """As it is, timed."""
        start = time.perf_counter()
        prepared = super().prepare(bucket, slot=slot)
        Timed.seconds += time.perf_counter() - start
        return prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", "--layers", options.layers)
        engine = make_engine(model, Path(folder) / "engine_0.log")
        engine.start(deadline_s=600)
        try:
            measure(engine, model, options)
        finally:
            engine.shutdown()


def measure(engine: Any, model: Path, options: Namespace) -> None:
    """Sync `repeat` times after one that nobody times, and print the medians."""
    weights = list(load_file(model / "model.safetensors").items())
    buckets = [found for i in range(options.buckets) if (found := weights[i :: options.buckets])]
    base.iter_hf_buckets = lambda args, model, *, buffer_size: iter(buckets)  # type: ignore[assignment]
    from_tensor.HandOver = Timed  # type: ignore[misc]
    args = Namespace(
        update_weights_in_flight=False,
        update_weight_buffer_size=1,
        distributed_timeout_minutes=5.0,
        hf_checkpoint=str(model),
        mtp_num_layers=None,
        check_weight_update_equal=False,
        offload_train=False,
    )
    updater = from_tensor.TensorWeightUpdater(args, model=[])
    updater.connect([engine], engine_sizes=[1])
    updater.update()
    rows: dict[str, list[float]] = {}
    for _ in range(options.repeat):
        Timed.seconds = 0.0
        for name, seconds in updater.update().items():
            rows.setdefault(name, []).append(seconds)
        rows.setdefault("of the send: flatten and handles", []).append(Timed.seconds)
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    print(f"{len(weights)} tensors, {num_bytes / 1e6:.1f} MB in {len(buckets)} buckets, {options.repeat} syncs")
    for name, values in rows.items():
        print(f"{1e3 * statistics.median(values):9.1f} ms  {name}")
    print(f"{1e3 * statistics.median(rows['perf/update_weights_send_time']) / len(buckets):9.1f} ms  a bucket")


if __name__ == "__main__":
    main()
