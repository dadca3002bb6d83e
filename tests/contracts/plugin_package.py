"""Installs a package that adds rows: its modules, and the metadata that `pip install` would write."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin_package"


def install_example(site: Path) -> Path:
    """Put examples/plugin_package into a folder for PYTHONPATH."""
    shutil.copytree(EXAMPLE / "slime_more", site / "slime_more")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    return install(site, project["name"], project["entry-points"])


def install(site: Path, name: str, groups: dict[str, dict[str, str]]) -> Path:
    """Write the metadata of a package; returns the folder."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in rows.items()) for group, rows in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site
