"""Have an engine join a run that goes on, and leave it: `python -m slime.backends.sglang_utils.join --run DIR`.

The run has to be started with --use-fault-tolerance --elastic-rollout, and its output directory shared. The command
starts a server with the arguments of the run's own engines, or takes one that runs already (--url), and stays until
the run ends or the engine leaves: on SIGTERM (a spot notice) or Ctrl-C the run sends it no more requests, those in
flight are finished, and the server ends. What is not finished in --drain-seconds is generated again by other engines.

The two sides talk through files in DIR/engines, which only this user can read: of each engine a request (its address,
its key, what it wants) and the run's answer; and the run's beat, by which an engine sees that the run is there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine
from slime.processes.directories import write_private
from slime.processes.registry import registry
from slime.processes.wait import WaitTimeout, wait
from slime.utils.errors import UsageError, exit_status
from slime.utils.http.api_keys import ENGINE_ENV
from slime.utils.misc import get_current_node_ip, get_free_port

logger = logging.getLogger(__name__)

FOLDER = "engines"
ANSWER_S = 120.0
SILENT_S = 600.0
"""Without a beat, after which the run is taken for dead."""
START_S = 1800.0
FIRST_PORT = 20000
LOOK_S = 0.5
JOINED, SERVING, DRAINING, REFUSED, GONE = "joined", "serving", "draining", "refused", "gone"
FINAL = (REFUSED, GONE)


@dataclass(frozen=True)
class JoinRequest:
    """What an engine says to a run.

    Attributes:
        url: `http://host:port`.
        key: that it asks for in requests; None for none.
        wants_to_leave: or else to join.
    """

    url: str
    key: str | None = field(default=None, repr=False)
    wants_to_leave: bool = False


class GuestBook:
    """The folder through which a run and engines that come and go talk.

    Args:
        run_dir: --output-dir of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER
        self._beats = 0

    def open(self) -> None:
        """Make the folder (the run's side)."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.beat()

    def beat(self) -> None:
        """Show that the run is there."""
        self._beats += 1
        self._write("run.json", {"beat": f"{os.getpid()}.{self._beats}"})

    def last_beat(self) -> str | None:
        """The newest beat; None where there was none, or the run has ended."""
        return (self._read("run.json") or {}).get("beat")

    def close(self) -> None:
        """Say that the run has ended."""
        self._write("run.json", {})

    def requests(self) -> dict[str, JoinRequest]:
        """Name -> what each engine says."""
        suffix = ".request.json"
        names = sorted(path.name.removesuffix(suffix) for path in self.folder.glob(f"*{suffix}"))
        found = {name: self._read(f"{name}{suffix}") for name in names}
        return {name: JoinRequest(**values) for name, values in found.items() if values}

    def ask(self, name: str, request: JoinRequest) -> None:
        """Say something as an engine."""
        self._write(f"{name}.request.json", asdict(request))

    def answer(self, name: str, state: str, why: str = "") -> None:
        """Say to an engine what has become of its request."""
        self._write(f"{name}.answer.json", {"state": state, "why": why})

    def answer_to(self, name: str) -> tuple[str, str]:
        """(state, why) that the run has answered; empty before it has."""
        found = self._read(f"{name}.answer.json") or {}
        return found.get("state", ""), found.get("why", "")

    def forget(self, name: str) -> None:
        """Remove an engine's files."""
        for kind in ("request", "answer"):
            (self.folder / f"{name}.{kind}.json").unlink(missing_ok=True)

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        draft = self.folder / f".{name}.{os.getpid()}"
        write_private(draft, json.dumps(values))
        draft.replace(self.folder / name)  # whole, whoever reads meanwhile

    def _read(self, name: str) -> dict[str, Any] | None:
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found = json.loads((self.folder / name).read_text())
            return found if isinstance(found, dict) else None
        return None


def server_values(launch: Mapping[str, Any], host: str, port: int, base_gpu_id: int) -> dict[str, Any]:
    """The ServerArgs of an engine that joins, from those of an engine of the run.

    Args:
        launch: `server_args` of the run's launch file.
        host: to listen on.
        port: with free ones behind it.
        base_gpu_id: the first of its GPUs on this machine.

    Raises:
        UsageError: such an engine cannot be started by one command.
    """
    if launch.get("nnodes", 1) > 1:
        raise UsageError(
            f"the run's engines lie over {launch['nnodes']} machines each, which this command cannot start: start "
            "one with SGLang's own launcher, and give its address with --url."
        )
    own = {"host": host, "port": port, "nccl_port": port + 1}
    if "dist_init_addr" in launch:
        own["dist_init_addr"] = f"{host}:{port + 2}"
    if "base_gpu_id" in launch:
        own["base_gpu_id"] = base_gpu_id
    # unlike all others', or two engines would draw the same samples
    return {**launch, **own, "random_seed": secrets.randbelow(2**30)}


def read_launch_file(run_dir: Path) -> dict[str, Any]:
    """The launch file of the first of the run's engines that generate.

    Raises:
        UsageError: it has none.
    """
    for path in sorted(run_dir.glob("logs/engine_*.json")):
        launch: dict[str, Any] = json.loads(path.read_text())
        values = launch["server_args"]
        if not values.get("encoder_only") and values.get("disaggregation_mode") in (None, "null"):
            return launch
    raise UsageError(
        f"--run {run_dir}: it has started no engine whose arguments could be used (logs/engine_*.json); give an "
        "engine that runs with --url."
    )


class Guest:
    """One engine's visit.

    Args:
        book: of the run.
        request: to join.
    """

    def __init__(self, book: GuestBook, request: JoinRequest) -> None:
        self.book, self.request = book, request
        self.name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.leaves = threading.Event()
        self._beat: tuple[str | None, float] = ("", time.monotonic())

    def arrive(self) -> str:
        """Ask to join; returns the run's state of it once it has answered.

        Raises:
            UsageError: the run refuses it, or does not answer.
        """
        self.book.ask(self.name, self.request)
        try:
            state, why = wait(
                "the run's answer", ANSWER_S, lambda: a if (a := self.book.answer_to(self.name))[0] else None
            )
        except WaitTimeout:
            raise UsageError(f"{self.book.folder.parent} gives no answer: has the run ended? Start it again") from None
        if state == REFUSED:
            raise UsageError(f"the run does not take {self.request.url}: {why}")
        return state

    def stay(self, why_ended: Any) -> str:
        """Stay until the run ends, has lost the engine, or the engine is to leave; returns why.

        Args:
            why_ended: returns why the server has ended, None while it runs.
        """
        while not self.leaves.wait(LOOK_S):
            state, why = self.book.answer_to(self.name)
            if problem := why_ended() or (why or state if state in FINAL else None):
                return str(problem)
            if self._is_run_over():
                return "the run has ended"
        return ""

    def leave(self, drain_s: float) -> bool:
        """Leave once requests in flight are finished; returns whether they were within `drain_s` seconds."""
        self.book.ask(self.name, JoinRequest(self.request.url, self.request.key, wants_to_leave=True))
        try:
            wait("the last requests", drain_s, self._is_over)
        except WaitTimeout:
            return False
        return True

    def _is_over(self) -> bool:
        return self.book.answer_to(self.name)[0] in FINAL or self._is_run_over()

    def _is_run_over(self) -> bool:
        beat, now = self.book.last_beat(), time.monotonic()
        if beat != self._beat[0]:
            self._beat = (beat, now)
        return beat is None or now - self._beat[1] > SILENT_S


def visit(options: argparse.Namespace) -> str:
    """Join, stay and leave; returns a sentence about the end.

    Raises:
        UsageError: there is no such run, it refuses the engine, or the server does not start.
    """
    book = GuestBook(options.run)
    if book.last_beat() is None:
        raise UsageError(
            f"--run {options.run}: no run goes on there that takes engines; give the --output-dir of one that was "
            "started with --use-fault-tolerance --elastic-rollout."
        )
    engine, request = None, JoinRequest((options.url or "").rstrip("/"), os.environ.get(ENGINE_ENV))
    if options.url is None:
        engine, request = _start_engine(options)
    guest = Guest(book, request)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: guest.leaves.set())
    try:
        print(f"{request.url}: {guest.arrive()}", flush=True)
        end = guest.stay(engine.ending if engine is not None else lambda: None)
        if not end:
            is_whole = guest.leave(options.drain_seconds)
            end = "it has left" + ("" if is_whole else f"; after {options.drain_seconds:g} s requests were under way")
    finally:
        book.forget(guest.name)
        if engine is not None:
            engine.shutdown()
    return f"{request.url}: {end}"


def _start_engine(options: argparse.Namespace) -> tuple[SGLangEngine, JoinRequest]:
    launch = read_launch_file(options.run)
    of_run = launch["server_args"]["host"]
    host = options.host or (of_run if of_run.startswith("127.") else get_current_node_ip())
    port = get_free_port(FIRST_PORT + 8 * secrets.randbelow(1500), consecutive=4)  # others may join just now
    values = server_values(launch["server_args"], host, port, options.base_gpu_id)
    values["api_key"] = secrets.token_urlsafe(32)
    log = options.run / "logs" / f"engine_joined_{socket.gethostname()}_{os.getpid()}.log"
    registry()  # in the main thread, where it can catch signals
    engine = SGLangEngine(values, rank=os.getpid(), log_path=log, accelerator=launch["accelerator"], num_threads=1)
    try:
        return engine, JoinRequest(engine.start(START_S), values["api_key"])
    except EngineStartError as error:
        raise UsageError(str(error)) from None


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="--output-dir of the run, which all machines share")
    parser.add_argument(
        "--url", help=f"http://host:port of an SGLang server that runs already; its key is read from ${ENGINE_ENV}"
    )
    parser.add_argument("--host", help="address to listen on (default: as the run's engines, or this machine's)")
    parser.add_argument("--base-gpu-id", type=int, default=0, help="the first GPU of this machine that it takes")
    parser.add_argument(
        "--drain-seconds", type=float, default=90.0, help="for requests in flight, once it is to leave"
    )
    return parser


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(exit_status(lambda: visit(build_parser().parse_args())))
