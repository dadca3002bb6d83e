"""Memory that log-probs and entropy need above the logits they are given, in bytes of tensors.

    python benchmarks/log_prob_memory.py [--vocab-size 150000] [--tokens 512] [--responses 384] [--chunk-size 64]
        [--temperature 0.7] [--device cpu]

Two ways, on the same logits [1, T, V] of which R rows predict response tokens: log_softmax as it is usually written
(gather the rows, log_softmax, the entropy from it, autograd), and `get_log_probs_and_entropy`'s. Targets: forward only
at most 4 float32 chunks [chunk, V]; with a backward pass one gradient of the size and type of the logits and 4 chunks.
`tests/training/algorithms/test_log_prob_memory.py` holds them on smaller inputs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime.algorithms.log_probs import calculate_log_probs_and_entropy  # noqa: E402

MIB = 2**20
Columns = tuple[torch.Tensor, torch.Tensor | None]
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Columns]
"""(logits [1, T, V], rows [R], targets [R]) -> (log_probs [R], entropy [R])."""


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """Most bytes that torch's allocator handed out at once while a function ran, above those of its start."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())), default=0)


def naive(temperature: float) -> Way:
    """The usual way: every row at once, autograd keeps what it needs."""

    def of(logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> Columns:
        log_p = torch.log_softmax(logits[0].index_select(0, rows).float() / temperature, dim=-1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    return of


def ours(temperature: float, chunk_size: int, with_entropy: bool = True) -> Way:
    """As the trainer calls it."""

    def of(logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> Columns:
        options = {"temperature": temperature, "rows": rows}
        return calculate_log_probs_and_entropy(logits.squeeze(0), targets, None, with_entropy, chunk_size, **options)

    return of


def make_inputs(
    num_tokens: int, num_responses: int, vocab_size: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [1, T, V] that want a gradient, the last R rows but one, and a target for each."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(1, num_tokens, vocab_size, generator=generator, device=device).to(dtype).requires_grad_()
    rows = torch.arange(num_tokens - 1 - num_responses, num_tokens - 1, device=device)
    return logits, rows, torch.randint(vocab_size, (num_responses,), generator=generator, device=device)


def above_the_logits(way: Way, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    """(peak without gradients, peak of forward and backward pass), in bytes above the inputs."""
    device = inputs[0].device.type

    def forward_only() -> None:
        with torch.no_grad():
            way(*inputs)

    def train() -> None:
        sums = [column.sum() for column in way(*inputs) if column is not None]
        torch.stack(sums).sum().backward()

    forward_only()  # the first call allocates what stays
    peaks = peak_bytes(forward_only, device), peak_bytes(train, device)
    inputs[0].grad = None
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--tokens", type=int, default=512, help="packed tokens, prompts included")
    parser.add_argument("--responses", type=int, default=384, help="of them predict response tokens")
    parser.add_argument("--chunk-size", type=int, default=64, help="--log-probs-chunk-size")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print(f"{options.tokens} tokens, {options.responses} of responses, vocabulary {options.vocab_size:,}")
    print("MiB above the logits; chunks: float32 [chunk, V] (training: beyond one gradient); x: naive / ours")
    print("| logits | pass | naive | ours | chunks | x | target |\n|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make_inputs(options.tokens, options.responses, options.vocab_size, dtype, options.device)
        gradient, chunk = inputs[0].nbytes, 4 * options.chunk_size * options.vocab_size
        usual = above_the_logits(naive(options.temperature), inputs)
        chunked = above_the_logits(ours(options.temperature, options.chunk_size), inputs)
        for name, before, after, given in zip(("forward", "training"), usual, chunked, (0, gradient), strict=True):
            chunks = (after - given) / chunk
            target = "met" if chunks <= 4 else "missed"
            print(
                f"| {str(dtype).removeprefix('torch.')} | {name} | {before / MIB:.0f} | {after / MIB:.0f} "
                f"| {chunks:.2f} | {before / after:.1f} | {target} |"
            )


if __name__ == "__main__":
    main()
