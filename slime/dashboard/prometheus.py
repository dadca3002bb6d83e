"""The run's Prometheus endpoint: the driver starts `python -m slime.dashboard.prometheus OUTPUT_DIR HOST PORT`.

One target for the whole run. A scrape reads what is new in metrics.jsonl and run_events.jsonl, and asks the routers
(found by the files that they are started with) and the engines behind them, each with a deadline: what does not answer
is left out, and `slime_target_up` says so. A process of its own: the run does not wait for it, and outlives it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import requests
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from slime.dashboard.runs import Run, current_phase
from slime.utils.http.api_keys import headers_for, protect_engine, protect_router
from slime.utils.misc import url_host

logger = logging.getLogger(__name__)

ASK_S = 2.0  # for one router or engine
ALL_S = 5.0  # for all of them; Prometheus itself gives up after 10 s
MOST_AT_ONCE = 32
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


def families_of(run: Run) -> Iterator[Metric]:
    """Yield gauges: `slime_train_loss{metric="train/loss"}` for each metric, the phase, and when records came."""
    by_name: dict[str, GaugeMetricFamily] = {}
    records = GaugeMetricFamily("slime_last_record_seconds", "when the last record was made", labels=["step_key"])
    values: dict[str, float] = {}
    at: dict[str, float] = {}
    # In the order of their last records: not every record has every metric.
    for metric, points in sorted(run.series.points.items(), key=lambda named: named[1].record[-1]):
        if (value := next(filter(math.isfinite, reversed(points.value)), None)) is not None:
            values[metric] = value
        values[points.step_key], at[points.step_key] = points.step[-1], points.time[-1]
    for metric, value in values.items():
        name = name_of(metric)
        family = by_name.setdefault(name, GaugeMetricFamily(name, f"last value of {metric}", labels=["metric"]))
        family.add_metric([metric], value)
    yield from by_name.values()
    phase = GaugeMetricFamily("slime_phase_begin_seconds", "when the phase began", labels=["phase"])
    if (span := current_phase(run)) is not None:
        phase.add_metric([span["name"]], span["since"])
    for key, time_s in at.items():
        records.add_metric([key], time_s)
    yield phase
    yield records
    alarms = run.series.alarms
    num_begun = sum(alarm.get("state") != "ended" for alarm in alarms)
    yield GaugeMetricFamily("slime_alarms", "alarms of this run", value=num_begun)
    active = GaugeMetricFamily("slime_alarm_active", "whether an alarm has begun and not ended", labels=["name"])
    for name, alarm in {alarm["name"]: alarm for alarm in alarms}.items():
        is_of_now = (alarm["time"] or 0.0) >= run.start.get("time", 0.0)  # else a resumed run says no end of it
        active.add_metric([name], is_of_now and alarm.get("state") != "ended")
    yield active
    begun = [event["rollout"] for event in run.events if event.get("rollout") is not None]
    if begun:
        yield GaugeMetricFamily("slime_rollout", "the rollout that the phase is of", value=begun[-1])


def name_of(metric: str) -> str:
    """Return the Prometheus name of a metric.

    Example:
        >>> name_of("eval/gsm8k-pass@4")
        'slime_eval_gsm8k_pass_4'
    """
    return "slime_" + _NOT_IN_NAMES.sub("_", metric)


class Targets:
    """The routers and engines of a run.

    Args:
        directory: --output-dir.
        given: addresses of routers that the run did not start.
    """

    def __init__(self, directory: Path, given: Iterable[str] = ()) -> None:
        self._logs, self._given = directory / "logs", list(given)
        self._told: set[str] = set()

    def families(self) -> list[Metric]:
        """Ask all of them at once; return their families with a label that says whose they are, and who answered."""
        threads = ThreadPoolExecutor(MOST_AT_ONCE)
        until = time.monotonic() + ALL_S
        found: dict[str, Metric] = {}
        up = GaugeMetricFamily("slime_target_up", "whether it answered this scrape", labels=["kind", "address"])
        routers = list(self._routers())
        asked = {threads.submit(workers_of, url): url for url, _ in routers}
        texts = {threads.submit(text_of, metrics): {"router": url} for url, metrics in routers if metrics}
        wait(asked, max(until - time.monotonic(), 0.0))
        engines: set[str] = set()
        for router, url in asked.items():
            is_up = self._has_answered(router, url)
            up.add_metric(["router", url], is_up)
            engines |= set(router.result(0)) if is_up else set()
        texts |= {threads.submit(text_of, f"{url}/metrics"): {"engine": url} for url in sorted(engines)}
        wait(texts, max(until - time.monotonic(), 0.0))
        threads.shutdown(wait=False, cancel_futures=True)
        for text, label in texts.items():
            is_up = self._has_answered(text, next(iter(label.values())))
            if is_up:
                add_families(found, text.result(0), label)
            if url := label.get("engine", ""):
                up.add_metric(["engine", url], is_up)
        return [*found.values(), up]

    def _has_answered(self, answer: Future[Any], url: str) -> bool:
        """Whether an answer came; why not is logged, once for each address and kind of error."""
        is_there = answer.done() and not answer.cancelled()
        error = answer.exception() if is_there else TimeoutError(f"no answer in {ALL_S:.0f} s")
        if error is not None and (what := f"{url} {type(error).__name__}") not in self._told:
            self._told.add(what)
            logger.warning("%s is left out of a scrape: %s", url, error)
        return error is None

    def _routers(self) -> Iterator[tuple[str, str | None]]:
        """Yield (address, address of its metrics) of each router."""
        for file in sorted(self._logs.glob("*router*.json")):
            try:
                values = json.loads(file.read_text())
                metrics = f"http://{url_host(values['prometheus_host'])}:{values['prometheus_port']}/metrics"
                yield f"http://{url_host(values['host'])}:{values['port']}", metrics
            except (OSError, ValueError, LookupError, TypeError):  # not a router's, or it is being written
                continue
        for url in self._given:
            yield url, None


def workers_of(router: str) -> list[str]:
    """Return the addresses of the engines behind a router.

    Raises:
        RequestException: it does not answer.
    """
    protect_router(router)
    answer = requests.get(f"{router}/workers", headers=headers_for(router), timeout=ASK_S)
    answer.raise_for_status()
    urls = [str(worker["url"]) for worker in answer.json()["workers"]]
    for url in urls:
        protect_engine(url)
    return urls


def text_of(url: str) -> str:
    """Return what a metrics address answers.

    Raises:
        RequestException: it does not answer, or not well.
    """
    answer = requests.get(url, headers=headers_for(url), timeout=ASK_S)
    answer.raise_for_status()
    return answer.text


def add_families(found: dict[str, Metric], text: str, labels: Mapping[str, str]) -> None:
    """Add the families of one text, with more labels; a text that breaks off keeps what came before.

    Args:
        found: name -> family of all that were asked.
        text: in Prometheus' text format.
        labels: of the one that it is from.
    """
    try:
        for family in text_string_to_metric_families(text):
            merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.add_sample(sample.name, {**sample.labels, **labels}, sample.value)
    except ValueError as error:
        logger.warning("metrics of %s are no text of Prometheus: %s", labels, error)


class RunCollector:
    """What a scrape collects."""

    def __init__(self, directory: Path, routers: Iterable[str] = ()) -> None:
        directory = directory.resolve()
        self._run, self._targets = Run(directory, directory), Targets(directory, routers)

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        with self._run.lock:  # another scrape may come meanwhile
            self._run.refresh()
            families = list(families_of(self._run))
        yield from families
        yield from self._targets.families()


def main(directory: str, host: str, port: str, *routers: str) -> None:
    """Serve until this process is ended."""
    os.nice(10)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    collected = CollectorRegistry(auto_describe=False)
    collected.register(RunCollector(Path(directory), routers))
    _, thread = start_http_server(int(port), addr=host, registry=collected)
    while thread.is_alive():
        thread.join(60.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
