"""Where the processes of a run say what they have done, and the driver reads it: a key of each in Ray's own table.

A process publishes from a thread of its own, once a second and only what has changed, so its work is never held up and
a process that is stopped or holds the interpreter's lock falls silent. The table is Ray's control store: it needs no
port and no process more. It does not judge whether the run goes on (`slime.ray.stall_watch`).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ray.experimental import internal_kv

from slime.utils.progress_counts import counts
from slime.utils.run_processes import MARK

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
PREFIX = "slime-progress:"
MANAGER = "rollout manager"
"""Name of the process that generates."""


def publish(name: str, more: Callable[[], dict[str, Any]] = dict) -> None:
    """Publish this process's counts from now on, in a Ray actor of a run; does nothing outside one.

    Args:
        name: of the process: "trainer 0".
        more: what else to say; called in the publishing thread.
    """
    if run := os.environ.get(MARK):
        threading.Thread(target=_run, args=(f"{PREFIX}{run}:{name}", more), name="progress", daemon=True).start()


def _run(key: str, more: Callable[[], dict[str, Any]]) -> None:
    said: dict[str, Any] = {}
    while True:
        try:
            found = {"counts": counts(), **more()}
            if found != said:
                said = json.loads(json.dumps(found))
                _put(key, {**found, "time": time.time(), "pid": os.getpid()})
        except Exception as error:  # noqa: BLE001 - a boundary: what only reports must not end what works
            logger.debug("progress was not published: %s", error)
        time.sleep(PERIOD_S)


def _put(key: str, value: dict[str, Any]) -> None:
    internal_kv._internal_kv_put(key.encode(), json.dumps(value).encode(), overwrite=True)


def read(run: str) -> dict[str, dict[str, Any]]:
    """Name of each process -> what it published last: "counts", "time" (seconds since 1970), "pid", and more."""
    prefix = f"{PREFIX}{run}:"
    found = {}
    for key in internal_kv._internal_kv_list(prefix.encode()):
        if text := internal_kv._internal_kv_get(key):
            found[key.decode().removeprefix(prefix)] = json.loads(text)
    return dict(sorted(found.items()))


def said_by(run: str, name: str) -> dict[str, Any]:
    """What one process published last; nothing where it has not."""
    text = internal_kv._internal_kv_get(f"{PREFIX}{run}:{name}".encode())
    return dict(json.loads(text)) if text else {}


def clear(run: str) -> None:
    """Forget a run that is over: the Ray that it ran on may live on."""
    for name in read(run):
        internal_kv._internal_kv_del(f"{PREFIX}{run}:{name}".encode())
