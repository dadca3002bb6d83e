"""What pip-audit reports becomes a status: vulnerable packages fail, a database that cannot be reached is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import audit_packages

CLEAN = {"name": "orjson", "version": "3.13.0", "vulns": []}
BAD = {"name": "aiohttp", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
UNKNOWN = {"name": "six", "skip_reason": "Dependency not found on PyPI and could not be audited: six (1.17.0)"}


def test_a_vulnerable_package_fails_with_its_remedy() -> None:
    status, text = audit_packages.judged({"dependencies": [CLEAN, BAD, UNKNOWN]})
    assert status == 1
    assert text == "2 of 3 packages audited, 1 with known vulnerabilities:\naiohttp 1.0: PYSEC-1; fixed in 1.1"


def test_clean_packages_pass() -> None:
    assert audit_packages.judged({"dependencies": [CLEAN]}) == (0, "1 of 1 packages audited: no known vulnerability")


def test_a_database_that_knows_no_package_was_not_reached() -> None:
    status, text = audit_packages.judged({"dependencies": [UNKNOWN, UNKNOWN]})
    assert status == 0 and "cannot reach its database" in text and "not audited" in text


def test_a_missing_program_and_one_that_fails_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(audit_packages.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(audit_packages.shutil, "which", lambda name: None)
    assert audit_packages.main(["requirements.txt"]) == 0
    assert "not installed" in capsys.readouterr().out
    program = tmp_path / "pip-audit"
    program.write_text("#!/bin/sh\necho 'ConnectionError: no route' >&2\nexit 1\n")
    program.chmod(0o755)
    assert audit_packages.main(["requirements.txt"]) == 0
    assert "cannot reach its database (ConnectionError: no route)" in capsys.readouterr().out
