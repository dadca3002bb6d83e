"""An engine that has too little GPU memory at its start says which flag to change; needs a GPU and SGLang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine
from slime.ray.rollout.router import reserve_block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
ROOT = Path(__file__).resolve().parents[2]


def start_error(work: Path, fraction: float) -> str:
    model = work / "model"
    subprocess.run(
        [sys.executable, ROOT / "tools/make_tiny_model.py", "--output", model, "--head-dim", "64"], check=True
    )
    block = reserve_block("127.0.0.1")
    settings = {
        "model_path": str(model), "host": "127.0.0.1", "port": block[0], "nccl_port": block[1],
        "mem_fraction_static": fraction, "attention_backend": "triton", "sampling_backend": "pytorch",
        "disable_cuda_graph": True, "skip_server_warmup": True,
    }  # fmt: skip
    engine = SGLangEngine(settings, rank=0, log_path=work / "engine.log", accelerator="cuda")
    try:
        with pytest.raises(EngineStartError) as error:
            engine.start(deadline_s=240)
    finally:
        engine.shutdown()
    return str(error.value).splitlines()[0]


def test_a_fraction_that_holds_not_even_the_weights_says_what_to_raise_it_to(tmp_path: Path) -> None:
    assert "--sglang-mem-fraction-static 0.0001: of " in (line := start_error(tmp_path, 0.0001)), line
    assert "raise it to 0." in line


def test_a_gpu_that_another_process_holds_is_said_to_be_held(tmp_path: Path) -> None:
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free - 700 * 2**20, dtype=torch.uint8, device="cuda")
    try:
        line = start_error(tmp_path, 0.5)
    finally:
        del held
        torch.cuda.empty_cache()
    assert "ran out of GPU memory at its start" in line or "another process holds the GPU" in line, line
