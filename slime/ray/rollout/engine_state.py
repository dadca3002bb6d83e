"""What the engines of a run are busy with, asked of all at once with a short deadline: for the stall report.

It changes nothing, and an engine that does not answer is told as that.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.utils.errors import HttpError

ASK_S = 3.0


def engine_state(routers: Iterable[str], engines: Iterable[str]) -> dict[str, Any]:
    """Address -> its load (requests that run and wait, tokens held, ...), or why it does not tell.

    Args:
        routers: their addresses; engines behind them are asked, too.
        engines: addresses of engines that are known.
    """
    found: dict[str, Any] = {}
    urls = set(engines)
    for router in routers:
        try:
            urls |= set(server_control.list_workers_sync(router, timeout_s=ASK_S))
        except HttpError as error:
            found[f"router {router}"] = str(error)
        else:
            found[f"router {router}"] = "answers"
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(urls))), thread_name_prefix="engine-state") as threads:
        answers = threads.map(_load_of, sorted(urls))
        found |= {f"engine {url}": answer for url, answer in zip(sorted(urls), answers, strict=True)}
    return found


def _load_of(url: str) -> Any:
    problem = "?"
    try:
        loads = server_control.loads_sync(url, timeout_s=ASK_S)
    except HttpError as error:
        problem = str(error)
    else:
        kept = [{key: value for key, value in load.items() if key != "timestamp"} for load in loads]
        known = kept[0] if len(kept) == 1 else kept
        # The load is read from memory that the scheduler writes, and still there when it hangs.
        why = server_control.why_unhealthy_sync(url, timeout_s=ASK_S, probe=server_control.Probe.SCHEDULES)
        return known if why is None else f"its scheduler does not answer ({why}); its last load: {known}"
    with suppress(HttpError):  # an encoder knows no loads
        server_control.model_info_sync(url, timeout_s=ASK_S)
        return "answers, but tells no load"
    return problem
