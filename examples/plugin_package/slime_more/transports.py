"""Weights over files, with a note of every version that the engines took."""

from slime.weights.transports import WeightTransport

NOTED_FILES = WeightTransport("slime_more.updater:NotedFiles", is_over_files=True, title="files, each version noted")
