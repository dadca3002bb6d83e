"""Turn rows of SWE-bench, or folders of Harbor and Terminal-Bench tasks, into rows for training.

    python examples/coding_agent_rl/load_tasks.py --output swe.jsonl --swe-bench test.jsonl     # or .parquet
    python examples/coding_agent_rl/load_tasks.py --output tasks.jsonl --tasks terminal-bench/tasks

The tests travel inside `eval_cmd`, so that the agent never sees them. Its changes reach the grader as a patch of the
work directory: a task that judges files elsewhere, or processes, cannot be solved.
"""

from __future__ import annotations

import argparse
import base64
import io
import re
import shlex
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from examples.tiny import write_jsonl
from slime.utils.files.rows import read_file

TESTBED = ". /opt/miniconda3/bin/activate testbed"  # of SWE-bench's images
DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
OTHER_FORMS = ("sympy/sympy", "sphinx-doc/sphinx")  # their reports are not read by swe.run_evaluation
MOST_BYTES = 96_000  # of a command line: Linux takes 128 KiB
REWARD = "/logs/verifier/reward.txt"  # where a Harbor task's tests write theirs


def unpacked(data: bytes, command: str, *, name: str) -> str:
    """Return a command line that feeds `data` to a command.

    Raises:
        ValueError: it would be longer than a command line may be.
    """
    text = base64.b64encode(data).decode()
    if len(text) > MOST_BYTES:
        raise ValueError(f"{name}: its tests have {len(text)} bytes in base64; a command line takes {MOST_BYTES}")
    return f"echo {text} | base64 -d | {command}"


def swe_bench_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one instance: its image, and a command that puts the tests in place and runs them.

    Raises:
        ValueError: its repository reports tests in a form that is not read here.
    """
    name, repo, patch = row["instance_id"], row["repo"], row["test_patch"]
    if repo in OTHER_FORMS:
        raise ValueError(f"{name}: the reports of {repo}'s tests are not read here")
    changed = re.findall(r"^--- a/(\S+)", patch, re.MULTILINE)
    tests = [path for path in re.findall(r"^\+\+\+ b/(\S+)", patch, re.MULTILINE) if path.endswith(".py")]
    run = f"pytest -rA {shlex.join(tests)}"
    if repo == "django/django":
        run = f"{DJANGO} {shlex.join(path.removeprefix('tests/')[:-3].replace('/', '.') for path in tests)}"
    steps = [TESTBED, unpacked(patch.encode(), "git apply -", name=name), run]
    if changed:
        steps.insert(1, f"git checkout {row['base_commit']} -- {shlex.join(changed)}")
    metadata = {
        "instance_id": name,
        "image": f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_').lower()}:latest",
        "workdir": "/testbed",
        "problem_statement": row["problem_statement"],
        "eval_cmd": " && ".join(steps),
        **{key: row[key] for key in ("FAIL_TO_PASS", "PASS_TO_PASS")},
    }
    return {"prompt": row["problem_statement"], "metadata": metadata}


def task_row(folder: Path) -> dict[str, Any]:
    """Return the row of a task folder; Harbor's have a task.toml, Terminal-Bench's a task.yaml.

    Raises:
        ValueError: its tests are too large for a command line.
    """
    is_harbor = (folder / "task.toml").is_file()
    if is_harbor:
        image = tomllib.loads((folder / "task.toml").read_text()).get("environment", {}).get("docker_image")
        said, dockerfile, script = (
            (folder / "instruction.md").read_text(),
            folder / "environment/Dockerfile",
            "test.sh",
        )
    else:
        image, said = None, yaml.safe_load((folder / "task.yaml").read_text())["instruction"]
        dockerfile, script = folder / "Dockerfile", "run-tests.sh"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        archive.add(folder / "tests", ".")
        if not is_harbor:
            archive.add(folder / script, script)
    steps = ["mkdir -p /tests /logs/verifier", unpacked(packed.getvalue(), "tar xJ -C /tests", name=folder.name)]
    run = f"TEST_DIR=/tests bash /tests/{script}"
    steps.append(f'{{ {run}; test "$(cat {REWARD})" = 1; }}' if is_harbor else run)
    workdirs = re.findall(r"^WORKDIR\s+(\S+)", dockerfile.read_text(), re.MULTILINE) if dockerfile.is_file() else []
    metadata = {
        "instance_id": folder.name,
        "image": image or f"{folder.name.lower()}:latest",
        "workdir": (workdirs or ["/app"])[-1],
        "problem_statement": said.strip(),
        "eval_cmd": " && ".join(steps),
    }
    return {"prompt": said.strip(), "metadata": metadata}


def loaded(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows; print what is left out, and the images that are yet to be built."""
    sources: Iterable[Any] = read_file(str(args.swe_bench)) if args.swe_bench else sorted(args.tasks.iterdir())
    for source in sources:
        if isinstance(source, Path) and not any((source / name).is_file() for name in ("task.toml", "task.yaml")):
            continue
        try:
            row = task_row(source) if isinstance(source, Path) else swe_bench_row(source)
        except ValueError as error:
            print(f"left out: {error}")
            continue
        if isinstance(source, Path) and row["metadata"]["image"] == f"{source.name.lower()}:latest":
            where = source / "environment" if (source / "task.toml").is_file() else source
            print(f"docker build -t {row['metadata']['image']} {where}")
        yield row


def main() -> None:
    """Write the rows and say how many there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--swe-bench", type=Path, help="JSONL or parquet file of SWE-bench")
    source.add_argument("--tasks", type=Path, help="folder whose folders are tasks")
    args = parser.parse_args()
    print(f"{args.output}: {write_jsonl(args.output, loaded(args))} rows")


if __name__ == "__main__":
    main()
