"""A weight sync by broadcasts over gloo, from a trainer of one rank to real engines."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.backends.megatron_utils.update_weight import (
    base,
    connected_weight_updater,
    from_distributed,
    from_tensor,
    over_files_instead,
)
from slime.backends.megatron_utils.update_weight.buckets import BucketBuffers
from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
from slime.backends.megatron_utils.update_weight.from_distributed import (
    GROUP_NAME,
    CollectiveTransport,
    DistributedWeightUpdater,
    announcement,
)
from slime.backends.sglang_utils import weight_transfer
from slime.backends.sglang_utils.bucket_load import NOT_SHORT, layout_of
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from tests.integration.conftest import make_engine
from tests.integration.launch import make_model
from tests.integration.test_engine import largest_gap
from tests.integration.trainer_world import trainer_args
from tests.unit.megatron_fakes import run_world


def updater_to(engine: SGLangEngine, model: Path) -> DistributedWeightUpdater:
    """An updater of a run of `model`, in a group with the engine."""
    args = SimpleNamespace(
        update_weights_in_flight=False,
        update_weight_buffer_size=1,
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(model),
        mtp_num_layers=None,
        check_weight_update_equal=False,
        train_backend="megatron",
        multimodal_keys=None,
        offload_train=False,
    )
    made = DistributedWeightUpdater(args, model=[])
    made.connect([engine], engine_sizes=[1])
    return made


@pytest.fixture
def iterated(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, torch.Tensor]]]:
    """What the iterator over the model yields; a test fills and changes it."""
    found: list[list[tuple[str, torch.Tensor]]] = []
    monkeypatch.setattr(base, "iter_hf_buckets", lambda args, model, *, buffer_size: iter(found))
    return found


def leave(updater: DistributedWeightUpdater) -> None:
    """End the group on both sides: the next test makes one of the same name."""
    updater.fleet.call("destroy_weights_update_group", f"{GROUP_NAME}0")
    assert isinstance(updater.transports[0], CollectiveTransport)
    torch.distributed.destroy_process_group(updater.transports[0]._group)


def cut(model: Path, count: int) -> list[list[tuple[str, torch.Tensor]]]:
    weights = list(load_file(model / "model.safetensors").items())
    return [weights[i::count] for i in range(count)]


def test_buckets_that_come_again_restore_every_bit(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], iterated: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than there are buffers; from the second sync on the engine loads them by `bucket_load`'s copies."""
    updater = updater_to(engine, tiny_models[0])
    caplog.set_level("INFO")
    for version, model in enumerate([*tiny_models, *tiny_models], start=1):
        iterated[:] = cut(model, 5)
        updater.update()
        if version == 2:
            engine.check_weights("snapshot")
    assert engine.get_weight_version() == "4"
    engine.check_weights("reset_tensors")
    with pytest.raises(RuntimeError, match="check tensor equality failed"):
        engine.check_weights("compare")
    updater.update()
    engine.check_weights("compare")
    assert NOT_SHORT not in Path(engine.contact().log_path).read_text()
    assert "weight sync 5, 5 buckets, " in caplog.text and "; answers after " in caplog.text
    leave(updater)


def test_a_bucket_that_an_engine_refuses_is_sent_again_over_a_new_group(
    engine: SGLangEngine,
    tiny_models: tuple[Path, Path],
    iterated: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It refuses before it takes part in the broadcast, which waits for it: in that group the two are out of step."""
    updater = updater_to(engine, tiny_models[0])
    iterated[:] = cut(tiny_models[1], 4)
    refused = iter([False, True])

    def announced(places: Any) -> Any:
        names, dtypes, shapes = announcement(places)
        return names, ["float7"] * len(dtypes) if next(refused, False) else dtypes, shapes

    monkeypatch.setattr(from_distributed, "announcement", announced)
    updater.update()
    assert "no attribute 'float7'" in caplog.text and "it is sent whole once more" in caplog.text
    assert engine.get_weight_version() == "1"
    for action in ("snapshot", "reset_tensors"):
        engine.check_weights(action)
    updater.update()
    engine.check_weights("compare")
    leave(updater)


def test_an_engine_that_cannot_reach_the_trainer_gets_its_weights_over_files(
    engine: SGLangEngine,
    tiny_models: tuple[Path, Path],
    iterated: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(from_distributed, "get_current_node_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(from_distributed, "listen_anywhere", out_of_service)
    args = trainer_args(tiny_models[1], hf_checkpoint=str(tiny_models[1]), update_weight_disk_dir=str(tmp_path / "w"))
    iterated[:] = cut(tiny_models[1], 2)
    how: dict[str, Any] = {"engine_sizes": [1], "colocated": False, "weight_version": 0}
    updater = connected_weight_updater(args, [], [engine], **how)
    assert isinstance(updater, DiskWeightUpdater)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "as files in --update-weight-disk-dir" in warning
    assert f"{engine.contact()} cannot connect to the trainer at 127.0.0.1:" in warning
    updater.update()
    assert engine.get_weight_version() == "1"
    args = trainer_args(tiny_models[1], hf_checkpoint=str(tiny_models[1]))
    with pytest.raises(base.NoLinkError, match="Connection refused"):
        connected_weight_updater(args, [], [engine], **how)


@pytest.mark.parametrize("is_link_lost", [False, True], ids=["buckets are refused", "no group can be formed anew"])
def test_weights_that_do_not_come_through_go_over_files_from_then_on(
    is_link_lost: bool,
    engine: SGLangEngine,
    tiny_models: tuple[Path, Path],
    iterated: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first bucket of the second sync is refused, and so is that of its repetition, or the group for it."""
    args = trainer_args(tiny_models[1], hf_checkpoint=str(tiny_models[1]), update_weight_disk_dir=str(tmp_path / "w"))
    iterated[:] = cut(tiny_models[0], 2)
    begun = connected_weight_updater(args, [], [engine], engine_sizes=[1], colocated=False, weight_version=0)
    begun.update()
    assert engine.get_weight_version() == "1"

    def announced(places: Any) -> Any:
        names, dtypes, shapes = announcement(places)
        return names, ["float7"] * len(dtypes), shapes

    monkeypatch.setattr(from_distributed, "announcement", announced)
    if is_link_lost:
        monkeypatch.setattr(from_distributed, "listen_anywhere", out_of_service)
    iterated[:] = cut(tiny_models[1], 2)
    with pytest.raises(base.WeightSyncError) as failed:
        begun.update()
    updater = over_files_instead(begun, failed.value)
    assert isinstance(updater, DiskWeightUpdater) and updater.update()["perf/update_weights_wire_bytes"] > 0
    assert engine.get_weight_version() == "2"
    assert largest_gap(engine, AutoModelForCausalLM.from_pretrained(tiny_models[1])) < 1e-4
    why = "cannot connect to the trainer" if is_link_lost else "no attribute 'float7'"
    (warning,) = [text for text in caplog.messages if "as files in --update-weight-disk-dir" in text]
    assert why in warning
    updater.update()
    assert engine.get_weight_version() == "3"


def test_weights_do_not_go_over_files_where_an_engine_is_gone(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], iterated: list[Any], tmp_path: Path
) -> None:
    args = trainer_args(tiny_models[1], hf_checkpoint=str(tiny_models[1]), update_weight_disk_dir=str(tmp_path / "w"))
    iterated[:] = cut(tiny_models[0], 2)
    updater = connected_weight_updater(args, [], [engine], engine_sizes=[1], colocated=False, weight_version=0)
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SGLangEngine, "url", gone)
        with pytest.raises(base.WeightSyncError, match="Cannot connect to host") as failed:
            updater.update()
        with pytest.raises(base.WeightSyncError) as again:
            over_files_instead(updater, failed.value)
    leave(updater)
    assert again.value is failed.value
    assert not list((tmp_path / "w").glob("weight_v*"))


class TakesHandles:
    """Stands for an engine in the trainer's slot: it counts handles, and loads nothing."""

    def __init__(self) -> None:
        self.num_handles = 0
        self.version = "default"

    def update_weights_from_tensor(self, handles: list[str], *, weight_version: str, **how: Any) -> str:
        self.num_handles += len(handles)
        return weight_version

    def set_weight_version(self, version: str) -> str:
        self.version = version
        return version

    def sample_weights(self, names: Any) -> None:
        return None

    def pause(self, mode: str) -> None: ...
    def flush_cache(self) -> None: ...
    def continue_generation(self) -> None: ...


def test_an_engine_behind_the_trainers_slots_gets_broadcasts_in_the_sync_of_those_that_share_memory(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], iterated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(from_tensor, "split_engines", lambda slots, sizes, num_ranks: ({0: [0]}, [1]))
    args = trainer_args(tiny_models[1], hf_checkpoint=str(tiny_models[1]))
    updater = from_tensor.TensorWeightUpdater(args, [])
    near = TakesHandles()
    updater.connect([near, engine], engine_sizes=[1, 1])
    iterated[:] = cut(tiny_models[1], 4)
    updater.update()
    engine.check_weights("snapshot")
    engine.check_weights("reset_tensors")
    updater.update()
    engine.check_weights("compare")
    assert (near.num_handles, near.version, engine.get_weight_version()) == (2 * 4, "2", "2")
    updater.transports[1].close()


def out_of_service(host: str) -> socket.socket:
    """A socket that was given a port and does not listen."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


def test_what_is_broadcast_is_what_a_stock_server_expects() -> None:
    """It is told names, types and shapes only, and lays its buffer out from them."""
    weight_transfer.preload()
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    sent = [("scale", torch.rand(3)), ("flag", torch.ones(5).bool()), ("w", torch.randn(16, 32).bfloat16())]
    flat = BucketBuffers(1, 1, torch.device("cpu")).fill(0, sent)
    names, dtypes, shapes = announcement(flat.places)
    empty = [
        (name, torch.empty(shape, dtype=getattr(torch, dtype)))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
    stock = FlattenedTensorBucket(named_tensors=empty)
    stock.get_flattened_tensor().copy_(flat.data)
    assert all(torch.equal(tensor, dict(sent)[name]) for name, tensor in stock.reconstruct_tensors())
    num_bytes, ours = layout_of(tuple(names), tuple(dtypes), tuple(map(tuple, shapes)))
    assert num_bytes == flat.data.numel()
    assert [(m.name, m.start_idx, m.end_idx) for m in ours] == [
        (m.name, m.start_idx, m.end_idx) for m in stock.get_metadata()
    ]


def send_twice(args: argparse.Namespace, url: str, out: Path) -> None:
    """What each trainer rank does; rank r notes its group with the engine, and the pairs (version, size) it sent."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.setup import build_model

    model = build_model(args)
    load_hf_weights(args, [model], args.hf_checkpoint)
    updater = DistributedWeightUpdater(args, [model])
    posted = []
    post = updater._post
    updater._post = lambda prepared, version: posted.append(version) or post(prepared, version)  # type: ignore[method-assign]
    updater.connect(
        [weight_transfer.DirectEngine(weight_transfer.EngineContact(0, url, "engine.log"))], engine_sizes=[1]
    )
    for _ in range(2):
        updater.update()
    (out / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(posted))


def test_each_pipeline_stage_sends_its_own_layers_with_the_experts_of_all_ranks(tmp_path: Path) -> None:
    import transformers as hf

    models = [make_model(tmp_path / str(seed), "--family", "qwen3_moe", "--seed", seed) for seed in (0, 1)]
    engine = make_engine(models[0], tmp_path / "engine_0.log")
    engine.start(deadline_s=170)
    try:
        flags = "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"
        args = trainer_args(models[1], flags, dp_size=2, update_weight_buffer_size=100_000)
        run_world(4, send_twice, args, engine.url, tmp_path)
        assert engine.get_weight_version() == "2"
        expected = hf.AutoModelForCausalLM.from_pretrained(models[1], dtype=torch.float32).eval()
        assert largest_gap(engine, expected) < 1e-4
    finally:
        engine.shutdown()
    sent = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert sent[1] == sent[3] == [], "ranks 1 and 3 only help to gather experts"
    for stage, versions in enumerate((sent[0], sent[2])):
        count = len(versions) // 2
        assert count > 1
        assert versions == [f"{sync}.{stage}.{i}" for sync in (1, 2) for i in range(count)]
