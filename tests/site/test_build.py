"""The documentation's site: it builds without a warning, and needs nothing from other hosts."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def build_site() -> Path:
    """Build the site once and return its folder; a link to a page or heading that is not there is a warning."""
    built = subprocess.run(["bash", "scripts/docs.sh"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert built.returncode == 0, built.stderr[-3000:]
    return ROOT / "build" / "docs"


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere() -> None:
    site = build_site()
    for page in ROOT.glob("docs/**/*.md"):  # Sphinx warns of a page that no table of contents has
        assert (site / page.relative_to(ROOT).with_suffix(".html")).exists(), page
    html = [path.read_text() for path in site.rglob("*.html")]
    loaded = [
        url for text in html for url in re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]+)", text)
    ]
    assert not loaded
    (moved,) = re.findall(r'url=([^"]+)"', (site / "docs/custom_generate_and_reward.html").read_text())
    assert (site / "docs" / moved).resolve() == site / "docs/customization.html"
    assert "docs/quick_start" in (site / "searchindex.js").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_of_two_versions_links_each_from_the_other() -> None:
    built = subprocess.run(
        ["bash", "scripts/docs.sh", "--versions", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=560
    )
    assert built.returncode == 0, built.stderr[-3000:]
    site = ROOT / "build" / "docs"
    for page in (site / "docs/start/own_data.html", site / "versions/HEAD/docs/start/own_data.html"):
        links = re.findall(r'href="([^"]*docs/index\.html)">(?:latest|HEAD)</a>', page.read_text())
        places = {(page.parent / link).resolve() for link in links}
        assert places == {site / "docs/index.html", site / "versions/HEAD/docs/index.html"}
    assert all(place.exists() for place in places)
