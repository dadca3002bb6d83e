"""The command `slime`.

slime view DIR...           pages over runs: docs/dashboard.md
slime runs DIR...           the same runs in the terminal, a line each
slime init DIR              write a task of your own, to be changed: docs/start/own_generate.md
slime train FLAG...         train.py; `train-async` is train_async.py
slime plan FLAG...          train.py --dry-run: the plan of a run, nothing is started
slime convert WAY FLAG...   a checkpoint into another form: docs/conversion.md
slime doctor                is this machine ready? A line for each thing, with the remedy
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer

from slime.dashboard.address import LOOPBACK, lines_for_user, listen, new_token
from slime.processes.directories import ROOT
from slime.processes.progress import host_memory

WAYS = {
    "hf-to-megatron": "convert_hf_to_torch_dist.py",
    "megatron-to-hf": "convert_torch_dist_to_hf.py",
    "fsdp-to-hf": "convert_fsdp_to_hf.py",
    "hf-to-fp8": "convert_hf_to_fp8.py",
    "fp8-to-bf16": "fp8_cast_bf16.py",
    "hf-to-int4": "convert_hf_to_int4_direct.py",
    "gguf-to-hf": "convert_gguf_to_hf.py",
    "merge-lora": "convert_lora.py",
}
PACKAGES = ("torch", "transformers", "ray", "sglang", "megatron-core")
LEAST_DISK, LEAST_SHARED, LEAST_MEMORY = 10, 1, 6  # GB
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="slime: RL post-training of language models.",
)


@app.callback()
def slime() -> None:
    """slime: RL post-training of language models."""


@app.command()
def view(
    directories: Annotated[list[Path], typer.Argument(help="--output-dir of runs, or directories of them")],
    port: Annotated[int, typer.Option(help="0: a free one", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="address to listen on")] = LOOPBACK,
) -> None:
    """Serve pages over runs: while they run, and after they ended or crashed. Nothing is written."""
    from slime.dashboard.app import make_app, serve  # `slime --help` needs no server

    _check(directories)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise typer.BadParameter(f"--host {host} --port {port} cannot be used: {error.strerror}") from None
    token = new_token()
    for line in lines_for_user(host, listening.getsockname()[1], token):
        typer.echo(line)
    serve(make_app(directories), listening, token=token, host=host)


@app.command()
def runs(
    directories: Annotated[list[Path], typer.Argument(help="--output-dir of runs, or directories of them")],
) -> None:
    """List runs: how each stands, rollouts done, newest reward, alarms of the last rollouts."""
    from slime.dashboard.pages import overview
    from slime.dashboard.runs import EVENTS_FILE, METRICS_FILE, Library

    _check(directories)
    for run in Library(directories).runs():
        if not any((run.directory / name).exists() for name in (METRICS_FILE, EVENTS_FILE)):
            raise typer.BadParameter(
                f"{run.directory} holds no run ({METRICS_FILE} or {EVENTS_FILE}), nor does a directory in it; "
                "name the --output-dir of a run, or a directory of them"
            )
        run.refresh()
        line = overview(run)
        done = f"{line['rollout']}/{line['num_rollout'] or '?'}"
        reward = "-" if line["reward"] is None else f"{line['reward']:.3f}"
        typer.echo(f"{line['status']:9} {done:>11}  reward {reward:>7}  alarms {line['alarms']}  {run.directory}")


@app.command()
def init(directory: Annotated[Path, typer.Argument(help="directory to make")]) -> None:
    """Write a complete task of your own: data, generate, reward, filter, settings and run script."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise typer.BadParameter(f"{directory} exists and is not empty; name a new directory")
    installed = Path(__file__).parent / "template"
    template = installed if installed.is_dir() else ROOT / "examples" / "bring_your_own_task"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("make_data.py", "task.py", "settings.yaml", "run.sh"):
            text = (template / name).read_text().replace("python examples/bring_your_own_task/", "python ")
            text = text.replace("$here/../..", str(ROOT)).replace("$slime/.venv/bin/python", sys.executable)
            (directory / name).write_text(text)
            typer.echo(directory / name)
        (directory / "run.sh").chmod(0o755)
    except OSError as error:
        raise typer.BadParameter(f"{directory} cannot be written: {error.strerror}; name another one") from None
    typer.echo(f"next: change make_data.py and task.py, then MODEL=DIR bash {directory / 'run.sh'}")


@app.command(context_settings=PASSED_ON)
def train(context: typer.Context) -> None:
    """Run train.py with these flags (--help lists them)."""
    _become(ROOT / "train.py", context.args)


@app.command(context_settings=PASSED_ON)
def train_async(context: typer.Context) -> None:
    """Run train_async.py with these flags: generation runs ahead of training."""
    _become(ROOT / "train_async.py", context.args)


@app.command(context_settings=PASSED_ON)
def plan(context: typer.Context) -> None:
    """Print the plan of a run with these flags; nothing is started."""
    _become(ROOT / "train.py", [*context.args, "--dry-run"])


@app.command(context_settings=PASSED_ON)
def convert(context: typer.Context, way: Annotated[str, typer.Argument(help=", ".join(WAYS))] = "") -> None:
    """Convert a checkpoint: `slime convert WAY --help` lists the flags of a way."""
    if way in ("--help", "-h"):
        typer.echo("usage: slime convert WAY FLAG...; each way has its own --help\n")
        typer.echo("\n".join(f"  {name:15} tools/{tool}" for name, tool in WAYS.items()))
        raise typer.Exit
    if way not in WAYS:
        raise typer.BadParameter(f"{way or 'no way'} is not a way to convert; give one of {', '.join(WAYS)}")
    _become(ROOT / "tools" / WAYS[way], context.args)


def _become(script: Path, words: Sequence[str]) -> NoReturn:
    """Replace this process by a script, so that signals and the exit status are the script's."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, str(script), *words])


class Finding(NamedTuple):
    """What one check of the machine found; without a remedy all is well."""

    name: str
    text: str
    remedy: str = ""


@app.command()
def doctor() -> None:
    """Check this machine: a line for each thing, with the remedy where something is wrong (status 1 then)."""
    findings = list(examine())
    for finding in findings:
        mark = "wrong" if finding.remedy else "ok"
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{mark:5}  {finding.name:13} {finding.text}{remedy}")
    raise typer.Exit(int(any(finding.remedy for finding in findings)))


def examine() -> Iterator[Finding]:
    """Look at versions, GPU, NCCL, Ray, ports, disk, memory and clock of this machine."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", version, "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer")
    for package in PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "is not installed", "run: bash scripts/setup_env.sh")
    yield from _gpus()
    yield _ray(os.environ.get("RAY_ADDRESS", ""))
    yield _ports()
    yield _room("memory", host_memory(), LEAST_MEMORY, "give the machine or its container more memory")
    for name, path, least, remedy in (
        ("disk", Path.cwd(), LEAST_DISK, "free some, or give --output-dir and --save another disk"),
        ("shared memory", Path("/dev/shm"), LEAST_SHARED, "start the container with --shm-size 32g"),  # nosec B108: only its free space is read
    ):
        if path.is_dir():  # /dev/shm is Linux's
            yield _room(name, shutil.disk_usage(path).free, least, remedy)
    yield _clock(time.time())


def _gpus() -> Iterator[Finding]:
    """Look at the GPUs that torch sees and at their NCCL."""
    try:
        import torch  # takes seconds, and may be missing
    except ImportError:
        return  # the line of torch says so
    count = torch.cuda.device_count()
    if not count:
        has_driver = shutil.which("nvidia-smi") is not None
        remedy = "torch does not see them: run: bash scripts/setup_env.sh --cuda" if has_driver else ""
        yield Finding("GPU", "none: runs need --accelerator cpu" if not has_driver else "nvidia-smi is here", remedy)
        return
    yield Finding("GPU", f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def _ray(address: str) -> Finding:
    """Look whether the Ray of RAY_ADDRESS answers."""
    host, _, port = address.rpartition(":")
    if not address:
        return Finding("Ray", "no RAY_ADDRESS: a run starts its own")
    if address in ("auto", "local"):
        return Finding("Ray", f"RAY_ADDRESS={address}: Ray looks for it")
    if not port.isdigit() or "/" in host.removeprefix("ray://"):
        return Finding("Ray", f"RAY_ADDRESS={address} is not HOST:PORT", "give Ray's own, for example 10.0.0.1:6379")
    try:
        socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        remedy = "start that Ray, or unset RAY_ADDRESS"
        return Finding("Ray", f"RAY_ADDRESS={address} does not answer ({error})", remedy)
    return Finding("Ray", f"{address} answers")


def _ports() -> Finding:
    """Look whether this machine's own name leads to an address on which it can listen."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.create_server((address, 0)):
            return Finding("ports", f"{name} is {address}, which can listen")
    except OSError as error:
        return Finding("ports", f"{name} cannot listen ({error})", "correct /etc/hosts, or set SLIME_HOST_IP")


def _room(name: str, num_bytes: int, least: int, remedy: str) -> Finding:
    """Compare bytes with what a small run needs, in GB."""
    return Finding(name, f"{num_bytes / 1e9:.0f} GB", "" if num_bytes >= least * 1e9 else f"{remedy} ({least} GB)")


def _clock(now: float) -> Finding:
    """Look whether the clock is set: by the system's word, else by the age of this file."""
    said = ""
    if shutil.which("timedatectl"):
        asked = ["timedatectl", "show", "--property", "NTPSynchronized", "--value"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    is_wrong = said == "no" or now < Path(__file__).stat().st_mtime
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)) + {"yes": ", synchronised"}.get(said, "")
    return Finding(
        "clock", text, "synchronise it (NTP): tokens and logs of several machines need it" if is_wrong else ""
    )


def _check(directories: list[Path]) -> None:
    for directory in directories:
        if not directory.is_dir():
            raise typer.BadParameter(f"{directory} is not a directory; name the --output-dir of a run")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    result = app(args=list(words) if words is not None else None, standalone_mode=True)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
