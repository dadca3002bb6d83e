"""tools/profile_rollout.py: what it asks of the engines behind a router, and what it says when one refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.test_server_control import Script
from tools.profile_rollout import main


@pytest.fixture
def servers() -> Iterator[list[Script]]:
    """A router and two engines, scripted: real ones take half a minute (tests/integration/test_profile_rollout.py)."""
    router, *engines = running = [Script(), Script(), Script()]
    router.answers["/workers"] = [
        (200, {"workers": [{"url": engine.url, "is_healthy": True} for engine in engines]}),
    ]
    for engine in engines:
        engine.answers |= {"/start_profile": [(200, "Start profiling.\n")], "/stop_profile": [(200, "Stop.\n")]}
    yield running
    for one in running:
        one.server.shutdown()
        one.server.server_close()


def test_every_engine_records_with_the_flags_into_files_of_its_own(servers: list[Script]) -> None:
    router, *engines = servers
    flags = ["--output-dir", "/traces", "--num-steps", "5", "--activities", "CPU", "GPU", "--profile-by-stage"]
    assert main(["--router-url", router.url, *flags, "--record-shapes"]) == 0
    for engine in engines:
        expected = {
            "output_dir": "/traces",
            "num_steps": 5,
            "activities": ["CPU", "GPU"],
            "profile_by_stage": True,
            "with_stack": False,
            "record_shapes": True,
            "profile_prefix": f"127.0.0.1-{engine.server.server_port}",
        }
        assert engine.requests == [("/start_profile", expected)]
    assert main(["--router-url", router.url + "/", "--action", "stop"]) == 0
    assert [engine.requests[-1][0] for engine in engines] == ["/stop_profile"] * 2


def test_zero_steps_record_until_they_are_stopped(servers: list[Script]) -> None:
    assert main(["--router-url", servers[0].url, "--num-steps", "0", "--with-stack"]) == 0
    _, body = servers[1].requests[-1]
    assert body["num_steps"] is None and body["with_stack"] is True


def test_an_address_of_an_engine_is_taken_as_one(servers: list[Script], capsys: pytest.CaptureFixture[str]) -> None:
    engine = servers[1]
    engine.answers["/workers"] = [(404, {"detail": "Not Found"})]
    assert main(["--router-url", engine.url]) == 0
    assert engine.requests[-1][0] == "/start_profile" and not servers[2].requests
    assert "records 3 steps into /tmp/sglang_profile" in capsys.readouterr().out


def test_an_engine_that_refuses_is_named_and_the_others_go_on(
    servers: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    router, first, second = servers
    first.answers["/stop_profile"] = [(500, "Internal Server Error")]
    assert main(["--router-url", router.url, "--action", "stop"]) == 1
    captured = capsys.readouterr()
    assert first.url in captured.err and "stops by itself" in captured.err
    assert second.url in captured.out


@pytest.mark.parametrize(
    ("url", "flags", "says"),
    [
        ("http://127.0.0.1:9", [], "is not the address of a running router"),
        ("nothing", [], "--router-url nothing"),
        (None, ["--num-steps", "-1"], "--num-steps -1"),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(
    url: str | None, flags: list[str], says: str, servers: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--router-url", url or servers[0].url, *flags]) == 2
    text = capsys.readouterr().err
    assert says in text and len(text.splitlines()) == 1


def test_a_router_without_healthy_engines_is_no_success(
    servers: list[Script], capsys: pytest.CaptureFixture[str]
) -> None:
    servers[0].answers["/workers"] = [(200, {"workers": []})]
    assert main(["--router-url", servers[0].url]) == 2
    assert "no healthy engine" in capsys.readouterr().err
