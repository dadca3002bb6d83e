"""How fast a checkpoint converts beside the disk's own speed of copying, and in how much memory.

    python benchmarks/convert.py                                  1.5 GB, three rounds, every way
    python benchmarks/convert.py --gigabytes 0.2 --rounds 1       a quick look
    python benchmarks/convert.py --ways "HF to int4 by GPTQ" --gigabytes 0.3 --rounds 1

The rules that must hold decide the status: every way but GPTQ (which holds a layer, and what the samples are in it)
keeps to the memory, and those between HF and torch_dist to the speed, too (most others compute). It writes an HF
checkpoint of random bf16 weights (Qwen3's shape) in shards, the same as FSDP saves it, and a GGUF file in Q8_0; then,
each in a process of its own, in rounds, for every way copies it with `cp` and a sync, then converts it, and compares
the medians of both. A tool's seconds are those that it says itself, which the loading of libraries is not in (it takes
as long whatever the model); memory is the largest resident set that the kernel saw, libraries in it. What came back
from torch_dist and from FSDP must be the bytes of the start.
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

MOST_MEMORY, LEAST_SPEED = 2.5, 0.2
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

    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import HfTarget, Job, write_hf

    generator = torch.Generator().manual_seed(0)

    def job_of(name: str, shape: tuple[int, ...]) -> Job:
        info = TensorInfo(torch.bfloat16, shape)
        return Job({name: info}, lambda: [torch.randn(shape, generator=generator).to(torch.bfloat16)])

    jobs = [job_of(name, shape) for name, shape in tensor_shapes(num_layers, vocab).items()]
    config = CONFIG | {"num_hidden_layers": num_layers, "vocab_size": vocab}
    return write_hf(HfTarget(path=path, flag="--dir", config=config, shard_bytes=shard_bytes), jobs)


def make_fsdp(hf: Path, path: Path) -> None:
    """Write the weights of an HF directory as FSDP saves a model."""
    import torch.distributed.checkpoint as torch_checkpoint

    from slime.conversion.reader import RawTensors

    raw = RawTensors(hf)
    writer = torch_checkpoint.FileSystemWriter(path, thread_count=4)
    torch_checkpoint.save(
        {f"model.{name}": raw.read(name) for name in raw.file_of}, storage_writer=writer, no_dist=True
    )


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
}


def make_gguf(path: Path, num_layers: int, vocab: int) -> None:
    """Write a GGUF file of such a model with random values, matrices in Q8_0."""
    import gguf
    import numpy

    writer, random = gguf.GGUFWriter(path, "qwen3"), numpy.random.default_rng(0)
    for key, value in {
        **{"context_length": 40960, "embedding_length": 1024, "block_count": num_layers, "feed_forward_length": 3072},
        **{"head_count": 16, "head_count_kv": 8, "key_length": 128, "value_length": 128, "rope_freq_base": 1e6},
        **{"layer_norm_rms_eps": 1e-6, "vocab_size": vocab, "eos_token_id": 0, "bos_token_id": 0},
    }.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", "aba", *(f"t{i}" for i in range(4, vocab))])
    writer.add_token_merges(["a b", "ab a"])
    shapes = {}
    for name, shape in tensor_shapes(num_layers, vocab).items():
        for hf_name, gguf_name in GGUF_NAMES.items():
            name = name.replace(hf_name, gguf_name)
        shapes[name] = shape
        is_matrix, rows = len(shape) > 1, shape[0]
        stored = (rows, shape[1] // 32 * 34) if is_matrix else shape
        kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else gguf.GGMLQuantizationType.F32
        dtype = numpy.dtype(numpy.uint8 if is_matrix else numpy.float32)
        writer.add_tensor_info(name, stored, dtype, int(numpy.prod(stored)) * dtype.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for shape in shapes.values():
        if len(shape) == 1:
            writer.write_tensor_data(numpy.ones(shape, numpy.float32))
            continue
        blocks = random.integers(0, 256, (shape[0], shape[1] // 32, 34), numpy.uint8)  # an fp16 scale, and 32 values
        blocks[..., :2] = numpy.array([0.01], numpy.float16).view(numpy.uint8)
        writer.write_tensor_data(blocks)
    writer.close()


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
        spoken = said.read(), errors.read()
    if status:
        raise SystemExit(f"error: {' '.join(command)} failed: {spoken[1][-3000:]}")
    # Its last line says it, or its bar at the end.
    own = re.search(r" in ([\d.]+) s$", spoken[0], re.MULTILINE) or re.search(r", in ([\d.]+) s\]", spoken[1])
    return float(own[1]) if own else seconds, usage.ru_maxrss / 1e3


def tool(name: str, *flags: str) -> list[str]:
    """The command line of one of tools/."""
    return [sys.executable, str(ROOT / "tools" / name), *flags]


def digest(directory: Path) -> str:
    """One number for all tensors of an HF directory, however they are spread over files."""
    from slime.conversion.reader import RawTensors, bytes_of

    raw, total = RawTensors(directory), hashlib.sha256()
    for name in sorted(raw.file_of):
        total.update(name.encode())
        total.update(bytes_of(raw.read(name)))
    return total.hexdigest()


WITH_SPEED = ("HF to torch_dist", "torch_dist to HF")
SAME_BYTES = {"torch_dist to HF": "back", "FSDP to HF": "of_fsdp"}
OF_LONG = "HF to int4 by GPTQ"


def ways(work: Path, shard_bytes: int) -> dict[str, list[str]]:
    """What is run on the checkpoint, in order; what one writes others read."""
    hf, gguf = str(work / "model"), str(work / "model.gguf")
    copied, dist, back, fp8, int4, gptq = (f"{hf}_{name}" for name in ("copy", "dist", "back", "fp8", "int4", "gptq"))
    fsdp, shards = f"{hf}_fsdp", ("--shard-bytes", str(shard_bytes))
    origin = ("--origin-hf-dir", hf, "--chunk-size", str(shard_bytes))
    to_bf16 = "convert_k2_thinking_int4_to_bf16.py"
    calibrated = (
        "--data-dir",
        str(work / "rows.jsonl"),
        "--num-calibration-samples",
        "16",
        "--max-sequence-length",
        "256",
    )
    return {
        "copy": ["bash", "-c", f"cp -r {hf} {copied} && sync {copied}/*"],
        "HF to torch_dist": tool("convert_hf_to_torch_dist.py", "--hf-checkpoint", hf, "--save", dist),
        "torch_dist to HF": tool("convert_torch_dist_to_hf.py", "--input-dir", dist, "--output-dir", back, *origin),
        "FSDP to HF": tool("convert_fsdp_to_hf.py", "--input-dir", fsdp, "--output-dir", f"{hf}_of_fsdp", *origin),
        "GGUF to HF": tool(
            "convert_gguf_to_hf.py", "--gguf", gguf, "--output", f"{hf}_of_gguf", "--dtype", "bfloat16", *shards
        ),
        "HF to fp8": tool("convert_hf_to_fp8.py", "--model-dir", hf, "--save-dir", fp8, *shards),
        "fp8 to HF": tool(
            "fp8_cast_bf16.py", "--input-fp8-hf-path", fp8, "--output-bf16-hf-path", f"{hf}_of_fp8", *shards
        ),
        "HF to int4": tool("convert_hf_to_int4_direct.py", "--model-dir", hf, "--save-dir", int4, *shards),
        "int4 to HF": tool(to_bf16, "--model-dir", int4, "--output-dir", f"{hf}_of_int4", *shards),
        OF_LONG: tool("convert_hf_to_int4.py", "--input-dir", hf, "--output-dir", gptq, *shards, *calibrated),
    }


def measure(work: Path, shard_bytes: int, chosen: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """One round: (seconds, MB, seconds of the copy just before) of each way.

    What the round before wrote is removed first. The disk's speed swings within minutes, so that every way has a copy
    of its own to be compared with.
    """
    for old in work.glob("model_*"):
        if old.name != "model_fsdp":
            shutil.rmtree(old)
    copy, found = ways(work, shard_bytes)["copy"], {}
    for way in chosen:
        shutil.rmtree(work / "model_copy", ignore_errors=True)
        copied = run(copy)
        found[way] = (*run(ways(work, shard_bytes)[way]), copied[0])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 where a rule does not hold."""
    names = list(ways(Path(), 0))[1:]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=ROOT / "models" / "convert_benchmark", help="scratch directory")
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=2, help="shards of the checkpoint")
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=names,
        default=[name for name in names if name != OF_LONG],
        help="what to measure (default: all but GPTQ, which takes minutes); some read what others write",
    )
    args = parser.parse_args(argv)
    if args.dir.exists():
        raise SystemExit(f"error: --dir {args.dir} exists; it is removed at the end, so name a new one")
    args.dir.mkdir(parents=True)
    try:
        return compare(args.dir, args.gigabytes, args.rounds, args.shards, args.ways)
    finally:
        shutil.rmtree(args.dir)


def make_inputs(work: Path, num_layers: int, vocab: int, shard_bytes: int, chosen: Sequence[str]) -> None:
    """Write what the ways read, each in a process of its own."""
    apart(make_checkpoint, work / "model", num_layers, vocab, shard_bytes)
    if "FSDP to HF" in chosen:
        apart(make_fsdp, work / "model", work / "model_fsdp")
    if "GGUF to HF" in chosen:
        apart(make_gguf, work / "model.gguf", num_layers, vocab)
    if OF_LONG in chosen:
        apart(make_samples, work / "model", work / "rows.jsonl")


def make_samples(hf: Path, path: Path) -> None:
    """Write a tokenizer into an HF directory, and samples of more tokens than are taken."""
    from tools.make_tiny_model import build_tokenizer

    build_tokenizer().save_pretrained(hf)
    path.write_text("".join(json.dumps({"text": f"{i} + {i * i} = {i + i * i} " * 512}) + "\n" for i in range(16)))


def compare(work: Path, gigabytes: float, rounds: int, num_shards: int, chosen: Sequence[str]) -> int:
    """Make the checkpoints, measure, print."""
    layer_bytes = 31.5e6
    vocab = int(min(151936, gigabytes * 1e9 / 4 / 2048))
    num_layers = max(1, round((gigabytes * 1e9 - vocab * 2048) / layer_bytes))
    shard_bytes = int(gigabytes * 1e9 / num_shards)
    make_inputs(work, num_layers, vocab, shard_bytes, chosen)
    sizes = [file.stat().st_size for file in (work / "model").glob("*.safetensors")]
    total, largest = sum(sizes), max(sizes)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for way, result in measure(work, shard_bytes, chosen).items():
            found.setdefault(way, []).append(result)
    same = [name for way, name in SAME_BYTES.items() if way in chosen]
    if {apart(digest, work / f"model_{name}") for name in same} - {apart(digest, work / "model")}:
        print("error: the bytes that came back are not those of the start", file=sys.stderr)
        return 1
    print(f"{total / 1e9:.2f} GB, largest shard {largest / 1e6:.0f} MB, {rounds} round(s), bytes equal: {same}")
    holds = True
    for way, results in found.items():
        seconds, memory, copies = zip(*results, strict=True)
        speed = statistics.median(copies) / statistics.median(seconds)
        shards = max(memory) * 1e6 / largest
        holds &= (way == OF_LONG or shards < MOST_MEMORY) and (way not in WITH_SPEED or speed >= LEAST_SPEED)
        row = {
            "way": way,
            "seconds": [round(one, 2) for one in seconds],
            "of the copies": [round(one, 2) for one in copies],
            "MB/s": round(total / 1e6 / statistics.median(seconds)),
            "of copy's speed": round(speed, 2),
            "peak MB": round(max(memory)),
            "peak / largest shard": round(shards, 2),
        }
        print(json.dumps(row))
    print(
        f"memory < {MOST_MEMORY} largest shards, between HF and torch_dist speed >= {LEAST_SPEED} of the copy's: "
        f"{'holds' if holds else 'NO'}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
