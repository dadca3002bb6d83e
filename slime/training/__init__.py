"""A rollout's training on one rank, over any trainer backend; no module here imports one."""
