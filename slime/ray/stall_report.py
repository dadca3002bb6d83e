"""The text of `stall_report.txt`: what every part of a run is doing while nothing goes on.

It asks with deadlines and writes down what does not answer; it changes nothing and decides nothing.
docs/fault_tolerance.md says how to read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slime.observability.phases import Phase, seconds
from slime.ray.stall_watch import clock
from slime.ray.utils import actor_env
from slime.utils.run_processes import processes_of
from slime.utils.stacks import describe, free_memory

logger = logging.getLogger(__name__)

FILE = "stall_report.txt"
NODE_DEADLINE_S = 90.0


def headline(phase: Phase, limit_s: float, stopped: Sequence[str] = ()) -> str:
    """The sentence that says what has stalled, and which processes (`stopped_processes`) cannot go on."""
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
        board: what processes say of themselves (`progress_board.read`), which gives them names.
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
            try:
                text = make()
            except Exception as error:  # noqa: BLE001 - a boundary: one part that cannot be asked must not hide others
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
            except Exception as error:  # noqa: BLE001 - what a node cannot tell must not hide the others
                text = f"(not there: {error})"
        texts.append(f"-- node {address}\n{text}")
    return "\n".join(texts) or "the run has one node"
