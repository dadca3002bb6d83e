"""What the controls of the pages do, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.viewer import GROUP, write_rollout
from tests.dashboard.run_files import write_lines, write_run
from tests.dashboard.test_pages import write_evaluation
from tests.dashboard.test_samples import write_samples


def only_id(visitor: Any, index: int = 0) -> str:
    """The id of a run."""
    found = visitor.tab.evaluate("fetch('api/runs').then((a) => a.json()).then((a) => a.runs.map((run) => run.id))")
    return str(found[index])


def test_curves_are_smoothed_banded_scaled_grouped_and_downloaded(tmp_path: Path, visit: Any) -> None:
    write_run(tmp_path, 10, flags={"rollout_batch_size": 4, "n_samples_per_prompt": 2})
    visitor = visit(tmp_path)
    tab = visitor.show(f"#/curves/{only_id(visitor)}")
    panel = tab.locator("figure[data-metric='rollout/response_len/mean']")
    panel.locator("canvas").wait_for()
    picture = "document.querySelector(\"figure[data-metric='rollout/response_len/mean'] canvas\").toDataURL()"

    def changes(action: Any) -> None:
        before = tab.evaluate(picture)
        action()
        tab.wait_for_function(f"(before) => {picture} !== before", arg=before)

    changes(lambda: tab.click("text=bands"))
    changes(lambda: tab.click("text=log scale"))
    changes(lambda: tab.locator("input[type=range]").fill("0.9"))
    for axis in ("time", "tokens", "samples"):
        changes(lambda axis=axis: tab.get_by_label("over").select_option(axis))
    tab.get_by_label("over").select_option("step")
    tab.locator("input[type=range]").fill("0")
    with tab.expect_download() as saved:
        panel.get_by_label("Download rollout/response_len/mean").click()
    head, *rows = Path(saved.value.path()).read_text().splitlines()
    expected = [[str(rollout), str(100 + rollout)] for rollout in range(10)]
    assert head == "run,x,value" and [row.split(",")[1:] for row in rows] == expected
    groups = "[...document.querySelectorAll('details.group')].map(({ dataset }) => dataset.group)"
    assert set(tab.evaluate(groups)) <= {"Key", "perf", "rollout", "train"}
    tab.get_by_label("Find a metric").fill("grad norm")
    shown = "[...document.querySelectorAll('figure.panel')].map(({ dataset }) => dataset.metric).join()"
    tab.wait_for_function(f"() => {shown} === 'train/grad_norm'")


def test_a_group_is_laid_side_by_side_and_those_without_spread_are_found(tmp_path: Path, visit: Any) -> None:
    write_run(tmp_path, 1)
    write_rollout(tmp_path, 0, samples=10 * GROUP, tokens=8)
    visitor = visit(tmp_path)
    tab = visitor.show(f"#/rollouts/{only_id(visitor)}")
    tab.click("text=groups without spread")
    # Of group g the first g % 9 samples are right: none of group 0 and 9, all of group 8.
    tab.wait_for_selector(f"[data-found='{3 * GROUP}']")
    tab.click("text=groups without spread")
    tab.wait_for_selector(f"[data-found='{10 * GROUP}']")
    tab.locator("td.c-group_index button").first.click()
    tab.wait_for_selector("h2:has-text('Side by side')")
    articles = tab.locator(".beside article")
    assert articles.count() == GROUP
    assert all(f"sample {n} of 0" in articles.nth(n).inner_text() for n in range(GROUP))


def test_a_conversation_shows_its_tools_calls_and_thoughts(tmp_path: Path, visit: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "reasoning_content": "a tool knows it", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "3"},
        {"role": "assistant", "content": "<think>so it is three</think>It is 3."},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "adds"}}]
    write_samples(tmp_path, {"messages": json.dumps({"messages": messages, "tools": tools})})
    visitor = visit(tmp_path)
    tab = visitor.show(f"#/sample/{only_id(visitor)}/00000/0")
    turns = tab.locator("article.turn")
    roles = [text.split()[0] for text in turns.locator("h3").all_inner_texts()]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert '"name": "add"' in turns.nth(1).get_by_label("tool calls").inner_text()
    thoughts = [turns.nth(n).locator("details.thinking").text_content() for n in (1, 3)]
    assert "a tool knows it" in thoughts[0] and "so it is three" in thoughts[1]
    assert "It is 3." in turns.nth(3).inner_text() and "so it is three" not in turns.nth(3).inner_text(), (
        "it is folded"
    )
    tab.click("summary:has-text('Tools')")
    assert "adds" in tab.get_by_label("Conversation").inner_text()


def test_evaluations_show_errors_problems_over_steps_and_flips(tmp_path: Path, visit: Any) -> None:
    write_run(tmp_path, 1)
    for step, rewards in ((0, [0.0, 0.0, 1.0, 1.0]), (5, [1.0, 1.0, 1.0, 0.0])):
        write_evaluation(tmp_path, step, rewards)
    visitor = visit(tmp_path)
    tab = visitor.show(f"#/evaluation/{only_id(visitor)}")
    assert "0.75 ± 0.25" in tab.locator("figure.panel .readout").inner_text()  # as sqrt(3 / 4 * 1 / 3) / 2
    assert "2 became right, 1 became wrong" in tab.inner_text("main")
    assert (tab.locator(".flip.right").count(), tab.locator(".flip.wrong").count()) == (2, 1)
    tab.click("text=only flips")
    tab.wait_for_function("() => document.querySelectorAll('table.heat tbody tr').length === 3")
    tab.get_by_label("step 5: reward 0 of 1 answers").click()
    tab.wait_for_selector("h1:has-text('Sample 3')")


def test_runs_are_compared_by_flags_metrics_and_answers(tmp_path: Path, visit: Any) -> None:
    for name, rate, rewards in (("a", 1e-6, [0.0, 1.0]), ("b", 2e-6, [0.0, 0.0])):
        write_evaluation(write_run(tmp_path / name, 2, flags={"lr": rate, "seed": 1}), 0, rewards)
    visitor = visit(tmp_path)
    tab = visitor.show(f"#/compare/{only_id(visitor)}?with={only_id(visitor, 1)}")
    assert "1 flags differ" in tab.inner_text("main")
    assert tab.locator("tr:has-text('--lr')").locator("td").all_inner_texts() == ["0.000001", "0.000002"]
    assert "2 problems in common" in tab.inner_text("main")
    assert tab.locator("tr:has-text('problem 1')").locator("td").all_inner_texts()[1:] == ["1", "0"]


def test_time_shows_phases_engines_and_where_samples_waited(tmp_path: Path, visit: Any) -> None:
    names = ("running", "queued", "kv_use", "tokens_per_s", "cache_hits")
    times = [{"begin": 5.0, "end": 9.0, "spans": [["tool", 6, 7.5]]}, {"begin": 5.0, "end": 8.0}]
    write_samples(tmp_path, *({"times": json.dumps(of)} for of in times))
    write_run(tmp_path, 3, flags={"num_rollout": 6})
    loads = {f"rollout/engine_loads/{name}": 0.5 for name in names}
    write_lines(tmp_path / "metrics.jsonl", [{"step_key": "rollout/step", "time": 1.0, "rollout/step": 2, **loads}])
    visitor = visit(tmp_path)
    tab = visitor.show(f"#/time/{only_id(visitor)}")
    assert tab.locator(".gantt-block svg rect").count() >= 3
    assert tab.locator("svg.bars rect").count() >= 3
    assert set(loads) <= set(tab.locator("figure.panel h3").all_inner_texts())
    lanes = tab.locator("svg.swim g.span")
    assert "sample 0, tool: 1.5 s" in lanes.first.text_content()
    assert lanes.count() == 2 and "tool" not in lanes.last.text_content()
    lanes.last.click()
    tab.wait_for_selector("h1:has-text('Sample 1')")
