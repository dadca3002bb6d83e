"""The quick start as a newcomer runs it, with fewer steps: seed 0 must gain 15 points (another estimator too: `slow`).

The full run, three seeds and the control that must not learn are benchmarks/quickstart.py; all estimators are
benchmarks/learning.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slime.processes.wait import wait
from tests.dashboard.visitors import IS_HERE, Visitor, chromium, require_browser
from tests.integration.launch import ROOT, log_tails

pytestmark = pytest.mark.timeout(2700)
SFT_STEPS, GRPO_STEPS = 280, 28
OTHER, OTHER_STEPS = "reinforce_plus_plus", 25


@dataclass
class QuickStart:
    """What a run of the script left, and what a tab on the page of its GRPO run said meanwhile."""

    output: Path
    printed: str = ""
    said: list[str] | None = None  # None: there is no browser


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> QuickStart:
    """Run once."""
    output = tmp_path_factory.mktemp("quick_start")
    environment = {
        **os.environ,
        "OUTPUT": str(output),
        "SLIME_PYTHON": sys.executable,
        "SFT_STEPS": str(SFT_STEPS),
        "GRPO_STEPS": str(GRPO_STEPS),
    }
    environment.pop("RAY_ADDRESS", None)
    printed, found = output / "printed.txt", QuickStart(output)
    with printed.open("w") as file:
        command = ["bash", "scripts/run-tiny-cpu.sh"]
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            if IS_HERE:
                found.said = look_at_the_page(printed, run)
            run.wait(2400)
        finally:
            run.terminate()
    found.printed = printed.read_text()
    assert run.returncode == 0, found.printed[-3000:] + log_tails(output / "grpo")
    return found


def look_at_the_page(printed: Path, run: subprocess.Popen[bytes]) -> list[str]:
    """Go from a curve that moves to a token, while the GRPO run goes on; the console's lines and foreign requests."""

    def addresses() -> list[str]:
        return re.findall(r"dashboard: (\S+)", printed.read_text())

    wait("the page of the second run", 1200, lambda: len(addresses()) == 2 or run.poll() is not None)
    with chromium() as browser:
        visitor = Visitor(browser, addresses()[1])
        tab = visitor.tab
        tab.set_default_timeout(120_000)
        tab.wait_for_selector(f"text=/Rollout \\d+ of {GRPO_STEPS}/")
        tab.click("nav >> text=Curves")
        panel = tab.locator("figure[data-metric='rollout/raw_reward']")
        panel.locator("canvas").wait_for()
        # A panel has no canvas for a moment where a new metric has the page drawn anew.
        picture = "document.querySelector(\"figure[data-metric='rollout/raw_reward'] canvas\")?.toDataURL()"
        tab.wait_for_function(f"before => ({picture} ?? before) !== before", arg=tab.evaluate(picture))
        over = panel.locator(".u-over").bounding_box()
        tab.mouse.click(over["x"] + 2, over["y"] + over["height"] / 2)
        tab.wait_for_selector("h1:has-text('Rollout 0')")
        tab.locator("table.samples tbody tr").first.click()
        tab.wait_for_selector("h1:has-text('Sample ')")
        tab.locator(".token").last.hover()
        tab.wait_for_function("document.querySelector('.readout.num').textContent.includes('rollout_log_probs')")
        assert run.poll() is None, "it goes on"
        tab.close()
    words = {"slime.dashboard", str(printed.parent / "grpo")}
    [page] = [process for process in psutil.process_iter(["cmdline"]) if words <= set(process.info["cmdline"] or ())]
    page.kill()  # all that is asserted of the run holds without its page
    return visitor.wrong


def test_grpo_alone_lifts_held_out_accuracy_by_fifteen_points(
    quick_start: QuickStart,
):
    output = quick_start.output
    records = [json.loads(line) for line in (output / "grpo" / "metrics.jsonl").read_text().splitlines()]
    accuracy = [record["eval/addition"] for record in records if "eval/addition" in record]
    assert accuracy[-1] - accuracy[0] >= 0.15, accuracy
    assert (output / "grpo" / "curves.png").stat().st_size > 10_000
    assert (output / "grpo" / "hf" / "config.json").is_file()
    assert "seconds per phase" in quick_start.printed and "after GRPO: 57+68=" in quick_start.printed


def test_its_page_shows_the_run_live_and_when_killed_the_run_goes_on(quick_start: QuickStart) -> None:
    require_browser()
    assert quick_start.said == [], "no line of the console, and no request that leaves the host"


@pytest.mark.slow
def test_another_estimator_lifts_it_from_the_same_start(quick_start: QuickStart, tmp_path: Path):
    command = [
        sys.executable, "benchmarks/learning.py", "--start", quick_start.output, "--output", tmp_path,
        "--only", OTHER, "--seeds", 0, "--steps", OTHER_STEPS,
    ]  # fmt: skip
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        timeout=1200,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    # It fails unless the run gains 15 points.
    assert done.returncode == 0, done.stdout[-3000:] + log_tails(tmp_path / f"{OTHER}-0")
    assert OTHER in (tmp_path / "table.md").read_text() and (tmp_path / "learning.png").is_file()
