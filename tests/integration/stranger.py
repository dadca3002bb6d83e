"""Knock, as another user of this machine, at each door of a Ray that scripts/common.sh has started.

Started as root, with that script's environment but for Ray's token, which that user cannot read.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import psutil
from ray._raylet import GcsClient
from ray.core.generated import ray_client_pb2, ray_client_pb2_grpc
from ray.exceptions import AuthenticationError

from slime.processes.wait import wait

NOBODY = 65534


def main(session: int, folder: str) -> None:
    """Print what each door answers, and every address at which the Ray listens.

    Args:
        session: of the Ray's processes.
        folder: of the Ray.
    """
    commands = [process.info["cmdline"] for process in _processes(session)]
    # It gives up on a busy machine, which nothing here misses.
    client = next((command for command in commands if "ray.util.client.server" in command), None)
    # Ray takes jobs before all of its processes listen.
    bound, agents = wait("Ray's agents for environments to listen", 60, lambda: _listeners(session))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    dashboard = os.environ["SLIME_RAY_DASHBOARD"]
    answers = {
        "folder": _refusal(PermissionError, lambda: os.listdir(folder)),
        "job": _status(f"{dashboard}/api/jobs/", {"entrypoint": "true"}),
        "dashboard": _status(f"{dashboard}/nodes?view=summary"),
        "environment agents": [_status(f"http://{ip}:{port}/get_or_create_runtime_env", {}) for _, ip, port in agents],
        "gcs": _refusal(
            AuthenticationError, lambda: GcsClient(address=os.environ["RAY_ADDRESS"]).internal_kv_keys(b"", b"fun")
        ),
        "client": _refusal(grpc.RpcError, lambda: _ask_client_server(client)) if client else "refused",
    }
    print(json.dumps({"answers": answers, "bound": bound}))


def _processes(session: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if _session(process.pid) == session]


def _session(process: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):  # it has ended since
        return os.getsid(process)
    return None


def _listeners(session: int) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]] | None:
    """Return where the Ray listens, and where of these its agents for environments do, which must be one at least."""
    bound = []
    for process in _processes(session):
        with contextlib.suppress(psutil.NoSuchProcess):
            listening = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            bound += [(process.name(), laddr.ip, laddr.port) for laddr in listening]
    agents = [door for door in bound if door[0].startswith("ray::RuntimeEnvAgent")]
    return (bound, agents) if agents else None


def _value(command: list[str], prefix: str) -> str:
    return next(part for part in command if part.startswith(prefix)).removeprefix(prefix)


def _status(url: str, body: dict[str, str] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data), timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code


def _refusal(kind: type[Exception], call: Callable[[], Any]) -> str:
    try:
        return repr(call())
    except kind:
        return "refused"


def _ask_client_server(command: list[str]) -> Any:
    port = command[command.index("--port") + 1] if "--port" in command else _value(command, "--port=")
    stub = ray_client_pb2_grpc.RayletDriverStub(grpc.insecure_channel(f"127.0.0.1:{port}"))
    request = ray_client_pb2.ClusterInfoRequest(type=ray_client_pb2.ClusterInfoType.PING)
    return stub.ClusterInfo(request, timeout=20, metadata=[("client_id", "stranger")])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
