"""How a run ends: in which order its parts and its trackers are ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray import run as run_module
from slime.ray.run import TrainingRun
from tests.unit.test_drivers import run_args


@pytest.mark.parametrize("fails", ["", "trackers", "ray"])
def test_trackers_upload_when_nothing_of_the_run_holds_a_gpu_any_more(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    order: list[str] = []

    def end(what: str) -> None:
        order.append(what)
        if what == fails:
            raise RuntimeError("it does not answer")

    monkeypatch.setattr(run_module.logging_utils, "finish_tracking", lambda **_: end("trackers"))
    monkeypatch.setattr(run_module.ray, "is_initialized", lambda: True)
    run = TrainingRun(run_args(ray_timeline_path=None))
    monkeypatch.setattr(run.parts, "end", lambda **_: order.append("parts"))
    run._supervisor = SimpleNamespace(  # type: ignore[assignment]
        before_end=lambda: order.append("watchdog"),
        shut_ray_down=lambda: end("ray"),
        end=lambda **_: order.append("guard"),
        lost_ray=None,
    )
    run.finish(failed=True)
    assert order == ["watchdog", "parts", "ray", "trackers", "guard"]
