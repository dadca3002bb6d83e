"""Say where the time of torch profiler traces goes: kinds of kernels, idle time and its cause, transfers, ranks.

    python tools/analyze_profile.py --profile-dir outputs/run/profile               # rank 0 of a trainer
    python tools/analyze_profile.py --profile-dir outputs/run/profile --all-ranks   # and all ranks side by side
    python tools/analyze_profile.py --profile-dir /tmp/sglang_profile               # engines (profile_rollout.py)

What the words of the tables mean: tools/parts/kernel_traces.py and docs/profiling.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.utils.errors import UsageError
from tools.parts.kernel_traces import Summary, kind_of, rank_of, read_trace, summarize

WIDTH_OF_FILES = 150
"""Columns where the output is no terminal: names of kernels are long."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--profile-dir", type=Path, required=True, help="folder of traces (or one): *.json, *.json.gz")
    parser.add_argument("--rank", type=int, help="only the traces of this rank (default: the lowest)")
    parser.add_argument("--all-ranks", action="store_true", help="every rank, and tables that compare them")
    parser.add_argument("--top-n", type=int, default=20, help="how many kernels to list (default: 20)")
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_FILES, highlight=False)
    try:
        if args.all_ranks and args.rank is not None:
            raise UsageError(f"--rank {args.rank} names one rank, --all-ranks every one: drop one of the two")
        if args.top_n < 0:
            raise UsageError(f"--top-n {args.top_n} is no number of kernels: use 0 or more")
        traces = find_traces(args.profile_dir)
        ranks = {rank for _, rank in traces}
        wanted = min(ranks) if args.rank is None else args.rank
        if wanted not in ranks:
            known = ", ".join(map(str, sorted(ranks)))
            raise UsageError(f"--rank {args.rank}: {args.profile_dir} has no trace of it; there are {known}")
        show_all(console, [(p, r) for p, r in traces if args.all_ranks or r == wanted], top_n=args.top_n)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def find_traces(place: Path) -> list[tuple[Path, int]]:
    """Trace files of a folder and the ranks that they are of.

    Raises:
        UsageError: there is none.
    """
    paths = [place] if place.is_file() else sorted([*place.glob("*.json"), *place.glob("*.json.gz")])
    if not paths:
        raise UsageError(f"--profile-dir {place} holds no *.json or *.json.gz: name the folder that was recorded to")
    return [(path, rank_of(path)) for path in paths]


def show_all(console: Console, traces: Sequence[tuple[Path, int]], *, top_n: int) -> None:
    """Print every trace, then a table for each set of files that differ only in their rank."""
    same: dict[str, dict[int, Summary]] = defaultdict(dict)
    for path, rank in traces:
        try:
            summary = summarize(read_trace(path))
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        show(console, path.name, summary, top_n=top_n)
        same[re.sub(r"(rank_?|TP-)\d+", r"\g<1>*", path.name)][rank] = summary
    for name, by_rank in same.items():
        if len(by_rank) > 1:
            compare(console, name, by_rank)


def show(console: Console, name: str, summary: Summary, *, top_n: int) -> None:
    """Print one trace."""
    console.rule(escape(name))
    what = "GPU" if summary.is_device else "CPU operators (the trace has no GPU in it)"
    console.print(f"{what}: {_ms(summary.span_us)} ms, busy {_share(summary.busy_us, summary)}, "
                  f"idle {_share(summary.idle_us, summary)}")  # fmt: skip
    if summary.is_device:
        console.print(f"host-bound (the GPU waited for a launch): {_share(summary.host_bound_us, summary)}")
    if summary.is_device and summary.communication_us:
        hidden = 100 * (1 - summary.exposed_us / summary.communication_us)
        sent = f"{_ms(summary.communication_us)} ms, {hidden:.1f}% of it hidden behind computation"
        console.print(f"communication: {sent}; exposed {_share(summary.exposed_us, summary)}")
    kinds = _table("kind", "ms", "share of work", "count")
    work = sum(total.us for total in summary.kinds.values())
    for kind, total in summary.kinds.items():
        kinds.add_row(kind, _ms(total.us), f"{100 * total.us / max(work, 1e-9):.1f}%", str(total.count))
    console.print(kinds)
    if top_n:
        console.print(_top(summary, top_n, work))
    if summary.gaps:
        gaps = _table("idle from (ms)", "ms", "host-bound", "host was in", "next kernel")
        for gap in summary.gaps:
            share = f"{100 * gap.host_us / gap.us:.0f}%"
            gaps.add_row(
                _ms(gap.start_us), _ms(gap.us), share, escape(gap.host_op), escape(gap.next_kernel) or "(end)"
            )
        console.print(gaps)


def _top(summary: Summary, top_n: int, work: float) -> Table:
    table = _table("ms", "share", "count", "us each", "kind", "kernel" if summary.is_device else "operator")
    for name, total in list(summary.names.items())[:top_n]:
        share, each = f"{100 * total.us / max(work, 1e-9):.1f}%", f"{total.us / total.count:.1f}"
        table.add_row(_ms(total.us), share, str(total.count), each, kind_of(name), escape(name))
    return table


def compare(console: Console, name: str, by_rank: Mapping[int, Summary]) -> None:
    """Print one line a rank; what its transfers take beyond the shortest of all ranks is waiting for the others."""
    console.rule(f"{escape(name)}: {len(by_rank)} ranks")
    table = _table("rank", "ms", "busy", "idle", "host-bound", "communication ms", "exposed", "waiting for others ms")
    shortest = min(summary.communication_us for summary in by_rank.values())
    for rank, one in sorted(by_rank.items()):
        shares = [_share(us, one) for us in (one.busy_us, one.idle_us, one.host_bound_us)]
        waiting = _ms(one.communication_us - shortest)
        sent = _ms(one.communication_us), _share(one.exposed_us, one), waiting
        table.add_row(str(rank), _ms(one.span_us), *shares, *sent)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        is_text = column in ("kind", "kernel", "operator", "host was in", "next kernel")
        last = column in ("kernel", "operator", "next kernel")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True, ratio=1 if last else None)
    return table


def _ms(us: float) -> str:
    return f"{us / 1000:.3f}"


def _share(us: float, summary: Summary) -> str:
    return f"{100 * us / summary.span_us:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
