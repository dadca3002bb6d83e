"""Adapters on their way to an engine and in it: shared memory, stacks of projections, versions."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from slime.backends.sglang_utils import cpu_standins, engine_patches
from slime.backends.sglang_utils.weight_transfer import (
    DirectEngine,
    EngineContact,
    SharedRoom,
    adapter_tensors_of,
    in_shared_memory,
)
from slime.utils import http_utils
from slime.weights.adapters import BASE, STACKED, stacks_of


def test_an_adapter_lies_in_shared_memory_as_it_was() -> None:
    drawn = {"A": torch.randn(4, 6).bfloat16(), "B": torch.randn(6, 4).bfloat16().t(), "C": torch.ones(3).bfloat16()}
    shared = in_shared_memory(drawn)
    assert shared.data.is_shared() and shared.data.numel() == sum(tensor.nbytes for tensor in drawn.values())
    for (name, shape, dtype, start), (own_name, tensor) in zip(shared.places, drawn.items(), strict=True):
        assert (name, shape, dtype) == (own_name, tensor.shape, tensor.dtype)
        assert shared.tensors[name].equal(tensor)
        assert shared.data[start : start + tensor.nbytes].view(dtype).view(shape).equal(tensor)


PROJECTIONS = {
    "self_attn": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "mlp.experts.1": ["up_proj", "gate_proj"],
    "latent": ["kv_a_proj_with_mqa", "q_a_proj", "q_b_proj"],
}


def test_an_engine_keeps_stacks_as_they_lie_and_as_sglang_would_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_standins.install()
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig

    names = [f"base_model.model.model.layers.1.{at}.{leaf}" for at, leaves in PROJECTIONS.items() for leaf in leaves]
    halves = {"A": (4, 6), "B": (8, 4)}
    drawn = {f"{name}.lora_{half}.weight": torch.randn(shape) for name in names for half, shape in halves.items()}
    shared = in_shared_memory(drawn)
    [body], _ = adapter_tensors_of(shared, {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0}, [1], with_checksums=True)
    sent = {
        name: shared.data[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for name, shape, dtype, start in shared.places
    }
    assert sorted(body["expected_checksums"]) == sorted(sent), "a checksum of each that is sent"

    def loaded(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
        config = config | {"target_modules": "all-linear"}
        of_model = SimpleNamespace(num_hidden_layers=2)
        adapter = LoRAAdapter("one", LoRAConfig.from_dict(config, None, base_vocab_size=9), of_model, None, None)
        adapter.initialize_weights_from_tensors(tensors)
        return adapter.layers[1].weights

    theirs = loaded(drawn, {**body["config_dict"], STACKED: False})
    monkeypatch.setattr(LoRAAdapter, "initialize_weights_from_tensors", LoRAAdapter.initialize_weights_from_tensors)
    engine_patches.take_stacks()
    ours = loaded(sent, body["config_dict"])
    made = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in ours}
    assert made == {"qkv_proj", "o_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa", "q_b_proj"}
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)
    own = shared.data.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() == own for tensor in ours.values()), "nothing was copied"
    again = loaded(drawn, {**body["config_dict"], STACKED: False})
    assert all(again[name].equal(theirs[name]) for name in theirs), "adapters of other people load as before"


def test_a_load_answers_with_the_version_that_the_server_has_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer compares it, and need not ask. The fakes are SGLang's scheduler, which has loaded it, and HTTP."""
    cpu_standins.install()
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.utils.msgspec_utils import msgspec_to_builtins

    class Manager:
        record_config_updates, config_value = TokenizerManager.record_config_updates, TokenizerManager.config_value
        _config_updates: list[Any] = []
        server_args = SimpleNamespace(weight_version="16")
        lora_registry = SimpleNamespace(get_all_adapters=dict)

    async def load(manager: Any, request: Any) -> Any:
        return LoadLoRAAdapterReqOutput(success=True, loaded_adapters={request.lora_name: "__tensor__"})

    def post(url: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        request = SimpleNamespace(lora_name=payload["lora_name"], lora_path=None)
        return msgspec_to_builtins(asyncio.run(engine_patches.LiveAdapter().noting(load)(Manager(), request)))

    monkeypatch.setattr(http_utils, "post_sync", post)
    engine = DirectEngine(EngineContact(0, "http://127.0.0.1:1"))
    assert engine.load_adapter("slime-v17@math") == "17" == Manager().config_value("weight_version")
    assert engine.load_adapter("judge") is None, "somebody else's has no version"
    assert Manager().config_value("weight_version") == "17"


@pytest.mark.parametrize("failed", [0, 712])
def test_memory_is_known_to_the_driver_until_it_is_closed_or_dropped(
    monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """A registration that outlives its memory would have the driver write to pages of somebody else."""
    known: set[int] = set()
    driver = SimpleNamespace(
        cudaHostRegister=lambda at, size, flags: failed or known.add(at) or 0, cudaHostUnregister=known.remove
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: nullcontext())
    rooms = [SharedRoom(64, torch.device("cuda", 1)) for _ in range(2)]
    assert known == (set() if failed else {room.data.data_ptr() for room in rooms})
    rooms[0].close()
    rooms[0].close()
    del rooms
    assert known == set()


def test_a_projection_without_its_fellows_is_no_stack() -> None:
    names = ["a.q_proj.lora_A.weight", "a.kv_a_proj_with_mqa.lora_A.weight", "a.o_proj.lora_A.weight"]
    assert stacks_of(names) == {name: [name] for name in names}


def test_an_adapter_on_the_host_travels_where_sglang_writes_tensors_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_standins.install()
    from sglang.srt.utils import MultiprocessingSerializer, patch_torch

    reducers = ForkingPickler._extra_reducers | {torch.Tensor: patch_torch._reduce_tensor_modified}
    monkeypatch.setattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor, raising=False)
    monkeypatch.setattr(
        ForkingPickler, "_extra_reducers", reducers | {torch.Tensor: patch_torch._reduce_tensor_modified}
    )
    shared = in_shared_memory({"A": torch.arange(6.0)})
    with pytest.raises(IndexError):  # what it does to them without our help
        MultiprocessingSerializer.serialize(shared.data, output_str=True)
    [body], _ = adapter_tensors_of(shared, {}, [1], with_checksums=False)
    [handle] = body["serialized_named_tensors"]
    assert MultiprocessingSerializer.deserialize(handle)["flattened_tensor"].equal(shared.data)


def test_an_engine_that_gives_memory_up_keeps_its_host_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_standins.install()
    from sglang.srt.utils import torch_memory_saver_adapter as saver

    paused = []
    library = SimpleNamespace(
        retain_cpu_backup=False, pause=lambda tag: paused.append((tag, library.retain_cpu_backup))
    )
    monkeypatch.setattr(saver, "_memory_saver", library, raising=False)
    monkeypatch.setattr(saver._TorchMemorySaverAdapterReal, "pause", saver._TorchMemorySaverAdapterReal.pause)
    engine_patches.keep_host_copies()
    saver._TorchMemorySaverAdapterReal().pause("weights")
    assert paused == [("weights", True)]


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (None, ["slime-v3"] * 3),
        (BASE, None),
        ("slime-v2", ["slime-v2"] * 3),
        ([None, BASE, "slime-v2"], ["slime-v3", None, "slime-v2"]),
        ([BASE] * 3, None),
    ],
)
def test_each_request_of_a_batch_gets_what_it_names(asked: Any, given: Any) -> None:
    cpu_standins.install()
    from sglang.srt.managers.io_struct import GenerateReqInput

    live = engine_patches.LiveAdapter()
    live.names = {None: "slime-v3"}
    batch = GenerateReqInput(input_ids=[[1, 2]] * 3, lora_path=asked)
    batch.normalize_batch_and_arguments()
    parts = [batch[number] for number in range(3)]
    live.give_to(batch, batch.lora_path)
    assert batch.lora_path == given
    assert [part.lora_path for part in parts] == (given or [None] * 3)
    single = GenerateReqInput(input_ids=[1, 2], lora_path=None)
    single.normalize_batch_and_arguments()
    live.give_to(single, single.lora_path)
    assert single.lora_path == "slime-v3"
