"""The weight sync to engines on GPUs of their own, beside what the link between the GPUs does.

    python benchmarks/gpu_multi_sync.py --layout 1+1                 one trainer and one engine GPU
    python benchmarks/gpu_multi_sync.py --layout 2+2                 both tensor parallel, 4 GPUs
    python benchmarks/gpu_multi_sync.py --layout ep2+tp2 --model 30B-A3B    experts over 2 GPUs, engine tensor parallel
    python benchmarks/gpu_multi_sync.py --way disk                   over files; --way delta: only what changed
    python benchmarks/gpu_multi_sync.py --way lora                   adapters of rank 32 alone
    python benchmarks/gpu_multi_sync.py --tiny --layout 1+1          on the CPU, over gloo

A short run of train.py, by default with the 4B shape (8.04 GB). Limit: broadcasts of 512 MiB from one process to
another on two of the same GPUs, measured in the same call. Target: median of the syncs, without the pause's drain, at
most 1.5 times the limit; adapters: at most 50 ms, packing and pause included. A shape with experts trains its last
norm alone, as two GPUs have no room for more; every weight is sent all the same. Over files there is no target: the
row says how many bytes were written, what share of the elements had changed after a step at lr 1e-6, and how long
engines were paused.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_lora import sync_row  # noqa: E402
from benchmarks.gpu_models import num_parameters, prepare_model  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    apart,
    folder_of,
    grpo_flags,
    make_parser,
    median_of,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
    settled,
)
from benchmarks.gpu_weight_sync import BYTES, PAUSE, SEND, SYNC  # noqa: E402
from slime.utils.misc import listen_anywhere  # noqa: E402

TARGET = 1.5
LAYOUTS = {"1+1": (1, 1), "2+2": (2, 2), "ep2+tp2": (2, 2)}
BROADCASTS = 8
WIRE, WRITE, DENSITY = (f"perf/update_weights_{what}" for what in ("wire_bytes", "write_time", "density"))


def main() -> None:
    parser = make_parser(__doc__, "gpu_multi_sync")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="1+1", help="trainer GPUs + engine GPUs")
    parser.add_argument("--way", choices=["nccl", "disk", "delta", "lora"], default="nccl")
    parser.add_argument("--model", default="4B", help="0.6B, 4B, or 30B-A3B:LAYERS with fewer than its 48 layers")
    parser.add_argument("--link-rank", type=int, help="used by the benchmark itself")
    parser.add_argument("--link-port", type=int, help="likewise")
    options = parse_options(parser)
    if options.link_rank is not None:
        print(json.dumps(broadcast_rate(options.link_rank, options.link_port, options.accelerator)))
        return
    options.model = options.model if not options.tiny else "tiny-moe" if options.layout == "ep2+tp2" else "tiny"
    options.benchmark = f"{options.benchmark}-{options.model}-{options.layout}-{options.way}"
    run = sync_run(options)
    if not run_train(run, options):
        sys.exit(report([not_measured("weight sync", options.layout, f"<= {TARGET}", "no complete run")], options))
    model = prepare_model(run.model, options.output / "models", device=options.accelerator)
    num_bytes = num_parameters(model) * BYTES[options.accelerator]
    series, shape = series_of(run, options), f"{run.model}, {num_bytes / 1e9:.2f} GB, {options.layout}"
    if options.way == "lora":
        sys.exit(report([sync_row(series, f"{run.model}, {options.layout}")], options))
    if options.way != "nccl":
        report([files_row(series, shape, options.way, num_bytes)], options)
        return
    sys.exit(report([judge(series, shape, num_bytes, link_rate(run, options))], options))


def sync_run(options: Namespace) -> Run:
    """A short run with trainer and engine apart."""
    trainers, engines = LAYOUTS[options.layout]
    prompts, samples, response, rollouts = (2, 2, 8, 5) if options.tiny else (8, 8, 128, 8)
    more = apart(options, trainers=trainers, engines=engines, tokens=4096)
    if options.layout == "ep2+tp2":
        more += ["--tensor-model-parallel-size", 1, "--expert-model-parallel-size", 2]
        more += ["--only-train-params-name-list", "final_layernorm"]
    name = f"apart-{options.model}-{options.layout}-{options.way}"
    more += way_flags(options.output / "runs" / name, options.way)
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=rollouts, more=more)
    return Run(name, options.model, flags)


def way_flags(folder: Path, way: str) -> list[Any]:
    """Flags of a sync of adapters, or over files; none for all weights over the link."""
    if way == "nccl":
        return []
    if way == "lora":
        return ["--lora-rank", 32]
    flags: list[Any] = ["--update-weight-transport", "disk", "--update-weight-disk-dir", folder / "versions"]
    if way == "delta":
        flags += ["--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", folder / "local"]
    return flags


def link_rate(run: Run, options: Namespace) -> float:
    """GB/s of broadcasts between two processes on two GPUs, measured once a run."""
    path = folder_of(run, options) / "link.json"
    if not path.is_file():
        listener = listen_anywhere("127.0.0.1")
        port = str(listener.getsockname()[1])
        listener.close()
        tiny = ["--tiny"] * options.tiny
        command = [sys.executable, __file__, *tiny, "--link-port", port, "--link-rank"]
        env = os.environ | {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
        other = subprocess.Popen([*command, "1"], env=env, stdout=subprocess.DEVNULL)
        found = subprocess.run([*command, "0"], env=env, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
        other.wait(60)
        path.write_text(found.stdout.splitlines()[-1])
    return float(json.loads(path.read_text()))


def broadcast_rate(rank: int, port: int, accelerator: str) -> float:
    """The best of some broadcasts from rank 0 to rank 1, GB/s."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    is_cuda = accelerator == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(minutes=3),
    )
    data = torch.ones(2**29 if is_cuda else 2**24, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(BROADCASTS):
        dist.barrier()
        begin = time.perf_counter()
        dist.broadcast(data, 0)
        if is_cuda:
            torch.cuda.synchronize()
        best = max(best, data.numel() / (time.perf_counter() - begin) / 1e9)
    dist.destroy_process_group()
    return best


def files_row(series: Series, shape: str, way: str, num_bytes: int) -> Row:
    """What a sync over files wrote and took; medians."""
    what = f"weight sync over files, {way}"
    values = [median_of(series, name) for name in (WIRE, WRITE, SEND)]
    if None in values:
        return not_measured(what, shape, "", f"the run did not log {WIRE}, {WRITE} and {SEND}")
    wire, write, send = (float(value or 0) for value in values)
    density = median_of(series, DENSITY)
    note = "" if density is None else f"{density:.2%} of the elements changed"
    figure = f"{wire / 1e9:.3f} GB, written in {write:.2f} s, engines paused for {send:.2f} s"
    return Row(what, shape, figure, f"{num_bytes / 1e9:.2f} GB, all weights", wire / num_bytes, "", True, note)


def judge(series: Series, shape: str, num_bytes: int, link_gb_s: float) -> Row:
    """The row of a run over the link."""
    what = "weight sync to GPUs of their own, without the pause"
    totals, pauses = settled(series, SYNC), settled(series, PAUSE)
    if not totals or len(totals) != len(pauses):
        return not_measured(what, shape, f"<= {TARGET}", f"the run did not log {SYNC} and {PAUSE} together")
    times = [total - pause for total, pause in zip(totals, pauses, strict=True)]
    seconds, limit = statistics.median(times), num_bytes / link_gb_s / 1e9
    note = f"{len(times)} syncs, {min(times):.3f} to {max(times):.3f} s; pause {statistics.median(pauses):.3f} s"
    return Row(
        what,
        shape,
        f"{seconds:.3f} s",
        f"{limit:.3f} s at {link_gb_s:.0f} GB/s, a broadcast",
        seconds / limit,
        f"<= {TARGET}",
        seconds <= TARGET * limit,
        note,
    )


if __name__ == "__main__":
    main()
