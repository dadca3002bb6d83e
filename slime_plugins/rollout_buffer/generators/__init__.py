"""Generators that the buffer server finds here: modules with TASK_TYPE and run_rollout (see base_generator)."""
