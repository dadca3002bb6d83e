"""A bucket that is received reaches the model, and the one with which the engine drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils import bucket_load, cpu_standins


class Updater:
    """The part of SGLang's WeightUpdater that a received bucket goes through."""

    device = "cpu"
    _model_update_group: dict[str, Any] = {"g": None}

    def __init__(self) -> None:
        self.loaded: list[bytes] = []

    def _update_weights_from_flattened_bucket(self, bucket: dict[str, Any]) -> None:
        self.loaded.append(bucket["flattened_tensor"].numpy().tobytes())


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's class of the scheduler that is asked for an update, with a target that receives "abcd"."""
    cpu_standins.install()
    from sglang.srt.managers.scheduler_components import weight_updater as of_scheduler
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for owner, name in (
        (of_scheduler.SchedulerWeightUpdaterManager, "update_weights_from_distributed"),
        (WeightUpdater, "_update_bucketed_weights_from_distributed"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # `install` replaces them
    bucket_load.install()
    sent = torch.frombuffer(bytearray(b"abcd"), dtype=torch.uint8)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda data, src, group: data.copy_(sent))

    def made(target: Updater, draft_worker: Any) -> Any:
        def receive(request: Any) -> tuple[bool, str]:
            return bucket_load._receive(target, ["w"], ["uint8"], [[4]], "g")

        return of_scheduler.SchedulerWeightUpdaterManager(
            tp_worker=SimpleNamespace(update_weights_from_distributed=receive),
            draft_worker=draft_worker,
            tp_cpu_group=None,
            memory_saver_adapter=None,
            flush_cache=lambda **_: True,
            is_fully_idle=lambda **_: True,
        )

    return made


REQUEST = SimpleNamespace(flush_cache=False)


def test_an_engine_that_drafts_loads_a_bucket_into_both_of_its_models(manager: Any) -> None:
    target, draft = Updater(), Updater()
    runner = SimpleNamespace(weight_updater=draft)
    for _ in range(2):
        assert (
            manager(target, SimpleNamespace(draft_model_runner=runner))
            .update_weights_from_distributed(REQUEST)
            .success
        )
    assert target.loaded == draft.loaded == [b"abcd"] * 2


def test_one_whose_drafts_need_no_model_or_the_same_loads_it_once(manager: Any) -> None:
    target = Updater()
    same = SimpleNamespace(draft_model_runner=SimpleNamespace(weight_updater=target))
    for count, worker in enumerate([None, same], start=1):
        assert manager(target, worker).update_weights_from_distributed(REQUEST).success
        assert len(target.loaded) == count


def test_a_draft_that_cannot_load_is_an_answer_and_not_the_end(manager: Any) -> None:
    def fail(bucket: Any) -> None:
        raise RuntimeError("no such layer")

    draft = SimpleNamespace(_update_weights_from_flattened_bucket=fail)
    worker = SimpleNamespace(draft_model_runner=SimpleNamespace(weight_updater=draft))
    answer = manager(Updater(), worker).update_weights_from_distributed(REQUEST)
    assert not answer.success and "no such layer" in answer.message
    assert bucket_load._drafts == []
