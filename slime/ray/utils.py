"""Waiting on Ray references, and what every Ray actor of a run is created with and has in common.

`get` is the only way this package waits for a result: it has a deadline, names what it waited for, and surfaces the
first actor that failed instead of waiting for its peers.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slime.processes.progress import (
    counts,
    killed_for_memory,
    memory_kills,
    too_few_addresses,
    write_stacks_on_signal,
)
from slime.processes.registry import MARK
from slime.processes.wait import Watch, try_and_log
from slime.utils.accelerator import compile_cache
from slime.utils.errors import UsageError
from slime.utils.http.network import given_address, interface_problem
from slime.utils.misc import listen_anywhere

POLL_S = 1.0
FETCH_DEADLINE_S = 600.0  # of a result that is there, perhaps on another node
PROGRESS_KEY = "slime-progress:"
MANAGER = "rollout manager"  # Name of the process that generates.
SLOT_RESOURCE = {"cpu": "slime_slot", "cuda": "GPU"}
REPO_ROOT = Path(__file__).resolve().parent.parent.parent


class ActorFailure(RuntimeError):
    """An actor failed or died.

    Args:
        message: one line for the user.
        details: the remote traceback, for a file.
        cause: what the actor raised.
    """

    def __init__(self, message: str, details: str = "", cause: BaseException | None = None) -> None:
        self.details = details
        self.cause = cause
        super().__init__(message)


class ActorLost(ActorFailure):
    """An actor's process is gone, or cannot be reached: what it held is lost, and another may take its place."""


class _Interrupt:
    """What another thread of the driver ends the main thread's next wait with. (Ray's own wait takes no exception out
    of a signal handler but KeyboardInterrupt and SystemExit.)"""

    error: BaseException | None = None

    def take(self) -> None:
        if self.error is not None and threading.current_thread() is threading.main_thread():
            error, self.error = self.error, None
            raise error


_interrupt = _Interrupt()
_kills = memory_kills()


def interrupt_main(error: BaseException | None) -> None:
    """Have the main thread's wait in `get`, this one or the next, end with an error; None takes that back."""
    _interrupt.error = error


def get(
    refs: ray.ObjectRef | Sequence[ray.ObjectRef],
    what: str,
    deadline_s: float,
    *,
    beside: Mapping[ray.ObjectRef, str] | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Any:
    """Wait for one reference or all of several.

    Args:
        refs: one reference or a sequence of them.
        what: what is waited for, as it is to appear in an error ("train step of rollout 3").
        deadline_s: seconds after which the wait is given up.
        beside: what else is under way, with what it is called. It is not waited for, but when it fails before the end
            of this wait, that is raised.
        meanwhile: called about once a second until the end; what it raises ends the wait.

    Raises:
        UsageError: raised by the actor: passed on as it is.
        ActorFailure: an actor raised anything else; raised at once, even while others are still running.
        ActorLost: it died; likewise.
        TimeoutError: the deadline passed.
    """
    several = not isinstance(refs, ray.ObjectRef)
    pending = list(refs) if several else [refs]
    others = dict(beside or {})
    end = time.monotonic() + deadline_s
    while pending:
        _interrupt.take()
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"waited {deadline_s:.0f} s for {what}; {len(pending)} result(s) are still missing")
        done, _ = ray.wait([*pending, *others], timeout=min(POLL_S, left_s))
        for ref in done:
            fetch(ref, others.pop(ref, what))
        pending = [ref for ref in pending if ref not in done]
        if meanwhile is not None and not done:
            meanwhile()
    return [fetch(ref, what) for ref in refs] if several else fetch(refs, what)


def fetch(ref: ray.ObjectRef, what: str) -> Any:
    """The value of a finished reference, or its error in the terms of `get`."""
    try:
        return ray.get(ref, timeout=FETCH_DEADLINE_S)
    except GetTimeoutError:
        raise TimeoutError(f"waited {FETCH_DEADLINE_S:.0f} s to fetch the result of {what}") from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UsageError):
            raise UsageError(cause.messages) from None
        said = f"{type(cause).__name__}: {cause}"
        if "ulimit -v" not in said and (reason := too_few_addresses(said)) is not None:
            said = f"{reason} ({said})"
        raise ActorFailure(f"{what} failed: {said}", str(error), cause) from None
    except RayActorError as error:
        reason = killed_for_memory(_kills) if f"ip: {ray.util.get_node_ip_address()}" in str(error) else None
        died = f"{_who_died(error)} died ({reason or _first_line(error)})"
        raise ActorLost(f"{what} failed: {died}", str(error)) from None
    except RayError as error:
        raise ActorFailure(f"{what} failed: {_first_line(error)}", str(error)) from None


def _who_died(error: RayActorError) -> str:
    said = dict(re.findall(r"^\s*(class_name|pid|ip): (\S+)$", str(error), re.MULTILINE))
    if len(said) < 3:  # it died before Ray knew that much
        return "a Ray actor"
    return f"the Ray actor {said['class_name']} (process {said['pid']} on {said['ip']})"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def node_address() -> str:
    """The address at which other nodes reach this one: `given_address`, else the one that Ray was started with.

    Raises:
        UsageError: SLIME_HOST_IP is no address of this host.
    """
    return given_address(os.environ) or ray.util.get_node_ip_address()


def check_network(who: str, *, uses_nccl: bool) -> None:
    """See that this process's choice of network interfaces is one of its host's.

    Args:
        who: this process, for the message.
        uses_nccl: whether it forms groups of NCCL.

    Raises:
        UsageError: it is not.
    """
    if (problem := interface_problem(os.environ, uses_nccl=uses_nccl)) is not None:
        raise UsageError(f"{who}: {problem}")


def slot_options(accelerator: str, amount: float) -> dict[str, Any]:
    """Ray actor options that take `amount` of a slot: a GPU on "cuda", the custom resource `slime_slot` on "cpu"."""
    if accelerator == "cuda":
        return {"num_cpus": 0, "num_gpus": amount}
    return {"num_cpus": 0, "resources": {SLOT_RESOURCE[accelerator]: amount}}


def in_bundle(placement_group: Any, bundle_index: int) -> PlacementGroupSchedulingStrategy:
    """The scheduling strategy that puts an actor into one bundle of a placement group."""
    return PlacementGroupSchedulingStrategy(
        placement_group=placement_group,
        placement_group_bundle_index=bundle_index,
        placement_group_capture_child_tasks=True,
    )


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """The scheduling strategy that puts an actor on the node of this process."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def actor_env(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Environment of every actor: user code imports as it does in the driver, nothing is fetched from a model hub."""
    script_dir, inherited = sys.path[0], os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys([str(REPO_ROOT), os.getcwd(), script_dir, *inherited])
    return {
        "PYTHONPATH": os.pathsep.join(path for path in paths if os.path.isdir(path)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **({MARK: os.environ[MARK]} if MARK in os.environ else {}),  # of the run: a Ray that ran before has it not
        **compile_cache.passed_on(),
        **(extra or {}),
    }


def redirect_output(path: str | Path, *, stdout: bool = True) -> None:
    """Send this process's stderr, and its stdout unless told otherwise, to the end of `path`; native code's too."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 2)
        if stdout:
            os.dup2(file.fileno(), 1)


class RayActor:
    """Base of the actors: where it runs, and a port of its own there.

    `sys.exit()` in user code that a method calls is an error of that method. Ray would end the process, and the driver
    would replace it as if its machine had failed.
    """

    _listener: socket.socket | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(cls, name, _exits_as_errors(method))

    def node_address(self) -> str:
        """The address at which other nodes reach this actor's node."""
        return node_address()

    def master_address(self) -> tuple[str, int]:
        """(address, port) for a process group whose rank 0 is this actor.

        The actor listens there from now on, so nobody takes the port before the group is formed.
        """
        address = self.node_address()
        self._listener = listen_anywhere(address)
        return address, self._listener.getsockname()[1]


def _exits_as_errors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # Ray's marks on the method, too
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            if hasattr(error, "ray_terminate_msg"):  # Ray itself ends the process
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.name} ({place.filename}:{place.lineno})"
            raise RuntimeError(f"{where} raised {type(error).__name__}: {error}") from error

    return call


def publish_progress(name: str, more: Callable[[], dict[str, Any]] = dict) -> None:
    """Publish this process's counts from now on, in a Ray actor of a run, and have it write its stacks when asked.

    They go into Ray's own table, which needs no port and no process more: from a thread, once a second and only what
    has changed, so the process's work is never held up.

    Args:
        name: of the process: "trainer 0".
        more: what else to say; called in the publishing thread.
    """
    write_stacks_on_signal()
    if run := os.environ.get(MARK):
        _Publisher(run, name, more).start()


class _Publisher(Watch):
    def __init__(self, run: str, name: str, more: Callable[[], dict[str, Any]]) -> None:
        super().__init__("progress", every_s=POLL_S)
        self._key, self._more, self._said = _progress_key(run, name), more, ""

    def tick(self) -> None:
        """Publish what has changed. Without Ray the actor ends soon, and its log needs no line a second about it."""
        try_and_log("publishing progress", self._publish, level=logging.DEBUG)

    def _publish(self) -> None:
        said = json.dumps({"counts": counts(), **self._more()})
        if said != self._said:
            value = {**json.loads(said), "time": time.time(), "pid": os.getpid()}
            internal_kv._internal_kv_put(self._key, json.dumps(value).encode(), overwrite=True)
            self._said = said


def _progress_key(run: str, name: str) -> bytes:
    return f"{PROGRESS_KEY}{run}:{name}".encode()


def read_progress(run: str) -> dict[str, dict[str, Any]]:
    """Name of each process -> what it published last: "counts", "time" (seconds since 1970), "pid", and more."""
    prefix = _progress_key(run, "")
    names = sorted(key.removeprefix(prefix).decode() for key in internal_kv._internal_kv_list(prefix))
    return {name: said for name in names if (said := progress_of(run, name))}


def progress_of(run: str, name: str) -> dict[str, Any]:
    """What one process published last; nothing where it has not."""
    text = internal_kv._internal_kv_get(_progress_key(run, name))
    return dict(json.loads(text)) if text else {}


def forget_progress(run: str) -> None:
    """Forget a run that is over: the Ray that it ran on may live on."""
    for name in read_progress(run):
        internal_kv._internal_kv_del(_progress_key(run, name))
