"""The run's /metrics: what the driver wrote, routers and engines that answer, and those that do not."""

from __future__ import annotations

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slime.config.parse import parse_args
from slime.dashboard import prometheus
from slime.observability import logging_utils
from tests.unit.argument_lines import base, errors, line
from tests.unit.test_observability import make_args

__all__ = ["base"]  # a fixture
ROOT = Path(__file__).parents[2]


def scrape(directory: Path) -> dict[tuple[str, str], float]:
    """(metric, its labels) -> value."""
    collected = CollectorRegistry(auto_describe=False)
    collected.register(prometheus.RunCollector(directory))
    text = generate_latest(collected).decode()
    families = text_string_to_metric_families(text)
    return {(s.name, ",".join(sorted(s.labels.values()))): s.value for family in families for s in family.samples}


def test_what_the_driver_wrote_is_the_last_value_of_each_metric(tmp_path: Path):
    records = [
        {"step_key": "train/step", "time": 5.0, "train/step": 0, "train/loss": 2.0},
        {"step_key": "train/step", "time": 6.0, "train/step": 1, "train/loss": None},
        {"step_key": "eval/step", "time": 7.0, "eval/step": 1, "eval/a-pass@2": 0.25, "eval/a/pass@2": 0.75},
        {"step_key": "alarm", "time": 8.0, "alarm": {"what": "it"}},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step_key": "train/step", "train/loss": 9')
    events = [{"event": "begin", "phase": "start", "time": 1.0}, {"event": "begin", "phase": "load", "time": 2.0}]
    events += [{"event": "end", "phase": "load", "time": 3.0}]
    (tmp_path / "run_events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = scrape(tmp_path)
    assert found["slime_train_loss", "train/loss"] == 2.0, "null is no value, and half a line is none yet"
    assert found["slime_eval_a_pass_2", "eval/a-pass@2"] == 0.25, "two names that become one are told apart"
    assert found["slime_eval_a_pass_2", "eval/a/pass@2"] == 0.75
    assert found["slime_phase_begin_seconds", "start"] == 1.0 and ("slime_phase_begin_seconds", "load") not in found
    assert found["slime_last_record_seconds", "train/step"] == 6.0 and found["slime_alarms", ""] == 1


def test_the_newest_record_of_a_kind_counts_and_not_that_of_a_metric_which_is_seldom(tmp_path: Path):
    records = [
        {"step_key": "rollout/step", "time": 5.0, "rollout/step": 0, "rollout/reward": 0.5, "perf/save_time": 2.0},
        {"step_key": "rollout/step", "time": 9.0, "rollout/step": 1, "rollout/reward": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = scrape(tmp_path)
    assert found["slime_last_record_seconds", "rollout/step"] == 9.0
    assert found["slime_rollout_step", "rollout/step"] == 1
    assert found["slime_perf_save_time", "perf/save_time"] == 2.0


def test_alarms_are_counted_as_a_run_writes_them_and_say_which_still_hold(tmp_path: Path):
    recorded = (ROOT / "tests/fixtures/metrics/stale_async.jsonl").read_text().splitlines()
    logging_utils.init_tracking(make_args(tmp_path))
    for record in map(json.loads, recorded):
        step_key = record.pop("step_key")
        logging_utils.log(make_args(tmp_path), {name: v for name, v in record.items() if name != "time"}, step_key)
        if "perf/step_time" in record:
            logging_utils.end_rollout(record["rollout/step"])
    logging_utils.finish_tracking()
    found = scrape(tmp_path)
    names = {labels: value for (name, labels), value in found.items() if name == "slime_alarm_active"}
    assert names["staleness"] == 1 and found["slime_alarms", ""] >= len(names) >= 3
    write_end = {"step_key": "rollout/step", "time": 1.0, "alarm": {"name": "staleness", "state": "ended"}}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(write_end) + "\n")
    after = scrape(tmp_path)
    assert after["slime_alarm_active", "staleness"] == 0 and after["slime_alarms", ""] == found["slime_alarms", ""]


def test_an_alarm_of_an_attempt_that_was_lost_is_over_once_the_run_is_resumed(tmp_path: Path):
    begun = {"step_key": "rollout/step", "time": 5.0, "alarm": {"name": "truncated", "state": "begun"}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(begun) + "\n")
    start = [{"event": "start", "time": at} for at in (1.0, 6.0)]
    (tmp_path / "run_events.jsonl").write_text(json.dumps(start[0]) + "\n")
    assert scrape(tmp_path)["slime_alarm_active", "truncated"] == 1
    (tmp_path / "run_events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in start))
    assert scrape(tmp_path)["slime_alarm_active", "truncated"] == 0


def test_a_run_without_files_has_an_endpoint(tmp_path: Path):
    assert scrape(tmp_path)["slime_alarms", ""] == 0


class Server:
    """Answers with a text at each path, as slowly as it is told, and to nobody without its key."""

    def __init__(self, answers: dict[str, str], *, after_s: float = 0.0, key: str | None = None) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(after_s)
                is_known = key is None or self.headers["Authorization"] == f"Bearer {key}"
                content = answers.get(self.path, "").encode() if is_known else b""
                self.send_response(200 if content else 404 if is_known else 401)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """The test's output stays clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def test_engines_that_answer_are_there_with_their_name_and_a_hanging_one_is_down(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(prometheus, "ASK_S", 0.5)
    text = '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{{model="m"}} {}\n'
    text += "# TYPE sglang:prompt_tokens counter\nsglang:prompt_tokens_total {}\n"
    engines = [Server({"/metrics": text.format(n, 10 * n)}) for n in (1, 2)]
    engines.append(Server({"/metrics": text}, after_s=3.0))
    workers = {"workers": [{"url": engine.url} for engine in engines]}
    router = Server({"/workers": json.dumps(workers), "/metrics": "smg_requests 3\n"})
    (tmp_path / "logs").mkdir()
    values = {"host": "127.0.0.1", "port": router.port, "prometheus_host": "127.0.0.1", "prometheus_port": router.port}
    (tmp_path / "logs" / "router.json").write_text(json.dumps(values))
    begun = time.monotonic()
    found = scrape(tmp_path)
    assert time.monotonic() - begun < 2.5
    for number, engine in enumerate(engines[:2], start=1):
        assert found["sglang:num_running_reqs", f"{engine.url},m"] == number
        assert found["sglang:prompt_tokens_total", engine.url] == 10 * number
        assert found["slime_target_up", f"engine,{engine.url}"] == 1
    assert found["slime_target_up", f"engine,{engines[2].url}"] == 0
    assert found["smg_requests", router.url] == 3
    for server in (*engines, router):
        server.server.shutdown()
        server.server.server_close()


def test_a_router_that_asks_for_its_key_gets_it_and_one_that_refuses_is_told_of_once(
    tmp_path: Path, monkeypatch, caplog
):
    engine = Server({"/metrics": "sglang:num_running_reqs 2\n"})
    router = Server({"/workers": json.dumps({"workers": [{"url": engine.url}]})}, key="secret of the run")
    collector = prometheus.RunCollector(tmp_path, [router.url])
    monkeypatch.setenv("SLIME_API_KEY", "another")
    for _ in range(2):
        up = [
            sample for family in collector.collect() for sample in family.samples if sample.name == "slime_target_up"
        ]
        assert [(sample.labels["kind"], sample.value) for sample in up] == [("router", 0)]
    [message] = [record.getMessage() for record in caplog.records]
    assert router.url in message and "401" in message
    monkeypatch.setenv("SLIME_API_KEY", "secret of the run")
    samples = [sample for family in collector.collect() for sample in family.samples]
    assert [sample.value for sample in samples if sample.name == "sglang:num_running_reqs"] == [2]
    for server in (engine, router):
        server.server.shutdown()
        server.server.server_close()


def test_flags_of_the_endpoint_that_cannot_work_or_have_no_effect(base: dict[str, list[str]]):
    args = parse_args(argv=line(base, "--prometheus-port 9400"))
    assert args.sglang_overrides["enable_metrics"] is True and args.prometheus_host == "127.0.0.1"
    assert "enable_metrics" not in parse_args(argv=line(base, "")).sglang_overrides
    assert any("--prometheus-port 70000 must be" in text for text in errors(line(base, "--prometheus-port 70000")))
    alone = errors(line(base, "--strict-flags --prometheus-host 0.0.0.0"))
    assert any("--prometheus-host has no effect without --prometheus-port" in text for text in alone)


def names_on_the_board() -> set[str]:
    """The metrics that the board's queries ask for by their whole name."""
    board = json.loads((ROOT / "docs/grafana/slime.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return {name for query in queries for name in re.findall(r"\b(?:slime_|sglang:)\w*[^\W_]\b", query)}


def test_the_board_is_one_that_grafana_imports():
    board = json.loads((ROOT / "docs/grafana/slime.json").read_text())
    assert board["schemaVersion"] and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {"slime_rollout_raw_reward", "sglang:token_usage", "slime_target_up"} <= names_on_the_board()
