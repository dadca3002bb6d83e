"""The watchdog for stalls (--stall-timeout): what every process reports as done, who notices that nothing is done any
more, and the report on what each part of the run is doing then (docs/stalls.md says how to read it).

1. Every process publishes its counts in Ray's own table (`publish_progress`), which needs no port and no process more:
   from a thread, once a second and only what has changed, so its work is never held up, and a process that is stopped
   or holds the interpreter's lock falls silent.
2. A thread of the driver (`StallWatch`) reads them. A phase is stalled when it has made no progress for six times its
   own median, `--stall-timeout` at least. It is reported once.
3. The report (`write_report`) asks with deadlines and writes down what does not answer; it changes nothing.

Wait graph: the watch waits for `look` and for the report, which have deadlines of their own; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.observability.phases import Phase, Phases, seconds
from slime.processes.progress import counts, describe, free_memory
from slime.processes.registry import MARK, processes_of
from slime.processes.wait import Watch, try_and_log
from slime.ray.utils import actor_env
from slime.utils.misc import attempt

logger = logging.getLogger(__name__)

SLOW = {"start": 900.0}  # Phases that count nothing while they work: processes start and weights are read.
LOOKS = 10  # Looks within the time that a phase may be silent for.


class StallWatch(Watch):
    """A watch over phases.

    Args:
        phases: of the run.
        look: something that changes when anything is done.
        look_closely: likewise, at a cost: it is asked only in a phase that has been silent for half its time.
        on_stall: called in the watch's thread with the phase that stalled and how long it may be silent for.
        timeout_s: the least time that a phase may be silent for.
    """

    def __init__(
        self,
        phases: Phases,
        look: Callable[[], Any],
        look_closely: Callable[[], Any],
        on_stall: Callable[[Phase, float], None],
        *,
        timeout_s: float,
    ) -> None:
        super().__init__("stall-watch", every_s=max(0.05, min(30.0, timeout_s / LOOKS)))
        self._phases = phases
        self._looks = {"look": look, "closely": look_closely}
        self._on_stall = on_stall
        self._timeout_s = timeout_s
        self._seen: dict[str, Any] = {}
        self._is_reported = False

    def tick(self) -> None:
        """Look once."""
        phase = self._phases.current()
        if phase is None:
            return
        limit_s = self._phases.limit_s(phase.name, max(self._timeout_s, SLOW.get(phase.name, 0.0)))
        looks = ("look", "closely") if phase.silent_s >= limit_s / 2 else ("look",)
        changed = [self._has_changed(one) for one in looks]  # each: the next look compares with what there is now
        if any(changed):
            self._phases.went_on()
            self._is_reported = False
        elif phase.silent_s < limit_s:
            self._is_reported = False
        elif not self._is_reported:
            self._is_reported = True
            self._on_stall(phase, limit_s)

    def _has_changed(self, look: str) -> bool:
        found = try_and_log("a look of the watchdog", self._looks[look], level=logging.DEBUG)
        if found is None:
            return False
        has_changed = look in self._seen and self._seen[look] != found
        self._seen[look] = found
        return has_changed


def clock() -> str:
    """Now, for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


FILE = "stall_report.txt"
NODE_DEADLINE_S = 90.0


def headline(phase: Phase, limit_s: float, stopped: Sequence[str] = ()) -> str:
    """The sentence that says what has stalled, and which processes (`stopped_processes`) cannot continue."""
    who = f"; stopped, which SIGCONT ends: {', '.join(stopped)}" if stopped else ""
    return (
        f"nothing has gone on in the phase {phase.name!r} for {seconds(phase.silent_s)} (it began "
        f"{seconds(phase.seconds)} ago; it may be silent for {seconds(limit_s)}: six times its median, and "
        f"--stall-timeout at least){who}"
    )


def stopped_processes(run: str, board: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Processes of a run on this node that a signal, a debugger or a full terminal has stopped.

    Args:
        run: its mark.
        board: what processes say of themselves (`read_progress`), which gives them names.
    """
    names = {said.get("pid"): name for name, said in board.items()}
    found = []
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                title = " ".join(Path(word).name for word in process.cmdline()[:4]) or process.name()
                found.append(f"{names.get(process.pid, title)} (process {process.pid})")
    return found


def write_report(path: Path, title: str, sections: Mapping[str, Callable[[], str]]) -> None:
    """Write sections one after the other, each as soon as it is there; one that fails says how.

    Args:
        path: of the file, to whose end is written: a run may stall twice.
        title: the first line.
        sections: heading -> what makes its text.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{clock()}: {title}\n")
        for heading, make in sections.items():
            text, error = attempt(make)  # one part that cannot be asked must not hide others
            if text is None:
                text = f"(not there: {type(error).__name__}: {error})"
            file.write(f"\n== {heading}\n{text.rstrip()}\n")
            file.flush()
        file.write("\n")


def progress_lines(board: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each process: what it has done, and when it last said so."""
    lines = [
        f"{name} (process {said.get('pid')}): {_counts(said.get('counts', {}))}; last heard "
        f"{seconds(time.time() - float(said.get('time', 0)))} ago"
        for name, said in board.items()
    ]
    return "\n".join(lines) or "no process has said anything"


def collective_lines(board: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each trainer rank: the collective it is in or was seen in last, and what its groups have begun."""
    lines = []
    for name, said in board.items():
        if "begun" not in said:
            continue
        last = said.get("last")
        where = "none was seen"
        if last:
            where = f"{'in' if last['in_it'] else 'last seen in'} {last['call']} since {last['since']}"
        begun = ", ".join(f"{group} {count}" for group, count in said["begun"].items() if count)
        lines.append(f"{name}: {where}; operations begun by each group: {begun or 'not known'}")
    return "\n".join(lines) or "no trainer rank is in a process group"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "nothing yet"


def engine_lines(state: Mapping[str, Any]) -> str:
    """A line for each router and engine."""
    return "\n".join(f"{name}: {_short(found)}" for name, found in state.items()) or "the run has no engines"


def _short(found: Any) -> str:
    return found if isinstance(found, str) else json.dumps(found, default=str)


def of_node(run: str, directory: str, more: Sequence[int] = ()) -> str:
    """Memory of this node, and what every process of the run on it is doing.

    Args:
        run: mark of the run.
        directory: whose disk is looked at.
        more: process ids that do not bear the mark.
    """
    pids = sorted({*more, *(process.pid for process in processes_of(run))} - {os.getpid()} | set(more))
    return f"{free_memory(Path(directory))}\n\n{describe(pids)}"


def of_other_nodes(run: str, directory: str) -> str:
    """`of_node` of every other node of the cluster, by a Ray task on each."""
    here = ray.get_runtime_context().get_node_id()
    others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    asked = {
        node["NodeManagerAddress"]: ray.remote(of_node)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            runtime_env={"env_vars": actor_env()},
        )
        .remote(run, directory)
        for node in others
    }
    done = set(ray.wait([*asked.values()], num_returns=len(asked), timeout=NODE_DEADLINE_S)[0]) if asked else set()
    texts = []
    for address, ref in asked.items():
        text = f"(no answer within {NODE_DEADLINE_S:g} s)"
        if ref in done:
            try:
                text = ray.get(ref, timeout=10.0)
            except RayError as error:  # what a node cannot tell must not hide the others
                text = f"(not there: {error})"
        texts.append(f"-- node {address}\n{text}")
    return "\n".join(texts) or "the run has one node"


PERIOD_S = 1.0
PREFIX = "slime-progress:"
MANAGER = "rollout manager"  # Name of the process that generates.


def publish_progress(name: str, more: Callable[[], dict[str, Any]] = dict) -> None:
    """Publish this process's counts from now on, in a Ray actor of a run; does nothing outside one.

    Args:
        name: of the process: "trainer 0".
        more: what else to say; called in the publishing thread.
    """
    if run := os.environ.get(MARK):
        threading.Thread(
            target=_publish_always, args=(f"{PREFIX}{run}:{name}", more), name="progress", daemon=True
        ).start()


def _publish_always(key: str, more: Callable[[], dict[str, Any]]) -> None:
    said: dict[str, Any] = {}

    def publish() -> None:
        nonlocal said
        found = {"counts": counts(), **more()}
        if found != said:
            said = json.loads(json.dumps(found))
            _put(key, {**found, "time": time.time(), "pid": os.getpid()})

    while True:
        try_and_log("publishing progress", publish, level=logging.DEBUG)
        time.sleep(PERIOD_S)


def _put(key: str, value: dict[str, Any]) -> None:
    internal_kv._internal_kv_put(key.encode(), json.dumps(value).encode(), overwrite=True)


def read_progress(run: str) -> dict[str, dict[str, Any]]:
    """Name of each process -> what it published last: "counts", "time" (seconds since 1970), "pid", and more."""
    prefix = f"{PREFIX}{run}:"
    found = {}
    for key in internal_kv._internal_kv_list(prefix.encode()):
        if text := internal_kv._internal_kv_get(key):
            found[key.decode().removeprefix(prefix)] = json.loads(text)
    return dict(sorted(found.items()))


def progress_of(run: str, name: str) -> dict[str, Any]:
    """What one process published last; nothing where it has not."""
    text = internal_kv._internal_kv_get(f"{PREFIX}{run}:{name}".encode())
    return dict(json.loads(text)) if text else {}


def clear_progress(run: str) -> None:
    """Forget a run that is over: the Ray that it ran on may live on."""
    for name in read_progress(run):
        internal_kv._internal_kv_del(f"{PREFIX}{run}:{name}".encode())
