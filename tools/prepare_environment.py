r"""Make a virtual environment for environments of another framework, and rows that name an environment's tasks.

    python tools/prepare_environment.py venv verifiers venvs/verifiers
    python tools/prepare_environment.py tasks --config environment.yaml --output tasks.jsonl --count 1000

`venv` runs `python -m venv` and installs the exact versions of slime_plugins/environments/requirements/, without their
dependencies' say. `tasks` loads the environment of the file, and writes {"prompt": messages, "tools": schemas,
"metadata": {"environment": {"task": number}}} for each task (docs/environments.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError
from slime.utils.files.yaml_config import load_yaml
from slime_plugins.environments.process import KEY, EnvironmentFailure, EnvironmentProcess, read_settings

REQUIREMENTS = Path(__file__).parents[1] / "slime_plugins" / "environments" / "requirements"
AT_ONCE = 100


def make_venv(framework: str, path: Path, python: str) -> None:
    """Make a virtual environment at `path` with a framework's packages, and say how long it took and how large it is.

    Raises:
        UsageError: there is something at `path`, or the packages could not be installed.
    """
    if path.exists():
        raise UsageError(f"{path} is there already; name another directory, or remove it")
    begin = time.monotonic()
    steps = (
        [python, "-m", "venv", str(path)],
        [path / "bin" / "pip", "install", "--quiet", "--no-deps", "--requirement", REQUIREMENTS / f"{framework}.txt"],
        [path / "bin" / "pip", "check"],
    )
    for step in steps:
        if subprocess.run(list(map(str, step)), timeout=3600).returncode != 0:
            raise UsageError(f"failed: {' '.join(map(str, step))}")
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
    print(f"{path}/bin/python has {framework}: {time.monotonic() - begin:.0f} s, {size / 2**20:.0f} MiB")


async def read_tasks(values: Any, *, start: int, count: int, log_path: Path) -> list[dict[str, Any]]:
    """The rows of `count` tasks from `start`; fewer where the environment has no more.

    Args:
        values: the key `environment` of the file.
        start, count: which tasks.
        log_path: for the output of the environment's process.

    Raises:
        UsageError: the environment cannot be loaded, or has no such tasks.
    """
    process = EnvironmentProcess(read_settings(values), 0, log_path=log_path, budget=[0])
    rows: list[dict[str, Any]] = []
    try:
        await process.ensure()
        while len(rows) < count:
            wanted = min(AT_ONCE, count - len(rows))
            found = (await process.ask("tasks", start=start + len(rows), count=wanted))["tasks"]
            rows += [to_row(task) for task in found]
            if len(found) < wanted:
                break
    except (RuntimeError, EnvironmentFailure) as error:
        raise UsageError(str(error)) from error
    finally:
        await process.end()
    if not rows:
        raise UsageError(f"the environment has {process.info['num_tasks']} tasks, none from --start {start}")
    return rows


def to_row(task: dict[str, Any]) -> dict[str, Any]:
    """One line of the output."""
    tools = {"tools": task["tools"]} if task["tools"] else {}
    return {"prompt": task["messages"], **tools, "metadata": {KEY: {"task": task["task"]}}}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    venv = commands.add_parser("venv", help="make a virtual environment with a framework")
    venv.add_argument("framework", choices=sorted(path.stem for path in REQUIREMENTS.glob("*.txt")), help="which one")
    venv.add_argument("path", type=Path, help="directory to make")
    venv.add_argument("--python", default=sys.executable, help="Python that it is made with, 3.11 or newer")
    tasks = commands.add_parser("tasks", help="write the tasks of an environment as rows for --prompt-data")
    tasks.add_argument("--config", required=True, help="file of --custom-config-path, with the key environment")
    tasks.add_argument("--output", type=Path, required=True, help="JSON lines to write")
    tasks.add_argument("--start", type=int, default=0, help="number of the first task")
    tasks.add_argument("--count", type=int, default=1000, help="tasks to write at most")
    return parser


def main() -> None:
    """Make the one or the other."""
    args = build_parser().parse_args()
    try:
        if args.command == "venv":
            make_venv(args.framework, args.path, args.python)
            return
        config = load_yaml(args.config, "--config").value or {}
        log_path = args.output.with_suffix(".log")
        rows = asyncio.run(read_tasks(config.get(KEY), start=args.start, count=args.count, log_path=log_path))
    except UsageError as error:
        raise SystemExit(f"error: {error}") from error
    args.output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    log_path.unlink(missing_ok=True)
    print(f"{args.output}: {len(rows)} rows")


if __name__ == "__main__":
    main()
