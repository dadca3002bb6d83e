"""Rollout throughput on a GPU: our loop beside a bare client of the same engine, which is what the engine can do.

    python benchmarks/gpu_rollout.py [--rounds 4]
    python benchmarks/gpu_rollout.py --tiny

512 requests of 64 + 512 tokens with log-probs to one engine (Qwen3-0.6B shape, random weights), through the router,
all in flight: by asyncio and aiohttp alone (write JSON, read JSON, keep the answers), and by generate_rollout with a
trivial reward; alternating. Target: median of the rounds' ratios, ours / bare in tokens/s, at least 0.95.
"""

from __future__ import annotations

import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import PROMPT_TOKENS, prepare_model, write_prompts  # noqa: E402
from benchmarks.gpu_runs import Row, make_parser, parse_options, report  # noqa: E402
from benchmarks.rollout_overhead import median_ratio, rates_of_both  # noqa: E402
from slime.config.parse import parse_args  # noqa: E402

TARGET, GROUP = 0.95, 8


def main() -> None:
    parser = make_parser(__doc__, "gpu_rollout")
    parser.add_argument("--rounds", type=int, default=4)
    options = parse_options(parser)
    shape, requests, response = ("tiny", 64, 16) if options.tiny else ("0.6B", 512, 512)
    with tempfile.TemporaryDirectory() as work:
        args = make_args(options, Path(work), shape=shape, requests=requests, response=response)
        ours, bare = rates_of_both(args, Path(work), rounds=options.rounds, engines=1)
    ratio = median_ratio(ours, bare)
    mine, theirs = (statistics.median(rates) * response for rates in (ours, bare))
    row = Row(
        what="rollout: our loop / a bare client of the same engine",
        shape=f"{shape}, {requests} x ({PROMPT_TOKENS} + {response}) tokens",
        figure=f"{mine:,.0f} tok/s",
        limit=f"{theirs:,.0f} tok/s",
        ratio=ratio,
        target=f">= {TARGET}",
        holds=ratio >= TARGET,
        note=f"median of {options.rounds} rounds",
    )
    sys.exit(report([row], options))


def make_args(options: Any, work: Path, *, shape: str, requests: int, response: int) -> Any:
    """The flags of a run that only generates."""
    model = prepare_model(shape, options.output / "models", device=options.accelerator)
    flags = [
        "--accelerator", options.accelerator, "--debug-rollout-only", "--rollout-num-gpus", 1,
        "--hf-checkpoint", model, "--prompt-data", write_prompts(work / "prompts.jsonl", requests // GROUP),
        "--input-key", "prompt", "--num-rollout", 1, "--rollout-batch-size", requests // GROUP,
        "--n-samples-per-prompt", GROUP, "--global-batch-size", requests, "--rollout-max-response-len", response,
        "--rollout-ignore-eos", "--custom-rm-path", f"{ROOT}/benchmarks/rollout_overhead.py:response_length",
        "--sglang-server-concurrency", requests, "--output-dir", work / "out",
        *(shlex.split(options.engine_flags) if options.accelerator == "cuda" else []),
        *shlex.split(options.extra_flags),
    ]  # fmt: skip
    return parse_args(argv=list(map(str, flags)))


if __name__ == "__main__":
    main()
