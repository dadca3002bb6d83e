"""The handle of a bucket that each engine rank gets, broadcasts and their announcement, buffers and samples."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.update_weight import from_distributed, from_tensor
from slime.backends.megatron_utils.update_weight.base import choose
from slime.backends.megatron_utils.update_weight.buckets import BucketBuffers
from slime.backends.megatron_utils.update_weight.engines import EngineFleet
from slime.backends.sglang_utils.weight_samples import agrees, describe, on_host, sample
from slime.config.rules.files import check_weight_update_equal


class RecordingEngine:
    """Takes whatever a transport gives it."""

    def __init__(self) -> None:
        self.handles: list[str] = []
        self.joined: tuple[int, int] | None = None

    def update_weights_from_tensor(self, handles: list[str], **keywords: object) -> str:
        self.handles = handles
        return str(keywords["weight_version"])

    def init_weights_update_group(self, address, port, rank_offset, world_size, name, backend) -> None:
        self.joined = (rank_offset, world_size)


@pytest.fixture
def engines_of_three_sizes() -> tuple[list[RecordingEngine], list[int]]:
    """One rank, then two, then four: groups of --sglang-config with sizes of their own."""
    return [RecordingEngine() for _ in range(3)], [1, 2, 4]


def test_every_rank_of_every_engine_gets_a_handle_of_its_own(engines_of_three_sizes, monkeypatch) -> None:
    engines, sizes = engines_of_three_sizes
    monkeypatch.setattr(
        from_tensor, "serialize_flat", lambda data, places, count: ([f"h{i}" for i in range(count)], None)
    )
    receivers, others = from_tensor.split_engines([0, 1, 3], sizes, num_ranks=0)
    fleet = EngineFleet(engines, deadline_s=5)
    transport = from_tensor.HandOver(fleet, receivers, buffer_size=8, keeps_buffers=True)
    posted = transport.post(transport.prepare([("w", torch.zeros(1))], slot=0), version="1")
    assert fleet.wait(posted.calls, "the load") == ["1", "1", "1"]
    assert [engine.handles for engine in engines] == [["h0"], ["h1", "h2"], ["h3", "h4", "h5", "h6"]]
    assert not others


def test_an_engine_rank_gets_the_handle_of_the_trainer_rank_on_its_gpu(engines_of_three_sizes) -> None:
    engines, sizes = engines_of_three_sizes
    receivers, others = from_tensor.split_engines([3, 1, 4], sizes, num_ranks=6)
    assert receivers == {0: [3], 1: [1, 2]}
    assert others == [2], "slots 4 to 7: two of them are behind the trainer's six"
    fleet = EngineFleet(engines, deadline_s=5).some([0, 1])
    transport = from_tensor.HandOver(fleet, receivers, buffer_size=8, keeps_buffers=True)
    assert transport.shares_memory
    posted = transport.post([[], ["of 1"], ["of 2"], ["of 3"], [], []], version="1")
    fleet.wait(posted.calls, "the load")
    assert [engine.handles for engine in engines] == [["of 3"], ["of 1", "of 2"], []]


@pytest.mark.parametrize("refused", ["before", "after"])
def test_where_ipc_is_refused_every_engine_gets_the_collective_on_gloo(
    engines_of_three_sizes, monkeypatch, caplog, refused
) -> None:
    engines, sizes = engines_of_three_sizes
    made = []
    monkeypatch.setattr(from_tensor.accelerator, "current_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(from_tensor, "ipc_refusal", lambda: "no such capability" if refused == "before" else None)
    monkeypatch.setattr(
        from_tensor,
        "CollectiveTransport",
        lambda fleet, sizes, **how: made.append((list(fleet.engines), sizes, how["backend"])),
    )
    updater = from_tensor.TensorWeightUpdater.__new__(from_tensor.TensorWeightUpdater)
    updater._fleet, updater.deadline_s = EngineFleet(engines, deadline_s=5), 5.0
    updater.args = SimpleNamespace(update_weight_buffer_size=8, offload_train=True)
    transports = updater.open(sizes)
    if refused == "before":
        assert made == [([0, 1, 2], [1, 2, 4], "gloo")], "NCCL takes no two ranks on one GPU"
        assert "CUDA IPC is refused (no such capability)" in caplog.text
    else:  # one trainer rank: it shares its GPU with the first engine alone
        assert made == [([1, 2], [2, 4], None)]
        assert isinstance(transports[0], from_tensor.HandOver)


def collective(fleet: EngineFleet, sizes: list[int]) -> from_distributed.CollectiveTransport:
    return from_distributed.CollectiveTransport(fleet, sizes, deadline_s=5.0, buffer_size=8, keeps_buffers=True)


def test_a_broadcast_is_announced_to_an_engine_when_it_has_answered_for_the_one_before(monkeypatch) -> None:
    """Two buckets are under way, and requests that are sent together may overtake each other."""
    import threading

    told, answers = [], [threading.Event(), threading.Event()]

    class Engine(RecordingEngine):
        def update_weights_from_distributed(self, names, dtypes, shapes, **keywords) -> str:
            told.append((names, dtypes, shapes, keywords["load_format"]))
            answers[len(told) - 1].wait(5)
            return str(keywords["weight_version"])

    sent = []
    monkeypatch.setattr(from_distributed, "init_process_group", lambda **keywords: None)
    monkeypatch.setattr(from_distributed, "process_group_backend", lambda: "gloo")
    done = SimpleNamespace(wait=lambda: True)
    monkeypatch.setattr(
        from_distributed.dist, "broadcast", lambda data, *how, **more: sent.append(data.clone()) or done
    )
    fleet = EngineFleet([Engine()], deadline_s=5)
    transport = collective(fleet, [1])
    odd, even = torch.arange(3, dtype=torch.uint8), torch.full((2, 3), 0.5)
    posted = [
        transport.post(transport.prepare([("odd", odd), ("even", even + slot)], slot=slot), version=f"1.{slot}")
        for slot in range(transport.num_slots)
    ]
    kind = (["even", "odd"], ["float32", "uint8"], [[2, 3], [3]], "flattened_bucket")
    assert not posted[1].calls[0].done() and told in ([], [kind])
    for slot, answer in enumerate(answers):
        answer.set()
        assert fleet.wait(posted[slot].calls, "the load") == [f"1.{slot}"]
        assert torch.equal(sent[slot][:24].view(torch.float32).view(2, 3), even + slot)
        assert torch.equal(sent[slot][24:], odd)
    assert told == [kind] * 2


def test_engines_of_several_sizes_have_ranks_side_by_side_in_the_group(engines_of_three_sizes, monkeypatch) -> None:
    engines, sizes = engines_of_three_sizes
    monkeypatch.setattr(from_distributed, "init_process_group", lambda **keywords: keywords["world_size"])
    monkeypatch.setattr(from_distributed, "process_group_backend", lambda: "gloo")
    transport = collective(EngineFleet(engines, deadline_s=5), sizes)
    assert transport._group == 1 + sum(sizes)
    assert [engine.joined for engine in engines] == [(1, 8), (2, 8), (4, 8)]


def test_a_buffer_holds_tensors_of_several_types_where_a_view_of_each_may_begin() -> None:
    buffers = BucketBuffers(2, 1 << 20, torch.device("cpu"))
    for number in range(2):  # the second time its layout is known
        tensors = [
            ("b", torch.arange(number, number + 3, dtype=torch.uint8)),
            ("f", torch.nn.Parameter(torch.randn(2, 5))),
            ("t", torch.randn(4, 3).T),
            ("h", torch.randn(7).bfloat16()),
            ("s", torch.tensor(float(number))),
            ("w", torch.randn(16, 16).to(torch.float8_e4m3fn)),  # a whole block, as nearly all are
        ]
        flat = buffers.fill(0, tensors)
        assert [name for name, *_ in flat.places] == ["w", "f", "t", "s", "h", "b"]
        assert flat.data.numel() == sum(tensor.nbytes for _, tensor in tensors), (
            "SGLang expects no gaps in a broadcast"
        )
        for name, shape, dtype, start in flat.places:
            tensor = dict(tensors)[name]
            assert (shape, dtype) == (tensor.shape, tensor.dtype)
            assert start % dtype.itemsize == 0
            assert torch.equal(
                flat.data[start : start + tensor.nbytes].view(dtype).view(shape).float(), tensor.float()
            )


def test_a_buffer_is_used_again_grows_for_a_larger_bucket_and_can_be_given_up() -> None:
    buffers = BucketBuffers(2, 1024, torch.device("cpu"))
    first = buffers.fill(0, [("w", torch.zeros(200))]).data
    assert first.untyped_storage().nbytes() == 1024, "nearly full: the next one may be a little larger"
    assert buffers.fill(0, [("w", torch.ones(256))]).data.data_ptr() == first.data_ptr()
    assert buffers.fill(1, [("w", torch.ones(200))]).data.data_ptr() != first.data_ptr()
    large = buffers.fill(0, [("w", torch.ones(1000))])
    assert large.data.numel() == 4000
    assert (
        BucketBuffers(1, 1 << 30, torch.device("cpu")).fill(0, [("w", torch.ones(1))]).data.untyped_storage().nbytes()
        == 4
    )
    buffers.release()
    assert buffers.fill(0, [("w", torch.full((2,), 3.0))]).data[:8].view(torch.float32).tolist() == [3.0, 3.0]


def test_a_check_against_other_weights_than_training_starts_from_is_refused(tmp_path) -> None:
    (sentence,) = check_weight_update_equal(load=str(tmp_path / "resumed"), hf_checkpoint=str(tmp_path))
    assert "--check-weight-update-equal compares with the weights of --hf-checkpoint" in sentence
    assert not [*check_weight_update_equal(load=f"{tmp_path}/", hf_checkpoint=str(tmp_path))]


def test_a_handful_of_tensors_that_engines_do_not_fuse_is_looked_at() -> None:
    layers = [
        f"model.layers.{i}.{name}.weight" for i in range(40) for name in ("self_attn.q_proj", "self_attn.o_proj")
    ]
    chosen = choose(["model.embed_tokens.weight", *layers, "model.norm.weight", "model.layers.0.mlp.gate.e_bias"])
    assert len(chosen) == 8
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= chosen
    assert not [name for name in chosen if "q_proj" in name]
    assert choose([]) == set()


def test_samples_of_several_types_are_fetched_at_once_and_stay_what_they_are() -> None:
    sent = [torch.arange(3, dtype=torch.uint8), torch.randn(5), torch.randn(7).bfloat16(), torch.randn(0)]
    for before, after in zip(sent, on_host(sent), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)
    assert on_host([]) == []


def test_a_sample_is_compared_in_the_type_that_the_engine_keeps() -> None:
    sent = torch.randn(64, 64)
    assert agrees((64, 64), sample(sent), describe((64, 64), sample(sent.bfloat16())))
    assert agrees((64, 64), sample(sent), describe((64, 64), sample(sent + 1))) is False
    assert agrees((64, 64), sample(sent), describe((64, 32), sample(sent))) is None, "cut over ranks"
    assert agrees((64, 64), sample(sent), describe((64, 64), sample(sent.to(torch.float8_e4m3fn)))) is None, (
        "quantised"
    )
