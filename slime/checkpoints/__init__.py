"""What a run keeps on disk: where a checkpoint lies, what its files were when they were written, dumps of rollouts."""
