"""An engine that fails, at its start or later, is the run's error in its own words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine, last_error
from slime.processes.registry import registry
from slime.ray.rollout import watches
from slime.ray.rollout.watches import EngineEnds
from slime.utils.errors import HttpError
from slime.utils.http.network import Outages

ROUTER = "http://127.0.0.1:3000"


class ScriptedEngine(SGLangEngine):
    """A real child process with a real log, whose program is a few lines in place of SGLang."""

    def __init__(self, program: str, log_path: Path) -> None:
        kwargs = {"host": "127.0.0.1", "port": 1, "model_path": "/models/m"}  # nothing listens at port 1
        super().__init__(kwargs, rank=0, log_path=log_path, accelerator="cpu")
        self.program = program

    def _begin(self) -> None:
        command = [sys.executable, "-c", self.program]
        self.process = registry().start(command, name="engine 0", log_path=self.log_path)


FAILS = "print('[10:00] loading', 'ValueError: no such model', 'Rank 0 scheduler is dead', sep='\\n'); exit(3)"
IS_KILLED = "import os; print('loading', flush=True); os.kill(os.getpid(), 9)"


def start_error(engine: SGLangEngine) -> str:
    with pytest.raises(EngineStartError) as caught:
        engine.start(deadline_s=60)
    return str(caught.value).splitlines()[0]


def test_an_engine_that_does_not_start_says_why_in_its_first_line(tmp_path: Path) -> None:
    said = start_error(ScriptedEngine(FAILS, tmp_path / "engine_0.log"))
    assert said == "engine 0 ended (exit code 3) before it was healthy: ValueError: no such model"


def test_an_engine_that_is_never_healthy_says_its_last_error(tmp_path: Path) -> None:
    engine = ScriptedEngine("print('OSError: gone', flush=True); import time; time.sleep(600)", tmp_path / "log")
    with pytest.raises(EngineStartError, match=r"waited 2 s for engine 0 .* to be healthy: OSError: gone\n"):
        engine.start(deadline_s=2)


def test_an_engine_that_the_kernel_has_killed_for_memory_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(IS_KILLED, tmp_path / "log")
    assert start_error(engine) == "engine 0 ended (killed by SIGKILL) before it was healthy"
    monkeypatch.setattr("slime.processes.progress.memory_kills", lambda: {"another file": 1})
    said = start_error(engine)
    assert said.startswith(
        "engine 0 ended (killed by SIGKILL) before it was healthy: out of host memory: the kernel's"
    )


def test_an_engine_with_too_small_an_address_space_is_said_to_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "print('RuntimeError: DefaultCPUAllocator: can\\'t allocate memory'); exit(1)"
    monkeypatch.setattr("slime.processes.progress.address_limit", lambda: 8 * 10**9)
    said = start_error(ScriptedEngine(program, tmp_path / "log"))
    assert said.endswith(": `ulimit -v` lets a process map 8.0 GB only; lift it: ulimit -v unlimited")


def test_an_engine_knows_that_it_has_ended_by_itself(tmp_path: Path) -> None:
    engine = ScriptedEngine(FAILS, tmp_path / "log")
    assert engine.ending() is None
    engine._begin()
    assert engine.process is not None
    engine.process.wait(30)
    assert engine.ending() == f"engine 0 has ended (exit code 3): ValueError: no such model ({tmp_path / 'log'})"
    engine.shutdown()
    assert engine.ending() is None, "it was told to"


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("all is well", None),
        ("an Error: in a sentence\nKeyError: 'a'\n  ValueError: indented", "KeyError: 'a'"),
        ("torch.OutOfMemoryError: CUDA\nRuntimeError: Initialization failed.", "torch.OutOfMemoryError: CUDA"),
        ("EOFError", "EOFError"),
    ],
)
def test_the_last_error_of_a_log_is_no_consequence_of_another(log: str, error: str | None) -> None:
    assert last_error(log) == error


class Engine:
    """An actor that says how its server has ended."""

    def __init__(self, why: str | None) -> None:
        self.ending = SimpleNamespace(remote=lambda: why)


def model(**engines: list[str | None]) -> SimpleNamespace:
    whys = [(kind, why) for kind, of_kind in engines.items() for why in of_kind]
    seats = [SimpleNamespace(worker_type=kind, engine=Engine(why), external=None) for kind, why in whys]
    router = SimpleNamespace(address=SimpleNamespace(url=ROUTER))
    return SimpleNamespace(seats=seats, router=router, plan=SimpleNamespace(name="default"))


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        ({"regular": [None, "engine 1 has ended"]}, None),
        ({"regular": ["engine 0 has ended", "engine 1 has ended"]}, "engine 0 has ended"),
        ({"prefill": [None], "decode": ["engine 1 has ended"]}, "engine 1 has ended"),
    ],
)
def test_requests_that_no_engine_can_answer_fail_with_what_the_engine_says(monkeypatch, engines, why) -> None:
    outages = Outages()
    monkeypatch.setattr(watches, "OUTAGES", outages)
    monkeypatch.setattr(watches, "get", lambda answer, what, deadline_s: answer)
    found = EngineEnds([model(**engines)]).look()
    assert found == [said for whys in engines.values() for said in whys if said]
    if why is None:
        assert not outages.is_on(ROUTER)
        return
    with pytest.raises(HttpError, match=f"generate has no engine any more: {why}"):
        asyncio.run(outages.over(f"{ROUTER}/generate"))
