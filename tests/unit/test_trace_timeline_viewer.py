"""tools/trace_timeline_viewer.py: the page of a rollout dump, and what it says about files that are none."""

from __future__ import annotations

import json
import os
import threading
import urllib.request

import pytest
import torch

from slime.observability.trace_utils import trace_event, trace_span
from slime.utils.types import Sample
from tools.trace_timeline_viewer import build, main, make_server, timeline


def traced(index: int) -> Sample:
    sample = Sample(index=index, group_index=index // 2, response="</script><b>")
    with trace_span(sample, "generate", attrs={"text": "</script>"}), trace_span(sample, "tool") as tool:
        trace_event(sample, "called")
        tool.set("result", 3)
    return sample


@pytest.fixture
def dump(tmp_path):
    path = tmp_path / "3.pt"
    samples = [traced(0), traced(1), Sample(index=2)]
    torch.save({"rollout_id": "3", "samples": [sample.to_dict() for sample in samples]}, path)
    return path


def data_of(page) -> dict:
    line = next(line for line in page.read_text().splitlines() if line.startswith("const DATA = "))
    return json.loads(line.removeprefix("const DATA = ").removesuffix(";"))


def test_the_page_has_a_row_for_each_traced_sample_and_needs_no_network(dump):
    page = build(dump)
    assert page.name == "3.trace.html"
    text = page.read_text()
    assert "http" not in text and text.count("</script>") == 1, "no text of a sample ends the script"
    data = data_of(page)
    assert (data["rollout_id"], data["num_samples"], len(data["rows"])) == ("3", 3, 2)
    row = data["rows"][0]
    assert [(span["name"], span["level"], span["is_open"]) for span in row["spans"]] == [
        *[("generate", 0, False), ("tool", 1, False)]
    ]
    assert row["spans"][0]["attrs"] == {"text": "</script>"} and row["spans"][1]["attrs"] == {"result": 3}
    assert [(event["name"], event["level"]) for event in row["events"]] == [("called", 1)]
    assert row["depth"] == 2 and row["spans"][0]["start"] <= row["spans"][1]["start"]


def test_times_count_from_the_first_event_and_totals_are_by_name():
    def span(name: str, start: float, end: float | None, span_id: str) -> list[dict]:
        event = {"name": name, "span_id": span_id, "parent_span_id": None, "attempt": 0, "attrs": {}}
        ends = [] if end is None else [event | {"type": "span_end", "ts": end}]
        return [event | {"type": "span_start", "ts": start}, *ends]

    def sample(index: int, *events: list[dict]) -> dict:
        return {"trace": {"sample_id": index, "group_id": 0, "events": [one for pair in events for one in pair]}}

    data = timeline([sample(0, span("a", 101.0, 103.0, "1")), sample(1, span("a", 100.0, 101.0, "2")), {}])
    assert [row["label"] for row in data["rows"]] == ["sample 1 (group 0)", "sample 0 (group 0)"]
    assert data["seconds"] == 3.0
    assert data["totals"] == [{"name": "a", "count": 2, "mean": 1.5, "median": 1.5, "longest": 2.0}]
    lost = timeline([sample(0, span("a", 100.0, 104.0, "1"), span("b", 101.0, None, "2"))])
    assert [(one["name"], one["end"], one["is_open"]) for one in lost["rows"][0]["spans"]] == [
        *[("a", 4.0, False), ("b", 4.0, True)]
    ]
    assert [line["name"] for line in lost["totals"]] == ["a"]


def test_a_page_is_made_anew_when_the_dump_is_newer_or_when_asked(dump):
    page = build(dump)
    page.write_text("kept")
    assert build(dump).read_text() == "kept"
    assert build(dump, rebuild=True).read_text() != "kept"
    page.write_text("kept")
    os.utime(dump, (page.stat().st_mtime + 5,) * 2)
    assert build(dump).read_text() != "kept"


def test_the_page_is_served_to_this_machine(dump):
    page = build(dump)
    with make_server(page, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(f"http://127.0.0.1:{server.server_port}/anything", timeout=10) as answer:
                assert answer.read() == page.read_bytes()
        finally:
            server.shutdown()
            thread.join(10)


def test_a_file_that_is_no_dump_is_a_sentence(tmp_path, dump, capsys):
    def said(*argv: str) -> str:
        assert main([*argv, "--no-serve"]) == 2
        return capsys.readouterr().err

    assert "name one rollout's dump" in said(str(tmp_path))
    text = tmp_path / "x.pt"
    text.write_text("no dump")
    assert "is no dump" in said(str(text))
    torch.save({"step": 1}, text)
    assert "is no rollout dump: it holds step" in said(str(text))
    torch.save({"rollout_id": "1", "samples": [Sample(index=0).to_dict()]}, text)
    assert "none of the 1 samples" in said(str(text))
    with make_server(dump, 0) as server:
        assert main([str(dump), "--port", str(server.server_port)]) == 2
    assert "choose another" in capsys.readouterr().err
    assert main([str(dump), "--no-serve"]) == 0
