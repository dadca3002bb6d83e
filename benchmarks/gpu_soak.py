"""Fifty colocated cycles of generate, wake up, train, sync, sleep: is memory the same after each of them?

    python benchmarks/gpu_soak.py [--cycles 50]
    python benchmarks/gpu_soak.py --tiny

Qwen3-0.6B shape, 64 prompts x 8 samples of 64 tokens. After the first five cycles: GPU memory after each phase
(memory/after_<phase>/gpu_used_gb) may differ by at most 100 MB between cycles; the resident memory of all processes of
the run, sampled every two seconds, may grow by at most 1% from the first third of the cycles to the last.
The run also gives the difference of trainer and engine log-probs over its steps (benchmarks/gpu_log_prob_gap.py).
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    colocated,
    folder_of,
    grpo_flags,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
    settled,
)

SKIP = 5
SPREAD_GB, GROWTH = 0.1, 0.01
USED = "/gpu_used_gb"


def main() -> None:
    parser = make_parser(__doc__, "gpu_soak")
    parser.add_argument("--cycles", type=int, default=50)
    options = parse_options(parser)
    run = soak_run(options, cycles=options.cycles)
    if not run_train(run, options):
        sys.exit(report([not_measured("cycles", run.model, f"{options.cycles}", "the run did not end well")], options))
    series = series_of(run, options)
    rows = gpu_rows(series, shape=f"{run.model}, {options.cycles} cycles")
    samples = read_memory(folder_of(run, options) / "host.jsonl")
    begin = first_time(folder_of(run, options) / "metrics.jsonl", SKIP)
    rows.append(host_row([gb for at, gb in samples if at >= begin], shape=f"{run.model}, {options.cycles} cycles"))
    sys.exit(report(rows, options))


def soak_run(options: Namespace, *, cycles: int = 50) -> Run:
    """The run; benchmarks/gpu_log_prob_gap.py reads the same one."""
    prompts, samples, response = (2, 4, 8) if options.tiny else (64, 8, 64)
    flags = grpo_flags(
        prompts=prompts, samples=samples, response=response, rollouts=cycles, more=colocated(options, tokens=32768)
    )
    model = "tiny" if options.tiny else "0.6B"
    return Run(f"soak-{model}", model, flags)


def gpu_rows(series: Series, *, shape: str) -> list[Row]:
    """A row for each phase after which GPU memory was logged."""
    names = sorted(name for name in series if name.startswith("memory/after_") and name.endswith(USED))
    target = f"<= {1e3 * SPREAD_GB:.0f} MB"
    if not names:
        return [not_measured("GPU memory", shape, target, "the run logged no memory/after_<phase>/gpu_used_gb")]
    rows = []
    for name in names:
        values, what = settled(series, name, SKIP), f"GPU memory {name.split('/')[1].replace('_', ' ')}"
        if not values:
            rows.append(not_measured(what, shape, target, f"{name} was logged in no cycle after the first {SKIP}"))
            continue
        spread = max(values) - min(values)
        figure = f"{min(values):.3f} to {max(values):.3f} GB"
        rows.append(Row(what, shape, figure, "", None, target, spread <= SPREAD_GB, f"spread {1e3 * spread:.0f} MB"))
    return rows


def host_row(gigabytes: list[float], *, shape: str) -> Row:
    """Growth of the processes' resident memory from the first to the last third of the samples."""
    what, target = "host memory of all processes", f"<= {GROWTH:.0%} growth"
    third = len(gigabytes) // 3
    if third < 3:
        return not_measured(what, shape, target, "fewer than nine samples of memory after the first cycles")
    first, last = statistics.mean(gigabytes[:third]), statistics.mean(gigabytes[-third:])
    return Row(what, shape, f"{first:.2f} to {last:.2f} GB", "", last / first, target, last <= (1 + GROWTH) * first)


def read_memory(path: Path) -> list[tuple[float, float]]:
    """(time, GB) of each sample."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [(record["time"], record["rss_gb"]) for record in map(json.loads, lines)]


def first_time(metrics: Path, rollout: int) -> float:
    """When the first record of a rollout was logged; 0 where there is none."""
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        if record.get("rollout/step") == rollout:
            return float(record["time"])
    return 0.0


if __name__ == "__main__":
    main()
