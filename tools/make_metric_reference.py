"""Write docs/reference/metrics.md, the page of every metric, from the rows of slime.observability.metric_table.

    python tools/make_metric_reference.py                 write the page
    python tools/make_metric_reference.py --output FILE   write it somewhere else

A test compares the page with what this makes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.observability.metric_table import FAMILIES  # noqa: E402

DEFAULT_OUTPUT = ROOT / "docs" / "reference" / "metrics.md"
HEAD = """# Every metric

Made by `tools/make_metric_reference.py` from `slime/observability/metric_table.py`; do not edit.

Each line of `<output-dir>/metrics.jsonl` is one record: its `step_key`, its `time`, and metrics by name.
`<stat>` is mean, median, max, min, p10 or p90 (percentiles); any other `<word>` stands for a text of the run.
What is not healthy for some rollouts raises an [alarm](../alarms.md). `slime.log` and hooks add names of their own.
"""


def render() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_sections()])


def _sections() -> Iterator[str]:
    for title, rows in FAMILIES.items():
        yield f"## {title}\n"
        yield "| metric | meaning | unit | healthy | made in |\n|---|---|---|---|---|"
        for row in rows:
            yield f"| `{row.name}` | {row.meaning} | {row.unit} | {row.healthy} | `{row.source}` |"
        yield ""


def main() -> None:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="file to write")
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render())
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
