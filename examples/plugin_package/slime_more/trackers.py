"""A tracker that writes one line a number."""

import csv
from pathlib import Path


class CsvTracker:
    """Appends (step key, step, name, value) to `metrics.csv` in --output-dir."""

    def __init__(self, args):
        self._path = Path(args.output_dir) / "metrics.csv"

    def open(self, config, run):
        """Begin, or go on; say where the numbers are seen."""
        self._file = self._path.open("a", newline="")
        self._rows = csv.writer(self._file)
        return str(self._path)

    def log(self, metrics, step):
        """Take one record; `metrics[step.key]` is its step."""
        self._rows.writerows((step.key, step.number, name, value) for name, value in metrics.items())
        self._file.flush()

    def log_samples(self, samples, step):
        """Take the answers of one evaluation (--log-eval-samples)."""

    def log_alarm(self, alarm, step):
        """Take an alarm."""

    def finish(self, summary):
        """Close the file: the run is over."""
        self._file.close()
