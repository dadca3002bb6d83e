"""What keeps the house in order: figures of the product's source, each with its limit."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "no_such_flag"


def _with_unknown_reads(source: str) -> tuple[str, int]:
    """The source with a read of an unknown flag in every function that takes `args`, and how many there are."""
    tree, count = ast.parse(source), 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(
            parameter.arg == "args" for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ):
            node.body.append(ast.parse(f"args.{UNKNOWN}").body[0])
            node.body.sort(key=lambda statement: not _is_read(statement))
            count += 1
    return ast.unparse(tree), count


def _is_read(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement) == f"args.{UNKNOWN}"


def test_mypy_notices_an_unknown_flag_in_every_function_that_takes_args(tmp_path: Path) -> None:
    inserted = 0
    for package in ("slime", "slime_plugins"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (tmp_path / package).rglob("*.py"):
            text, count = _with_unknown_reads(path.read_text())
            if count:
                path.write_text(text)
            inserted += count
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    run = subprocess.run([sys.executable, "-m", "mypy"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if f'has no attribute "{UNKNOWN}"' in line]
    noticed = {line.partition(" error:")[0] for line in lines}  # "Args | None" is noticed twice
    assert inserted > 500
    assert len(noticed) == inserted, run.stdout[-2000:]


def test_no_flag_is_of_any_type() -> None:
    stubs = [*(ROOT / "slime" / "config").rglob("values.pyi")]
    assert len(stubs) == 2
    assert not any("Any" in stub.read_text() for stub in stubs)
    args = ast.parse((ROOT / "slime" / "config" / "args.py").read_text())
    assert not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in ast.walk(args))


def test_the_types_of_megatrons_and_sglangs_flags_are_those_of_the_installed_packages() -> None:
    command = [sys.executable, "tools/make_args_stubs.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
