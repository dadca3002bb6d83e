"""What is fused on CUDA beside the same functions run operation by operation, one at a time.

    python benchmarks/gpu_fusion.py [--shape 4B]                      # one GPU
    python benchmarks/gpu_fusion.py --tiny --accelerator cpu          # to try the script: nothing is fused there

Forward and backward of one layer's part for 16,384 tokens (log-probs: of one model's logits for 4,096), both ways in
turn through the product's own functions (torch.compiler.set_stance("force_eager") is the way without). "device" is the
time by CUDA events; "host" is what the calling thread needs for one call on 8 tokens, without waiting for the device:
it decides where a rank has little work for each layer. Best of 5 rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HEAD_DIM, KV_HEADS, VOCAB = 128, 8, 151936
SIZES = {"0.6B": (1024, 3072, 16), "4B": (2560, 9728, 32)}
"""Qwen3 -> hidden and FFN size, heads."""
ROUNDS, CALLS = 5, 10
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """A function of a model and what it is given for so many tokens."""

    name: str
    tokens: int
    prepare: Callable[[int], Run]


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
    print("| part | device, fused | device, unfused | ratio | host, fused | host, unfused | ratio |\n|" + "---|" * 7)
    for part in parts(options.shape, options.accelerator):
        tokens = 16 if options.tiny else part.tokens
        device = both_ways(part.prepare(tokens), lambda run: device_ms(run, options.accelerator))
        host = both_ways(part.prepare(8), host_ms)
        cells = (f"{fused:.3f} | {plain:.3f} | {plain / fused:.2f}" for fused, plain in (device, host))
        print(f"| {part.name} | {' | '.join(cells)} |", flush=True)


def parts(shape: str, device: str) -> Iterator[Part]:
    """The fused parts of a layer and of the loss."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from slime.backends.megatron_utils.megatron_patch.packed_rope import _rotate
    from slime.backends.megatron_utils.model.spec import RMSNorm
    from slime.utils.ppo_utils import calculate_log_probs_and_entropy

    hidden, ffn, heads = SIZES[shape]
    dtype = torch.bfloat16
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=False)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=dtype)

    def with_backward(
        function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *weights: torch.Tensor
    ) -> Run:
        x.requires_grad_()
        grad = torch.ones_like(function(x))
        return lambda: torch.autograd.grad(function(x), (x, *weights), grad)[0]

    def swiglu(tokens: int) -> Run:
        return with_backward(lambda x: bias_swiglu_impl(x, None), random(tokens, 1, 2 * ffn))

    def norm(*more: int) -> Callable[[int], Run]:
        layer = RMSNorm(config, more[-1])
        return lambda tokens: with_backward(layer, random(tokens, 1, *more), layer.weight)

    def rotate(num_heads: int) -> Callable[[int], Run]:
        def prepare(tokens: int) -> Run:
            cos, sin = random(tokens, 1, HEAD_DIM), random(tokens, 1, HEAD_DIM)
            return with_backward(lambda x: _rotate(x, cos, sin), random(tokens, num_heads, HEAD_DIM))

        return prepare

    def log_probs(tokens: int) -> Run:
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


def both_ways(run: Run, measure: Callable[[Run], float]) -> tuple[float, float]:
    """Milliseconds fused and unfused, in turn."""
    fused, plain = [], []
    for _ in range(ROUNDS):
        fused.append(measure(run))
        with torch.compiler.set_stance("force_eager"):
            plain.append(measure(run))
    return min(fused), min(plain)


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
