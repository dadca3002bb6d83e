"""The trainer's side of the transport; a file of its own, for it imports torch."""

from pathlib import Path

from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater


class NotedFiles(DiskWeightUpdater):
    """Send weights as `disk` does, and append each version to `versions.txt` in --output-dir (the writing rank)."""

    def update(self):
        """Send the next version; returns metrics."""
        metrics = super().update()
        if self.is_source:
            with (Path(self.args.output_dir) / "versions.txt").open("a") as file:
                file.write(f"{self.weight_version}\n")
        return metrics
