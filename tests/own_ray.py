"""A Ray of this process, as a run starts one, which leaves nothing behind for the tests that follow."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from slime.ray.placement import connect_ray, read_auth

NAMES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


@contextmanager
def own_ray(args: Any) -> Iterator[None]:
    """Start a Ray with the slots that `args` ask for, and end it."""
    before = {name: os.environ.pop(name) for name in NAMES if name in os.environ}
    folder = connect_ray(args)
    assert folder is not None
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ |= before
        read_auth()
