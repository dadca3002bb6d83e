"""The docker backend: its real client against a server of the documented API, whose containers are local sandboxes."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import struct
import subprocess
import tarfile
from typing import Any

import pytest
from aiohttp import web

from slime.agent.sandbox import (
    DockerSandbox,
    LocalSandbox,
    Sandbox,
    SandboxError,
    SandboxTimeout,
    docker,
    make_sandbox,
)

pytestmark = pytest.mark.processes

pytest.importorskip("docker.client")


@pytest.fixture(scope="module", autouse=True)
def kernel_allows_sandboxes() -> None:
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody make a user namespace (`unshare -Ur true` fails)")


class Daemon:
    """The parts of the Docker Engine API (1.47) that the backend uses."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.containers: dict[str, LocalSandbox] = {}
        self.execs: dict[str, dict[str, Any]] = {}
        self.removed: list[str] = []
        self.names: dict[str, str] = {}
        self.start_s = 0.0
        self.numbers = itertools.count(1)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        one = r"/v{version:[0-9.]+}/containers/{id}"
        app.add_routes(
            [
                web.get("/version", self.version),
                web.post(r"/v{version:[0-9.]+}/containers/create", self.create),
                web.post(f"{one}/start", self.start),
                web.get(f"{one}/json", self.inspect),
                web.delete(one, self.remove),
                web.post(f"{one}/exec", self.exec_create),
                web.post(r"/v{version:[0-9.]+}/exec/{id}/start", self.exec_start),
                web.get(r"/v{version:[0-9.]+}/exec/{id}/json", self.exec_inspect),
                web.put(f"{one}/archive", self.put_archive),
                web.get(f"{one}/archive", self.get_archive),
            ]
        )
        return app

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.47", "MinAPIVersion": "1.24", "Version": "27.0"})

    async def create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["Image"] == "absent":
            return web.json_response({"message": "invalid reference format"}, status=400)
        name = f"{next(self.numbers):064x}"
        self.made[name] = body
        self.names[request.query["name"]] = name
        return web.json_response({"Id": name, "Warnings": []}, status=201)

    async def start(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.start_s)
        sandbox = LocalSandbox()
        self.containers[request.match_info["id"]] = await sandbox.__aenter__()
        return web.Response(status=204)

    async def inspect(self, request: web.Request) -> web.Response:
        return web.json_response({"Id": request.match_info["id"], "State": {"Running": True}, "Config": {}})

    async def remove(self, request: web.Request) -> web.Response:
        assert request.query["force"] in ("1", "True", "true")
        name = self.names.get(request.match_info["id"], request.match_info["id"])
        if name not in self.containers:
            return web.json_response({"message": "No such container"}, status=404)
        await self.containers.pop(name).__aexit__()
        self.removed.append(name)
        return web.Response(status=204)

    async def exec_create(self, request: web.Request) -> web.Response:
        name = f"e{next(self.numbers)}"
        self.execs[name] = {"container": request.match_info["id"], **await request.json()}
        return web.json_response({"Id": name}, status=201)

    async def exec_start(self, request: web.Request) -> web.StreamResponse:
        made = self.execs[request.match_info["id"]]
        response = web.StreamResponse(status=101, headers={"Connection": "Upgrade", "Upgrade": "tcp"})
        await response.prepare(request)
        sandbox, argv = self.containers[made["container"]], made["Cmd"]
        env = dict(entry.split("=", 1) for entry in made["Env"] or [])
        command = " ".join(f"'{word.replace(chr(39), chr(39) + chr(92) + chr(39) + chr(39))}'" for word in argv)
        made["exit"], stdout, stderr = await sandbox.exec(command, user=made["User"], env=env)
        await asyncio.sleep(0.02)  # A daemon's output does not come with the headers.
        assert request.transport is not None
        for stream, text in ((1, stdout), (2, stderr)):
            if text:
                request.transport.write(struct.pack(">BxxxL", stream, len(text.encode())) + text.encode())
        request.transport.close()
        return response

    async def exec_inspect(self, request: web.Request) -> web.Response:
        return web.json_response({"ExitCode": self.execs[request.match_info["id"]]["exit"], "Running": False})

    async def put_archive(self, request: web.Request) -> web.Response:
        with tarfile.open(fileobj=io.BytesIO(await request.read())) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                path = f"{request.query['path']}/{member.name}"
                await self.containers[request.match_info["id"]].write_file(path, file.read())
        return web.Response()

    async def get_archive(self, request: web.Request) -> web.Response:
        path = request.query["path"]
        sandbox, archive = self.containers[request.match_info["id"]], io.BytesIO()
        kind = (await sandbox.exec(f"stat -c %F {path}"))[1].strip()
        if not kind:
            return web.json_response({"message": f"Could not find the file {path} in container"}, status=404)
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo(path.rpartition("/")[2])
            if kind == "symbolic link":
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(member)
            else:
                data = await sandbox.read_bytes(path)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return web.Response(body=archive.getvalue(), headers={"X-Docker-Container-Path-Stat": "e30="})


def test_a_container_is_used_as_a_local_sandbox() -> None:
    async def run() -> None:
        daemon = Daemon()
        runner = web.AppRunner(daemon.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server and site._server.sockets  # type: ignore[attr-defined]
        url = f"tcp://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        sandbox = make_sandbox("docker", image="debian", base_url=url, memory_mb=300, processes=50)
        async with sandbox:
            assert isinstance(sandbox, DockerSandbox) and isinstance(sandbox, Sandbox)
            assert await sandbox.exec("echo out; echo err >&2; echo $A; exit 3", env={"A": "b c"}) == (
                3,
                "out\nb c\n",
                "err\n",
            )
            await sandbox.write_file("/tmp/new/a", "text ü", user="agent")
            assert await sandbox.read_file("/tmp/new/a") == "text ü"
            await sandbox.exec("ln -s /etc/passwd /tmp/link")
            for path, said in {"/tmp/link": "not a regular file", "/nowhere": "Could not find the file"}.items():
                with pytest.raises(SandboxError, match=said):
                    await sandbox.read_file(path)
            with pytest.raises(SandboxTimeout, match=r"more than 0.5 s; its end: begun"):
                await sandbox.exec("echo begun; sleep 9", timeout=0.5)
            with pytest.raises(SandboxError, match="exit code 1 of 'false'"):
                await sandbox.exec("false", check=True)
            await sandbox.exec("sleep 77 > /dev/null 2>&1 &")
            await sandbox.kill_all()
            assert (await sandbox.exec("pgrep -c sleep"))[1] == "0\n"
        (name,) = daemon.removed
        host = daemon.made[name]["HostConfig"]
        assert (host["NetworkMode"], host["Memory"], host["PidsLimit"]) == ("none", 300 << 20, 50)
        assert host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges"] and host["AutoRemove"]
        assert "-lt $end" in json.dumps(daemon.made[name]["Cmd"])
        with pytest.raises(SandboxError, match="invalid reference format"):
            await DockerSandbox("absent", base_url=url).__aenter__()
        await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_container_whose_start_was_given_up_is_removed(monkeypatch: pytest.MonkeyPatch, is_cancelled: bool) -> None:
    monkeypatch.setattr(docker, "_START_S", 600.0 if is_cancelled else 0.5)

    async def run() -> None:
        daemon = Daemon()
        daemon.start_s = 1.5
        runner = web.AppRunner(daemon.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server and site._server.sockets  # type: ignore[attr-defined]
        url = f"tcp://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        opening = asyncio.create_task(DockerSandbox("debian", base_url=url).__aenter__())
        await asyncio.sleep(0.4)
        if is_cancelled:
            opening.cancel()
        with pytest.raises((SandboxError, asyncio.CancelledError)):
            await opening
        async with asyncio.timeout(60):
            while not daemon.removed:
                await asyncio.sleep(0.05)
        assert daemon.removed == list(daemon.made) and not daemon.containers
        await runner.cleanup()

    asyncio.run(run())


def test_bad_input_and_a_daemon_that_is_not_there_are_named() -> None:
    for options, said in ((("",), "needs an image"), (("a",), "memory_mb=0 of a docker sandbox: at least 1")):
        with pytest.raises(ValueError, match=said):
            DockerSandbox(*options, memory_mb=0)

    async def nowhere() -> None:
        async with DockerSandbox("debian", base_url="tcp://127.0.0.1:9"):
            pass

    with pytest.raises(SandboxError, match="Docker daemon"):
        asyncio.run(nowhere())
