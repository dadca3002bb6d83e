"""What can be asked of a running SGLang server or of the router in front of it, over HTTP only.

What changes a server, the run alone asks (`engine_client`).

`list_workers` and `abort_all` are coroutines, for the rollout loop; the names that end in `_sync` are for code without
an event loop (the engine object, starting and stopping). Importing this module takes neither SGLang nor torch, so that
`slime.rollout` may use it anywhere. Addresses are `http://host:port`, without a slash at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slime.processes.wait import wait
from slime.utils import http_utils
from slime.utils.http.api_keys import key_of
from slime.utils.http_utils import HttpError

CONTROL_TIMEOUT_S = 60.0
ABORT_TIMEOUT_S = 10.0
ROUTER_DEADLINE_S = 60.0


async def list_workers(router_url: str) -> list[str]:
    """Addresses of the healthy workers behind a router."""
    return _healthy(await http_utils.get(f"{router_url}/workers", timeout_s=CONTROL_TIMEOUT_S))


def list_workers_sync(router_url: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> list[str]:
    """As `list_workers`."""
    return _healthy(http_utils.get_sync(f"{router_url}/workers", timeout_s=timeout_s))


def _healthy(answer: dict[str, Any]) -> list[str]:
    return [worker["url"] for worker in answer["workers"] if worker.get("is_healthy")]


@dataclass(frozen=True)
class Worker:
    """A server as a router sees it.

    Attributes:
        url: `http://host:port`.
        worker_type: regular, prefill or decode.
        bootstrap_port: where decode servers find a prefill server.
    """

    url: str
    worker_type: str = "regular"
    bootstrap_port: int | None = None

    @property
    def request(self) -> dict[str, Any]:
        """What `POST /workers` takes; the router sends the engine its key."""
        port = {} if self.bootstrap_port is None else {"bootstrap_port": self.bootstrap_port}
        key = {} if (found := key_of(self.url)) is None else {"api_key": found}
        return {"url": self.url, "worker_type": self.worker_type, **port, **key}


def register_worker_sync(router_url: str, worker: Worker, *, deadline_s: float = ROUTER_DEADLINE_S) -> None:
    """Put a server behind a router and wait until the router sends it requests.

    Raises:
        WaitTimeout: the router did not find it healthy in time.
    """
    http_utils.post_sync(f"{router_url}/workers", worker.request, timeout_s=CONTROL_TIMEOUT_S)
    wait(
        f"the router {router_url} to accept {worker.url}",
        deadline_s,
        lambda: worker.url in list_workers_sync(router_url),
    )


def remove_worker_sync(router_url: str, worker_url: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
    """Take a server from behind a router; nothing happens where it is not there."""
    workers = http_utils.get_sync(f"{router_url}/workers", timeout_s=timeout_s)["workers"]
    for worker in workers:
        if worker["url"] == worker_url:
            http_utils.delete_sync(f"{router_url}/workers/{worker['id']}", timeout_s=timeout_s)


async def abort_all(worker_url: str) -> None:
    """End every request of a server; each is answered with finish reason "abort" and what it has so far.

    Tried once: a request may come in right after, so whoever needs the server idle asks again anyway.
    """
    body, timeout_s = {"abort_all": True}, ABORT_TIMEOUT_S
    await http_utils.post(f"{worker_url}/abort_request", body, max_retries=0, timeout_s=timeout_s)


def loads_sync(worker_url: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> list[dict[str, Any]]:
    """What each data-parallel rank of a server is busy with: requests that run and wait, tokens held, ..."""
    answer = http_utils.get_sync(f"{worker_url}/v1/loads?include=core", timeout_s=timeout_s)
    return list(answer["loads"]) if isinstance(answer, dict) and "loads" in answer else []


def server_info_sync(worker_url: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
    """A server's arguments and state; older servers have it under another name."""
    try:
        found = http_utils.get_sync(f"{worker_url}/server_info", timeout_s=timeout_s)
    except HttpError as error:
        if error.status != 404:
            raise
        found = http_utils.get_sync(f"{worker_url}/get_server_info", timeout_s=timeout_s)
    if not isinstance(found, dict):
        raise HttpError(f"{worker_url}/server_info answered {str(found)[:200]!r}, which is no JSON object")
    return found


def model_info_sync(worker_url: str, *, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
    """The model that a server has loaded: model_path, architectures, weight_version, ..."""
    found = http_utils.get_sync(f"{worker_url}/model_info", timeout_s=timeout_s)
    return found if isinstance(found, dict) else {}


class Probe(StrEnum):
    """How much of a server a question about its health is about."""

    GENERATES = "generates"
    """All of its processes: it makes one token, or goes on with those of its requests."""
    SCHEDULES = "schedules"
    """Its HTTP server and its scheduler, which answers without memory, too, and while generation is paused."""
    LISTENS = "listens"
    """Its HTTP server alone: a scheduler that takes part in a collective does not answer."""


def why_unhealthy_sync(worker_url: str, *, timeout_s: float, probe: Probe = Probe.GENERATES) -> str | None:
    """Why a server does not do what the probe is about; None if it does."""
    try:
        if probe is Probe.SCHEDULES:
            server_info_sync(worker_url, timeout_s=timeout_s)
        else:
            path = "health_generate" if probe is Probe.GENERATES else "health"
            http_utils.get_sync(f"{worker_url}/{path}", timeout_s=timeout_s)
    except HttpError as error:
        return str(error)
    return None
