"""The local sandbox as programs use it: commands, files, ends of every kind, refusals, bad input."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import ClientSession, ClientTimeout, web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict
from yarl import URL

from slime.agent.sandbox import (
    EXIT_KILLED,
    EXIT_TIME_BUDGET_EXCEEDED,
    LocalSandbox,
    Sandbox,
    SandboxError,
    SandboxTimeout,
    ensure_agent_user,
    exec_and_wait,
    make_sandbox,
)
from slime.agent.sandbox.access import _CREDENTIALS, GatewayAccess, GatewayDoor
from slime.agent.sandbox.grading import take_diff
from slime.agent.sandbox.pool import SandboxPool
from tests.unit.sandbox_fakes import gateway

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


@pytest.fixture(scope="module", autouse=True)
def kernel_allows_sandboxes() -> None:
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody make a user namespace (`unshare -Ur true` fails)")


def inside(use: Callable[[LocalSandbox], Awaitable[T]], **options: object) -> T:
    async def run() -> T:
        async with LocalSandbox(**options) as sandbox:  # type: ignore[arg-type]
            return await use(sandbox)

    return asyncio.run(run())


def test_a_command_has_its_exit_code_its_outputs_and_a_small_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the run")

    async def use(sandbox: LocalSandbox) -> None:
        assert isinstance(sandbox, Sandbox) and sandbox.sandbox_id.startswith("local-") and sandbox.refused == []
        assert await sandbox.exec("echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
        assert await sandbox.exec("kill -TERM $$") == (128 + signal.SIGTERM, "", "")
        assert (await sandbox.exec("no-such-program"))[0] == 127
        _, names, _ = await sandbox.exec("env | cut -d= -f1 | sort", env={"MINE": "1"})
        own = {"GIT_CONFIG_SYSTEM", "HOME", "LANG", "PATH", "PWD", "TMPDIR", "USER"}
        assert set(names.split()) == own | {"MINE", "SHLVL", "_"}
        assert (await sandbox.exec("pwd; whoami; echo $HOME", user="agent"))[1].split()[::2] == [
            "/workspace",
            "/home/agent",
        ]
        with pytest.raises(SandboxError, match="exit code 1 of 'false'"):
            await sandbox.exec("false", check=True)
        with pytest.raises(ValueError, match="users root and agent, not 'bob'"):
            await sandbox.exec("true", user="bob")
        with pytest.raises(ValueError, match="write a script with write_file"):
            await sandbox.exec("true " + "x" * 200_000)

    inside(use)


def test_files_are_written_and_read_and_errors_are_raised(tmp_path: Path) -> None:
    (tmp_path / "host").write_bytes(b"of the host")

    async def use(sandbox: LocalSandbox) -> None:
        await sandbox.write_file("/workspace/new/folder/a.txt", "text ü\n")
        assert await sandbox.read_file("/workspace/new/folder/a.txt") == "text ü\n"
        await sandbox.write_file("/tmp/b", tmp_path / "host")
        assert await sandbox.read_file("/tmp/b") == "of the host"
        await sandbox.write_file("/tmp/c", bytes(range(256)) * 4096)
        assert await sandbox.read_bytes("/tmp/c") == bytes(range(256)) * 4096
        for path, error in {"/tmp/c": "is not UTF-8", "/nowhere": "No such file", "/tmp": "not a regular"}.items():
            with pytest.raises(SandboxError, match=error):
                await sandbox.read_file(path)
        for path in ("/usr/x", "/etc/x", "/x"):
            with pytest.raises(SandboxError, match="Read-only file system"):
                await sandbox.write_file(path, "")
        with pytest.raises(ValueError, match="too large for the sandbox, which takes 16777216"):
            await sandbox.write_file("/tmp/d", b"x" * ((16 << 20) + 1))

    inside(use, disk_mb=16)


def test_a_command_that_takes_too_long_is_killed_with_its_children_and_the_sandbox_goes_on() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        with pytest.raises(SandboxTimeout, match=r"more than 0.3 s; its end: begun"):
            await sandbox.exec("echo begun; sleep 77 & sleep 77", timeout=0.3)
        task = asyncio.create_task(sandbox.exec("sleep 77"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if not (left := (await sandbox.exec("pgrep sleep"))[1]):
                break
        assert left == ""

    inside(use)


def test_what_a_command_leaves_in_the_background_runs_on_until_all_are_killed() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        await sandbox.exec("sleep 77 > /dev/null 2>&1 & until pgrep -x sleep > /dev/null; do :; done")
        assert (await sandbox.exec("pgrep -c sleep"))[1] == "1\n"
        await sandbox.kill_all()
        assert (await sandbox.exec("pgrep -c sleep"))[1] == "0\n"

    inside(use)


def test_many_commands_at_once_keep_their_outputs_apart() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        results = await asyncio.gather(*(sandbox.exec(f"echo {n}; exit {n}") for n in range(40)))
        assert results == [(n, f"{n}\n", "") for n in range(40)]

    inside(use)


def test_exec_and_wait_returns_the_code_the_output_and_kills_what_takes_too_long() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        await ensure_agent_user(sandbox, "/workspace")
        run = {"time_budget_sec": 20, "tag": "t", "user": "agent", "workdir": "/workspace"}
        assert await exec_and_wait(sandbox, cmd="pwd; echo $HOME $A", env={"A": "b"}, want_output=True, **run) == (
            0,
            "/workspace\n/home/agent b\n",
        )
        assert await exec_and_wait(sandbox, cmd="echo why; exit 7", **run) == (7, "why\n")
        assert await exec_and_wait(sandbox, cmd="echo unseen", **run) == (0, "")
        run["time_budget_sec"] = 0.5
        code, output = await exec_and_wait(sandbox, cmd="echo on; sleep 77 & sleep 77", **run)
        assert (code, output) == (EXIT_TIME_BUDGET_EXCEEDED, "on\n")
        await asyncio.sleep(0.1)
        assert (await sandbox.exec("pgrep -c sleep"))[1] == "0\n"

    inside(use)


def test_the_gateway_is_reached_under_the_own_key_and_carries_bodies() -> None:
    with gateway() as url:
        access = GatewayAccess(url, "key-of-b")
        post = (
            f"import urllib.request as r; print(r.urlopen(r.Request('{access.inside_url}/v1/messages',"
            " data=b'x' * 300000, headers={'Authorization': 'Bearer key-of-b'})).read().decode())"
        )

        async def use(sandbox: LocalSandbox) -> None:
            assert await sandbox.exec(f'/usr/bin/python3 -c "{post}"') == (0, "session b sent 300000\n", "")
            with pytest.raises(SandboxError, match="reaches a gateway already"):
                await sandbox.connect(access)

        inside(use, gateway=access)


def test_the_door_writes_the_credentials_and_refuses_addresses_that_lead_elsewhere() -> None:
    door = GatewayDoor(GatewayAccess("http://127.0.0.1:5000", "own"), None)  # type: ignore[arg-type]
    for path in ("/v1/messages?beta=..", "/a..b/%2e/c", "/s/own/v1/messages", "/v1/s/other"):
        assert str(door.target(path)) == f"http://127.0.0.1:5000{path}"
    for path in ("@evil/", "http://evil/", "//evil/", "/a/../b", "/a/%2e%2E/b", "/..%2fb", "/%2fevil", "*", ""):
        assert door.target(path) is None, path
    for path in ("/s/other/v1/messages", "/%73/other/v1/messages", "/s/own%2f../v1", "/s%2fother/v1", "/s/", "/s"):
        assert door.target(path) is None, path

    async def ask(*headers: tuple[str, str], path: str = "/v1/models") -> tuple[int, list[tuple[str, str]]]:
        seen: list[tuple[str, str]] = []

        async def answer(request: web.Request) -> web.Response:
            seen.extend((n.lower(), v) for n, v in request.headers.items() if n.lower() in _CREDENTIALS)
            return web.Response()

        behind = web.Application()
        behind.router.add_get("/v1/models", answer)
        listener = socket.create_server(("127.0.0.1", 0))
        async with TestServer(behind) as server:
            inner = GatewayDoor(GatewayAccess(str(server.make_url("/")), "own"), listener)
            await inner.open()
            url = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
            timeout = ClientTimeout(total=60)
            try:
                async with (
                    ClientSession(timeout=timeout) as client,
                    client.get(URL(url, encoded=True), headers=CIMultiDict(headers)) as got,
                ):
                    return got.status, sorted(seen)
            finally:
                await inner.close()

    own, both = ("Authorization", "Bearer own"), [("authorization", "Bearer own"), ("x-api-key", "own")]
    for good in ([own], [("Authorization", "own")], [("X-Api-Key", "own")], [own, own]):
        assert asyncio.run(ask(*good)) == (200, both)
    bad = ("Authorization", "Bearer other")
    for headers in ([], [own, bad], [bad, own], [own, ("x-api-key", "other")], [("x-api-key", "ü")]):
        assert asyncio.run(ask(*headers)) == (401, [])
    assert asyncio.run(ask(own, path="/v1/%2e%2e/models")) == (400, [])


def test_a_pool_hands_out_fresh_sandboxes_that_are_open_already() -> None:
    async def run() -> None:
        made: list[LocalSandbox] = []

        def make() -> LocalSandbox:
            made.append(LocalSandbox())
            return made[-1]

        async with SandboxPool(make, size=2) as pool:
            async with pool.take() as first, pool.take() as second:
                assert first is made[0] and second is made[1] and len(made) == 4
                await first.write_file("/workspace/mine", "x")
            async with pool.take() as third:
                assert third is made[2]
                assert (await third.exec("ls"))[1] == ""
        assert all(sandbox.process and sandbox.process.poll() is not None for sandbox in made)

        async with SandboxPool(lambda: LocalSandbox(workdir="/usr/local"), size=1) as _:
            pass

    with pytest.raises(ValueError, match="lies in a part that is read-only"):
        asyncio.run(run())


STARTER = """
import asyncio
from slime.agent.sandbox import LocalSandbox

async def main():
    async with LocalSandbox() as sandbox:
        await sandbox.exec("(setsid sleep 4321 &)", check=True)
        waiting = asyncio.create_task(sandbox.exec("exec sleep 4321"))
        while (await sandbox.exec("pgrep -c sleep"))[1] != "2\\n": pass
        print(sandbox.process.pid, flush=True)
        await waiting

asyncio.run(main())
"""


def starter(*, prefix: tuple[str, ...] = ()) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", STARTER], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def sleepers(outer: int) -> list[int]:
    """Processes of a sandbox, by the process that holds it."""
    lines = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(parent)) for pid, parent, *_ in (line.split() for line in lines.splitlines()[1:])]
    members = {outer} & {pid for pid, _ in rows}
    for _ in range(5):
        members |= {pid for pid, parent in rows if parent in members}
    return sorted(members)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and "zombie" not in _state(pid) for pid in pids)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "zombie"


@pytest.mark.parametrize("end", ["starter", "outer", "inner", "interrupt"])
def test_whoever_is_killed_nothing_of_the_sandbox_is_left(end: str) -> None:
    process, outer = starter()
    members = sleepers(outer)
    assert len(members) == 4  # the outer one, the first inner one, two that sleep
    if end in ("starter", "interrupt"):
        os.kill(process.pid, signal.SIGKILL if end == "starter" else signal.SIGTERM)
    else:
        os.kill(outer if end == "outer" else members[1], signal.SIGKILL)
    last = time.monotonic() + 15
    while not gone(members):
        assert time.monotonic() < last, [_state(pid) for pid in members]
        time.sleep(0.02)
    assert process.wait(15) != 0
    assert process.stdout is not None
    process.stdout.close()


def test_a_starter_that_is_stopped_finds_its_sandbox_when_it_goes_on() -> None:
    process, outer = starter()
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.3)
    assert len(sleepers(outer)) == 4
    os.kill(process.pid, signal.SIGCONT)
    members = sleepers(outer)
    process.kill()
    process.wait(15)
    last = time.monotonic() + 15
    while not gone(members):
        assert time.monotonic() < last
        time.sleep(0.02)
    assert process.stdout is not None
    process.stdout.close()


REFUSING = """
import asyncio, logging, sys
from slime.processes.isolation import kernel
from slime.agent.sandbox import LocalSandbox, SandboxError
numbers = {"unshare": kernel._DENIED["unshare"], "landlock": (444, 444)}
kernel._DENIED, kernel._ABSENT = {sys.argv[1]: numbers[sys.argv[1]]}, {}
kernel.restrict_system_calls(kernel.filter_program())  # the kernel itself refuses it from here on
logging.basicConfig(level="WARNING", stream=sys.stdout)

async def main():
    for unsafe in (False, True):
        try:
            async with LocalSandbox(unsafe=unsafe) as sandbox:
                print((await sandbox.exec("echo runs"))[1])
        except SandboxError as error:
            print(error)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ("landlock", ["refuses a local sandbox landlock (system call 444", "unsafe=True", "unsafe sandbox", "runs"]),
        ("unshare", ["cannot be made on this host, its kernel refuses", "unshare: Operation not permitted"]),
    ],
)
def test_what_the_kernel_refuses_is_named_and_needs_unsafe(refused: str, said: list[str]) -> None:
    command = [sys.executable, "-c", REFUSING, refused]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert all(part in done.stdout for part in said), done.stdout
    assert ("runs" in done.stdout) == (refused == "landlock")


def test_a_long_command_that_the_sandbox_has_killed_ends_at_once_not_with_its_budget() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        hold = "python3 -c 'held = b\"x\" * (200 << 20); import time; time.sleep(200)'"
        begin = time.monotonic()
        code, _ = await exec_and_wait(sandbox, cmd=hold, time_budget_sec=120, tag="hold")
        assert code == EXIT_KILLED and sandbox.killed_for_memory == 1
        assert time.monotonic() - begin < 60

    inside(use, memory_mb=100)


def test_paths_below_the_writable_ones_are_shown_read_only_and_a_parent_shows_all_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/deep").write_text("deep")
    (tmp_path / "a/high").write_text("high")
    (tmp_path / "secret").touch()

    async def use(sandbox: LocalSandbox) -> None:
        assert (await sandbox.exec(f"cd {tmp_path}; cat a/b/deep a/high; ls"))[1] == "deephigha\n"
        assert "Read-only" in (await sandbox.exec(f"echo > {tmp_path}/a/b/deep"))[2]
        assert await sandbox.exec(f"echo mine > {tmp_path}/own; cat {tmp_path}/own") == (0, "mine\n", "")

    inside(use, show=[str(tmp_path / "a/b"), str(tmp_path / "a")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "secret"]


def test_bad_input_is_refused_with_the_known_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for options, said in (
        ({"memory_mb": 1}, "memory_mb=1 of a local sandbox: at least 64"),
        ({"workdir": "work"}, "workdir='work' of a local sandbox: an absolute path"),
        ({"workdir": "/usr/work"}, "lies in a part that is read-only"),
        ({"show": ["/no/such"]}, "show='/no/such' of a local sandbox: there is no such path"),
        ({"show": ["/tmp/"]}, "are its own; name a path below /tmp or /home"),
        ({"show": ["/proc/self"]}, "are its own"),
        ({"show": [str(tmp_path)], "workdir": str(tmp_path)}, "are its own"),
    ):
        with pytest.raises(ValueError, match=said):
            LocalSandbox(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no sandbox backend is called 'lokal'; there are local, docker, e2b, http"):
        make_sandbox("lokal")
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_sandbox("local", image="debian"), LocalSandbox)
    assert "image 'debian' has no effect" in caplog.text
    with pytest.raises(SandboxError, match="not open"):
        asyncio.run(LocalSandbox().exec("true"))


def test_the_diff_is_that_of_the_base_commit_whatever_the_agent_commits() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        begin = "git init -q . && git config user.email a@b.c && git config user.name a && echo 1 > a && git add -A"
        await sandbox.exec(f"{begin} && git commit -q -m begin", check=True)
        base = (await sandbox.exec("git rev-parse HEAD"))[1].strip()
        # A setting that would run a program instead of showing the change, a commit, a new file, and one left out.
        await sandbox.exec("git config diff.external true; echo 2 > a; git commit -qam mine; echo 3 > b; echo 4 > c")
        diff = await take_diff(sandbox, "/workspace", base=base, exclude=["c"])
        assert "-1\n+2\n" in diff and "+3\n" in diff and "+4\n" not in diff

    inside(use)


@pytest.mark.parametrize(
    "said", [b"no json", b"[]", b'{"exit": 0}', b'{"id": 1, "exit": "x"}', b'{"id": [], "exit": 0}']
)
def test_a_message_that_cannot_be_read_ends_the_sandbox_and_leaks_no_file(said: bytes) -> None:
    async def use(sandbox: LocalSandbox) -> None:
        running = asyncio.create_task(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.1)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, open("/dev/null") as file:
            before = len(os.listdir("/proc/self/fd"))
            held, sandbox.control = sandbox.control, ours
            socket.send_fds(theirs, [b'{"id": 99, "exit": 0}'], [file.fileno()])
            sandbox._hear()
            assert len(os.listdir("/proc/self/fd")) == before
            theirs.send(said)
            sandbox._hear()
            assert held is not None
            asyncio.get_running_loop().remove_reader(held.fileno())
            held.close()
        with pytest.raises(SandboxError, match="sent no message that could be read"):
            await running
        with pytest.raises(SandboxError, match="not open"):
            await sandbox.exec("true")

    inside(use)


def test_a_request_waits_for_room_in_the_socket_and_a_broken_one_is_an_error() -> None:
    async def use(sandbox: LocalSandbox) -> None:
        first = sandbox.process
        assert first is not None and sandbox.control is not None
        [inner] = set(sleepers(first.pid)) - {first.pid}
        os.kill(inner, signal.SIGSTOP)
        asking = [asyncio.create_task(sandbox.exec(f"echo {'x' * 50_000} | wc -c")) for _ in range(20)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in asking)
        os.kill(inner, signal.SIGCONT)
        assert {code for code, _, _ in await asyncio.gather(*asking)} == {0}
        sandbox.control.shutdown(socket.SHUT_WR)
        with pytest.raises(SandboxError, match="has ended"):
            await sandbox.exec("true")
        assert not sandbox._pending

    inside(use)
