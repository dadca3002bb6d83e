"""A tree of processes that the kernel keeps from everything but its own files: no root, no daemon, no helper."""
