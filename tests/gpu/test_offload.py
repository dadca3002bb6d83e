"""A trainer that sleeps leaves its GPU, and wakes up as it was; needs a GPU, and a second one for its second case.

    python -m pytest -q -s tests/gpu/test_offload.py

Each rank is a process of its own under torch_memory_saver, as Ray starts it: this file, run as a program. The model is
random, of 0.3 B parameters: with gradients and Adam's state 5 GB, more than the context that a sleeping process keeps.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16}
SIZES |= {"num_key_value_heads": 8, "head_dim": 128, "vocab": 32000}
CYCLES, GB = 3, 1e9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.unit.megatron_fakes import make_hf_model

    path = tmp_path_factory.mktemp("offload") / "hf"
    make_hf_model(path, **SIZES)
    return path


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_sleeps_on_less_than_3_gb_and_wakes_up_bit_by_bit_as_it_was(model: Path, world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    from slime.utils.accelerator import memory_saver
    from slime.utils.misc import listen_anywhere

    listener = listen_anywhere()
    port = listener.getsockname()[1]
    listener.close()
    env = os.environ | memory_saver.environment(os.environ) | {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(model), str(rank), str(world_size), str(port)],
            env=env | {"CUDA_VISIBLE_DEVICES": visible_gpus()[rank]},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        found = [json.loads(rank.communicate(timeout=400)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, of_rank in enumerate(found):
        print(f"\n{world_size} GPU(s), rank {rank}: {of_rank}")
        assert of_rank["unchanged"] == [True] * CYCLES, "weights, masters and Adam's moments"
        assert all(used < 3 for used in of_rank["asleep_gb"]) and of_rank["awake_gb"] > 5 / world_size
        assert max(of_rank["asleep_gb"]) - min(of_rank["asleep_gb"]) < 0.1, "a sleep leaves something behind"
        assert of_rank["outside"] == 7.0, "what is allocated outside the saver stays where it is"
        before, after = of_rank["grad_norms"]
        assert 0 < after == pytest.approx(before, rel=1e-3), "it trains on as before"


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def used_gb() -> float:
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GB


def tensors_of(actor: Any) -> list[torch.Tensor]:
    """Weights, the optimizer's fp32 masters and its moments, on the host."""
    state = [value for chunk in actor.state.model for value in chunk.parameters()]
    for optimizer in getattr(actor.state.optimizer, "chained_optimizers", [actor.state.optimizer]):
        state += [value for group in optimizer.optimizer.param_groups for value in group["params"]]
        for moments in optimizer.optimizer.state.values():
            state += [value for value in moments.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().cpu() for tensor in state]


def train_as_rank(model: Path, rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Train on the same data before and after some sleeps, at a learning rate of 0: the gradients have to agree."""
    from slime.backends.megatron_utils import megatron_patch

    megatron_patch.apply("cuda")
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.ray.rollout.shares import split_train_data
    from slime.utils.accelerator.memory_saver import outside_saver
    from tests.integration.trainer_world import make_train_data, trainer_args

    flags = f"--tensor-model-parallel-size {world_size}" + " --sequence-parallel" * (world_size > 1)
    changes = {"accelerator": "cuda", "offload_train": True, "max_tokens_per_gpu": 512, "lr": 0.0}
    args = trainer_args(model, flags, **changes)
    where = {"rank": rank, "world_size": world_size, "master_addr": "127.0.0.1", "master_port": port}
    actor = MegatronTrainActor(args, **where)
    actor.init()

    def train(rollout_id: int) -> float:
        share = split_train_data(args, make_train_data(), actor.parallel_config())[0]
        records = actor.train_on(rollout_id, share)
        return next(metrics["train/grad_norm"] for metrics, key in records if key == "train/step")

    first = train(0)  # it makes the optimizer's state, too
    gc.collect()
    gc.freeze()  # as slime.ray.train_actor does: a sleep collects garbage, and need not look at what the imports made
    with outside_saver():
        outside = torch.full((1 << 20,), 7.0, device="cuda")
    found: dict[str, Any] = {"unchanged": [], "asleep_gb": [], "sleep_s": [], "wake_up_s": [], "awake_gb": used_gb()}
    for _ in range(CYCLES):
        before, begin = tensors_of(actor), time.monotonic()
        actor.sleep()
        slept = time.monotonic()
        found["asleep_gb"].append(round(used_gb(), 3))
        found["outside"] = outside[0].item()  # a mean would need memory for its result, which sleeps
        woken = time.monotonic()
        actor.wake_up()
        found["wake_up_s"].append(round(time.monotonic() - woken, 3))
        found["sleep_s"].append(round(slept - begin, 3))
        pairs = zip(before, tensors_of(actor), strict=True)
        found["unchanged"].append(all(torch.equal(one, other) for one, other in pairs))
    found["grad_norms"] = [first, train(1)]
    return found


if __name__ == "__main__":
    result = train_as_rank(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    print(json.dumps(result), flush=True)
    os._exit(0)
