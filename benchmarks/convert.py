"""How fast a checkpoint converts beside the disk's own speed of copying, and in how much memory.

    python benchmarks/convert.py                                  1.5 GB, three rounds
    python benchmarks/convert.py --gigabytes 0.2 --rounds 1       a quick look

The rules that must hold decide the status. It writes an HF checkpoint of random bf16 weights (Qwen3's shape) in
shards, then, each in a process of its own: copies it with `cp` and a sync, converts it to torch_dist, and that back to
HF. Rounds are interleaved and medians compared. A tool's seconds are those that it says itself, which the loading of
libraries is not in (it takes as long whatever the model); memory is the largest resident set that the kernel saw,
libraries in it. Bytes of the result must be those of the start.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MOST_MEMORY, LEAST_SPEED = 2.5, 0.5
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def tensor_shapes(num_layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """HF names and shapes of the model."""
    hidden, ffn = 1024, 3072
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}self_attn.q_proj.weight": (2048, hidden),
            f"{at}self_attn.k_proj.weight": (1024, hidden),
            f"{at}self_attn.v_proj.weight": (1024, hidden),
            f"{at}self_attn.o_proj.weight": (hidden, 2048),
            f"{at}self_attn.q_norm.weight": (128,),
            f"{at}self_attn.k_norm.weight": (128,),
            f"{at}mlp.gate_proj.weight": (ffn, hidden),
            f"{at}mlp.up_proj.weight": (ffn, hidden),
            f"{at}mlp.down_proj.weight": (hidden, ffn),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def make_checkpoint(path: Path, num_layers: int, vocab: int, shard_bytes: int) -> int:
    """Write the HF checkpoint; returns its bytes."""
    import torch

    from slime.utils.conversion.hf_output import HfTarget, Job, write_hf
    from slime.utils.conversion.raw_tensors import TensorInfo

    generator = torch.Generator().manual_seed(0)

    def job_of(name: str, shape: tuple[int, ...]) -> Job:
        info = TensorInfo(torch.bfloat16, shape)
        return Job({name: info}, lambda: [torch.randn(shape, generator=generator).to(torch.bfloat16)])

    jobs = [job_of(name, shape) for name, shape in tensor_shapes(num_layers, vocab).items()]
    config = CONFIG | {"num_hidden_layers": num_layers, "vocab_size": vocab}
    return write_hf(HfTarget(path=path, flag="--dir", config=config, shard_bytes=shard_bytes), jobs)


def apart(work: Callable[..., Any], *values: Any) -> Any:
    """work(*values) in a process of its own: Linux counts the memory of whoever starts a process as its, too."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, values)


def run(command: Sequence[str]) -> tuple[float, float]:
    """Seconds that a command says it took, or that it took, until its data were on the disk; MB of its memory."""
    os.sync()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        child = subprocess.Popen(command, env=environment, stdout=said, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        said.seek(0)
        errors.seek(0)
        if status:
            raise SystemExit(f"error: {' '.join(command)} failed: {errors.read()[-3000:]}")
        own = re.search(r" in ([\d.]+) s$", said.read(), re.MULTILINE)
    return float(own[1]) if own else seconds, usage.ru_maxrss / 1e3


def tool(name: str, *flags: str) -> list[str]:
    """The command line of one of tools/."""
    return [sys.executable, str(ROOT / "tools" / name), *flags]


def digest(directory: Path) -> str:
    """One number for all tensors of an HF directory, however they are spread over files."""
    from slime.utils.conversion.raw_tensors import RawTensors, bytes_of

    raw, total = RawTensors(directory), hashlib.sha256()
    for name in sorted(raw.file_of):
        total.update(name.encode())
        total.update(bytes_of(raw.read(name)))
    return total.hexdigest()


def ways(work: Path, shard_bytes: int) -> dict[str, list[str]]:
    """What is run on the checkpoint, in order."""
    hf, copied, dist, back = (work / name for name in ("model", "model_copy", "model_dist", "model_back"))
    copy = f"cp -r {hf} {copied} && sync {copied}/*"
    return {
        "copy": ["bash", "-c", copy],
        "HF to torch_dist": tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", str(hf), "--save", str(dist)),
        "torch_dist to HF": tool(
            "convert_torch_dist_to_hf.py",
            *("--input-dir", str(dist), "--origin-hf-dir", str(hf), "--output-dir", str(back)),
            *("--chunk-size", str(shard_bytes)),
        ),
    }


def measure(work: Path, shard_bytes: int) -> dict[str, tuple[float, float]]:
    """One round: (seconds, MB) of each way; what it wrote is removed, but for the HF directory that came out."""
    for suffix in ("_copy", "_dist", "_back"):
        shutil.rmtree(work / f"model{suffix}", ignore_errors=True)
    return {way: run(command) for way, command in ways(work, shard_bytes).items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 where a rule does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=ROOT / "models" / "convert_benchmark", help="scratch directory")
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2, help="shards of the checkpoint")
    args = parser.parse_args(argv)
    if args.dir.exists():
        raise SystemExit(f"error: --dir {args.dir} exists; it is removed at the end, so name a new one")
    args.dir.mkdir(parents=True)
    try:
        return compare(args.dir, args.gigabytes, args.rounds, args.shards)
    finally:
        shutil.rmtree(args.dir)


def compare(work: Path, gigabytes: float, rounds: int, num_shards: int) -> int:
    """Make both checkpoints, measure, print."""
    layer_bytes = 31.5e6
    vocab = int(min(151936, gigabytes * 1e9 / 4 / 2048))
    num_layers = max(1, round((gigabytes * 1e9 - vocab * 2048) / layer_bytes))
    shard_bytes = int(gigabytes * 1e9 / num_shards)
    apart(make_checkpoint, work / "model", num_layers, vocab, shard_bytes)
    sizes = [file.stat().st_size for file in (work / "model").glob("*.safetensors")]
    total, largest = sum(sizes), max(sizes)
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for way, result in measure(work, shard_bytes).items():
            found.setdefault(way, []).append(result)
    if apart(digest, work / "model") != apart(digest, work / "model_back"):
        print("error: the bytes that came back are not those of the start", file=sys.stderr)
        return 1
    print(f"{total / 1e9:.2f} GB, largest shard {largest / 1e6:.0f} MB, {rounds} round(s), bytes equal")
    copy_s = statistics.median(seconds for seconds, _ in found["copy"])
    holds = True
    for way, results in found.items():
        seconds = statistics.median(one for one, _ in results)
        memory = max(one for _, one in results)
        speed, shards = copy_s / seconds, memory * 1e6 / largest
        holds &= way == "copy" or (speed >= LEAST_SPEED and shards < MOST_MEMORY)
        row = {
            "way": way,
            "seconds": [round(one, 2) for one, _ in results],
            "MB/s": round(total / 1e6 / seconds),
            "of copy's speed": round(speed, 2),
            "peak MB": round(memory),
            "peak / largest shard": round(shards, 2),
        }
        print(json.dumps(row))
    print(
        f"speed >= {LEAST_SPEED} of the copy's and memory < {MOST_MEMORY} largest shards: {'holds' if holds else 'NO'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
