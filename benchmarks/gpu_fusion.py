"""What is fused on CUDA beside the same functions compiled by torch, and run operation by operation, one at a time.

    python benchmarks/gpu_fusion.py [--shape 4B]                      # one GPU
    python benchmarks/gpu_fusion.py --tiny --accelerator cpu          # to try the script: nothing is fused there

Forward and backward of one layer's part for 16,384 tokens (log-probs: of one model's logits for 4,096), all ways in
turn: as the product runs it (a kernel by hand, for log-probs torch.compile), through torch.compile, and operation by
operation. "device" is the time by CUDA events; "host" is what the calling thread needs for one call on 8 tokens,
without waiting for the device: it decides where a rank has little work for each layer. Best of 5 rounds.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HEAD_DIM, KV_HEADS, VOCAB = 128, 8, 151936
SIZES = {"0.6B": (1024, 3072, 16), "4B": (2560, 9728, 32)}
"""Qwen3 -> hidden and FFN size, heads."""
ROUNDS, CALLS = 5, 10
WAYS = ("used", "compiled", "plain")
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A function of a model and what it is given for so many tokens, in one of the `WAYS`."""

    name: str
    tokens: int
    prepare: Callable[[int, str], Run]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SIZES), default="4B")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="16 tokens")
    options = parser.parse_args()
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        parser.error("--accelerator cuda: this machine has no CUDA; --accelerator cpu --tiny tries the script")
    from slime.backends.megatron_utils import megatron_patch

    megatron_patch.apply(options.accelerator)
    print(f"{options.shape}, {torch.cuda.get_device_name() if options.accelerator == 'cuda' else 'CPU'}, ms a call")
    columns = (f"{of}, {way}" for of in ("device", "host") for way in (*WAYS, "compiled / used", "plain / used"))
    print(f"| part | {' | '.join(columns)} |\n|" + "---|" * 11)
    for part in parts(options.shape, options.accelerator):
        tokens = 16 if options.tiny else part.tokens
        device = all_ways(part, tokens, lambda run: device_ms(run, options.accelerator))
        host = all_ways(part, 8, host_ms)
        cells = [f"{ms:.3f}" if i < len(WAYS) else f"{ms:.2f}" for of in (device, host) for i, ms in enumerate(of)]
        print(f"| {part.name} | {' | '.join(cells)} |", flush=True)


def parts(shape: str, device: str) -> Iterator[Part]:
    """The fused parts of a layer and of the loss."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from slime.algorithms.log_probs import calculate_log_probs_and_entropy
    from slime.backends.megatron_utils.megatron_patch.layers import rotate as rotation
    from slime.backends.megatron_utils.model.spec import rms_norm
    from slime.utils.accelerator.fusion import fused_on_cuda

    hidden, ffn, heads = SIZES[shape]
    dtype = torch.bfloat16

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def with_backward(
        function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *weights: torch.Tensor
    ) -> Run:
        x.requires_grad_()
        grad = torch.ones_like(function(x))
        return lambda: torch.autograd.grad(function(x), (x, *weights), grad)[0]

    def in_way(function: Callable[..., torch.Tensor], way: str) -> Callable[..., torch.Tensor]:
        plain = inspect.unwrap(function)
        return {"used": function, "compiled": fused_on_cuda(plain), "plain": plain}[way]

    def plain_swiglu(y: torch.Tensor) -> torch.Tensor:
        gate, linear = y.chunk(2, -1)
        return torch.nn.functional.silu(gate) * linear

    def swiglu(tokens: int, way: str) -> Run:
        function = (lambda y: bias_swiglu_impl(y, None)) if way == "used" else in_way(plain_swiglu, way)
        return with_backward(function, random(tokens, 2 * ffn))

    def norm(*more: int) -> Callable[[int, str], Run]:
        def prepare(tokens: int, way: str) -> Run:
            function, weight = in_way(rms_norm, way), random(more[-1]).requires_grad_()
            return with_backward(lambda x: function(x, weight, 1e-6, False), random(tokens, *more), weight)

        return prepare

    def rotate(num_heads: int) -> Callable[[int, str], Run]:
        def prepare(tokens: int, way: str) -> Run:
            function, cos, sin = in_way(rotation, way), random(tokens, 1, HEAD_DIM), random(tokens, 1, HEAD_DIM)
            return with_backward(lambda x: function(x, cos, sin, False, False), random(tokens, num_heads, HEAD_DIM))

        return prepare

    def log_probs(tokens: int, _: str) -> Run:
        targets = torch.randint(VOCAB, (tokens,), device=device)

        def of(logits: torch.Tensor) -> torch.Tensor:
            chosen, entropy = calculate_log_probs_and_entropy(logits, targets, None, True, 4096)
            assert entropy is not None
            return chosen + entropy

        return with_backward(of, random(tokens, VOCAB))

    yield Part("norm of hidden states", 16384, norm(hidden))
    yield Part("norm of queries", 16384, norm(heads, HEAD_DIM))
    yield Part("norm of keys", 16384, norm(KV_HEADS, HEAD_DIM))
    yield Part("rotation of queries", 16384, rotate(heads))
    yield Part("SwiGLU", 16384, swiglu)
    yield Part("log-probs and entropy", 4096, log_probs)


def all_ways(part: Part, tokens: int, measure: Callable[[Run], float]) -> tuple[float, ...]:
    """Milliseconds of each of the `WAYS`, in turn, and the others' in units of the first's."""
    runs = {way: part.prepare(tokens, way) for way in WAYS}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            with torch.compiler.set_stance("force_eager" if way == "plain" else "default"):
                found[way].append(measure(run))
    used, *others = (min(found[way]) for way in WAYS)
    return (used, *others, *(other / used for other in others))


def device_ms(run: Run, device: str) -> float:
    """Milliseconds of the device for one call."""
    run()
    if device == "cpu":
        return host_ms(run)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Work to be behind of, at some 2 GHz, so that the host's time does not count.
    torch.cuda._sleep(round(2e6 * (5 + 2 * CALLS * host_ms(run))))
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    if start.query():
        raise RuntimeError("the device had nothing left to do before the host was done: this would be the host's time")
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def host_ms(run: Run) -> float:
    """Milliseconds of the calling thread for one call, whose work on the device takes less."""
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    return 1e3 * (time.perf_counter() - start) / CALLS


if __name__ == "__main__":
    main()
