"""Take the pictures of five pages of the documentation's site, docs/images/site, for eyes to look at.

    bash scripts/docs.sh && python -m tools.make_site_images [--output docs/images/site] [--chromium /usr/bin/chromium]

It needs playwright (requirements-dev.txt), a Chromium, and a font with Chinese characters. A message of the browser's
console, a request to another host, or a page that is wider than its window is an error.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import threading
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PAGES: dict[str, tuple[str, Literal["dark", "light"]]] = {
    "front": ("docs/index.html", "light"),
    "reward": ("docs/start/own_reward.html", "light"),
    "troubleshooting": ("docs/troubleshooting.html", "dark"),
    "compatibility": ("docs/reference/compatibility.html", "light"),
    "search": ("search.html?q=why+is+my+reward+flat", "light"),
}
WIDTH, HEIGHT = 1280, 900


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line for each."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def take(address: str, output: Path, chromium: str) -> list[str]:
    """Take every picture of the site at an address; return what was wrong."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for name, (path, scheme) in PAGES.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            page.on("console", lambda message: wrong.append(f"console: {message.text}"))
            page.on(
                "request", lambda asked: None if asked.url.startswith((address, "data:")) else wrong.append(asked.url)
            )
            page.goto(f"{address}/{path}")
            page.wait_for_timeout(1500)  # results of a search come one by one
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                wrong.append(f"{name} is wider than {WIDTH} px")
            image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            image.quantize(256, dither=Image.Dither.NONE).save(output / f"{name}.png", optimize=True)
            page.close()
        browser.close()
    return wrong


def main() -> int:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/site", help="directory of the pictures")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser that takes them")
    options = parser.parse_args()
    handler = functools.partial(Quiet, directory=ROOT / "build" / "docs")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # a search reads pages over HTTP
        threading.Thread(target=server.serve_forever, daemon=True).start()
        wrong = take(f"http://127.0.0.1:{server.server_port}", options.output, options.chromium)
        server.shutdown()
    print("\n".join(wrong) or f"wrote {', '.join(PAGES)} to {options.output}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
