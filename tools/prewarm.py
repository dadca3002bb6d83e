"""Fill a compile cache with the kernels of a run, for an image or for the other hosts of a cluster.

    python tools/prewarm.py --compile-cache-dir /opt/kernels -- <the run's flags>

Needs a GPU of the run's kind. It does two rollouts with these flags, and keeps only the cache of them. A run with the
same flags and this --compile-cache-dir compiles nothing. Copy the directory to the same path of every host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script from a clone that is not installed

from slime.plan.tune import without  # noqa: E402

WITH_VALUE = ("save", "save-interval", "save-hf", "load", "resume", "output-dir", "num-rollout", "tracker")
DROPPED = {f"--{name}": 1 for name in WITH_VALUE} | {
    f"--use-{name}": 0 for name in ("wandb", "tensorboard", "swanlab")
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the run's exit status, or 2 for unusable input."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compile-cache-dir", type=Path, required=True, help="directory to fill")
    parser.add_argument("--train", default="train.py", choices=["train.py", "train_async.py"], help="the run's driver")
    parser.add_argument("flags", nargs="+", metavar="-- FLAGS", help="the run's flags, as train.py takes them")
    args = parser.parse_args(argv)
    before, begin = size_of(args.compile_cache_dir), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="prewarm-") as scratch:
        line = [sys.executable, str(ROOT / args.train), *short_run(args.flags, f"{scratch}/run")]
        status = subprocess.run([*line, "--compile-cache-dir", str(args.compile_cache_dir)], check=False).returncode
    if status == 0:
        grown = (size_of(args.compile_cache_dir) - before) / 1e6
        print(f"{args.compile_cache_dir}: {grown:.1f} MB more, after {time.monotonic() - begin:.0f} s")
    return status


def short_run(flags: Sequence[str], scratch: str) -> list[str]:
    """Make of a run's flags those of two rollouts that begin anew, save nothing and are not tracked.

    Args:
        flags: as given.
        scratch: directory that is removed afterwards.
    """
    kept, _ = without(flags, DROPPED)
    return [*kept, "--num-rollout", "2", "--output-dir", scratch]


def size_of(directory: Path) -> int:
    """Bytes of the files below a directory."""
    sizes = (os.path.getsize(Path(folder) / name) for folder, _, names in os.walk(directory) for name in names)
    return sum(sizes)


if __name__ == "__main__":
    sys.exit(main())
