"""The server: the addresses of the pages and of their data, who may ask, and how it runs.

Only GET is answered, and only with the token: in the address (which sets a cookie and leaves the address again), in
the cookie, or in an `Authorization: Bearer` header. On the loopback the Host header must name it, so that a page of
somebody else's whose name leads here gets nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime.dashboard import pages
from slime.dashboard.address import is_loopback
from slime.dashboard.runs import Library, Run, time_page
from slime.observability.series import AXES

if TYPE_CHECKING:
    from slime.dashboard.records import Samples

STATIC = Path(__file__).parent / "static"
LOOK_S = 1.0
KEEP_ALIVE_S = 15.0
MOST_NAMES, MOST_POINTS = 64, 5000
MOST_COMPARED = 12
LARGEST_TOKENIZER = 64 << 20  # bytes
COOKIE = "slime_dashboard"  # and the port: cookies of a host are sent to all of its ports
HEADERS = {
    # data: alone for pictures of samples, which the server has found to be pixels.
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def answer(value: Any) -> JSONResponse:
    """Return JSON; numbers that are not finite become null."""
    try:
        return JSONResponse(value)
    except ValueError:
        return JSONResponse(json.loads(json.dumps(value), parse_constant=lambda name: None))


class Api:
    """The addresses below /api.

    Args:
        library: the runs.
    """

    def __init__(self, library: Library) -> None:
        self._library = library

    def routes(self) -> list[Route]:
        """Return them."""
        of_runs: dict[str, Callable[[Request, Run], Any]] = {
            "": lambda _, run: pages.run_page(run),
            "/metrics": lambda _, run: pages.metric_names(run),
            "/series": series_of,
            "/time": lambda _, run: time_page(run),
            "/evaluation": lambda request, run: pages.evaluation_page(run, request.query_params.get("set", "")),
            "/rollouts": lambda _, run: pages.rollout_list(run.rollouts.files.values()),
        }
        of_samples: dict[str, Callable[[Request, Run, Samples], Any]] = {
            "": sample_list,
            "/{row:int}": lambda request, _, samples: samples.sample(request.path_params["row"]),
            "/times": lambda _, __, samples: samples.lanes(),
            "/{row:int}/text": lambda request, _, samples: samples.text(
                request.path_params["row"],
                request.query_params.get("text", "response"),  # more of a long one: `?text=response&start=20000`
                number_of(request, "start", 0),
            ),
            "/{row:int}/tokens": sample_tokens,
        }
        routes = [Route(f"/runs/{{run}}{path}", self._of_run(page)) for path, page in of_runs.items()]
        below = "/runs/{run}/rollouts/{name}"
        routes += [Route(f"{below}{path}", self._of_samples(page)) for path, page in of_samples.items()]
        own = [Route("/runs", self._runs), Route("/events", self._events), Route("/compare", self._compare)]
        return [*own, *routes]

    def _of_run(self, page: Callable[[Request, Run], Any], *, locks: bool = True) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            run = self._library.find(request.path_params["run"])
            if run is None:
                raise HTTPException(404, "no such run")
            with run.lock if locks else contextlib.nullcontext():
                found = page(request, run)
            return answer(found)

        return endpoint

    def _of_samples(self, page: Callable[[Request, Run, Samples], Any]) -> Callable[[Request], Response]:
        def of_samples(request: Request, run: Run) -> Any:
            try:
                return page(request, run, run.rollouts.open(request.path_params["name"]))
            except LookupError as error:
                raise HTTPException(404, str(error.args[0])) from None
            except ValueError as error:
                raise HTTPException(422, f"these samples cannot be read: {error}") from None

        return self._of_run(of_samples, locks=False)

    def _runs(self, request: Request) -> Response:
        runs = self._library.runs()
        for run in runs:
            run.refresh()
        lines = []
        for run in runs:
            with run.lock:
                lines.append(pages.overview(run))
        return answer({"runs": lines})

    def _compare(self, request: Request) -> Response:
        asked = request.query_params.get("runs", "").split(",")[:MOST_COMPARED]
        runs = [run for run_id in asked if (run := self._library.find(run_id))]
        with contextlib.ExitStack() as locks:
            for run in sorted(runs, key=lambda run: run.id):  # in one order, so that nobody waits for ever
                locks.enter_context(run.lock)
            return answer(pages.compare_page(runs))

    async def _events(self, request: Request) -> Response:
        wanted = [run_id for run_id in request.query_params.get("runs", "").split(",") if run_id]
        return StreamingResponse(self._changes(request, wanted), media_type="text/event-stream")

    async def _changes(self, request: Request, wanted: Sequence[str]) -> AsyncIterator[str]:
        """A line for each run that has changed; pages then ask for what is new. Files are read once for all pages."""
        sent: dict[str, Any] = {}
        silent_s = 0.0
        while not await request.is_disconnected():
            changed = await asyncio.to_thread(self._newer, wanted, sent)
            for run_id, version in changed.items():
                yield f"data: {json.dumps({'run': run_id, 'version': version})}\n\n"
            silent_s = 0.0 if changed else silent_s + LOOK_S
            if silent_s >= KEEP_ALIVE_S:
                silent_s = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(LOOK_S)

    def _newer(self, wanted: Sequence[str], sent: dict[str, Any]) -> dict[str, Any]:
        changed = {}
        for run_id in wanted:
            run = self._library.find(run_id)
            version = None  # it was moved, or removed
            if run is not None:
                with run.lock:
                    version = (*run.version, run.status())
            if sent.get(run_id, ()) != version:
                changed[run_id] = sent[run_id] = version
        return changed


def series_of(request: Request, run: Run) -> dict[str, Any]:
    """Metrics of a run: `?name=A&name=B&axis=step&after=0&points=2000`.

    Raises:
        HTTPException: there is no such axis, or a number is none.
    """
    asked = request.query_params
    axis, names = asked.get("axis", "step"), asked.getlist("name")[:MOST_NAMES]
    if axis not in AXES:
        raise HTTPException(400, f"axis is one of {', '.join(AXES)}")
    after, most = number_of(request, "after", 0), min(number_of(request, "points", 2000), MOST_POINTS)
    samples = run.samples_per_rollout
    found = {
        name: run.series.select(name, axis=axis, after=after, most=most, samples_per_rollout=samples) for name in names
    }
    return {"record": run.series.num_records, "names": len(run.series.points), "series": found}


def sample_list(request: Request, _: Run, samples: Samples) -> dict[str, Any]:
    """A page of a list: `?q=TEXT&status=truncated&low=0&high=1&flat=1&sort=reward&desc=1&start=0&count=50`.

    Raises:
        HTTPException: there is no such order, or a number is none.
    """
    from slime.dashboard.records import EXACT, SORTABLE, Query  # imports pyarrow

    asked = request.query_params
    sort = asked.get("sort", SORTABLE[0])
    if sort not in SORTABLE:
        raise HTTPException(400, f"sort is one of {', '.join(SORTABLE)}")
    query = Query(
        text=asked.get("q", "")[:200],
        exact={name: asked[name] for name in EXACT if name in asked},
        low=_float_of(request, "low"),
        high=_float_of(request, "high"),
        only_flat="flat" in asked,
        sort=sort,
        is_descending="desc" in asked,
    )
    return samples.page(query, start=number_of(request, "start", 0), count=number_of(request, "count", 50))


def sample_tokens(request: Request, run: Run, samples: Samples) -> dict[str, Any]:
    """Tokens with their values: `?start=0&count=2000`; their texts where the run's tokenizer can be read."""
    start, count = number_of(request, "start", 0), number_of(request, "count", 2000)
    found = samples.tokens(request.path_params["row"], start=start, count=count)
    return found | {"texts": token_texts(run.flags.get("hf_checkpoint"), found["ids"])}


def token_texts(checkpoint: object, ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token; None where the tokenizer.json of the checkpoint cannot be read."""
    path = Path(str(checkpoint)) / "tokenizer.json"
    try:
        if not checkpoint or path.stat().st_size > LARGEST_TOKENIZER:
            return None
        tokenizer = _tokenizer(str(path), path.stat().st_mtime)
    except OSError:
        return None
    return tokenizer and [tokenizer.decode([token], skip_special_tokens=False) for token in ids]


@lru_cache(maxsize=1)
def _tokenizer(path: str, changed: float) -> Any:
    """The tokenizer of one checkpoint, by `tokenizers` alone: transformers would take ten times the memory."""
    from tokenizers import Tokenizer

    with ThreadPoolExecutor(1) as thread:  # a future holds what is raised, which has no type of its own
        read = thread.submit(Tokenizer.from_file, path)
    return None if read.exception() else read.result()


def _float_of(request: Request, name: str) -> float | None:
    try:
        return float(request.query_params[name]) if name in request.query_params else None
    except ValueError:
        raise HTTPException(400, f"{name} must be a number") from None


def number_of(request: Request, name: str, default: int) -> int:
    """Return a whole number of the address.

    Raises:
        HTTPException: it is none.
    """
    try:
        return max(0, int(request.query_params.get(name, default)))
    except ValueError:
        raise HTTPException(400, f"{name} must be a whole number") from None


@lru_cache(maxsize=1)
def _load_ahead() -> None:
    """Somebody looks: import what reads samples (a second, 30 MB) before they are asked for."""
    Thread(target=importlib.import_module, args=("slime.dashboard.records",), daemon=True).start()


def _page(request: Request) -> Response:
    _load_ahead()
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html")


def make_app(directories: Sequence[Path]) -> Starlette:
    """Return the application.

    Args:
        directories: runs, or directories of runs; nothing outside them is read, except a run's tokenizer.
    """
    routes = [
        Route("/", _page),
        Mount("/api", routes=Api(Library(directories)).routes()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(GZipMiddleware, minimum_size=4096)])


class Guard:
    """Answers who may not ask, and adds headers to every answer.

    Args:
        app: the application behind it.
        token: opens it.
        host: the host that the server listens on.
    """

    def __init__(self, app: ASGIApp, *, token: str, host: str) -> None:
        self._app, self._token, self._is_local = app, token, is_loopback(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *added]
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("only GET is answered", 405, {"allow": "GET, HEAD"})
        name, port = _host(request.headers.get("host", ""))
        cookie = f"{COOKIE}_{port}"
        if self._is_local and not is_loopback(name):
            return PlainTextResponse("this server is for the loopback host alone", 421)
        given = request.query_params.get("token", "")
        if given and self._is_right(given):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(cookie, given, httponly=True, samesite="strict")
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer" and self._is_right(bearer.strip())
        if is_bearer or self._is_right(request.cookies.get(cookie, "")):
            return None
        return PlainTextResponse("open the URL that was printed at the start: it holds the token\n", 401)

    def _is_right(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _host(header: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{header}")
        return parts.hostname or "", parts.port or 80
    except ValueError:  # it is no host and port
        return "", 0


def serve(app: ASGIApp, listening: socket.socket, *, token: str, host: str) -> None:
    """Serve an application, guarded, until this process is asked to end.

    Args:
        app: answers those who may ask.
        listening: the socket.
        token, host: see `Guard`.
    """
    with contextlib.suppress(OSError):
        os.nice(10)
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, this goes first and not a run
    config = uvicorn.Config(
        Guard(app, token=token, host=host),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=64 << 10,
        limit_concurrency=200,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listening])
