"""A tracker that writes one line a number."""

import csv
from pathlib import Path


class CsvTracker:
    """Appends (step key, step, name, value) to `metrics.csv` in --output-dir."""

    def __init__(self, args):
        self._file = (Path(args.output_dir) / "metrics.csv").open("a", newline="")
        self._rows = csv.writer(self._file)

    def write(self, metrics, step_key):
        """Take one record; `metrics[step_key]` is its step."""
        self._rows.writerows((step_key, metrics[step_key], name, value) for name, value in metrics.items())

    def write_eval_samples(self, shown, step):
        """Take the answers of one evaluation (--log-eval-samples)."""

    def write_alarm(self, alarm):
        """Take one alarm."""

    def finish(self):
        """Close the file: the run is over."""
        self._file.close()
