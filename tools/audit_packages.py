"""Ask pip-audit whether known vulnerabilities touch the packages that slime pins; scripts/test.sh runs it.

    python tools/audit_packages.py requirements-cpu.txt requirements-dev.txt

Status 0 means that no package has a known vulnerability, or that nobody can be asked here (pip-audit is not installed,
or its database cannot be reached): the last line says which. Status 1 names the packages. Only exact pins are asked
about; nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 300.0
SHOWN = 3


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", help="requirements files with exact pins")
    files = parser.parse_args(argv).files
    beside = Path(sys.executable).with_name("pip-audit")
    program = str(beside) if beside.exists() else shutil.which("pip-audit")
    if program is None:
        print("pip-audit is not installed (pip install pip-audit): packages were not audited")
        return 0
    command = [program, "--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, *(part for file in files for part in ("--requirement", file))],
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"pip-audit did not end within {DEADLINE_S:g} s: packages were not audited")
        return 0
    try:
        report = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        print(f"pip-audit cannot reach its database ({reason}): packages were not audited")
        return 0
    status, text = judged(report)
    print(text)
    return status


def judged(report: dict[str, Any]) -> tuple[int, str]:
    """(exit status, what to say) for pip-audit's JSON report; a package that it knows nothing of has "skip_reason"."""
    packages = report["dependencies"]
    known = [one for one in packages if "vulns" in one]
    if not known:
        reason = next((one["skip_reason"] for one in packages if "skip_reason" in one), "no package is pinned")
        return 0, f"pip-audit cannot reach its database ({reason}): packages were not audited"
    bad = [one for one in known if one["vulns"]]
    asked = f"{len(known)} of {len(packages)} packages audited"
    if not bad:
        return 0, f"{asked}: no known vulnerability"
    lines = [f"{one['name']} {one['version']}: {_told(one['vulns'])}" for one in bad]
    return 1, "\n".join([f"{asked}, {len(bad)} with known vulnerabilities:", *lines])


def _told(found: Sequence[dict[str, Any]]) -> str:
    names = ", ".join(one["id"] for one in found[:SHOWN])
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    fixed = sorted({version for one in found for version in one.get("fix_versions", [])})
    return f"{names}{more}" + (f"; fixed in {', '.join(fixed)}" if fixed else "; not fixed yet")


if __name__ == "__main__":
    sys.exit(main())
