"""Forming a group with engines: who fails is named, in time, and weights then go another way."""

from __future__ import annotations

import pickle
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.megatron_utils import update_weight
from slime.backends.megatron_utils.update_weight import engines as engine_calls
from slime.backends.megatron_utils.update_weight import from_disk, from_distributed
from slime.backends.megatron_utils.update_weight.engines import EngineFleet, NoLinkError, WeightSyncError
from slime.backends.sglang_utils import engine_patches
from slime.backends.sglang_utils.weight_transfer import EngineContact


class Engine:
    """Answers at once, as one of ours."""

    is_ours = True

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[str] = []

    def contact(self) -> EngineContact:
        return EngineContact(self.number, f"http://e:{self.number}")

    def probe_link(self, address: str, port: int) -> None:
        self.asked.append("probe")

    def init_weights_update_group(self, *where: Any) -> None:
        self.asked.append("join")

    def try_broadcast(self, name: str) -> None:
        self.asked.append("try")


@pytest.fixture
def form(monkeypatch: pytest.MonkeyPatch) -> Any:
    """form(engines, deadline_s) with a trainer's side that takes part at once."""
    monkeypatch.setattr(from_distributed, "get_current_node_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(from_distributed, "init_process_group", lambda **how: how["group_name"])
    monkeypatch.setattr(from_distributed, "send_one", lambda group: None)

    def formed(engines: list[Any], deadline_s: float = 20.0) -> Any:
        fleet = EngineFleet(engines, deadline_s=deadline_s)
        return from_distributed.form_group(fleet, [1] * len(engines), name="g", backend="nccl", deadline_s=deadline_s)

    return formed


def test_each_engine_is_asked_whether_it_connects_joins_and_receives(form: Any) -> None:
    engines = [Engine(0), Engine(1)]
    assert form(engines) == "g"
    assert all(engine.asked == ["probe", "join", "try"] for engine in engines)


def test_a_server_of_somebody_else_is_asked_only_to_join(form: Any) -> None:
    ours, theirs = Engine(0), Engine(1)
    theirs.is_ours = False
    form([ours, theirs])
    assert (ours.asked, theirs.asked) == (["probe", "join"], ["join"]), "a broadcast is for all or for none"


PLACE = r"at 127\.0\.0\.1:\d+ \(interface lo\)"


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("probe_link", f"engine 1 at http://e:1 cannot connect to the trainer {PLACE}: OSError: no route"),
        (
            "init_weights_update_group",
            f"engine 1 at http://e:1 did not join the trainer's process group {PLACE}: OSErr",
        ),
        (
            "try_broadcast",
            f"engine 1 at http://e:1 did not receive a first broadcast over nccl {PLACE}: OSError: no r",
        ),
    ],
)
def test_an_engine_that_fails_is_named_with_the_address_and_interface_that_it_was_given(
    form: Any, step: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no route")

    engines = [Engine(0), Engine(1)]
    monkeypatch.setattr(engines[1], step, refuse, raising=False)
    with pytest.raises(NoLinkError, match=sentence) as caught:
        form(engines)
    assert "give --update-weight-disk-dir" in str(caught.value) and caught.value.is_final


def test_an_engine_that_never_joins_is_named_at_the_deadline(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    release, engines = threading.Event(), [Engine(0), Engine(1)]
    monkeypatch.setattr(engines[1], "init_weights_update_group", lambda *_: release.wait(), raising=False)
    with pytest.raises(NoLinkError, match="engine 1 at http://e:1 did not join .*: no answer within 1 s"):
        form(engines, deadline_s=2.0)
    release.set()


def test_a_trainer_whose_own_side_fails_says_why(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(from_distributed, "send_one", fail)
    with pytest.raises(NoLinkError, match="an engine did not receive a first broadcast .*: RuntimeError: NCCL error"):
        form([Engine(0)])


def test_an_address_within_reach_is_told_from_one_that_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert engine_patches.out_of_reach("127.0.0.1", port) is None
    reason = engine_patches.out_of_reach("127.0.0.1", port)
    assert reason is not None and f"cannot connect to 127.0.0.1:{port}: " in reason


class Linkless:
    """An updater over a link that is not there."""

    is_source = True
    is_over_files = False

    def __init__(self, args: Any, model: Any) -> None:
        self.args, self.model, self.weight_version = args, model, 0

    def connect(self, engines: Any, *, engine_sizes: Any) -> None:
        self.engines, self.engine_sizes = engines, engine_sizes
        raise NoLinkError("engine 0 cannot connect")

    def close(self) -> None: ...


class Files(Linkless):
    def connect(self, engines: Any, *, engine_sizes: Any) -> None:
        self.engines = engines


def test_without_a_link_weights_go_over_files_with_a_warning_where_a_directory_is_given(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(update_weight, "build_weight_updater", lambda args, model, *, colocated: Linkless(args, model))
    monkeypatch.setattr(from_disk, "DiskWeightUpdater", Files)
    how: dict[str, Any] = {"engine_sizes": [1], "colocated": False, "weight_version": 3}
    with pytest.raises(NoLinkError, match="engine 0 cannot connect"):
        update_weight.connected_weight_updater(SimpleNamespace(update_weight_disk_dir=None), [], ["e"], **how)
    args = SimpleNamespace(update_weight_disk_dir="/shared/w")
    made = update_weight.connected_weight_updater(args, [], ["e"], **how)
    assert isinstance(made, Files) and (made.engines, made.weight_version) == (["e"], 3)
    (record,) = caplog.records
    assert "as files in --update-weight-disk-dir /shared/w, which is slower: engine 0 cannot" in record.getMessage()


def test_engines_that_come_later_and_have_no_link_get_files_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One in the place of a lost engine may be on another host."""
    monkeypatch.setattr(from_disk, "DiskWeightUpdater", Files)
    args = SimpleNamespace(update_weight_disk_dir="/shared/w")
    before = Linkless(args, [])
    before.weight_version = 7
    how: dict[str, Any] = {"engine_sizes": [1], "colocated": False, "weight_version": 7, "updater": before}
    made = update_weight.connected_weight_updater(args, [], ["late"], **how)
    assert isinstance(made, Files) and (made.engines, made.weight_version) == (["late"], 7)
    assert "as files in --update-weight-disk-dir /shared/w" in caplog.text
    monkeypatch.setattr(Linkless, "connect", lambda updater, engines, *, engine_sizes: None)
    assert update_weight.connected_weight_updater(args, [], ["near"], **how) is before


def test_an_engine_that_has_refused_a_bucket_is_not_asked_to_take_the_next() -> None:
    asked = []

    class Refusing:
        def take(self, bucket: int) -> None:
            asked.append(bucket)
            raise RuntimeError("out of memory")

    fleet = EngineFleet([Refusing()], deadline_s=5).in_order()
    calls = [fleet.start("take", bucket) for bucket in range(2)]
    with pytest.raises(WeightSyncError, match="out of memory"):
        fleet.wait(calls[0], "the load")
    with pytest.raises(WeightSyncError, match="it was not asked, because"):
        fleet.wait(calls[1], "the load")
    assert asked == [0]


def test_what_cannot_be_formed_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_calls.together(lambda: 3) == 3
    error = pickle.loads(pickle.dumps(NoLinkError("rank 1 has no link", silent=(4,))))  # as it comes from a rank
    monkeypatch.setattr(engine_calls, "gathered", lambda own: [own, error])
    with pytest.raises(NoLinkError, match="rank 1 has no link") as failed:
        engine_calls.together(lambda: 3)
    assert failed.value.silent == (4,)
