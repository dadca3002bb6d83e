"""Host memory while FSDP2 builds a model and loads its shards: the peak of each rank beside the bytes of its shards.

    python benchmarks/fsdp_load.py [--ranks 4]

A Qwen3-shaped model of 220 M parameters with random weights, on CPU. The model is built on the meta device and each
rank reads the rows of its own shards, so that the peak, over what the process had before, is at most 1.2 times these.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SIZES = "--layers 12 --hidden-size 1024 --ffn-size 3072 --heads 16 --kv-heads 8 --vocab-multiple 32768"
TARGET = 1.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes that share the model")
    options = parser.parse_args()
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  (what code takes is not counted)

    import slime.backends.fsdp_utils.actor  # noqa: F401
    from tests.integration.trainer_world import trainer_args
    from tests.unit.megatron_fakes import run_world

    with tempfile.TemporaryDirectory() as work:
        make = [sys.executable, f"{ROOT}/tools/make_tiny_model.py", "--output", f"{work}/model", *SIZES.split()]
        subprocess.run(make, check=True)
        run_world(options.ranks, load, trainer_args(Path(work) / "model", dp_size=options.ranks, train_backend="fsdp"))


def load(args: Any) -> None:
    """One rank."""
    import torch.distributed as dist

    from slime.backends.fsdp_utils.model import build_policy, make_mesh
    from slime.backends.fsdp_utils.optimizer import local
    from slime.backends.fsdp_utils.weights import load_hf, named_parameters

    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    policy = build_policy(args, make_mesh(args))
    load_hf(policy, args.load)
    peak = status("VmHWM") - before
    shards = sum(local(parameter).nbytes for _, parameter in named_parameters(policy))
    ratio = peak / shards
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()}: shards {shards / 2**20:.0f} MiB, peak {peak / 2**20:.0f} "
        f"MiB, {ratio:.2f} times (<= {TARGET}: {'holds' if ratio <= TARGET else 'does not hold'})",
        flush=True,
    )
    dist.barrier()


def status(name: str) -> int:
    """Bytes of a row of this process's /proc status."""
    rows = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
