"""What integration tests share: a tiny model, and one real SGLang server on CPU for the whole session."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, build_server_args
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.ray.rollout.router import reserve_block
from tests.integration.launch import make_model

HOST = "127.0.0.1"


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two HF directories of the same shape with different random weights."""
    root = tmp_path_factory.mktemp("models")
    return make_model(root / "a", "--seed", 0), make_model(root / "b", "--seed", 1)


@pytest.fixture(scope="session")
def engine(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """A server that was started with the first of `tiny_models`, with seeded sampling.

    Tests may change its weights: one that relies on them loads them first.
    """
    running = make_engine(tiny_models[0], tmp_path_factory.mktemp("engine") / "engine_0.log")
    running.start(deadline_s=170)
    yield running
    running.shutdown()


def make_engine(
    model: Path, log_path: Path, *, accelerator: str = "cpu", num_gpus: int = 1, **overrides: object
) -> SGLangEngine:
    """A server that is not started yet, with seeded sampling."""
    args = Namespace(accelerator=accelerator, seed=1234, trust_remote_code=False, update_weights_in_flight=False)
    args.use_rollout_routing_replay = False
    args.params_dtype = "float32" if accelerator == "cpu" else "bfloat16"
    settings = {"enable_deterministic_inference": True, "max_total_tokens": 16384, **overrides}
    block = reserve_block(HOST)  # held until this process ends: nothing else takes the port meanwhile
    make_engine.blocks.append(block)  # type: ignore[attr-defined]
    place = EnginePlace(HOST, port=block[0], nccl_port=block[1], bootstrap_port=block[2], dist_init_port=block[4])
    kwargs = build_server_args(args, EngineSpec(0, str(model), num_gpus, settings=settings), place)
    return SGLangEngine(kwargs, rank=0, log_path=log_path, accelerator=accelerator, num_threads=1)


make_engine.blocks = []  # type: ignore[attr-defined]
