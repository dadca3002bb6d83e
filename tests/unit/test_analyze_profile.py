"""tools/analyze_profile.py: on a small CUDA trace whose numbers follow from its times, and on a real CPU trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.observability.profiler import Profiler
from tools.analyze_profile import main
from tools.parts.kernel_traces import Gap, kind_of, length, merged, summarize


def event(
    name: str, cat: str, ts: float, dur: float, *, tid: int = 7, correlation: int | None = None
) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 0, "tid": tid, "args": args}


def cuda_trace(*, transfer_us: float = 60.0) -> dict[str, Any]:
    """Host: 0-5 and 100-105 launch. Device: gemm 10-50, silu 50-60, [idle], gemm 115-155, nccl from 135, Adam 300-310.

    Adam was launched at 200, and starts when another stream lets it.
    """
    host = [
        event("aten::mm", "cpu_op", 0, 8),
        event("cudaLaunchKernel", "cuda_runtime", 1, 4, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 6, 1, correlation=2),
        event("aten::item", "cpu_op", 70, 30),
        event("cudaLaunchKernel", "cuda_runtime", 100, 5, correlation=3),
        event("cudaLaunchKernel", "cuda_runtime", 106, 1, correlation=4),
        event("cudaLaunchKernel", "cuda_runtime", 199, 1, correlation=5),
        {"ph": "M", "name": "process_name"},
        event("rollout", "user_annotation", 0, 5000),
    ]
    device = [
        event("nvjet_tst_128x256", "kernel", 10, 40, correlation=1),
        event("triton_poi_fused_silu_mul_0", "kernel", 50, 10, correlation=2),
        event("nvjet_tst_128x256", "kernel", 115, 40, correlation=3),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 135, transfer_us, tid=20, correlation=4),
        event("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "kernel", 300, 10, correlation=5),
    ]
    return {"traceEvents": host + device, "distributedInfo": {"rank": 0}}


def write(path: Path, content: Any) -> Path:
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def shown(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    assert main([str(part) for part in argv]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_busy_idle_and_exposed_time_follow_from_the_intervals() -> None:
    found = summarize(cuda_trace())
    assert found.is_device
    assert found.span_us == 310
    assert found.busy_us == (60 - 10) + (195 - 115) + (310 - 300)
    assert found.idle_us == 10 + 55 + 105
    assert found.communication_us == 60
    assert found.exposed_us == 195 - 155, "the first 20 are behind the second product"
    assert {kind: (total.us, total.count) for kind, total in found.kinds.items()} == {
        "matrix products": (80, 2),
        "communication": (60, 1),
        "norms, rotation, activations, loss": (10, 1),
        "optimizer": (10, 1),
    }
    assert list(found.names)[0] == "nvjet_tst_128x256"


def test_idle_time_is_host_bound_until_the_next_kernel_is_launched() -> None:
    found = summarize(cuda_trace())
    assert found.gaps == [
        Gap(195, 105, 200 - 195, "multi_tensor_apply_kernel<FusedAdamMathFunctor>", "Python"),
        Gap(60, 55, 105 - 60, "nvjet_tst_128x256", "aten::item"),
        Gap(0, 10, 5, "nvjet_tst_128x256", "aten::mm"),
    ]
    assert found.host_bound_us == 5 + 45 + 5


def test_time_after_the_last_kernel_is_host_bound() -> None:
    content = cuda_trace()
    content["traceEvents"].append(event("aten::to", "cpu_op", 310, 90))
    found = summarize(content, num_gaps=2)
    assert found.span_us == 400
    assert found.gaps[1] == Gap(310, 90, 90, "", "aten::to")


def test_a_trace_without_gpu_counts_self_times_of_operators(tmp_path: Path) -> None:
    nested = [
        event("aten::linear", "cpu_op", 0, 100),
        event("aten::mm", "cpu_op", 10, 60),
        event("aten::add", "cpu_op", 100, 20),
        event("aten::mm", "cpu_op", 0, 30, tid=8),
    ]
    found = summarize({"traceEvents": nested})
    assert not found.is_device and found.gaps == []
    assert {name: total.us for name, total in found.names.items()} == {
        "aten::mm": 60 + 30,
        "aten::linear": 100 - 60,
        "aten::add": 20,
    }
    assert found.busy_us == 120


def test_a_real_trace_of_a_cpu_shows_its_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler(tmp_path, rank=0, targets=["train_actor"], rollouts=range(1))
    weight = torch.randn(256, 256, requires_grad=True)
    with profiler.record("train_actor", 0):
        for _ in range(3):
            (torch.randn(64, 256) @ weight).square().mean().backward()
    text = shown(capsys, "--profile-dir", tmp_path, "--top-n", 5)
    assert "rollout_0_train_actor_rank_0.json.gz" in text
    products = next(line for line in text.splitlines() if line.startswith("matrix products"))
    assert int(products.split()[-1]) >= 6, "forward and backward of three passes"


def test_the_tables_show_kinds_kernels_gaps_and_transfers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rollout_1_train_actor_rank_0.json.gz", cuda_trace())
    text = shown(capsys, "--profile-dir", tmp_path)
    assert "busy 45.2%, idle 54.8%" in text, "140 and 170 of 310"
    assert "host-bound (the GPU waited for a launch): 17.7%" in text, "55 of 310"
    assert "33.3% of it hidden behind computation; exposed 12.9%" in text, "20 of 60; 40 of 310"
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert lines["matrix products"][-3:] == ["0.080", "50.0%", "2"]
    assert "nvjet_tst_128x256" in text and "aten::item" in text
    assert "nvjet" not in shown(capsys, "--profile-dir", tmp_path, "--top-n", 0).split("idle from")[0]


def test_ranks_are_compared_and_the_one_that_waits_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, transfer_us in ((0, 60.0), (1, 90.0)):
        path = tmp_path / f"rollout_1_train_actor_rank_{rank}.json"
        write(path, cuda_trace(transfer_us=transfer_us))
    table = shown(capsys, "--profile-dir", tmp_path, "--all-ranks").split("rank_*.json: 2 ranks")[1]
    rows = [line.split() for line in table.splitlines() if line[:4].strip().isdigit()]
    assert [(row[0], row[-3], row[-1]) for row in rows] == [("0", "0.060", "0.000"), ("1", "0.090", "0.030")]
    only = shown(capsys, "--profile-dir", tmp_path, "--rank", 1)
    assert "rank_1.json" in only and "rank_0.json" not in only
    assert "rank_0.json" in shown(capsys, "--profile-dir", tmp_path), "the lowest, if none is named"


def test_the_rank_of_a_trace_without_a_telling_name_is_what_torch_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "mine.json", cuda_trace() | {"distributedInfo": {"rank": 3}})
    assert "mine.json" in shown(capsys, "--profile-dir", tmp_path, "--rank", 3)
    write(tmp_path / "1763735000.5-TP-1-DECODE.trace.json.gz", cuda_trace())
    assert "DECODE" in shown(capsys, "--profile-dir", tmp_path, "--rank", 1)


@pytest.mark.parametrize(
    ("file", "argv", "says"),
    [
        (None, [], "holds no"),
        (b"nonsense", [], "no trace of torch's profiler"),
        (gzip.compress(b"{}")[:12], [], "no trace of torch's profiler"),
        (b'{"a": 1}', [], "no list of traceEvents"),
        (b'{"traceEvents": []}', [], "nothing ran"),
        (json.dumps(cuda_trace()).encode(), ["--rank", "4"], "--rank 4"),
        (json.dumps(cuda_trace()).encode(), ["--rank", "0", "--all-ranks"], "drop one"),
        (json.dumps(cuda_trace()).encode(), ["--top-n", "-1"], "--top-n -1"),
    ],
    ids=["no file", "no JSON", "cut off", "a table", "no events", "no such rank", "two choices of ranks", "top -1"],
)
def test_what_cannot_be_analysed_is_said_in_one_sentence(
    file: bytes | None, argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if file is not None:
        (tmp_path / "a_rank_0.json").write_bytes(file)
    text = shown(capsys, "--profile-dir", tmp_path, *argv, status=2)
    assert says in text and len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16", "communication"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("fused_moe_kernel", "experts"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("aten::addmm_", "matrix products"),
        ("aten::mmap_", "elementwise and sums"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "elementwise and sums"),
        ("triton_red_fused_rms_norm_3", "norms, rotation, activations, loss"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("my_own", "other"),
    ],
)
def test_kernels_are_sorted_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_merged_intervals_cover_the_same_moments_once(pairs: list[tuple[int, int]]) -> None:
    intervals = np.array([(start, start + took) for start, took in pairs], dtype=np.float64).reshape(-1, 2)
    moments = {moment for start, took in pairs for moment in range(start, start + took)}
    found = merged(intervals)
    assert length(found) == len(moments)
    assert (found[1:, 0] > found[:-1, 1]).all()
