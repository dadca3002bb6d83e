"""Sandboxes of another host: commands done once, leases, keys, limits, and ends of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import uvicorn

from slime.agent.sandbox import GatewayAccess, HttpSandbox, Sandbox, SandboxError, SandboxTimeout, make_sandbox
from slime.agent.sandbox_server import SandboxServer, _Held
from tests.unit.sandbox_fakes import gateway

pytestmark = pytest.mark.processes
ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-sixteen-or-more"


@pytest.fixture(scope="module", autouse=True)
def kernel_allows_sandboxes() -> None:
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody make a user namespace (`unshare -Ur true` fails)")


@contextlib.asynccontextmanager
async def serving(**options: object) -> AsyncIterator[tuple[str, SandboxServer]]:
    served = SandboxServer(KEY, **options)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(served.app(), log_level="warning", timeout_graceful_shutdown=1))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", served
    finally:
        server.should_exit = True
        await task
        listener.close()


def test_a_sandbox_of_another_host_is_used_as_a_local_one(tmp_path: Path) -> None:
    async def run(gateway_url: str) -> None:
        async with serving() as (url, served):
            access = GatewayAccess(gateway_url, "key-of-a")
            sandbox = make_sandbox("http", urls=[url], key=KEY, memory_mb=256, gateway=access)
            async with sandbox:
                assert isinstance(sandbox, Sandbox) and isinstance(sandbox, HttpSandbox)
                assert await sandbox.exec("echo $A; pwd; exit 3", env={"A": "b"}) == (3, "b\n/workspace\n", "")
                await sandbox.write_file("/tmp/a", "text ü")
                assert await sandbox.read_file("/tmp/a") == "text ü"
                ask = f"curl -s -H 'Authorization: Bearer key-of-a' {access.inside_url}"
                python = f"import urllib.request as r; print(r.urlopen(r.Request('{access.inside_url}', headers="
                fetch = f"/usr/bin/python3 -c \"{python}{{'Authorization': 'Bearer key-of-a'}})).read().decode())\""
                assert (await sandbox.exec(f"{ask} || {fetch}"))[1].strip() == "session a"
                with pytest.raises(SandboxTimeout, match=r"more than 0.2 s"):
                    await sandbox.exec("sleep 9", timeout=0.2)
                with pytest.raises(SandboxError, match="No such file"):
                    await sandbox.read_file("/nowhere")
                with pytest.raises(SandboxError, match="exit code 1 of 'false'"):
                    await sandbox.exec("false", check=True)
                await sandbox.exec("sleep 77 > /dev/null 2>&1 &")
                await sandbox.kill_all()
                assert (await sandbox.exec("pgrep -c sleep"))[1] == "0\n"
                assert len(served.held) == 1
            assert not served.held

    with gateway() as url:
        asyncio.run(run(url))


class CuttingProxy:
    """Passes bytes on to a server, and cuts the first connection that carries `word` before its answer comes."""

    def __init__(self, port: int, word: bytes) -> None:
        self.port, self.word, self.cuts = port, word, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(1 << 16):
                    target.write(data)
                    await target.drain()
                    if self.word in data and not self.cuts:
                        self.cuts += 1
                        await asyncio.sleep(0.2)  # The server has begun.
                        writer.transport.abort()
            target.close()

        await asyncio.gather(pump(reader, back), pump(there, writer))


def test_a_command_whose_connection_breaks_is_done_once() -> None:
    async def run() -> None:
        async with serving() as (url, _):
            proxy = CuttingProxy(int(url.rpartition(":")[2]), b"echo done")
            cutting = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
            address = f"http://127.0.0.1:{cutting.sockets[0].getsockname()[1]}"
            async with HttpSandbox(urls=[address], key=KEY) as sandbox:
                assert (await sandbox.exec("sleep 0.5; echo done >> log; cat log"))[1] == "done\n"
                assert proxy.cuts == 1 and await sandbox.read_file("/workspace/log") == "done\n"
            cutting.close()

    asyncio.run(run())


def test_a_sandbox_whose_owner_is_silent_ends_and_a_full_server_says_so() -> None:
    async def run() -> None:
        async with serving(most=1, lease_s=3) as (url, served):
            first = HttpSandbox(urls=[url], key=KEY)
            async with first:
                await asyncio.sleep(3.5)  # longer than the lease: it is renewed
                assert (await first.exec("echo there"))[1] == "there\n"
                with (
                    pytest.MonkeyPatch.context() as patched,
                    pytest.raises(SandboxError, match="1 sandboxes are open"),
                ):
                    patched.setattr("slime.agent.sandbox.http.TRIES", 1)
                    await HttpSandbox(urls=[url], key=KEY).__aenter__()
                assert first._renewing
                first._renewing.cancel()  # its owner hangs
                end = time.monotonic() + 10
                while served.held:
                    assert time.monotonic() < end
                    await asyncio.sleep(0.05)
                with pytest.raises(SandboxError, match=r"there is no sandbox \w+ \(any more\)"):
                    await first.exec("true")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("PUT", "/sandboxes/x", {"options": {"memory": 3}}, 400, "workdir, memory_mb, disk_mb, processes alone"),
        ("PUT", "/sandboxes/x", {"options": {"memory_mb": "3"}}, 400, "memory_mb='3' is no int"),
        ("PUT", "/sandboxes/x", {"options": {"memory_mb": 3}}, 400, "memory_mb=3 of a local sandbox: at least 64"),
        ("PUT", "/sandboxes/x", [], 400, "no JSON object"),
        ("PUT", "/sandboxes/x", {"gateway": {"url": "a"}}, 400, "key"),
        ("POST", "/sandboxes/y/exec", {}, 422, "there is no sandbox y"),
        ("POST", "/sandboxes/open/exec", {"cmd": 1}, 400, "cmd=1 of a command"),
        ("GET", "/sandboxes/open/files?path=a", None, 400, "path='a' of a file: an absolute path"),
        ("PUT", "/sandboxes/z", {"options": {"workdir": "x" * (2 << 20)}}, 400, "longer than 1048576 bytes"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(method: str, path: str, body: object, status: int, said: str) -> None:
    async def run() -> None:
        async with serving() as (url, _), aiohttp.ClientSession() as session:
            header = {"Authorization": f"Bearer {KEY}"}
            await session.put(f"{url}/sandboxes/open", json={}, headers=header)
            async with session.request(method, url + path, json=body, headers=header) as answer:
                assert (answer.status, said in await answer.text()) == (status, True), await answer.text()
            async with session.request(method, url + path, json=body, headers={"Authorization": "Bearer x"}) as answer:
                assert answer.status == 401

    asyncio.run(run())


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_sandboxes_of_a_server_end_with_it(end: signal.Signals) -> None:
    command = [sys.executable, "-m", "slime.agent.sandbox_server", "--port", "0"]
    environment = {**os.environ, "SLIME_SANDBOX_KEY": KEY}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    url = next(line for line in server.stderr if "sandbox server on" in line).split()[-1]

    async def run() -> None:
        sandbox = HttpSandbox(urls=["http://127.0.0.1:9", url], key=KEY)  # nobody listens on the first one
        async with sandbox:
            await sandbox.exec("(setsid sleep 5432.1 &) ; until pgrep -x sleep > /dev/null; do :; done", check=True)
            assert _sleepers()
            server.send_signal(end)
            last = time.monotonic() + 15
            while _sleepers():
                assert time.monotonic() < last
                await asyncio.sleep(0.05)
            with pytest.MonkeyPatch.context() as patch, pytest.raises((SandboxError, aiohttp.ClientError)):
                patch.setattr("slime.agent.sandbox.http.TRIES", 1)
                await sandbox.exec("true")
            sandbox._session, session = None, sandbox._session
            assert session
            await session.close()

    asyncio.run(run())
    server.wait(15)
    server.stderr.close()


def _sleepers() -> list[str]:
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line.startswith("sleep 5432.1")]


def test_a_server_without_a_key_or_with_bad_flags_does_not_start(tmp_path: Path) -> None:
    for key, flags, said in (
        ("", [], "set SLIME_SANDBOX_KEY to a key of at least 16 characters"),
        (KEY, ["--max-sandboxes", "0"], "--max-sandboxes 0: at least 1"),
        (KEY, ["--show", "/no/such"], "show='/no/such' of a local sandbox: there is no such path"),
    ):
        command = [sys.executable, "-m", "slime.agent.sandbox_server", *flags]
        environment = {**os.environ, "SLIME_SANDBOX_KEY": key}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and said in done.stderr
    for options, said in (({"urls": []}, "a list of http://"), ({"urls": ["http://a"]}, "SLIME_SANDBOX_KEY")):
        with pytest.raises(ValueError, match=said):
            HttpSandbox(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [aiohttp.ClientPayloadError("half"), aiohttp.ClientError("odd"), TimeoutError("late")]
)
def test_failures_of_the_client_are_sandbox_errors(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    sandbox = HttpSandbox(urls=["http://127.0.0.1:9"], key=KEY)

    async def send(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(sandbox, "_send", send)

    async def run() -> None:
        for use in (sandbox.__aenter__(), sandbox.exec("true"), sandbox.read_file("/a"), sandbox.kill_all()):
            with pytest.raises(SandboxError, match="does not answer"):
                await use

    asyncio.run(run())


def test_a_sandbox_that_cannot_be_ended_does_not_end_the_watch(caplog):
    ended = []

    class Stuck:
        def __init__(self, name: str) -> None:
            self.name = name

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_: object) -> None:
            ended.append(self.name)
            if self.name == "first":
                raise OSError("no such process")

    async def run() -> None:
        server = SandboxServer("k" * 16, lease_s=0.08)
        async with server._life(None):
            for name in ("first", "second"):
                server.held[name] = _Held(asyncio.create_task(Stuck(name).__aenter__()))
                async with asyncio.timeout(5):
                    while name not in ended:
                        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert ended == ["first", "second"] and "first was not ended: OSError: no such process" in caplog.text
