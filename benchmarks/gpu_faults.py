"""An engine or a trainer killed on GPUs: seconds until the run trains again.

    python benchmarks/gpu_faults.py [--rows "engine generate apart" "trainer train colocated"]
    python benchmarks/gpu_faults.py --tiny                           on the CPU

The rows of the chaos tests (tests/chaos/matrix.py: one SIGKILL in rollout 1 of a run that may replace engines and
restart trainers once, --save-interval 1) with the 0.6B shape: engine and trainer on one GPU, or on one each. From the
kill to the end of the next train step. Target: at most 90 s, and every sample trained on once.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import prepare_model  # noqa: E402
from benchmarks.gpu_runs import Row, make_parser, parse_options, report  # noqa: E402
from tests.chaos import matrix  # noqa: E402
from tests.integration.launch import write_prompts  # noqa: E402

TARGET_S = 90.0
ROWS = ("engine generate apart", "trainer train apart", "lone-engine generate colocated", "trainer train colocated")


def main() -> None:
    parser = make_parser(__doc__, "gpu_faults")
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=ROWS)
    options = parse_options(parser)
    matrix.DEADLINE_S = options.timeout
    sys.exit(report([measure(row, options) for row in options.rows], options))


def measure(name: str, options: argparse.Namespace) -> Row:
    """Do a row and judge it."""
    part, phase, place = name.split()
    folder = options.output / "faults" / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = "tiny" if options.tiny else "0.6B"
    model = prepare_model(shape, options.output / "models", device=options.accelerator)
    prompts = write_prompts(folder / "prompts.jsonl")
    row = matrix.Row(part, phase, "SIGKILL")
    found = matrix.run_row(row, folder / "run", model=model, prompts=prompts, more=flags_of(place, options))
    holds = found.outcome == "recovered" and found.productive_s is not None and found.productive_s <= TARGET_S
    figure = "never" if found.productive_s is None else f"{found.productive_s:.1f} s"
    return Row(
        what=f"{part} killed while the run is in {phase}, {place}",
        shape=shape,
        figure=f"{found.outcome}, {figure}; noticed after {found.noticed_s} s",
        limit="",
        ratio=None,
        target=f"<= {TARGET_S:.0f} s",
        holds=holds,
        note=found.reason[:200],
    )


def flags_of(place: str, options: argparse.Namespace) -> list[Any]:
    """Where trainer and engine are."""
    flags: list[Any] = ["--accelerator", options.accelerator, "--actor-num-gpus-per-node", 1]
    flags += ["--rollout-num-gpus", 1, *(["--colocate"] if place == "colocated" else [])]
    if options.accelerator == "cuda":
        flags += shlex.split(options.engine_flags)
        flags += ["--sglang-mem-fraction-static", "0.4"] if place == "colocated" else []
    return [*flags, *shlex.split(options.extra_flags)]


if __name__ == "__main__":
    main()
