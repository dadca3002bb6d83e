"""Pages of the built site in a browser and as files: contrast, headings, names of links and pictures, no request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.visitors import chromium, require_browser
from tests.site.test_build import build_site

# A front page, prose, code, wide tables, formulas, and the search.
PAGES = (
    "docs/index",
    "docs/start/own_reward",
    "docs/troubleshooting",
    "docs/algorithms",
    "docs/reference/hooks",
    "search",
)
# Text elements whose contrast (WCAG 2: relative luminance) is below 4.5, or 3 where the text is large.
LOW_CONTRAST = """() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const rgba = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (!own || style.visibility !== "visible" || style.opacity === "0" || !box.width || !box.height) continue;
    const front = rgba(style.color), back = behind(element), share = front[3] * style.opacity;
    const [a, b] = [front.map((v, i) => v * share + back[i] * (1 - share)), back].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) found.add(`${element.localName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return [...found];
}"""


@pytest.fixture(scope="module")
def site() -> Path:
    return build_site()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    require_browser()
    with chromium() as started:
        yield started


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_nothing_is_asked_of_the_network(site: Path, browser: Any, scheme: str) -> None:
    wrong: list[str] = []
    tab = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on(
        "request", lambda request: None if request.url.startswith(("file:", "data:")) else wrong.append(request.url)
    )
    for page in PAGES:
        tab.goto((site / f"{page}.html").as_uri())
        wrong += [f"{page}: {element}" for element in tab.evaluate(LOW_CONTRAST)]
    tab.close()
    assert wrong == []


def test_pale_text_is_found(browser: Any) -> None:
    tab = browser.new_page()
    tab.set_content(
        "<p style='color: #999'>pale</p><p style='color: #777'>nearly</p><p style='color: #767676'>fine</p>"
    )
    found = tab.evaluate(LOW_CONTRAST)
    tab.close()
    assert found == ["p. 2.85", "p. 4.48"]  # WCAG's own examples: #767676 on white is the palest grey that passes


def test_a_phone_scrolls_no_page_sideways(site: Path, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    widths = {}
    for page in PAGES:
        tab.goto((site / f"{page}.html").as_uri())
        widths[page] = tab.evaluate("document.documentElement.scrollWidth")
    tab.close()
    assert {page: width for page, width in widths.items() if width > 390} == {}


@pytest.mark.timeout(400)
def test_headings_are_in_order_and_pictures_and_links_have_names(site: Path) -> None:
    wrong = []
    for path in sorted(site.glob("docs/**/*.html")):
        text = path.read_text()
        if 'http-equiv="refresh"' in text:  # the old address of a page that has moved
            continue
        main = text[text.index("<article") : text.index("</article>")]
        levels = [int(level) for level in re.findall(r"<h(\d)[ >]", main)]
        if levels.count(1) != 1 or any(after > before + 1 for before, after in zip(levels, levels[1:], strict=False)):
            wrong.append(f"{path.name}: headings {levels}")
        wrong += [
            f"{path.name}: {tag}" for tag in re.findall(r"<img[^>]*>", main) if not re.search(r'alt="[^"]+"', tag)
        ]
        if '<html class="no-js" lang="en"' not in text and ' lang="' not in text[:400]:
            wrong.append(f"{path.name}: no language")
    assert wrong == []
