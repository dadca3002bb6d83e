"""Measure the local sandbox: milliseconds of a command bare, in a fresh sandbox and in an open one; 100 at once.

    python benchmarks/sandbox.py [--rounds 50] [--at-once 100]

Start to end as this process sees it, and the CPU time of all processes that took part, which work beside it does not
change much. The bare command is started as the sandbox's is: by asyncio, its output read.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.agent.sandbox import LocalSandbox  # noqa: E402

COMMANDS = ("true", "/usr/bin/python3 -c pass")


async def bare(cmd: str) -> None:
    """Run a command without a sandbox."""
    process = await asyncio.create_subprocess_exec("bash", "-c", cmd, stdout=asyncio.subprocess.PIPE)
    await process.communicate()


async def fresh(cmd: str) -> None:
    """Run it in a sandbox of its own."""
    async with LocalSandbox() as sandbox:
        await sandbox.exec(cmd, check=True)


def cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in used)


async def row(name: str, run: Callable[[str], Awaitable[object]], cmd: str, rounds: int) -> str:
    """Run a command `rounds` times, one after the other: a row of the table."""
    taken, cpu = [], cpu_s()
    for _ in range(rounds):
        begin = time.perf_counter()
        await run(cmd)
        taken.append((time.perf_counter() - begin) * 1000)
    cpu_ms = (cpu_s() - cpu) * 1000 / rounds
    late = statistics.quantiles(taken, n=20)[-1]
    return f"| `{cmd}`, {name} | {min(taken):.1f} | {statistics.median(taken):.1f} | {late:.1f} | {cpu_ms:.1f} |"


async def measure(rounds: int, at_once: int) -> None:
    """Print the table."""
    print("| | least, ms | median | 95th percentile | CPU, ms |\n|---|---|---|---|---|")
    for cmd in COMMANDS:
        print(await row("bare", bare, cmd, rounds))
        print(await row("fresh sandbox", fresh, cmd, rounds))
        async with LocalSandbox() as sandbox:  # The CPU time of its own processes is not seen before it ends.
            print(await row("open sandbox", sandbox.exec, cmd, rounds), flush=True)
    for name, run in (("bare", bare), ("fresh sandboxes", fresh)):
        begin = time.perf_counter()
        await asyncio.gather(*(run("true") for _ in range(at_once)))
        took = time.perf_counter() - begin
        print(f"{at_once} x `true` at once, {name}: {took:.2f} s, {took * 1000 / at_once:.1f} ms each")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--at-once", type=int, default=100)
    args = parser.parse_args()
    asyncio.run(measure(args.rounds, args.at_once))


if __name__ == "__main__":
    main()
