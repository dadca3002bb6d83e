"""A sync of LoRA adapters on the host, part by part: checking, packing, handing over, and SGLang's load elsewhere.

    python benchmarks/lora_sync.py [--rank 32] [--layers 36] [--threads 1]

The shapes are those of Qwen3-4B, the tensors random bf16; no model, engine or GPU is needed. SGLang's own code loads
them in another process. Each part runs `--repeats` times in memory of its own, as versions of a run do, and the median
counts. On a GPU the copy of `pack` is one from the GPU; `gpu_lora.py` measures the whole there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402

from slime.backends.sglang_utils import weight_transfer  # noqa: E402
from slime.weights.adapters import check_adapter  # noqa: E402

HIDDEN, MLP, Q, KV = 2560, 9728, 4096, 1024
PROJECTIONS = {
    "self_attn.q_proj": (Q, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, Q),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
}
"""HF's name -> [out, in]."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--layers", type=int, default=36, help="of the model")
    parser.add_argument("--threads", type=int, default=1, help="of torch; a trainer that Ray starts has one")
    parser.add_argument("--repeats", type=int, default=7, help="versions that are sent")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base, tensors = adapter_of(options.rank, options.layers)
    config = {"peft_type": "LORA", "r": options.rank, "lora_alpha": 64.0, "target_modules": "all-linear"}
    weight_transfer.preload()
    versions, times = [], dict[str, list[float]]()
    check, pack = partial(check_adapter, base=base, max_rank=options.rank), weight_transfer.adapter_tensors_of
    for _ in range(options.repeats):
        clocked(times, "check", check, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, config)
        room = clocked(times, "room (made ahead)", weight_transfer.SharedRoom, num_bytes(tensors))
        shared = clocked(times, "pack", weight_transfer.in_shared_memory, tensors, room)
        bodies, _ = clocked(times, "handles", partial(pack, with_checksums=False), shared, config, [1])
        versions.append((shared, clocked(times, "body as JSON", json.dumps, bodies[0])))
    print(f"{num_bytes(tensors) / 1e6:.0f} MB in {len(tensors)} tensors, sent as {len(shared.places)}")
    show("trainer", times)
    loading = multiprocessing.get_context("spawn").Pool(1)
    show("engine", loading.apply(load_all, ([body for _, body in versions], options.layers, options.threads)))


def adapter_of(rank: int, layers: int) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]:
    """(HF's name of each weight -> its shape, PEFT's name of each tensor -> random values)."""
    base: dict[str, tuple[int, ...]] = {}
    tensors = {}
    for layer in range(layers):
        for projection, (rows, columns) in PROJECTIONS.items():
            name = f"model.layers.{layer}.{projection}"
            base[f"{name}.weight"] = (rows, columns)
            for half, shape in {"A": (rank, columns), "B": (rows, rank)}.items():
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = torch.randn(shape).bfloat16()
    return base, tensors


def num_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def clocked(times: dict[str, list[float]], part: str, do: Callable[..., Any], *arguments: Any) -> Any:
    """Do something, and note the seconds under the part's name."""
    begin = time.perf_counter()
    result = do(*arguments)
    times.setdefault(part, []).append(time.perf_counter() - begin)
    return result


def load_all(bodies: list[str], layers: int, threads: int) -> dict[str, list[float]]:
    """Open the memory and make an adapter of what is in it, as an engine's scheduler does."""
    from slime.backends.sglang_utils import cpu_standins, engine_patches

    cpu_standins.install()
    weight_transfer.preload()
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
    from transformers import Qwen3Config

    engine_patches.take_stacks()
    torch.set_num_threads(threads)
    model, times, kept = Qwen3Config(num_hidden_layers=layers), dict[str, list[float]](), []
    for number, body in enumerate(bodies):
        request = clocked(times, "read the body", json.loads, body)
        [handle] = request["serialized_named_tensors"]
        data = clocked(times, "open", MultiprocessingSerializer.deserialize, handle)
        bucket = FlattenedTensorBucket(flattened_tensor=data["flattened_tensor"], metadata=data["metadata"])
        tensors = dict(clocked(times, "take apart", bucket.reconstruct_tensors))
        config = LoRAConfig.from_dict(request["config_dict"], None, base_vocab_size=model.vocab_size)
        adapter = LoRAAdapter(str(number), config, model, None, None)
        kept.append(adapter)
        clocked(times, "keep", adapter.initialize_weights_from_tensors, tensors)
    return times


def show(side: str, times: dict[str, list[float]]) -> None:
    """Print the median of each part, and the sum of those that a sync waits for."""
    each = {part: 1e3 * statistics.median(found) for part, found in times.items()}
    whole = sum(ms for part, ms in each.items() if "ahead" not in part)
    print(f"{side}: {whole:.1f} ms ({', '.join(f'{part} {ms:.1f}' for part, ms in each.items())})")


if __name__ == "__main__":
    main()
