"""Seconds of one GRPO step on CPU, split into its parts, beside TRL's GRPOTrainer on the same model and prompts.

    python benchmarks/cpu_step.py [--trl-path DIR] [--rounds 3] [--output results.json]

Both sides run 8 prompts x 4 samples x 64 tokens, alternating round by round on the same machine; the median over all
measured steps is reported, and the ratio. Without TRL (it is optional, see
trl_step.py) only our split is printed. Parts:

    decode     the slowest request's time inside the engine (SGLang's own e2e_latency)
    log-probs  the trainer's forward-only pass          train  forward, backward, optimizer
    sync       weights to the engine                    rest   what is left of the step: our own code, HTTP, Ray
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SAMPLES, TOKENS = 8, 4, 64
PARTS = {"log_probs": "perf/log_probs_time", "train": "perf/actor_train_time", "sync": "perf/update_weights_time"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps a round; the first two of a round are warm-up")
    parser.add_argument(
        "--trl-path", default=None, help="directory with TRL installed (pip --target); else the environment"
    )
    parser.add_argument("--output", type=Path, default=None, help="also write the result as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        report = compare(Path(work), options)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1))


def compare(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Alternate the two sides and print the table."""
    model, prompts = make_inputs(work)
    ours: list[dict[str, float]] = []
    trl: list[dict[str, float]] = []
    for round_id in range(options.rounds):
        ours += our_steps(work / f"ours-{round_id}", model, prompts, options.steps)
        trl += trl_steps(model, prompts, options)
    report: dict[str, Any] = {"ours": medians(ours), "trl": medians(trl) if trl else None}
    print(f"{PROMPTS} x {SAMPLES} samples x {TOKENS} tokens, {len(ours)} steps measured, median seconds")
    print("slime  " + "  ".join(f"{name} {value:.3f}" for name, value in report["ours"].items()))
    if report["trl"]:
        mine, theirs = report["ours"], report["trl"]
        print("TRL    " + "  ".join(f"{name} {value:.3f}" for name, value in theirs.items()))
        report["ratio"] = mine["step"] / theirs["step"]
        report["without_generation"] = (mine["step"] - mine["decode"], theirs["step"] - theirs["decode"])
        print(f"whole step, slime / TRL: {report['ratio']:.2f}")
        print("step without decode: slime {:.3f}, TRL {:.3f}".format(*report["without_generation"]))
    return report


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    """Median of each part over the steps."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def make_inputs(work: Path) -> tuple[Path, Path]:
    """A tiny model and 200 prompts of 8 characters."""
    model, prompts, rng = work / "model", work / "prompts.jsonl", random.Random(0)
    subprocess.run([sys.executable, ROOT / "tools/make_tiny_model.py", "--output", model], check=True)
    rows = [{"prompt": f"{rng.randrange(1000):03d}+{rng.randrange(1000):03d}="} for _ in range(200)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    return model, prompts


def our_steps(out: Path, model: Path, prompts: Path, steps: int) -> list[dict[str, float]]:
    """One `train.py` run; the parts of each step but the first two."""
    command = [
        sys.executable, ROOT / "train.py", "--accelerator", "cpu", "--colocate", "--actor-num-gpus-per-node", "1",
        "--hf-checkpoint", model, "--model-args-from-hf", "--prompt-data", prompts, "--input-key", "prompt",
        "--rollout-batch-size", PROMPTS, "--n-samples-per-prompt", SAMPLES, "--global-batch-size", PROMPTS * SAMPLES,
        "--rollout-max-response-len", TOKENS, "--num-rollout", steps, "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", 4096, "--lr", "1e-4", "--recompute-old-log-probs", "--output-dir", out,
        "--custom-generate-function-path", f"{ROOT}/benchmarks/fixed_length.py:generate",
        "--custom-rm-path", f"{ROOT}/benchmarks/fixed_length.py:distinct_characters",
        "--save-debug-rollout-data", out / "dump" / "{rollout_id}.pt",
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    by_step: dict[int, dict[str, float]] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step_key"] == "rollout/step":
            by_step.setdefault(int(record["rollout/step"]), {}).update(record)
    return [parts(by_step[i], out / "dump" / f"{i}.pt") for i in range(2, steps)]


def parts(metrics: dict[str, float], dump: Path) -> dict[str, float]:
    """Seconds of one step by part."""
    import torch

    samples = torch.load(dump, weights_only=False)["samples"]
    assert {sample["response_length"] for sample in samples} == {TOKENS}
    split = {"decode": max(sample["metadata"]["engine_s"] for sample in samples)}
    split |= {name: metrics[key] for name, key in PARTS.items()}
    step = metrics["perf/step_time"]
    return {"step": step, **split, "rest": step - sum(split.values())}


def trl_steps(model: Path, prompts: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """One run of TRL; an empty list when TRL is not installed."""
    path = os.pathsep.join(filter(None, [options.trl_path, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    if subprocess.run([sys.executable, "-c", "import trl"], env=environment, capture_output=True).returncode:
        print("TRL is not installed: only our side is measured", file=sys.stderr)
        return []
    command = [sys.executable, ROOT / "benchmarks/trl_step.py", "--model", model, "--prompts", prompts]
    command += ["--steps", options.steps, "--tokens", TOKENS]
    run = subprocess.run(list(map(str, command)), env=environment, check=True, capture_output=True, text=True)
    seconds = json.loads(run.stdout.splitlines()[-1])
    pairs = list(zip(seconds["step_s"], seconds["generate_s"], strict=True))[1:]
    return [{"step": step, "decode": generate} for step, generate in pairs]


if __name__ == "__main__":
    main()
