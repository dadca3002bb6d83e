"""The e2b backend: its real client against a server of the documented API, whose sandboxes are local ones.

The client's packages clash with ours and are large, so the slow test installs them into a directory of their own and
runs this file there as a program.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.agent.sandbox import E2BSandbox, LocalSandbox, Sandbox, SandboxError, SandboxTimeout, make_sandbox

ROOT = Path(__file__).resolve().parents[2]
KEY = "e2b_" + "0" * 40


class Service:
    """The service's REST API and the daemon in its sandboxes (Connect protocol, JSON), in one server."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.sandboxes: dict[str, LocalSandbox] = {}
        self.killed: list[str] = []
        self.num_failures = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.add_routes(
            [
                web.post("/v2/sandboxes", self.create),
                web.delete("/sandboxes/{id}", self.kill),
                web.post("/process.Process/Start", self.start),
                web.get("/files", self.read),
                web.post("/files", self.write),
            ]
        )
        return app

    def only(self) -> LocalSandbox:
        (sandbox,) = self.sandboxes.values()
        return sandbox

    async def create(self, request: web.Request) -> web.Response:
        assert request.headers["X-API-Key"] == KEY
        self.made = await request.json()
        self.sandboxes["one"] = await LocalSandbox().__aenter__()
        answer = {"sandboxID": "one", "templateID": "base", "clientID": "c", "envdVersion": "0.5.7"}
        return web.json_response({**answer, "envdAccessToken": "token"}, status=201)

    async def kill(self, request: web.Request) -> web.Response:
        self.killed.append(request.match_info["id"])
        await self.sandboxes.pop(request.match_info["id"]).__aexit__()
        return web.Response(status=204)

    async def start(self, request: web.Request) -> web.StreamResponse:
        body = json.loads((await request.read())[5:])["process"]
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await response.prepare(request)

        async def send(message: object, flags: int = 0) -> None:
            data = json.dumps(message).encode()
            await response.write(struct.pack(">BL", flags, len(data)) + data)

        if self.num_failures:
            self.num_failures -= 1
            await send({"error": {"code": "unavailable", "message": "try again"}}, flags=2)
            return response
        await send({"event": {"start": {"pid": 7}}})
        user = base64.b64decode(request.headers["Authorization"].removeprefix("Basic ")).decode().rstrip(":")
        run = self.only().exec(body["args"][-1], user=user, env=body.get("envs", {}))
        deadline_s = int(request.headers["Connect-Timeout-Ms"]) / 1000  # The protocol has the server keep it.
        try:
            code, stdout, stderr = await asyncio.wait_for(run, deadline_s)
        except TimeoutError:
            await send({"error": {"code": "deadline_exceeded", "message": "too late"}}, flags=2)
            return response
        for name, text in (("stdout", stdout), ("stderr", stderr)):
            if text:
                await send({"event": {"data": {name: base64.b64encode(text.encode()).decode()}}})
        await send({"event": {"end": {"exitCode": code, "exited": True, "status": f"exit status {code}"}}})
        await send({}, flags=2)
        return response

    async def read(self, request: web.Request) -> web.Response:
        try:
            return web.Response(body=await self.only().read_bytes(request.query["path"]))
        except SandboxError as error:
            return web.json_response({"code": 404, "message": str(error)}, status=404)

    async def write(self, request: web.Request) -> web.Response:
        part = await (await request.multipart()).next()
        await self.only().write_file(request.query["path"], bytes(await part.read()))  # type: ignore[union-attr]
        name = request.query["path"].rpartition("/")[2]
        return web.json_response([{"name": name, "type": "file", "path": request.query["path"]}])


async def use() -> None:
    """Use a sandbox of the service through the client."""
    service = Service()
    runner = web.AppRunner(service.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    os.environ |= {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY, "E2B_HTTP_VERSION": "1.1"}
    async with make_sandbox("e2b", image="task:1", image_metadata_key="acme/image") as sandbox:
        assert isinstance(sandbox, E2BSandbox) and isinstance(sandbox, Sandbox) and sandbox.sandbox_id == "one"
        assert service.made["metadata"] == {"acme/image": "task:1", "acme/size": "md"}
        assert service.made["timeout"] == 3600
        result = await sandbox.exec("echo out; echo err >&2; echo $A; whoami; exit 3", env={"A": "b"}, user="agent")
        assert result[0] == 3 and result[1].startswith("out\nb\n") and result[2] == "err\n"
        await sandbox.write_file("/tmp/new/a", "text ü")
        assert await sandbox.read_file("/tmp/new/a") == "text ü"
        try:
            await sandbox.read_file("/nowhere")
        except SandboxError as error:
            assert "No such file" in str(error)
        else:
            raise AssertionError("a missing file was read")
        try:
            await sandbox.exec("sleep 9", timeout=0.5)
        except SandboxTimeout:
            pass
        else:
            raise AssertionError("no timeout")
        service.num_failures = 1
        assert (await sandbox.exec("echo again"))[1] == "again\n"
        service.num_failures = 1
        try:
            await sandbox.exec("echo once", idempotent=False)
        except SandboxError as error:
            assert "try again" in str(error)
        else:
            raise AssertionError("it was sent twice")
    assert service.killed == ["one"]
    await runner.cleanup()
    print("done")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_client_uses_a_sandbox_of_the_service(tmp_path: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path), "e2b==2.63.0"]
    subprocess.run(install, check=True, timeout=500)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxError, match="set SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY"):
        asyncio.run(E2BSandbox("task:1").__aenter__())
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxError, match="pip install e2b"):
        asyncio.run(E2BSandbox("task:1", image_metadata_key="a").__aenter__())
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "many")
    with pytest.raises(ValueError, match="SLIME_AGENT_SANDBOX_RPC_RETRIES='many'"):
        E2BSandbox("task:1")
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_RPC_RETRIES", "2")
    monkeypatch.setenv("SWE_SANDBOX_LIFETIME_SEC", "60")
    sandbox = E2BSandbox("task:1")
    assert (sandbox.tries, sandbox.timeout, sandbox.size) == (2, 60, "md")


if __name__ == "__main__":
    asyncio.run(use())
