"""The trainer's sleep and wake-up of the 4B shape with its optimizer, beside what pinned copies take.

    python benchmarks/gpu_sleep_wake.py
    python benchmarks/gpu_sleep_wake.py --tiny

Reads the 4B run that benchmarks/gpu_weight_sync.py makes. What has to survive a sleep is bf16 weights, fp32 masters
and two moments of Adam: 14 bytes a parameter, out and in again. Limit: these bytes over the pinned-copy bandwidth in
each direction, measured just before the run on the same GPU. Target: perf/sleep_time + perf/wake_up_time at most 1.4
times that, and at most 3 GB of the GPU still held by the trainer's process when it sleeps
(memory/after_sleep/gpu_process_gb).
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import num_parameters, prepare_model  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Series,
    limits_of,
    make_parser,
    median_of,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
)
from benchmarks.gpu_weight_sync import large_run  # noqa: E402

SURVIVES_BYTES = 14
TARGET, RESIDUE_GB = 1.4, 3.0
USED_BEFORE, USED_AFTER = (f"memory/after_{phase}/gpu_used_gb" for phase in ("update_weights", "sleep"))
HELD = "memory/after_sleep/gpu_process_gb"


def main() -> None:
    options = parse_options(make_parser(__doc__, "gpu_sleep_wake"))
    run, shape = large_run(options), "tiny" if options.tiny else "4B"
    if run_train(run, options):
        count = num_parameters(prepare_model(shape, options.output / "models", device=options.accelerator))
        rows = judge(series_of(run, options), limits_of(run, options), shape=shape, parameters=count)
    else:
        rows = [not_measured("sleep + wake-up", shape, f"<= {TARGET}", "its run did not end well")]
    sys.exit(report(rows, options))


def judge(series: Series, limits: dict[str, float], *, shape: str, parameters: int) -> list[Row]:
    """The rows of time and of residue."""
    sleep, wake = median_of(series, "perf/sleep_time"), median_of(series, "perf/wake_up_time")
    if sleep is None or wake is None:
        why = "the run logged no perf/sleep_time and perf/wake_up_time: its trainer does not sleep"
        return [not_measured("trainer: sleep + wake-up", f"{shape} with optimizer", f"<= {TARGET}", why)]
    gigabytes = SURVIVES_BYTES * parameters / 1e9
    limit = gigabytes / limits["to_host"] + gigabytes / limits["to_device"]
    before, after = median_of(series, USED_BEFORE), median_of(series, USED_AFTER)
    freed = "" if before is None or after is None else f"; the GPU had {before - after:.1f} GB more free"
    time_row = Row(
        what="trainer: sleep + wake-up",
        shape=f"{shape} with optimizer, {gigabytes:.1f} GB to keep",
        figure=f"{sleep:.2f} + {wake:.2f} s",
        limit=f"{limit:.2f} s at {limits['to_host']:.0f} and {limits['to_device']:.0f} GB/s, pinned",
        ratio=(sleep + wake) / limit,
        target=f"<= {TARGET}",
        holds=sleep + wake <= TARGET * limit,
        note=f"medians after the first two{freed}",
    )
    return [time_row, residue_row(median_of(series, HELD), shape=shape)]


def residue_row(held_gb: float | None, *, shape: str) -> Row:
    """What the sleeping trainer's process still holds."""
    what, target = "trainer: GPU memory while it sleeps", f"<= {RESIDUE_GB:.0f} GB"
    if held_gb is None:
        return not_measured(
            what, shape, target, f"the run did not log {HELD}: the driver does not tell processes apart"
        )
    return Row(what, shape, f"{held_gb:.2f} GB", "", None, target, held_gb <= RESIDUE_GB, "with its CUDA context")


if __name__ == "__main__":
    main()
