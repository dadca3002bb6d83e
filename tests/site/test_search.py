"""The reader test: questions in a user's words find their page among the first three hits of the site's own search."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.site.test_build import build_site

SCRIPTS = ("documentation_options", "doctools", "sphinx_highlight", "searchtools", "language_data", "keywords", "rank")
# Question -> pages that answer it, any of which may be found.
QUESTIONS = dict(line.split(" -> ") for line in (Path(__file__).with_name("questions.txt")).read_text().splitlines())


@pytest.fixture(scope="module")
def hits(tmp_path_factory) -> dict[str, list[str]]:
    """Question -> pages that the built site's search lists, best first; asked in a browser that has no network."""
    browser = shutil.which("chromium")
    if browser is None:
        assert not os.environ.get("SLIME_REQUIRE_BROWSER"), "chromium is missing"
        pytest.skip("chromium is not installed")
    site = build_site()
    page = site / "reader_test.html"
    loads = [f'<script src="_static/{name}.js"></script>' for name in SCRIPTS]
    ask = f"""<script>addEventListener("load", () => {{ const found = {{}};
        for (const question of {json.dumps(list(QUESTIONS))})
            found[question] = Search._performSearch(...Search._parseQuery(question)).reverse().map((hit) => hit[0]);
        document.getElementById("found").textContent = JSON.stringify(found); }});</script>"""
    page.write_text(
        '<!doctype html><html data-content_root="./"><body><div id="search-progress"></div><pre id="found"></pre>'
        + "".join([*loads, '<script src="searchindex.js"></script>', ask])
        + "</body></html>"
    )
    profile = tmp_path_factory.mktemp("browser")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    try:
        done = subprocess.run(
            [*command, "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        page.unlink()
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found))


@pytest.mark.timeout(400)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_finds_its_page_among_the_first_three_hits(hits: dict[str, list[str]], question: str) -> None:
    pages = QUESTIONS[question].split()
    wanted = {page if page.isupper() or page.startswith("examples/") else f"docs/{page}" for page in pages}
    assert wanted & set(hits[question][:3]), hits[question][:6]


def test_every_page_with_keywords_exists() -> None:
    root = Path(__file__).parents[2]
    named = re.findall(r'^  "([^"]+)":', (root / "docs/search/keywords.js").read_text(), re.MULTILINE)
    assert named and not [name for name in named if not (root / f"{name}.md").is_file()]
