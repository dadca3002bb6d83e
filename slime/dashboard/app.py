"""The addresses of the pages and of their data."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from slime.dashboard import pages
from slime.dashboard.runs import Library, Run
from slime.dashboard.series import AXES

STATIC = Path(__file__).parent / "static"
LOOK_S = 1.0
KEEP_ALIVE_S = 15.0
MOST_NAMES, MOST_POINTS = 64, 5000


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
            "/rollouts": lambda _, run: pages.rollout_list(run.rollouts.files.values()),
        }
        routes = [Route(f"/runs/{{run}}{path}", self._of_run(page)) for path, page in of_runs.items()]
        return [Route("/runs", self._runs), Route("/events", self._events), *routes]

    def _of_run(self, page: Callable[[Request, Run], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            run = self._library.find(request.path_params["run"])
            if run is None:
                raise HTTPException(404, "no such run")
            with run.lock:
                found = page(request, run)
            return found if isinstance(found, Response) else answer(found)

        return endpoint

    def _runs(self, request: Request) -> Response:
        runs = self._library.runs()
        for run in runs:
            run.refresh()
        return answer({"runs": [pages.overview(run) for run in runs]})

    async def _events(self, request: Request) -> Response:
        wanted = request.query_params.get("runs", "").split(",")
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
            if run is not None and sent.get(run_id) != (version := (*run.version, run.status())):
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
    return {"record": run.series.num_records, "series": found}


def number_of(request: Request, name: str, default: int) -> int:
    """Return a whole number of the address.

    Raises:
        HTTPException: it is none.
    """
    try:
        return max(0, int(request.query_params.get(name, default)))
    except ValueError:
        raise HTTPException(400, f"{name} must be a whole number") from None


def _page(request: Request) -> Response:
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
