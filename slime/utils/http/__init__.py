"""HTTP between the processes of a run, below `slime.utils.http_utils`."""
