"""The weight sync's order, versions and completeness checks, over fake engines.

The fake engine keeps SGLang's rule that matters here: a version is set only by a bucket that was loaded.
"""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.update_weight import base
from slime.backends.megatron_utils.update_weight import engines as engine_calls
from slime.backends.megatron_utils.update_weight.base import WeightSyncError
from slime.backends.megatron_utils.update_weight.bucket_updater import BucketUpdater
from slime.backends.megatron_utils.update_weight.buckets import Bucket, BucketStream, Posted, Transport
from slime.backends.megatron_utils.update_weight.engines import EngineFleet
from slime.backends.sglang_utils.weight_samples import describe, sample
from slime.processes.wait import WaitTimeout
from slime.utils.errors import HttpError
from slime.weights.names import expected_hf_names

TENSORS = {f"layer.{i}.weight": torch.full((4,), float(i)) for i in range(3)}


class FakeEngine:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.version = "default"
        self.weights: dict[str, torch.Tensor] = {}

    def pause(self, mode):
        self.calls.append(f"pause {mode}")

    def flush_cache(self):
        self.calls.append("flush")

    def continue_generation(self):
        self.calls.append("continue")

    def set_weight_version(self, version):
        self.calls.append(f"name {version}")
        self.version = version
        return self.version

    def load(self, bucket, version):
        self.calls.append(f"load {version}")
        self.weights |= dict(bucket)
        self.version = version
        return version

    def sample_weights(self, names):
        return [{name: describe((4,), sample(self.weights[name])) for name in names if name in self.weights}]


def steps(engine: FakeEngine) -> list[str]:
    """What an engine was asked; loads that follow each other are sorted, for two may be under way at once."""
    runs = itertools.groupby(engine.calls, key=lambda call: call.startswith("load"))
    return [call for is_load, run in runs for call in (sorted(run) if is_load else run)]


class FakeTransport(Transport):
    """Hands over by calling `load`; `lose` says how often a version does not arrive."""

    num_slots = 2

    def __init__(self, fleet: EngineFleet) -> None:
        self.fleet = fleet
        self.lose: dict[str, int] = {}
        self.slots: list[int] = []

    def prepare(self, bucket: Bucket, *, slot: int) -> Bucket:
        self.slots.append(slot)
        return bucket

    def post(self, prepared: Bucket, *, version: str) -> Posted:
        if self.lose.get(version):
            self.lose[version] -= 1
            return Posted()
        return Posted(self.fleet.start("load", prepared, version))


class FakeUpdater(BucketUpdater):
    """Over one fake transport."""

    def open(self, engine_sizes: list[int]) -> list[Transport]:
        self.transport = FakeTransport(self.fleet)
        return [self.transport]


@pytest.fixture
def checkpoint(tmp_path):
    save_file({name: tensor.clone() for name, tensor in TENSORS.items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def buckets(monkeypatch):
    """What the iterator yields; a test may change the list."""
    found = [[item] for item in TENSORS.items()]
    monkeypatch.setattr(base, "iter_hf_buckets", lambda args, model, *, buffer_size: iter(found))
    return found


def make_updater(checkpoint, engines) -> FakeUpdater:
    args = SimpleNamespace(
        train_backend="megatron",
        multimodal_keys=None,
        update_weights_in_flight=False,
        update_weight_buffer_size=16,
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(checkpoint),
        mtp_num_layers=None,
        check_weight_update_equal=False,
    )
    updater = FakeUpdater(args, model=[])
    updater.connect(engines, engine_sizes=[1] * len(engines))
    return updater


def test_a_sync_pauses_flushes_sends_every_bucket_and_continues(checkpoint, buckets):
    engines = [FakeEngine(), FakeEngine()]
    updater = make_updater(checkpoint, engines)
    updater.update()
    for engine in engines:
        assert steps(engine) == ["pause abort", "flush", "load 1.0", "load 1.1", "load 1.2", "name 1", "continue"]
        assert engine.weights.keys() == TENSORS.keys()
    updater.update()
    assert engines[0].version == "2"


def test_a_sync_in_flight_puts_requests_aside_and_asks_for_no_flush(checkpoint, buckets):
    engine = FakeEngine()
    updater = make_updater(checkpoint, [engine])
    updater.args.update_weights_in_flight = True
    updater.update()
    assert steps(engine) == ["pause retract", "load 1.0", "load 1.1", "load 1.2", "name 1", "continue"]


@pytest.mark.parametrize("lost", ["1.0", "1.1", "1.2"])
def test_a_bucket_that_never_reaches_the_engines_is_noticed(checkpoint, buckets, lost):
    updater = make_updater(checkpoint, [FakeEngine()])
    updater.transport.lose = {lost: 2}
    with pytest.raises(WeightSyncError, match=f"failed 2 times.*lost: not at version {lost}: engine 0 .* is at None"):
        updater.update()
    calls = updater.fleet.engines[0].calls
    assert "continue" not in calls, "half of the weights are not to be served"
    assert "name 1" not in calls, "and not to be called version 1"
    updater.transport.lose = {}
    updater.update()
    assert steps(updater.fleet.engines[0])[-2:] == ["name 1", "continue"], "the next sync sends the same version"


@pytest.mark.parametrize("lost", ["1.0", "1.1", "1.2"])
def test_a_sync_that_loses_a_bucket_once_is_sent_whole_again_while_engines_are_paused(checkpoint, buckets, lost):
    engine = FakeEngine()
    updater = make_updater(checkpoint, [engine])
    updater.transport.lose = {lost: 1}
    updater.update()
    every = ["load 1.0", "load 1.1", "load 1.2"]
    # 1.0 is missed before the third bucket takes its slot, the others at the end.
    first = {"1.0": ["load 1.1"], "1.1": ["load 1.0", "load 1.2"], "1.2": ["load 1.0", "load 1.1"]}[lost]
    assert steps(engine) == ["pause abort", "flush", *sorted([*first, *every]), "name 1", "continue"]


def test_an_engine_that_does_not_take_the_version_is_noticed(checkpoint, buckets):
    engine = FakeEngine()
    engine.set_weight_version = lambda version: "default"
    updater = make_updater(checkpoint, [engine])
    with pytest.raises(WeightSyncError, match="not at version 1: engine 0 .* is at default"):
        updater.update()
    assert "continue" not in engine.calls


@pytest.mark.parametrize("method", ["pause", "continue_generation"])
def test_every_rank_hears_of_an_engine_that_dies_before_the_weights_or_behind_them(
    checkpoint, buckets, monkeypatch, method
):
    """Otherwise the others would wait for the source at the end of a sync, when it begins the next one."""
    engine, told = FakeEngine(), []

    def die(*_):
        raise RuntimeError("it is gone")

    updater = make_updater(checkpoint, [engine])
    monkeypatch.setattr(engine, method, die, raising=False)
    monkeypatch.setattr(updater, "_from_source", lambda error: told.append(error) or error)
    with pytest.raises(WeightSyncError, match="engine 0 .* it is gone"):
        updater.update()
    assert isinstance(told[-1], WeightSyncError)


def late() -> HttpError:
    """What a request says that was not answered in time."""
    error = HttpError("POST http://engine/flush_cache was not answered within 60 s")
    error.__cause__ = TimeoutError()
    return error


@pytest.mark.parametrize(
    ("error", "silent", "attempts"),
    [
        (late(), (1,), 1),  # a second attempt would wait as long
        (WaitTimeout("waited 60 s for engine 1 to flush its prefix cache"), (1,), 1),
        (HttpError("connection refused"), (1,), 2),
        (HttpError("HTTP 503", status=503), (1,), 2),
        (HttpError("HTTP 404", status=404), (), 2),  # it has answered
        (RuntimeError("engine 1 refused it: the shapes differ"), (), 2),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_sync_names_the_engine_that_has_not_answered(checkpoint, buckets, error, silent, attempts):
    engines = [FakeEngine(), FakeEngine()]
    loads = []

    def fail(bucket, version):
        loads.append(version)
        raise error

    engines[1].load = fail
    with pytest.raises(WeightSyncError, match="failed on engine 1") as failed:
        make_updater(checkpoint, engines).update()
    assert failed.value.silent == silent
    assert loads.count("1.0") == attempts


def test_an_incomplete_sync_gets_no_version(checkpoint, buckets):
    engine = FakeEngine()
    updater = make_updater(checkpoint, [engine])
    del buckets[0]
    with pytest.raises(WeightSyncError, match="sent 2 tensors"):
        updater.update()
    assert steps(engine) == ["pause abort", "flush", "load 1.0", "load 1.1"]


def test_an_engine_that_confirms_what_it_does_not_hold_is_noticed(checkpoint, buckets):
    engine = FakeEngine()
    engine.load = lambda bucket, version: FakeEngine.load(
        engine, [(name, tensor + 1) for name, tensor in bucket], version
    )
    updater = make_updater(checkpoint, [engine])
    with pytest.raises(WeightSyncError, match=r"engine 0 .* does not hold the weights that it confirmed: layer\.0"):
        updater.update()


def test_two_slots_take_turns(checkpoint, buckets):
    updater = make_updater(checkpoint, [FakeEngine()])
    updater.update()
    assert updater.transport.slots == [0, 1, 0]


def test_a_bucket_is_posted_at_once_and_a_slot_waits_for_the_bucket_that_was_in_it():
    fleet, order = EngineFleet([SimpleNamespace(load=lambda version: version)], deadline_s=5), []

    def post(prepared, version):
        order.append(f"post {version}")
        return Posted(fleet.start("load", version), lambda: order.append(f"confirmed {version}"))

    stream = BucketStream(fleet, post, version=3, num_slots=2)
    for number in range(4):
        stream.make_room(number % 2)
        stream.send(number, number % 2)
    stream.finish()
    assert stream.error is None
    # Buckets 2 and 3 take the slots of 3.0 and 3.1.
    assert order == [
        "post 3.0",
        "post 3.1",
        "confirmed 3.0",
        "post 3.2",
        "confirmed 3.1",
        "post 3.3",
        "confirmed 3.2",
        "confirmed 3.3",
    ]


def test_after_a_failure_nothing_more_is_posted():
    fleet, posted = EngineFleet([SimpleNamespace()], deadline_s=5), []
    stream = BucketStream(fleet, lambda prepared, version: posted.append(version) or Posted(), version=1, num_slots=1)
    for number in range(3):
        stream.make_room(0)
        stream.send(number, 0)
    stream.finish()
    assert posted == ["1.0"]
    assert stream.error is not None


def test_a_sync_says_how_long_pausing_and_sending_took(checkpoint, buckets):
    metrics = make_updater(checkpoint, [FakeEngine()]).update()
    parts = metrics["perf/update_weights_pause_time"] + metrics["perf/update_weights_send_time"]
    assert 0 < parts <= metrics["perf/update_weights_time"]


@pytest.mark.parametrize("dropped", range(len(TENSORS)))
def test_a_bucket_that_the_iterator_never_yields_is_noticed(checkpoint, buckets, dropped):
    updater = make_updater(checkpoint, [FakeEngine()])
    del buckets[dropped]
    with pytest.raises(WeightSyncError, match=rf"sent 2 tensors; 1 of .*layer\.{dropped}\.weight"):
        updater.update()


def test_a_sync_that_shrinks_is_noticed_even_where_no_checkpoint_names_can_be_compared(tmp_path, buckets):
    updater = make_updater(tmp_path, [FakeEngine()])
    updater.update()
    del buckets[0]
    with pytest.raises(WeightSyncError, match="sent 32 bytes, the first one 48"):
        updater.update()


def test_an_engine_that_fails_is_named_at_once(checkpoint, buckets):
    broken = FakeEngine()
    broken.flush_cache = lambda: 1 / 0
    updater = make_updater(checkpoint, [FakeEngine(), broken])
    with pytest.raises(WeightSyncError, match="flushing the prefix cache failed on engine 1 .*: ZeroDivisionError"):
        updater.update()


def test_an_engine_that_does_not_answer_is_given_up_at_the_deadline():
    import threading

    release = threading.Event()
    fleet = EngineFleet([SimpleNamespace(slow=release.wait)], deadline_s=0.1)
    with pytest.raises(WeightSyncError, match=r"waited 0 s for the slow call; 1 engine"):
        fleet.call("slow", what="the slow call")
    release.set()


def test_expected_names_leave_out_a_tied_head_and_old_buffers(tmp_path):
    tensors = {name: torch.zeros(1) for name in ("model.w", "lm_head.weight", "model.rotary_emb.inv_freq")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert expected_hf_names(tmp_path) == {"model.w", "lm_head.weight"}
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert expected_hf_names(tmp_path) == {"model.w"}


def test_expected_names_are_without_predicting_layers_unless_the_run_has_them(tmp_path):
    copies = {f"model.layers.2.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    names = {f"model.layers.{i}.w" for i in range(4)} | {"lm_head.weight"}
    save_file({name: torch.zeros(1) for name in names | copies}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_nextn_predict_layers": 2}))
    assert expected_hf_names(tmp_path) == names - {"model.layers.2.w", "model.layers.3.w"}
    assert expected_hf_names(tmp_path, 1) == names - {"model.layers.3.w"}
    assert expected_hf_names(tmp_path, 2) == names


def test_expected_names_read_a_sharded_checkpoint_from_its_index(tmp_path):
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert expected_hf_names(tmp_path) == {"a", "b"}


def test_a_sync_waits_no_longer_than_a_collective_may_take(checkpoint, buckets):
    import threading

    release, engine = threading.Event(), FakeEngine()
    engine.flush_cache = release.wait
    args = SimpleNamespace(
        train_backend="megatron",
        multimodal_keys=None,
        update_weights_in_flight=False,
        update_weight_buffer_size=16,
        distributed_timeout_minutes=0.002,
        hf_checkpoint=str(checkpoint),
        mtp_num_layers=None,
        check_weight_update_equal=False,
    )
    updater = FakeUpdater(args, model=[])
    updater.connect([engine], engine_sizes=[1])
    with pytest.raises(WeightSyncError, match="waited 0 s for"):
        updater.update()
    release.set()


def test_a_rank_that_waits_too_long_for_the_source_says_for_whom_and_which_flag_to_raise(
    checkpoint, buckets, monkeypatch
):
    updater = make_updater(checkpoint, [FakeEngine()])
    updater.weight_version, updater.deadline_s = 3, 600.0
    told = "Timed out waiting 600000ms for recv operation to complete"
    monkeypatch.setattr(base.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(base.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(base.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(engine_calls, "get_gloo_group", lambda: None)

    def broadcast(held, src, group):
        raise RuntimeError(told)

    monkeypatch.setattr(base.dist, "broadcast_object_list", broadcast)
    sentence = "weight sync 3: rank 1 waited 600 s for rank 0, which .* raise --distributed-timeout-minutes"
    with pytest.raises(WeightSyncError, match=sentence):
        updater._from_source(None)
    told = "Connection closed by peer"
    with pytest.raises(RuntimeError, match="^Connection closed by peer$"):
        updater._from_source(None)


def test_buckets_are_of_the_size_that_the_flag_says(checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(
        base,
        "iter_hf_buckets",
        lambda args, model, *, buffer_size: asked.append(buffer_size) or iter([[*TENSORS.items()]]),
    )
    updater = make_updater(checkpoint, [FakeEngine()])
    updater.args.update_weight_buffer_size = 48
    updater.update()
    assert asked == [48]
