"""Upstream's path of the metrics of training, which are in slime.training.reports."""

from slime.training.reports import column_means, pack_report, perf_metrics, reduce_reports

__all__ = ["column_means", "pack_report", "perf_metrics", "reduce_reports"]
