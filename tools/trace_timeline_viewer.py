"""Draw the traces of a rollout dump as a timeline: one row a sample, one bar a span.

    python tools/trace_timeline_viewer.py outputs/run/rollout_data/3.pt

It writes one HTML file that needs no network next to the dump (3.trace.html), and serves it on this machine until
Ctrl-C. A page that is newer than its dump is used as it is, unless --rebuild. The dump is loaded with pickle: open
only dumps of your own runs. What the records mean: slime/observability/trace_utils.py.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

from slime.checkpoints.rollout_files import load_dump
from slime.utils.errors import UsageError

TEMPLATE = Path(__file__).with_name("trace_timeline.html")
MARKER = "/*DATA*/null"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a rollout's dump (--save-debug-rollout-data, --dump-details)")
    parser.add_argument("--rebuild", action="store_true", help="make the page anew even if it is newer than the dump")
    parser.add_argument("--serve", action=argparse.BooleanOptionalAction, default=True, help="serve it (default: yes)")
    parser.add_argument("--port", type=int, default=9999, help="port to serve at, 0 = any free one (default: 9999)")
    parser.add_argument(
        "--trust", action="store_true", help="also read dumps that hold objects, which runs their code"
    )
    args = parser.parse_args(argv)
    try:
        page = build(args.path, rebuild=args.rebuild, trusted=args.trust)
        print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)", flush=True)
        if args.serve:
            serve(page, args.port)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def build(dump: Path, *, rebuild: bool = False, trusted: bool = False) -> Path:
    """The page of a dump, written if it is missing or older than the dump.

    Raises:
        UsageError: the file is missing, is no rollout dump, has no traces, or the page cannot be written.
    """
    page = dump.with_suffix(".trace.html")
    if not dump.is_file():
        raise UsageError(f"{dump} is no file: name one rollout's dump, as --save-debug-rollout-data writes them")
    if page.exists() and page.stat().st_mtime >= dump.stat().st_mtime and not rebuild:
        return page
    rollout_id, samples = read_dump(dump, trusted=trusted)
    data = timeline(samples) | {"rollout_id": rollout_id}
    if not data["rows"]:
        raise UsageError(f"none of the {len(samples)} samples in {dump} has a trace: nothing was generated for it")
    text = json.dumps(data, default=str).replace("</", "<\\/")  # no text of a sample may end the script
    try:
        page.write_text(TEMPLATE.read_text(encoding="utf-8").replace(MARKER, text), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {page}: {error}; copy the dump to a folder of your own") from error
    return page


def read_dump(path: Path, *, trusted: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """(rollout id, samples as dicts) of a dump.

    Raises:
        UsageError: it is none.
    """
    content = load_dump(path, trusted=trusted)
    if not {"rollout_id", "samples"} <= content.keys():
        raise UsageError(f"{path} is no rollout dump: it holds {', '.join(map(str, content))}")
    return str(content["rollout_id"]), list(content["samples"])


def timeline(samples: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the page draws: rows of spans and events in seconds since the first one, and totals by the span's name.

    Args:
        samples: `Sample.to_dict()`s; those without a trace have no row.
    """
    samples = list(samples)
    traced = [sample for sample in samples if (sample.get("trace") or {}).get("events")]
    stamps = [event["ts"] for sample in traced for event in sample["trace"]["events"]]
    begin, end = min(stamps, default=0.0), max(stamps, default=0.0)
    rows = [_row(sample, begin, end) for sample in traced]
    return {
        "rows": sorted(rows, key=lambda row: min(part["start"] for part in [*row["spans"], *row["events"]])),
        "seconds": max(end - begin, 1e-3),
        "num_samples": len(samples),
        "totals": _totals(span for row in rows for span in row["spans"]),
    }


def _row(sample: Mapping[str, Any], begin: float, end: float) -> dict[str, Any]:
    """One sample's row. A span that never ended (its process was killed) goes on to the end of the page."""
    trace, spans, events = sample["trace"], dict[str, dict[str, Any]](), []
    for event in sorted(trace["events"], key=lambda event: event["ts"]):
        at = event["ts"] - begin
        drawn = {"name": event["name"], "start": at, "attempt": event["attempt"], "attrs": dict(event["attrs"])}
        parent = spans.get(event["parent_span_id"] or "")
        level = parent["level"] + 1 if parent else 0
        if event["type"] == "span_start":
            spans[event["span_id"]] = drawn | {"end": end - begin, "is_open": True, "level": level}
        elif event["type"] == "span_end" and event["span_id"] in spans:
            started = spans[event["span_id"]]
            started.update(end=at, is_open=False, attrs=started["attrs"] | drawn["attrs"])
        elif event["type"] == "event":
            events.append(drawn | {"level": max(level - 1, 0)})  # on its span, not below
    return {
        "label": f"sample {trace['sample_id']} (group {trace['group_id']})",
        "group": trace["group_id"],
        "spans": list(spans.values()),
        "events": events,
        "depth": 1 + max((span["level"] for span in spans.values()), default=0),
    }


def _totals(spans: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    taken: dict[str, list[float]] = {}
    for span in spans:
        if not span["is_open"]:
            taken.setdefault(span["name"], []).append(span["end"] - span["start"])
    return [
        {
            "name": name,
            "count": len(seconds),
            "mean": statistics.fmean(seconds),
            "median": statistics.median(seconds),
            "longest": max(seconds),
        }
        for name, seconds in sorted(taken.items())
    ]


class _OnePage(http.server.BaseHTTPRequestHandler):
    """Serves one file, and nothing else of its folder."""

    def __init__(self, *args: Any, page: Path) -> None:
        self._page = page
        super().__init__(*args)

    def do_GET(self) -> None:  # noqa: N802 (the library's name)
        content = self._page.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for each request."""


def make_server(page: Path, port: int) -> http.server.ThreadingHTTPServer:
    """A server of the page for this machine only.

    Raises:
        UsageError: the port is taken.
    """
    try:
        return http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_OnePage, page=page))
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port}: {error}; choose another, or 0 for any free one") from error


def serve(page: Path, port: int) -> None:
    """Serve the page until Ctrl-C."""
    with make_server(page, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ until Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    sys.exit(main())
