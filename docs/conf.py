"""Settings of the documentation's site; `bash scripts/docs.sh` builds it.

The source folder is the repository, so that pages link to examples and to code as they do where Markdown is shown.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

project = "slime"
(release,) = re.findall(r'version="([^"]+)"', (Path(__file__).parents[1] / "setup.py").read_text())
author = "the slime authors"
copyright = author  # noqa: A001  (Sphinx's name)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "benchmarks/*.md",
    "examples/*.md",
    "examples/**/*.md",
    "tests/gpu/*.md",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["docs/images/**", "docs/grafana/**", "docs/templates/**"]

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "colon_fence"]
suppress_warnings = ["myst.header"]
napoleon_google_docstring = True

html_theme = "furo"
html_favicon = "images/favicon.svg"
# A tag or branch that `scripts/docs.sh --versions` builds; the site itself is of this checkout.
_tag = os.environ.get("SLIME_DOCS_VERSION", "")
html_title = f"slime {_tag or release}"
templates_path = ["templates"]
html_context = {"tags": os.environ.get("SLIME_DOCS_VERSIONS", "").split(), "to_top": "../../" if _tag else ""}
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
html_static_path = ["search"]
# Rank results by the words of a question; deferred, so that they come after Sphinx's own search.
html_js_files = [("keywords.js", {"defer": "defer"}), ("rank.js", {"defer": "defer"})]
html_show_sphinx = False
autodoc_typehints = "description"
autodoc_member_order = "bysource"


_attributes: dict[str, list[str]] = {}


def _markdown_docstring(_app: Any, what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings mark code as Markdown does, and those of hooks have fields; before napoleon reads their sections."""
    for i, line in enumerate(lines):
        coded = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line)
        lines[i] = re.sub(r"^(Called|Returns): ", r":\1: ", coded)
    if what in ("attribute", "data", "property"):
        _attributes[name] = list(lines)


def _whole_sentences(_app: Any, _what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Undo what napoleon does to an attribute: it takes the text before a colon for the type."""
    lines[:] = _attributes.pop(name, lines)


# Pages that were moved: the old address shows the new page. Both below docs/, without a suffix.
MOVED = {"custom_generate_and_reward": "customization", "vision": "vlm"}


def _redirect(app: Any, error: Exception | None) -> None:
    """Write a page at each old address that leads to the new one."""
    for old, new in MOVED.items() if error is None else ():
        target = f"{os.path.relpath(new, Path(old).parent)}.html"
        page = Path(app.outdir) / "docs" / f"{old}.html"
        page.write_text(
            f'<!doctype html><html lang="en"><meta http-equiv="refresh" content="0; url={target}">'
            f'<title>Moved</title><a href="{target}">This page has moved.</a></html>\n'
        )


def setup(app: Any) -> None:
    """Sphinx calls it."""
    app.connect("build-finished", _redirect)
    app.connect("autodoc-process-docstring", _markdown_docstring, priority=1)
    app.connect("autodoc-process-docstring", _whole_sentences, priority=999)
