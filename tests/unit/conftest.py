"""What every unit test gets: the root logger as it was, also after a test of a driver, which configures it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    # A handler that a test installed writes to a stream that pytest closes with the test.
    root.handlers[:], root.level = handlers, level
