"""The weight sync's order, versions and completeness checks, over fake engines.

The fake engine keeps SGLang's rule that matters here: a version is set only by a bucket that was loaded.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.megatron_utils.update_weight import base
from slime.backends.megatron_utils.update_weight.base import Bucket, WeightSyncError, WeightUpdater
from slime.backends.megatron_utils.update_weight.engines import EngineFleet
from slime.backends.megatron_utils.update_weight.expected_names import expected_hf_names

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

    def get_weight_version(self):
        return self.version

    def load(self, bucket, version):
        self.calls.append(f"load {version}")
        self.weights |= dict(bucket)
        self.version = version


class FakeUpdater(WeightUpdater):
    """Sends by calling `load`; `lose` names versions that never arrive."""

    lose: tuple[str, ...] = ()

    def open(self, engine_sizes: list[int]) -> None:
        pass

    def send(self, bucket: Bucket, *, version: str) -> None:
        if version not in self.lose:
            self.fleet.call("load", bucket, version)


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
        update_weights_in_flight=False,
        update_weight_buffer_size=16,
        distributed_timeout_minutes=0.02,
        hf_checkpoint=str(checkpoint),
        mtp_num_layers=None,
    )
    updater = FakeUpdater(args, model=[])
    updater.connect(engines, engine_sizes=[1] * len(engines))
    return updater


def test_a_sync_pauses_flushes_sends_every_bucket_and_continues(checkpoint, buckets):
    engines = [FakeEngine(), FakeEngine()]
    updater = make_updater(checkpoint, engines)
    updater.update()
    for engine in engines:
        assert engine.calls == ["pause abort", "flush", "load 1.0", "load 1.1", "load 1", "continue"]
        assert engine.weights.keys() == TENSORS.keys()
    updater.update()
    assert engines[0].version == "2"


def test_a_sync_in_flight_puts_requests_aside_and_asks_for_no_flush(checkpoint, buckets):
    engine = FakeEngine()
    updater = make_updater(checkpoint, [engine])
    updater.args.update_weights_in_flight = True
    updater.update()
    assert engine.calls == ["pause retract", "load 1.0", "load 1.1", "load 1", "continue"]


@pytest.mark.parametrize("lost", ["1.0", "1.1", "1"])
def test_a_bucket_that_never_reaches_the_engines_is_noticed(checkpoint, buckets, lost):
    updater = make_updater(checkpoint, [FakeEngine()])
    updater.lose = (lost,)
    with pytest.raises(WeightSyncError, match="a bucket of weights was lost"):
        updater.update()


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
    with pytest.raises(WeightSyncError, match="flushing the prefix cache failed on engine 1: ZeroDivisionError"):
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
        update_weights_in_flight=False,
        update_weight_buffer_size=16,
        distributed_timeout_minutes=0.002,
        hf_checkpoint=str(checkpoint),
        mtp_num_layers=None,
    )
    updater = FakeUpdater(args, model=[])
    updater.connect([engine], engine_sizes=[1])
    with pytest.raises(WeightSyncError, match="waited 0 s for"):
        updater.update()
    release.set()


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


class RecordingEngine:
    """Takes whatever a transport gives it."""

    def __init__(self) -> None:
        self.handles: list[str] = []
        self.joined: tuple[int, int] | None = None

    def update_weights_from_tensor(self, handles: list[str], **keywords: object) -> None:
        self.handles = handles

    def init_weights_update_group(self, address, port, rank_offset, world_size, name, backend) -> None:
        self.joined = (rank_offset, world_size)


@pytest.fixture
def engines_of_three_sizes() -> tuple[list[RecordingEngine], list[int]]:
    """One rank, then two, then four: groups of --sglang-config with sizes of their own."""
    return [RecordingEngine() for _ in range(3)], [1, 2, 4]


def test_every_rank_of_every_engine_gets_a_handle_of_its_own(engines_of_three_sizes, monkeypatch) -> None:
    from slime.backends.megatron_utils.update_weight import from_tensor

    engines, sizes = engines_of_three_sizes
    monkeypatch.setattr(from_tensor, "serialize_bucket_for", lambda tensors, count: [f"h{i}" for i in range(count)])
    updater = from_tensor.TensorWeightUpdater.__new__(from_tensor.TensorWeightUpdater)
    updater._fleet = EngineFleet(engines, deadline_s=5)
    updater.open(sizes)
    updater.send([("w", torch.zeros(1))], version="1")
    assert [engine.handles for engine in engines] == [["h0"], ["h1", "h2"], ["h3", "h4", "h5", "h6"]]


def test_engines_of_several_sizes_have_ranks_side_by_side_in_the_group(engines_of_three_sizes, monkeypatch) -> None:
    from slime.backends.megatron_utils.update_weight import from_distributed

    engines, sizes = engines_of_three_sizes
    monkeypatch.setattr(from_distributed, "init_process_group", lambda **keywords: keywords["world_size"])
    monkeypatch.setattr(from_distributed, "process_group_backend", lambda: "gloo")
    updater = from_distributed.DistributedWeightUpdater.__new__(from_distributed.DistributedWeightUpdater)
    updater._fleet, updater.deadline_s = EngineFleet(engines, deadline_s=5), 5.0
    updater.open(sizes)
    assert updater._group == 1 + sum(sizes)
    assert [engine.joined for engine in engines] == [(1, 8), (2, 8), (4, 8)]
