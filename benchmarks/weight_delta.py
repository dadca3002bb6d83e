"""Deltas of weights beside whole versions: seconds to write one, and to bring a host's copy to it.

    python benchmarks/weight_delta.py [--model 0.6B] [--density 0.01 0.1] [--rounds 3] [--folder DIR] [--device cuda]

The writers are those of --update-weight-mode delta, the copy is an engine host's, and what is loaded are an engine's
tensors without the engine, on bf16 weights of a Qwen3 shape; a share of the elements changes by its last bit between
two versions. No network takes part, and a GPU only where the weights lie there, as a trainer's and an engine's do.
Medians of the rounds. Limit: the same bytes copied in memory by one thread, in the same round.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.gpu_models import QWEN3, SHAPES  # noqa: E402
from slime.backends.megatron_utils.update_weight.from_disk import DeltaWriter, WholeWriter  # noqa: E402
from slime.backends.sglang_utils.disk_weights import ElementCopies, LocalCheckpoint, load  # noqa: E402
from slime.weights.delta import ENCODINGS  # noqa: E402

BUCKET = 2**29
Weights = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="0.6B")
    parser.add_argument("--layers", type=int, help="of the model (default: all)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.1], help="share of elements that change")
    parser.add_argument("--encoding", choices=ENCODINGS, default="xor")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="for the files (default: the temporary directory)")
    parser.add_argument("--device", default="cpu", help="where the trainer's weights lie")
    options = parser.parse_args()
    weights = random_weights(options.model, options.layers, options.device)
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{size / 1e9:.2f} GB, {len(weights)} tensors; seconds, and GB of weights a second\n")
    print("| version | on the way | written | host's copy brought to it | loaded | copy in memory |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        versions = Versions(Path(work), weights, options.encoding)
        print(row("whole", size, [versions.next(0.0, is_whole=True) for _ in range(options.rounds)]))
        for density in options.density:
            found = [versions.next(density, is_whole=False) for _ in range(options.rounds)]
            print(row(f"delta, {density:.0%} of the elements", size, found))


def random_weights(model: str, layers: int | None, device: str) -> Weights:
    """bf16, by HF name."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    config = Qwen3Config(**(QWEN3 | SHAPES[model] | ({"num_hidden_layers": layers} if layers else {})))
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Qwen3ForCausalLM(config).state_dict().items()}
    shapes.pop("lm_head.weight")
    how = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    return {name: torch.randn(shape, **how).mul_(0.02).bfloat16() for name, shape in shapes.items()}


class Versions:
    """A trainer's versions and the copy of a host, in one folder, and an engine's tensors on the same device."""

    def __init__(self, work: Path, weights: Weights, encoding: str) -> None:
        self._work = work
        self._weights = weights
        self._encoding = encoding
        held = {name.replace(".", "/"): torch.zeros_like(tensor) for name, tensor in weights.items()}
        self._model = torch.nn.ParameterDict(held).requires_grad_(False)
        self._loaded = ElementCopies(self._model)
        self._held: dict[str, Any] = {}
        self._number = 0
        device = next(iter(weights.values())).device
        self._how: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(1), "device": device}

    def next(self, density: float, *, is_whole: bool) -> dict[str, float]:
        """Change the weights, write a version and bring the copy there; seconds of each, and bytes written."""
        for tensor in self._weights.values():
            if density:
                changes = torch.rand(tensor.shape, **self._how) < density
                tensor.view(torch.int16).bitwise_xor_(changes.short())
        self._number += 1
        directory = self._work / f"v{self._number}"
        metadata = {"version": self._number, "run": "benchmark", "id": str(self._number)}
        if not is_whole:
            metadata |= {"base_version": self._number - 1, "base_id": str(self._number - 1)}
            metadata |= {"delta_encoding": self._encoding, "checksum_format": "xxh3-128"}
        kind = WholeWriter if is_whole else DeltaWriter
        writer = kind(self._held, directory, None, shard_bytes=BUCKET, index_metadata=metadata, has_manifest=True)

        def write() -> None:
            for bucket in self._buckets():
                writer.add(bucket)
            writer.finish()

        copies = [(torch.empty_like(tensor), tensor) for tensor in self._weights.values() if not tensor.is_cuda]
        for target, _ in copies:
            target.zero_()  # the pages are there
        found = {"copy": seconds(lambda: [target.copy_(source) for target, source in copies]), "write": seconds(write)}
        copies.clear()
        found["bring"] = seconds(lambda: LocalCheckpoint(self._work / "local").bring_to(directory))
        local = self._work / "local"
        found["load"] = seconds(lambda: load(directory, self._load_weights, local, self._loaded))
        assert all(torch.equal(self._model[name.replace(".", "/")], t) for name, t in self._weights.items())
        shutil.rmtree(directory)
        return {**found, "bytes": float(writer.num_bytes)}

    def _load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self._model[name.replace(".", "/")].data.copy_(tensor)

    def _buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        bucket: list[tuple[str, torch.Tensor]] = []
        for item in self._weights.items():
            if bucket and sum(tensor.nbytes for _, tensor in [*bucket, item]) > BUCKET:
                yield bucket
                bucket = []
            bucket.append(item)
        yield bucket


def seconds(action: Callable[[], Any]) -> float:
    """How long it takes."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def row(name: str, size: int, rounds: list[dict[str, float]]) -> str:
    """A line of the table."""
    medians = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    cells = [
        f"{medians[key]:.2f} s, {size / max(medians[key], 1e-9) / 1e9:.2f}"
        for key in ("write", "bring", "load", "copy")
    ]
    return " | ".join([f"| {name}", f"{medians['bytes'] / 1e6:.0f} MB", *cells]) + " |"


if __name__ == "__main__":
    main()
