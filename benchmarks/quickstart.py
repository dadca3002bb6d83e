"""Does the quick start learn? Seeds 0, 1, 2 and a control with random rewards, each by scripts/run-tiny-cpu.sh.

    python benchmarks/quickstart.py [--output outputs/quickstart] [--only seed-0 control]

Resumable: a run that is complete in --output is not repeated. The control starts from seed 0's SFT. The table shows
`eval/addition` (exact match at temperature 1, 4 samples a problem) before and after GRPO, and what each must hold:
a real run gains at least 30 points, the control ends at most 5 above its start and starts within 3 of seed 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GAIN, CONTROL_RISE, CONTROL_START = 0.30, 0.05, 0.03
RUNS: dict[str, dict[str, str]] = {
    "seed-0": {"SEED": "0"},
    "seed-1": {"SEED": "1"},
    "seed-2": {"SEED": "2"},
    "control": {"SEED": "0", "RM": "--rm-type random", "SFT_FROM": "seed-0"},
}


class Outcome(NamedTuple):
    """`eval/addition` before and after GRPO, in [0, 1], and the seconds that the script took."""

    start: float
    end: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/quickstart")
    parser.add_argument("--only", nargs="*", choices=list(RUNS), default=list(RUNS))
    options = parser.parse_args()
    outcomes = {name: run(name, options.output.resolve()) for name in options.only}
    failures = []
    for name, outcome in outcomes.items():
        gain = outcome.end - outcome.start
        verdict = judge(name, outcomes)
        failures += [name] * bool(verdict)
        figures = f"start {outcome.start:.3f}  end {outcome.end:.3f}  gain {100 * gain:+.1f} points"
        print(f"{name:8}  {figures}  {outcome.seconds:.0f} s  {verdict or 'holds'}")
    sys.exit(bool(failures))


def judge(name: str, outcomes: dict[str, Outcome]) -> str:
    """What a run does not hold; empty when it holds everything."""
    start, end, _ = outcomes[name]
    if name != "control":
        return "" if end - start >= GAIN else f"gained less than {GAIN:.2f}"
    if end - start > CONTROL_RISE:
        return f"a random reward must not teach: rose by more than {CONTROL_RISE:.2f}"
    if "seed-0" in outcomes and abs(start - outcomes["seed-0"].start) > CONTROL_START:
        return f"started more than {CONTROL_START:.2f} from seed 0"
    return ""


def run(name: str, output: Path) -> Outcome:
    """One run of the script, or what it left behind when it was complete."""
    out, done = output / name, output / name / "done.json"
    if not done.is_file():
        out.mkdir(parents=True, exist_ok=True)
        settings = dict(RUNS[name])
        if "SFT_FROM" in settings:
            settings["SFT_FROM"] = str(output / settings["SFT_FROM"])
        start = time.monotonic()
        with (out / "script.log").open("w") as log:
            subprocess.run(
                ["bash", ROOT / "scripts/run-tiny-cpu.sh"],
                env={**os.environ, "OUTPUT": str(out), **settings},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
            )
        done.write_text(json.dumps({"seconds": time.monotonic() - start}))
    values = evaluations(out / "grpo" / "metrics.jsonl")
    return Outcome(values[0], values[-1], json.loads(done.read_text())["seconds"])


def evaluations(path: Path) -> list[float]:
    """`eval/addition` of every evaluation, in order."""
    records = map(json.loads, path.read_text().splitlines())
    return [record["eval/addition"] for record in records if "eval/addition" in record]


if __name__ == "__main__":
    main()
