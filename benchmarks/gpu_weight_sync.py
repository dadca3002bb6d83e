"""Weight sync of colocated runs over CUDA IPC: milliseconds a sync, end to end without the pause's drain.

    python benchmarks/gpu_weight_sync.py [--model 0.6B] [--model 4B]
    python benchmarks/gpu_weight_sync.py --tiny

Reads the syncs of two runs of train.py: that of benchmarks/gpu_step.py for the 0.6B shape (1.2 GB), and a short one of
the 4B shape (8 GB), which benchmarks/gpu_sleep_wake.py shares. A sync's time is perf/update_weights_time less
perf/update_weights_pause_time (stopping the engines and their flush): gather, rename, flatten, hand over, load, and
continue. Medians after the first two. Targets: 25 ms and 120 ms. Beside it: the bytes over the rate of a copy on the
same GPU, measured just before the run; each tensor is copied at least twice (into the bucket, out of it).
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import num_parameters, prepare_model  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    colocated,
    grpo_flags,
    limits_of,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
    settled,
)
from benchmarks.gpu_step import STEPS, step_run  # noqa: E402

TARGET_S = {"0.6B": 0.025, "4B": 0.120, "tiny": 1.0}
SYNC, PAUSE, SEND = (f"perf/update_weights_{part}time" for part in ("", "pause_", "send_"))
BYTES = {"cuda": 2, "cpu": 4}
"""Of a weight as it is sent."""


def main() -> None:
    parser = make_parser(__doc__, "gpu_weight_sync")
    parser.add_argument("--model", action="append", choices=["0.6B", "4B"], help="default: both")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the 0.6B run, as of gpu_step.py")
    options = parse_options(parser)
    options.benchmark = "-".join([options.benchmark, *(options.model or [])])
    rows = []
    for model in ["tiny"] if options.tiny else options.model or ["0.6B", "4B"]:
        run = large_run(options) if model == "4B" else step_run(model, options, steps=options.steps)
        if not run_train(run, options):
            rows.append(not_measured("weight sync", model, f"<= {target(model)}", "its run did not end well"))
            continue
        folder = prepare_model(model, options.output / "models", device=options.accelerator)
        num_bytes = num_parameters(folder) * BYTES[options.accelerator]
        rows.append(judge(series_of(run, options), model, num_bytes, limits_of(run, options)["on_device"]))
    sys.exit(report(rows, options))


def large_run(options: Namespace) -> Run:
    """A short run of the 4B shape with all of its optimizer."""
    if options.tiny:
        return step_run("tiny", options, steps=options.steps)
    # trainer (72 GB) and engine (60 GB) fit side by side, whichever starts first
    more = colocated(options, tokens=4096, engine_share=0.4)
    return Run("short-4B", "4B", grpo_flags(prompts=8, samples=8, response=128, rollouts=10, more=more))


def target(model: str) -> str:
    """As the report shows it."""
    return f"{1e3 * TARGET_S[model]:.0f} ms"


def judge(series: Series, model: str, num_bytes: int, copy_gb_s: float) -> Row:
    """The row of a run; on a run that did not log the pause, nothing can be said."""
    what, shape = "weight sync without the pause", f"{model}, {num_bytes / 1e9:.2f} GB"
    totals, pauses = settled(series, SYNC), settled(series, PAUSE)
    if not totals or len(totals) != len(pauses):
        return not_measured(what, shape, f"<= {target(model)}", f"the run did not log {SYNC} and {PAUSE} together")
    times = [total - pause for total, pause in zip(totals, pauses, strict=True)]
    seconds, copies = statistics.median(times), 2 * num_bytes / copy_gb_s / 1e9
    sends = settled(series, SEND)
    note = f"{len(times)} syncs, {1e3 * min(times):.1f} to {1e3 * max(times):.1f} ms"
    note += f"; pause {1e3 * statistics.median(pauses):.1f} ms"
    if sends:
        note += f"; of the sync the send {1e3 * statistics.median(sends):.1f} ms"
    limit = f"{1e3 * copies:.1f} ms, two copies on the device"
    holds = seconds <= TARGET_S[model]
    return Row(what, shape, f"{1e3 * seconds:.1f} ms", limit, seconds / copies, f"<= {target(model)}", holds, note)


if __name__ == "__main__":
    main()
