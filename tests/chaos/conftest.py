"""The scripted engine and reward services of tests/rollout, for faults in between."""

from tests.rollout.conftest import letters, start_service

__all__ = ["letters", "start_service"]
