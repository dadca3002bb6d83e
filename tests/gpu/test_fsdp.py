"""FSDP2 in bfloat16 on one GPU: deterministic runs repeat bit by bit; with CPU offload it learns the same; needs CUDA.

python -m pytest -q -s tests/gpu/test_fsdp.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.utils.misc import listen_anywhere
from tests.integration.trainer_world import make_train_data, trainer_args
from tests.unit.megatron_fakes import make_hf_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 4}
NUM_STEPS = 3
Found = tuple[list[Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp") / "hf"
    make_hf_model(path, **SIZES)
    return path


def run(model: Path, out: Path, *, accelerator: str = "cuda", flags: str = "", **own: Any) -> Found:
    """(records, weights before, weights after) of a few steps in a fresh process."""
    common = {"lr": 1e-3, "fsdp_min_group_params": 1, "max_tokens_per_gpu": 24, "recompute_old_log_probs": True}
    args = trainer_args(
        model, f"--adam-eps 1e-5 {flags}", accelerator=accelerator, train_backend="fsdp", **common | own
    )
    with listen_anywhere("127.0.0.1") as listener:
        torch.multiprocessing.spawn(_rank, (listener, args, out), nprocs=1)
    found: Found = torch.load(out)
    return found


def _rank(_: int, listener: Any, args: Any, out: Path) -> None:
    from slime.backends.fsdp_utils.actor import FsdpTrainActor
    from slime.ray.rollout.shares import split_train_data

    actor = FsdpTrainActor(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=listener)
    actor.init()

    def whole() -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in actor.backend.named_weights()}

    (share,) = split_train_data(args, make_train_data(), {"dp_size": 1, "cp_size": 1})
    before = whole()
    records = [record for step in range(NUM_STEPS) for record, _ in actor.train_on(step, dict(share))]
    torch.save((records, before, whole()), out)
    actor.shutdown()


def test_a_deterministic_run_repeats_bit_by_bit(model: Path, tmp_path: Path) -> None:
    first, second = (run(model, tmp_path / f"{i}.pt", flags="--deterministic-mode") for i in range(2))
    assert first[0] == second[0]
    assert all(first[2][name].equal(second[2][name]) and not first[1][name].equal(first[2][name]) for name in first[2])


@pytest.mark.parametrize("granularity", ["", "--recompute-granularity full"])
def test_what_lies_in_host_memory_learns_as_what_lies_on_the_gpu(
    model: Path, tmp_path: Path, granularity: str
) -> None:
    on_gpu = run(model, tmp_path / "gpu.pt")
    offloaded = run(model, tmp_path / "cpu.pt", flags=granularity, fsdp_cpu_offload=True)
    for theirs, ours in zip(on_gpu[0], offloaded[0], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-2, abs=1e-4)  # weights of bf16 differ in a last digit
    moved = {name: after - on_gpu[1][name] for name, after in on_gpu[2].items()}
    gap = sum(float((offloaded[2][name] - after).square().sum()) for name, after in on_gpu[2].items())
    assert 0 < (gap / sum(float(update.square().sum()) for update in moved.values())) ** 0.5 < 2e-2
