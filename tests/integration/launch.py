"""Running train.py in a process as a user would, on a tiny model, and reading what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tools.make_tiny_model import build_parser, make_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 600


@dataclass(frozen=True)
class Run:
    """A finished run: its output directory and what it printed."""

    output_dir: Path
    status: int
    printed: str

    def records(self, step_key: str) -> list[dict[str, float]]:
        """Records of metrics.jsonl of one family, merged by step, in order of the step."""
        merged: dict[float, dict[str, float]] = {}
        for line in (self.output_dir / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["step_key"] == step_key:
                merged.setdefault(record[step_key], {}).update(record)
        return [merged[step] for step in sorted(merged)]

    def column(self, name: str, step_key: str = "train/step") -> list[float]:
        """One metric over the steps that have it."""
        return [record[name] for record in self.records(step_key) if name in record]


def make_model(path: Path, *flags: Any) -> Path:
    """A tiny Qwen3 in HF format. Large initial weights: with small ones every distribution is close to uniform."""
    command = ["--output", path, "--layers", 2, "--init-std", 0.1, *flags]
    args = build_parser().parse_args([str(part) for part in command])
    with torch.random.fork_rng(devices=[]):  # it seeds
        make_tiny_model(args)
    return path


def write_prompts(path: Path, count: int = 16) -> Path:
    """Prompts of different lengths, whose label is a digit."""
    rows = [{"input": f"{i * 37 % 1000}+{i}=", "label": str(i % 10)} for i in range(count)]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def grpo_flags(model: Path, prompts: Path) -> list[Any]:
    """A small GRPO run on CPU: 4 prompts x 4 samples a rollout, one train step, responses of at most 8 tokens."""
    return [
        "--accelerator", "cpu", "--actor-num-gpus-per-node", 1, "--hf-checkpoint", model, "--model-args-from-hf",
        "--prompt-data", prompts, "--input-key", "input", "--label-key", "label",
        "--custom-rm-path", f"{ROOT}/tests/integration/user_code.py:share_of_digits",
        "--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--global-batch-size", 16,
        "--rollout-max-response-len", 8, "--rollout-temperature", 1.0,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", 256, "--data-pad-size-multiplier", 8,
        "--lr", 1e-3, "--adam-eps", 1e-5, "--recompute-old-log-probs",
    ]  # fmt: skip


def train(output_dir: Path, *flags: Any, script: str = "train.py", check: bool = True, **env: str) -> Run:
    """Run a driver to its end; with `check` a failing run is an assertion with the end of what it printed."""
    done = subprocess.run(
        command_of(output_dir, *flags, script=script),
        cwd=ROOT,
        env=environment() | env,
        timeout=DEADLINE_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if check:
        assert done.returncode == 0, done.stdout[-4000:] + log_tails(output_dir)
    return Run(output_dir, done.returncode, done.stdout)


def command_of(output_dir: Path, *flags: Any, script: str = "train.py") -> list[str]:
    """The command line of a driver."""
    command = [sys.executable, str(ROOT / script), "--output-dir", str(output_dir), *map(str, flags)]
    if "--dashboard-port" not in command:
        command += ["--dashboard-port", "-1"]  # nobody looks, and it would only take time
    return command


def environment() -> dict[str, str]:
    """This process's environment without a Ray that a run could connect to."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors files."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def log_tails(output_dir: Path) -> str:
    """The last lines of every log of a run."""
    logs = sorted(path for path in (output_dir / "logs").glob("*") if path.is_file())
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
